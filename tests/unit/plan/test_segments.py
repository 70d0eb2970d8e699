"""Segments and moves: order, extents, joining, and what cannot be staged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.errors import InvalidArgument
from hawk.layouts import load
from hawk.memory.region import Region, Segments
from hawk.plan.segments import direct, staged, touched
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from tests.unit.plan import support as s


def scene(channels=7, seed=3, **kw):
    rng = np.random.default_rng(seed)
    layout = load("tenstorrent/kv").compile(s.shape(block_size=64, **kw), channels=channels)
    cache = s.Cache(layout, rng, staging=1 << 18)
    target = target_chunk(layout, rng.permutation(12)[:5], Selection(0, 2, 37, 250), Chunk(0, 2, 0, 5))
    return cache, target


def byte_map(segments):
    """One row for every byte: remote offset, region, local offset; ascending."""
    n = segments.nbytes
    step = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    columns = (
        np.repeat(segments.remote, n) + step,
        np.repeat(segments.region, n),
        np.repeat(segments.local, n) + step,
    )
    rows = np.stack(columns, axis=1)
    return rows[np.argsort(rows[:, 0])]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 60_000), max_size=6), st.integers(0, 2))
def test_no_segment_crosses_an_extent(cuts, region):
    cache, target = scene(channels=3)
    extents = [(0,)] * 3
    extents[region] = (0, *sorted(set(cuts)))
    plain = direct(target, cache.placement, 1000)
    cut = direct(target, cache.placement, 1000, extents)
    np.testing.assert_array_equal(byte_map(cut), byte_map(plain))
    ends = cut.local + cut.nbytes
    for edge in extents[region][1:]:
        assert not ((cut.region == region) & (cut.local < edge) & (ends > edge)).any()
    assert (cut.remote[1:] >= (cut.remote + cut.nbytes)[:-1]).all()
    assert (cut.nbytes > 0).all()
    expected = len(plain) + sum(
        int(((plain.region == region) & (plain.local < e) & (plain.local + plain.nbytes > e)).sum())
        for e in extents[region][1:]
    )
    assert len(cut) == expected


def test_extents_are_cut_in_the_order_of_the_arena():
    cache, target = scene(channels=1)
    edges = tuple(range(0, len(cache.regions[0]), 512))
    cut = direct(target, cache.placement, 0, [edges])
    assert (cut.nbytes <= 512).all()
    assert cut.total == direct(target, cache.placement, 0).total
    assert (np.diff(cut.remote) > 0).all()
    assert cut.region.dtype == np.int32


def test_segments_pass_their_own_check():
    cache, target = scene()
    regions = [Region(f"r{i}", r) for i, r in enumerate(cache.regions)]
    direct(target, cache.placement, 64).check(regions, 64 + target.nbytes)
    where = cache.placement.region[0], np.full(7, cache.cache_bytes)
    staged(target, cache.placement, 64, *where)[0].check(regions, 64 + target.nbytes)


def test_staging_takes_one_segment_a_channel_and_is_cut_at_extents_too():
    cache, target = scene()
    where = cache.placement.region[0], np.full(7, cache.cache_bytes)
    segments, moves = staged(target, cache.placement, 0, *where)
    assert len(segments) == 7
    assert segments.total == target.nbytes
    inside = (moves.source >= cache.cache_bytes) & (
        moves.source + moves.nbytes <= cache.cache_bytes + target.channel_bytes[moves.channel]
    )
    assert inside.all()
    edge = cache.cache_bytes + 512
    cut, _ = staged(target, cache.placement, 0, *where, [(0, edge)] * 7)
    assert len(cut) == 14
    np.testing.assert_array_equal(byte_map(cut), byte_map(segments))


def test_planes_that_border_on_both_sides_become_one_segment():
    layout = s.declare("l", "layer kv block slot head dim").compile(s.shape(blocks=3), channels=1)
    target = target_chunk(layout, np.arange(3), Selection(0, 2, 0, 96), Chunk(0, 2, 0, 3))
    placement = Placement(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int64))
    assert len(direct(target, placement, 0)) == 1
    assert len(touched(target, placement)) == 1


def test_staging_in_another_region_is_refused():
    cache, target = scene()
    regions = cache.placement.region[0].copy()
    regions[4] = 99
    with pytest.raises(InvalidArgument, match=r"staging_region\[4\]"):
        staged(target, cache.placement, 0, regions, np.zeros(7, np.int64))
    with pytest.raises(InvalidArgument, match="staging_offset"):
        staged(target, cache.placement, 0, cache.placement.region[0], np.zeros(6, np.int64))


def test_a_placement_of_another_layout_is_refused():
    cache, target = scene()
    wrong = Placement(cache.placement.region[:, :6], cache.placement.offset)
    with pytest.raises(InvalidArgument, match=r"placement\.region"):
        direct(target, wrong, 0)


def test_touched_is_sorted_joined_and_exact():
    cache, target = scene(channels=3)
    ranges = touched(target, cache.placement)
    moved = byte_map(direct(target, cache.placement, 0))[:, 1:]
    moved = moved[np.lexsort((moved[:, 1], moved[:, 0]))]
    as_segments = Segments(
        ranges.region, ranges.start, np.cumsum(ranges.nbytes) - ranges.nbytes, ranges.nbytes
    )
    np.testing.assert_array_equal(byte_map(as_segments)[:, 1:], moved)
    order = list(zip(ranges.region.tolist(), ranges.start.tolist(), strict=True))
    assert order == sorted(order)
    same = ranges.region[1:] == ranges.region[:-1]
    assert ((ranges.start + ranges.nbytes)[:-1] < ranges.start[1:])[same].all()


def test_what_borders_on_one_side_only_stays_apart():
    # A plane is 32 bytes: planes border in the cache, but their parts of the arena begin at multiples of 64.
    layout = s.declare("l", "layer kv block slot head dim").compile(
        s.shape(heads=1, dim=1, block_size=16, blocks=1), channels=1
    )
    target = target_chunk(layout, np.arange(1), Selection(0, 2, 0, 16), Chunk(0, 2, 0, 1))
    placement = Placement(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int64))
    segments = direct(target, placement, 0)
    assert segments.local.tolist() == [0, 32, 64, 96]
    assert segments.remote.tolist() == [0, 64, 128, 192]
    assert len(touched(target, placement)) == 1


def test_equal_offsets_of_two_regions_do_not_border():
    layout = s.declare("l", "block slot head dim", buffers="layer kv").compile(
        s.shape(layers=1, heads=1, block_size=16, blocks=2), channels=2
    )
    target = target_chunk(layout, np.arange(2), Selection(0, 1, 0, 32), Chunk(0, 1, 0, 2))
    # Channel 1's bytes follow channel 0's in the arena and, but for the region, in the cache.
    offset = np.asarray([[0, 2048], [1024, 3072]], np.int64)
    regions = np.asarray([[0, 1], [0, 1]], np.int32)
    assert len(direct(target, Placement(regions, offset), 0)) == 2
    assert len(direct(target, Placement(regions * 0, offset), 0)) == 1
