"""What no single program brings over meets in rows: against packing and unpacking written from public descriptions."""

from __future__ import annotations

import numpy as np
import pytest

from hawk.errors import Unmappable
from hawk.layouts import CacheShape, load
from hawk.plan import repeat
from hawk.plan.check import check
from hawk.plan.explain import explain
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Selection
from hawk.plan.ways import through_rows
from hawk.retile import rows as rows_module
from hawk.retile.rows import RowsStep
from tests.reference import tenstorrent as tt
from tests.unit.layouts import moving
from tests.unit.plan import support as s

PLAIN = CacheShape(layers=2, heads=2, dim=64, block_size=40, blocks=9)
WOVEN = CacheShape(layers=2, heads=2, dim=64, block_size=96, blocks=4)


def tiles(x: np.ndarray, codec: str, woven: bool, channels: int) -> list[list[np.ndarray]]:
    """The banks of each (layer, kv) of fp32 bits `[layers, kvs, blocks, heads, slots, dim]`."""
    found = []
    for layer in x:
        for kv, tensor in enumerate(layer):
            pages = tt.pages(tensor, codec, woven and kv == 0)
            stride = -(-pages.shape[1] // 64) * 64
            found.append(tt.to_channels(pages, channels, stride))
    return found


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize(
    ("before", "after"), [("bfp8_b", "bfp8_b"), ("bfp4_b", "bfp4_b"), ("bfp8_b", "bfp4_b")]
)
@pytest.mark.parametrize("small", [False, True])
def test_groups_of_several_pages_meet(before, after, small, core, monkeypatch):
    """Plain tiles into woven ones: K's groups are made anew of what the source's groups hold, V's stay."""
    if small:
        monkeypatch.setattr(rows_module, "BATCH_BYTES", 1)  # a batch for each block
    src = load("tenstorrent/kv-hf").compile(PLAIN, codec=before, channels=7)
    dst = load("tenstorrent/kv").compile(WOVEN, codec=after, channels=8)
    check(src, dst)
    assert through_rows(src, dst, None) == (0,)
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((2, 2, 9, 2, 40, 64)) * 2.0 ** rng.integers(-9, 9, (64,))).astype(np.float32)
    source = tiles(x.view(np.uint32), before, woven=False, channels=7)
    # What the source's bytes mean, token by token.
    held = np.empty_like(x)
    for layer in range(2):
        for kv in range(2):
            raw = tt.pages(x[layer, kv].view(np.uint32), before, interleave_dim=False)
            held[layer, kv] = tt.unpages(raw, before, x.shape[2:], interleaved=False).view(np.float32)
    tables = rng.permutation(9)[:7], rng.permutation(4)[:3]
    got = moving.move(src, dst, source, core, blocks=tables, tokens=250)
    tokens = held[:, :, tables[0]].transpose(0, 1, 3, 2, 4, 5).reshape(2, 2, 2, 280, 64)
    tokens[:, :, :, 250:] = 0
    blocks = np.zeros((2, 2, 4, 2, 96, 64), np.float32)
    padded = np.concatenate([tokens, np.zeros((2, 2, 2, 8, 64), np.float32)], axis=3)
    blocks[:, :, tables[1]] = padded.reshape(2, 2, 2, 3, 96, 64).transpose(0, 1, 3, 2, 4, 5)
    want = tiles(blocks.view(np.uint32), after, woven=True, channels=8)
    assert moving.equal(got, want)


def test_explain_tells_of_new_groups():
    src = load("tenstorrent/kv-hf").compile(PLAIN, codec="bfp8_b")
    dst = load("tenstorrent/kv").compile(WOVEN, codec="bfp8_b")
    found = explain(src, dst, Selection(0, 2, 0, 300))
    assert "grouped anew" in str(found.lossy)
    assert found.rows == "K"
    assert "K goes through rows" in str(found)
    assert explain(src, src, Selection(0, 2, 0, 300)).rows == ""


@pytest.mark.parametrize("token", [0, 37])
@pytest.mark.parametrize("part", [(), (1, 1, 2)])
def test_digits_that_do_not_nest_meet_in_rows(token, part, monkeypatch):
    """Tiles of 12 and of 8 columns have no common refinement; bits are kept, and nothing else is touched."""
    monkeypatch.setattr(rows_module, "BATCH_BYTES", 1)
    rng = np.random.default_rng(token)
    a = s.declare("a", "block head dim/12 slot | dim%12", buffers="layer kv")
    b = s.declare("b", "block head dim/8 | slot dim%8", buffers="layer kv")
    src = a.compile(s.shape(heads=4 if part else 2, dim=48, block_size=8, blocks=20), channels=3)
    dst = b.compile(s.shape(heads=2, dim=48, block_size=12), channels=5)
    assert through_rows(src, dst, None if not part else (1, 1, 2)) == (0, 1)
    selection = Selection(0, 2, token, 60, (), *part)
    source, target = s.Cache(src, rng), s.Cache(dst, rng)
    before = [r.copy() for r in target.regions]
    src_blocks, dst_blocks = rng.permutation(20)[:13], rng.permutation(12)[:9]
    values = rng.integers(0, 65536, (2, 2, src.shape.heads, token + 60, 48))
    every = np.arange(token + 60)
    for kv in range(2):
        s.store(source, kv, [0, 1], range(src.shape.heads), src_blocks, every, values[kv])
    marks = s.carry_out(source, target, selection, src_blocks, dst_blocks, rng=rng, max_bytes=40_000)
    ours = np.arange(token, token + 60)
    heads = [1] if part else [0, 1]
    for kv in range(2):
        got = s.fetch(target, kv, [0, 1], heads, dst_blocks, ours)
        want = values[kv][:, [2] if part else [0, 1], token:]
        np.testing.assert_array_equal(got, want)
    for region, old, mark in zip(target.regions, before, marks, strict=True):
        np.testing.assert_array_equal(region[~mark], old[~mark])


def test_later_chunks_are_the_first_ones_moved():
    src = load("tenstorrent/kv-hf").compile(PLAIN, codec="bfp8_b", channels=7)
    dst = load("tenstorrent/kv").compile(PLAIN, codec="bfp8_b", channels=8)
    selection, table = Selection(0, 2, 0, 100), np.arange(9)
    into = repeat.TargetPlans(dst, table, selection)
    out = repeat.SourcePlans(src, table, moving.placement(src), dst, table)
    for layer in range(2):
        chunk = Chunk(layer, 1, 0, 3)
        again = [step for step in out.plan(into.plan(chunk)) if isinstance(step, RowsStep)]
        fresh = retile_steps(
            src, table, moving.placement(src), target_chunk(dst, table, selection, chunk), table
        )
        once = [step for step in fresh if isinstance(step, RowsStep)]
        assert len(again) == len(once) == 1
        assert (again[0].layer, again[0].kv) == (once[0].layer, once[0].kv) == (layer, 0)
        places = [
            [(p.region, p.offset) for t in step.reads for p in t.passes] for step in (again[0], once[0])
        ]
        assert places[0] == places[1]


def test_what_rows_do_not_help_is_refused():
    src = load("vllm/nhd").compile(PLAIN)
    wide = CacheShape(layers=2, heads=2, dim=80, block_size=40, blocks=9)
    with pytest.raises(Unmappable, match="dim"):
        check(src, load("vllm/nhd").compile(wide))
    with pytest.raises(Unmappable, match="heads"):
        through_rows(src, load("vllm/nhd").compile(s.shape(heads=4, dim=64, block_size=40)), None)
