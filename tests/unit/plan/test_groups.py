"""Rows that repeat from plane to plane: as groups they are the rows that would have been written out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.errors import InvalidArgument
from hawk.layouts import load
from hawk.memory import groups as grouped
from hawk.memory.groups import GroupedRanges, GroupedSegments, JoinedRanges
from hawk.memory.npu import EmulatedNpu
from hawk.memory.region import ByteRanges, Region
from hawk.plan import segments
from hawk.plan.segments import ascending, direct, groups_of, touched
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from hawk.retile import native
from tests.unit.plan import support as s
from tests.unit.plan.test_segments import byte_map

CORES = ["numpy", *(["c"] if native.available() else [])]

LAYOUTS = {
    "tiles": load("tenstorrent/kv"),
    "layers in one buffer": s.declare("own/one", "layer kv block head slot/8 | slot%8 dim"),
    "layers inside a block": s.declare("own/inside", "block layer kv head slot/8 | slot%8 dim"),
    "two kinds of runs": s.declare(
        "own/kinds", "block head slot/8 | slot%8 dim", "slot/8 block head | slot%8 dim", buffers="layer kv"
    ),
}


def plan(name, channels, seed, *, blocks=6, spare=3, layers=3, heads=2, first=5, tokens=150):
    rng = np.random.default_rng(seed)
    shape = s.shape(layers, heads, 32, 32, blocks=blocks + spare)
    layout = LAYOUTS[name].compile(shape, channels=channels)
    cache = s.Cache(layout, rng)
    chunk = Chunk(0, layers, 0, -(-(first + tokens) // 32))
    table = rng.permutation(blocks + spare)[:blocks]
    return cache, target_chunk(layout, table, Selection(0, layers, first, tokens), chunk)


@pytest.mark.parametrize("core", CORES)
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)), st.sampled_from([1, 3, 7]), st.integers(1, 200), st.integers(0, 2**32)
)
def test_groups_are_the_rows(core, name, channels, batch, seed):
    cache, target = plan(name, channels, seed)
    regions = [Region(f"r{i}", r) for i, r in enumerate(cache.regions)]
    written = direct(target, cache.placement, 640)
    with native.using(core), pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "BATCH", batch)
        groups = groups_of(target, cache.placement, 640)
        found = GroupedSegments(groups)
        found.check(regions, 640 + target.nbytes)
        batches = list(found.batches())
        assert sum(map(len, batches)) == len(found)
        assert found.total == written.total == sum(rows.total for rows in batches)
        assert max(map(len, batches)) <= max(batch, int(groups.sizes.max()))
        np.testing.assert_array_equal(np.concatenate([byte_map(rows) for rows in batches]), byte_map(written))
        np.testing.assert_array_equal(byte_map(found), byte_map(written))
        assert (np.diff(found.remote) > 0).all()
        assert found.region.dtype == np.int32


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.sampled_from([1, 3, 7]), st.integers(0, 2**32))
def test_ranges_are_what_is_touched_in_order(name, channels, seed):
    cache, target = plan(name, channels, seed)
    wanted = touched(target, cache.placement)
    groups = ascending(groups_of(target, cache.placement))
    if groups is None:  # rows of one plane lie between those of another
        assert name == "layers inside a block"
        return
    found = GroupedRanges(groups)
    marks = [[np.zeros(len(r), bool) for r in cache.regions] for _ in range(3)]
    for mark, ranges in zip(marks, (wanted, found, found.spans()), strict=True):
        for r, start, n in zip(ranges.region, ranges.start, ranges.nbytes, strict=True):
            mark[r][start : start + n] = True
    for r in range(len(cache.regions)):
        np.testing.assert_array_equal(marks[0][r], marks[1][r])
        assert not (marks[0][r] & ~marks[2][r]).any()
    assert found.total == wanted.total
    order = np.lexsort((found.start, found.region))
    np.testing.assert_array_equal(order, np.arange(len(found)))


def test_joined_tables_are_all_their_rows():
    cache, target = plan("tiles", 3, 2)
    grouped = GroupedRanges(groups_of(target, cache.placement))
    plain = ByteRanges(np.array([2, 0], np.int32), np.array([5, 7]), np.array([3, 1]))
    joined = JoinedRanges.of([grouped, plain, grouped])
    assert JoinedRanges.of([plain]) is plain
    assert (len(joined), joined.total) == (2 * len(grouped) + 2, 2 * grouped.total + 4)
    for found, of in ((joined, lambda part: part), (joined.spans(), lambda part: part.spans())):
        parts = [of(part) for part in (grouped, plain, grouped)]
        for column in ("region", "start", "nbytes"):
            np.testing.assert_array_equal(
                getattr(found, column), np.concatenate([getattr(part, column) for part in parts])
            )
        assert (found.region.dtype, found.start.dtype) == (np.int32, np.int64)
    none = JoinedRanges.of([])
    assert (len(none), none.total, len(none.spans()), len(none.region)) == (0, 0, 0, 0)


def test_many_rows_stay_groups_and_few_are_joined(monkeypatch):
    cache, target = plan("tiles", 2, 1, blocks=40, spare=400, tokens=1200)
    assert not isinstance(direct(target, cache.placement, 0), GroupedSegments)
    rows = len(direct(target, cache.placement, 0))
    monkeypatch.setattr(segments, "GROUPED_FROM", rows)
    assert isinstance(direct(target, cache.placement, 0), GroupedSegments)
    assert isinstance(touched(target, cache.placement), GroupedRanges)
    # Where a registration begins anew amidst a group, rows are cut, and so written out.
    low, high, _ = groups_of(target, cache.placement).extents()
    for edges, whole in (((0,), True), ((0, int(low[0] + high[0]) // 2), False)):
        found = direct(target, cache.placement, 0, [edges] * 2)
        assert isinstance(found, GroupedSegments) == whole
        assert found.total == GroupedSegments(groups_of(target, cache.placement)).total


def test_what_lies_outside_is_refused():
    cache, target = plan("tiles", 3, 2)
    regions = [Region(f"r{i}", r) for i, r in enumerate(cache.regions)]
    found = GroupedSegments(groups_of(target, cache.placement))
    found.check(regions, target.nbytes)
    far = int((found.remote + found.nbytes).max())
    with pytest.raises(InvalidArgument, match="remote"):
        found.check(regions, far - 1)
    end = int((found.local + found.nbytes)[found.region == 1].max())
    with pytest.raises(InvalidArgument):
        found.check([regions[0], Region("r1", regions[1].array[: end - 1]), regions[2]])
    with pytest.raises(InvalidArgument):
        found.check(regions[:2])
    low = int(found.local.min())
    before = Placement(cache.placement.region, cache.placement.offset - low - 1)
    with pytest.raises(InvalidArgument):
        GroupedSegments(groups_of(target, before)).check(regions)
    empty = found.groups.nbytes.copy()
    empty[3] = 0
    with pytest.raises(InvalidArgument, match="empty"):
        GroupedSegments(replace(found.groups, nbytes=empty)).check(regions)


async def test_a_flush_takes_groups():
    _, target = plan("tiles", 3, 3, blocks=4, tokens=100)
    memory = EmulatedNpu("npu", capacity=3 << 20, channels=3)
    try:
        layout = target.layout
        offset = np.arange(layout.buffer_count, dtype=np.int64)[:, None] * layout.channel_bytes
        offset = offset + np.zeros(3, np.int64)
        region = np.tile(np.arange(3, dtype=np.int32), (layout.buffer_count, 1))
        ranges = GroupedRanges(groups_of(target, Placement(region, offset)))
        await memory.flush(ranges)
        assert (memory.flushed_ranges, memory.flushed_bytes) == (len(ranges), ranges.total)
        with pytest.raises(InvalidArgument):
            await memory.flush(GroupedRanges(groups_of(target, Placement(region, offset + (1 << 20)))))
    finally:
        memory.close()
