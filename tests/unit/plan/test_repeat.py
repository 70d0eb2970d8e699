"""Plans that are derived from an earlier chunk of the job are what planning them anew gives."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from hawk.layouts import CacheShape, Layout, load
from hawk.memory.groups import GroupedSegments
from hawk.plan.repeat import SourcePlans, TargetPlans
from hawk.plan.segments import laid, laid_again
from hawk.plan.source import retile_steps
from hawk.plan.target import split, target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from hawk.retile.program import Pieces
from tests.unit.layouts import moving
from tests.unit.plan import test_scaled as scaled

SHARED = """
name = "test/layers-share-a-buffer"
codec = "bf16"
codecs = ["bf16"]
[[piece]]
order = "layer kv block slot head dim"
"""


def placement(layout, seed: int) -> Placement:
    rng = np.random.default_rng(seed)
    shape = (layout.buffer_count, layout.channels)
    return Placement(
        region=rng.integers(0, 3, shape).astype(np.int32), offset=rng.integers(0, 1 << 30, shape) // 64 * 64
    )


@pytest.mark.parametrize("target", ["tenstorrent/kv", "vllm/nhd", "shared"])
@pytest.mark.parametrize("max_bytes", [1 << 20, 70_000, 9_000])
@pytest.mark.parametrize("first", [0, 37])
@pytest.mark.parametrize("picked", [(), (6, 0, 3, 1, 5)])
def test_every_chunk_is_as_if_planned_alone(
    target: str, max_bytes: int, first: int, picked: tuple[int, ...]
) -> None:
    shape = CacheShape(layers=5, heads=2, dim=64, block_size=32, blocks=40)
    layout = Layout.from_toml(SHARED) if target == "shared" else load(target)
    channels = 7 if target.startswith("tenstorrent") else None
    dst = layout.compile(shape, channels=channels)
    src = load("vllm/nhd").compile(CacheShape(layers=7, heads=2, dim=64, block_size=16, blocks=64))
    rng = np.random.default_rng(1)
    src_blocks, dst_blocks = rng.permutation(64)[:20], rng.permutation(40)[:9]
    where = placement(src, 2)
    selection = Selection(layer=0, layers=5, token=first, tokens=250 - first, source_layers=picked)
    chunks = split(dst, selection, max_bytes=max(max_bytes, 4096 * 5))
    into, out = TargetPlans(dst, dst_blocks, selection), SourcePlans(src, src_blocks, where, dst, dst_blocks)
    assert len(chunks) > 1 or max_bytes == 1 << 20
    for chunk in chunks:
        planned, alone = into.plan(chunk), target_chunk(dst, dst_blocks, selection, chunk)
        assert (planned.chunk, planned.planes, planned.kind, planned.nbytes) == (
            alone.chunk,
            alone.planes,
            alone.kind,
            alone.nbytes,
        )
        assert np.array_equal(planned.base, alone.base)
        assert np.array_equal(planned.shift, alone.shift)
        for got, right in zip(planned.runs, alone.runs, strict=True):
            for name in ("channel", "arena", "target", "nbytes", "channel_bytes"):
                assert np.array_equal(getattr(got, name), getattr(right, name))
        steps = out.plan(planned)
        lies = steps.lies()
        for name, column in (("src_region", "region"), ("src_offset", "offset"), ("dst_offset", "target")):
            assert getattr(lies, column).tolist() == [list(getattr(step, name)) for step in steps], name
        assert (out.plan(planned).lies().kinds is lies.kinds) == (target != "shared")
        for step, expected in zip(
            steps, retile_steps(src, src_blocks, where, alone, dst_blocks), strict=True
        ):
            for name in ("layer", "kv", "program", "src_region", "src_offset", "dst_offset"):
                assert getattr(step, name) == getattr(expected, name), name
            for name in (f.name for f in fields(Pieces)):
                assert np.array_equal(getattr(step.pieces, name), getattr(expected.pieces, name)), name


def test_what_goes_straight_lies_where_it_would_if_planned_alone() -> None:
    """Steps of other layers: the programs that bring elements over without rows are lifted with what they read."""
    src = scaled.layout(scaled.TOKEN, "int8", more=scaled.SEVEN).compile(scaled.NEAR)
    dst = scaled.layout(scaled.TOKEN_HEAD, "fp8_e5m2").compile(scaled.FAR)
    rng = np.random.default_rng(4)
    src_blocks, dst_blocks = rng.permutation(7)[:6], rng.permutation(5)[:4]
    where, selection = moving.placement(src), Selection(layer=0, layers=2, token=0, tokens=scaled.TOKENS)
    out = SourcePlans(src, src_blocks, where, dst, dst_blocks)
    seen = set()
    for layer in (0, 1):
        target = target_chunk(dst, dst_blocks, selection, Chunk(layer, 1, 0, 4))
        alone = retile_steps(src, src_blocks, where, target, dst_blocks)
        for step, expected in zip(out.plan(target), alone, strict=True):
            assert step.direct is not None
            assert expected.direct is not None
            for got, right in zip(step.direct(), expected.direct(), strict=True):
                for name in ("program", "src_region", "src_offset", "dst_offset"):
                    assert getattr(got, name) == getattr(right, name), name
                for name in (f.name for f in fields(Pieces)):
                    assert np.array_equal(getattr(got.pieces, name), getattr(right.pieces, name)), name
                seen.add(got.src_region)
    assert len(seen) == 4, "two layers of K and V"


def spread(layout, even: bool) -> Placement:
    """Buffers one behind the other in every channel, or one of them elsewhere."""
    shape = (layout.buffer_count, layout.channels)
    offset = np.repeat(np.arange(shape[0], dtype=np.int64)[:, None], shape[1], axis=1) << 32
    if not even:
        offset[-1] += 64
    return Placement(np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)), offset)


@pytest.mark.parametrize("blocks", [9, 3000])
@pytest.mark.parametrize("even", [True, False])
def test_what_a_chunk_writes_is_worked_out_from_one_like_it(blocks: int, even: bool) -> None:
    shape = CacheShape(layers=6, heads=2, dim=64, block_size=32, blocks=1 << 15)
    dst = load("tenstorrent/kv").compile(shape, channels=7)
    table = np.random.default_rng(1).permutation(1 << 15)[:blocks]
    selection = Selection(layer=0, layers=6, token=3, tokens=32 * blocks - 3)
    into, where = TargetPlans(dst, table, selection), spread(dst, even)
    extents = [(0,)] * dst.channels
    first, *others = (into.plan(chunk) for chunk in (Chunk(layer, 2, 0, blocks) for layer in (0, 2, 4)))
    known = first, *laid(first, where, extents)
    assert isinstance(known[1], GroupedSegments) == (blocks == 3000)
    for number, planned in enumerate(others):
        again = laid_again(known, planned, where)
        if number == 1 and not even:
            assert again is None
            continue
        for got, right in zip(again, laid(planned, where, extents), strict=True):
            for name in ("region", *(("local", "remote") if got is again[0] else ("start",)), "nbytes"):
                assert np.array_equal(getattr(got, name), getattr(right, name)), name
    elsewhere = TargetPlans(dst, table[::-1].copy(), selection).plan(Chunk(2, 2, 0, blocks))
    assert laid_again(known, elsewhere, where) is None
