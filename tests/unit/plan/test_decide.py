"""Direct or staged by stated costs, and the plan told to people."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hawk.errors import InvalidArgument, OutOfMemory, Unmappable
from hawk.layouts import load
from hawk.plan.decide import decide, direct_requests, statistics
from hawk.plan.explain import explain
from hawk.plan.segments import direct
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from tests.unit.plan import support as s

COSTS = {"move_cost": 1e-11, "request_cost": 2e-6, "bandwidth": 4e9, "max_sge": 16}


def chunk(blocks, channels=7, token=0, codec="bf16"):
    n = len(blocks)
    layout = load("tenstorrent/kv").compile(
        s.shape(heads=8, dim=128, block_size=64, blocks=100), codec=codec, channels=channels
    )
    return target_chunk(layout, np.asarray(blocks), Selection(0, 2, token, 64 * n - token), Chunk(0, 2, 0, n))


SCATTERED = list(range(0, 96, 2))


def test_statistics_count_what_direct_moves():
    for blocks, token in ((SCATTERED, 0), (list(range(20)), 17)):
        target = chunk(blocks, token=token)
        layout = target.layout
        offset = np.arange(4)[:, None] * layout.channel_bytes * 2 + np.zeros(7, np.int64)
        placement = Placement(np.tile(np.arange(7, dtype=np.int32), (4, 1)), offset)
        segments = direct(target, placement, 0)
        stats = statistics(target)
        assert (stats.runs, stats.nbytes) == (len(segments), segments.total)
        assert stats.shortest == segments.nbytes.min()
        assert stats.longest == segments.nbytes.max()
        assert stats.median == np.sort(segments.nbytes)[(len(segments) - 1) // 2]
        per_channel = np.bincount(segments.region, weights=segments.nbytes, minlength=7)
        assert stats.channel_bytes == tuple(per_channel.astype(int).tolist())
        assert stats.arena_bytes == target.nbytes


def test_the_median_is_the_lower_of_the_two_in_the_middle():
    # Blocks 0 and 1 join and 4 stays alone: in each channel one run of two blocks and one of one.
    target = chunk([0, 1, 4], channels=8)
    lengths = np.sort(target.runs[0].nbytes)
    assert lengths[7] < lengths[8]
    assert statistics(target).median == lengths[7]


def test_a_reader_scatters_and_a_writer_gathers():
    target = chunk(SCATTERED)
    runs = statistics(target).runs
    assert direct_requests(target, 1, "read") == runs
    assert direct_requests(target, 16, "write") == runs
    per_channel = np.concatenate([np.bincount(r.channel, minlength=7) for r in target.runs])
    expected = int((-(-per_channel // 16)).sum()) * (4 // len(target.runs))
    assert direct_requests(target, 16, "read") == expected


@pytest.mark.parametrize("most", [1, 4, 64])
@pytest.mark.parametrize("blocks", [SCATTERED, [0], list(range(48))])
def test_moves_that_cost_a_request_each_never_pay(blocks, most):
    """So nobody weighs the two where that is known."""
    costs = {"move_cost": 0.0, "request_cost": 1e-4, "bandwidth": 1e15, "max_sge": most}
    for channels in (1, 7, 12):
        target = chunk(blocks, channels=channels, token=5)
        assert decide(target, move_support="device", move_row_cost=1e-4, **costs).mode == "direct"


def test_long_runs_go_direct_and_short_ones_staged():
    assert decide(chunk(range(48)), move_support="device", **COSTS).mode == "direct"
    dear = {**COSTS, "request_cost": 1e-4, "max_sge": 1}
    assert decide(chunk(SCATTERED), move_support="device", **dear).mode == "staged"
    slow_moves = {**dear, "move_cost": 1e-8}
    assert decide(chunk(SCATTERED), move_support="device", **slow_moves).mode == "direct"
    slow_rows = decide(chunk(SCATTERED), move_support="device", move_row_cost=1e-3, **dear)
    assert slow_rows.mode == "direct"


def test_the_direction_matters():
    costs = {**COSTS, "max_sge": 1024, "move_cost": 5e-11}
    target = chunk(SCATTERED)
    assert decide(target, move_support="device", direction="read", **costs).mode == "direct"
    assert decide(target, move_support="device", direction="write", **costs).mode == "staged"


def test_reasons_name_the_numbers():
    got = decide(chunk(SCATTERED), move_support="host", **COSTS)
    assert str(statistics(chunk(SCATTERED)).runs) in got.reason
    assert "host" in got.reason
    assert got.reason.startswith(got.mode)


def test_what_cannot_be_staged_goes_direct_with_the_reason():
    dear = {**COSTS, "request_cost": 1.0, "max_sge": 1}
    target = chunk(SCATTERED)
    got = decide(target, move_support="none", **dear)
    assert got.mode == "direct"
    assert "cannot move bytes inside a channel" in got.reason
    region = np.tile(np.arange(7, dtype=np.int32), (4, 1))
    region[3, 5] = 9
    spread = Placement(region, np.zeros((4, 7), np.int64))
    got = decide(target, spread, move_support="device", **dear)
    assert got.mode == "direct"
    assert "channel 5" in got.reason
    with pytest.raises(InvalidArgument, match="channel 5"):
        decide(target, spread, move_support="device", override="staged", **dear)
    with pytest.raises(InvalidArgument, match="cannot move"):
        decide(target, move_support="none", override="staged", **dear)
    home = Placement(region[:3][[0, 1, 2, 0]], spread.offset)
    assert decide(target, home, move_support="device", **dear).mode == "staged"
    elsewhere = decide(target, home, move_support="device", staging_region=region[3], **dear)
    assert elsewhere.mode == "direct"


def test_the_config_overrides():
    assert decide(chunk(range(48)), move_support="host", override="staged", **COSTS).mode == "staged"
    dear = {**COSTS, "request_cost": 1.0, "max_sge": 1}
    assert decide(chunk(SCATTERED), move_support="host", override="direct", **dear).mode == "direct"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bandwidth", 0.0),
        ("bandwidth", float("nan")),
        ("max_sge", 0),
        ("request_cost", -1.0),
        ("move_cost", -1.0),
        ("override", "both"),
        ("move_support", "maybe"),
        ("direction", "up"),
    ],
)
def test_costs_that_cannot_be_right(field, value):
    with pytest.raises(InvalidArgument, match=field):
        decide(chunk([0]), **{"move_support": "device", **COSTS, field: value})


# -- explain ---------------------------------------------------------------------------------------------

SHAPE = {"layers": 4, "heads": 8, "dim": 128, "block_size": 64, "blocks": 64}


def layouts(codec="bf16", source="vllm/nhd"):
    src = load(source).compile(s.shape(**{**SHAPE, "block_size": 16, "blocks": 256}))
    return src, load("tenstorrent/kv").compile(s.shape(**SHAPE), codec=codec)


def test_an_explanation_adds_up():
    src, dst = layouts()
    selection = Selection(0, 4, 0, 1000)
    got = explain(src, dst, selection, max_bytes=3 << 20)
    assert len(got.chunks) > 1
    assert got.payload == 4 * 2 * 1000 * 8 * 128 * 2
    assert got.nbytes == 4 * 2 * 1024 * 8 * 128 * 2
    assert sum(got.channel_bytes) == got.nbytes == got.arena_bytes
    assert got.imbalance == 1.0
    assert got.lossy is None
    assert got.segments == len(got.chunks) * 8 * 2 * (got.chunks[0].layers)
    text = str(got)
    for part in (
        "vllm/nhd [bf16] -> tenstorrent/kv [bf16]",
        f"{got.nbytes:,}",
        "every value is kept",
        "direct",
    ):
        assert part in text


def test_lossy_codecs_are_declared():
    src, dst = layouts("bfp8_b")
    selection = Selection(0, 4, 0, 64)
    assert "bfp8_b" in explain(src, dst, selection).lossy
    assert explain(dst, src, selection).lossy is None
    wide = load("tenstorrent/kv").compile(s.shape(**SHAPE), codec="fp32")
    assert "round" in explain(wide, src, selection).lossy
    assert explain(src, wide, selection).lossy is None


def test_a_change_of_grouping_is_lossy():
    shape = s.shape(**SHAPE)
    interleaved = load("tenstorrent/kv").compile(shape, codec="bfp8_b")
    plain = load("tenstorrent/kv-hf").compile(shape, codec="bfp8_b")
    selection = Selection(0, 4, 0, 64)
    assert explain(plain, plain, selection).lossy is None
    assert "grouped anew" in explain(interleaved, plain, selection).lossy


def test_explain_takes_the_table_and_refuses_what_cannot_be():
    src, dst = layouts()
    selection = Selection(0, 4, 0, 256)
    near = explain(src, dst, selection, dst_blocks=[4, 5, 6, 7])
    far = explain(src, dst, selection, dst_blocks=[4, 8, 12, 16])
    assert far.segments == 4 * near.segments
    with pytest.raises(InvalidArgument, match=r"dst_blocks\[0\]"):
        explain(src, dst, selection, dst_blocks=[64, 5, 6, 7])
    with pytest.raises(OutOfMemory):
        explain(src, dst, selection, max_bytes=1)
    with pytest.raises(Unmappable):
        explain(load("vllm/nhd").compile(s.shape(**{**SHAPE, "heads": 4})), dst, selection)


def test_moves_that_nobody_measured_are_not_made():
    dear = {**COSTS, "request_cost": 1e-4, "max_sge": 1}
    assert decide(chunk(SCATTERED), move_support="device", **dear).mode == "staged"
    got = decide(chunk(SCATTERED), move_support="device", **{**dear, "move_cost": math.inf})
    assert (got.mode, "not measured" in got.reason) == ("direct", True)
    called = decide(chunk(SCATTERED), move_support="device", move_call_cost=10.0, **dear)
    assert called.mode == "direct"
