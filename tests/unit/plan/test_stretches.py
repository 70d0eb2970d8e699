"""Stretches: the same on both sides, every byte that moves in exactly one, each named by where it belongs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.layouts import load
from hawk.plan import stretches
from hawk.plan.segments import direct
from hawk.plan.target import split, target_chunk
from hawk.plan.types import Selection
from tests.unit.plan import support as s


def chunks(channels, first, tokens, max_bytes, seed=3, codec="bf16"):
    rng = np.random.default_rng(seed)
    layout = load("tenstorrent/kv").compile(s.shape(block_size=64), channels=channels, codec=codec)
    cache, blocks = s.Cache(layout, rng), rng.permutation(12)[:8]
    selection = Selection(0, 2, first, tokens)
    for chunk in split(layout, selection, max_bytes=max_bytes):
        yield cache, target_chunk(layout, blocks, selection, chunk)


@pytest.fixture(params=[64 << 10, 3000, 64], ids=["a part each", "odd", "small"])
def span(request, monkeypatch):
    monkeypatch.setattr(stretches, "SPAN", request.param)
    return request.param


@pytest.mark.parametrize("channels", [1, 7, 8])
@pytest.mark.parametrize(("first", "tokens"), [(0, 512), (37, 250), (70, 3)])
def test_both_sides_have_the_same_ones_and_together_all_bytes(span, channels, first, tokens):
    for cache, planned in chunks(channels, first, tokens, 1 << 15):
        sent, there = stretches.prepared(planned), stretches.landed(planned, cache.placement)
        np.testing.assert_array_equal(sent.begin, there.begin)
        plain = direct(planned, cache.placement, 0)
        for found in (sent, there):
            rows = found.rows
            assert (rows.nbytes > 0).all()
            assert rows.total == plain.total
            assert (rows.remote[1:] >= (rows.remote + rows.nbytes)[:-1]).all()
            assert (np.diff(found.first) > 0).all()
            number = np.repeat(np.arange(len(found)), np.diff(found.first))
            edges = np.append(found.begin, planned.nbytes)
            assert (rows.remote >= edges[number]).all()
            assert (rows.remote + rows.nbytes - edges[number] <= span).all()
        # The same bytes, seen from both ends.
        arena = np.random.default_rng(1).integers(0, 256, planned.nbytes, np.uint8)
        s.apply_segments(plain, cache.regions, arena)
        for i in range(len(sent)):
            assert content(sent, i, [arena]) == content(there, i, cache.regions)


def content(found, i, regions):
    rows = found.rows
    return b"".join(
        regions[rows.region[r]][rows.local[r] : rows.local[r] + rows.nbytes[r]].tobytes()
        for r in range(found.first[i], found.first[i + 1])
    )


def test_each_is_named_by_its_plane_and_channel(span):
    for _, planned in chunks(7, 37, 250, 1 << 15):
        found = stretches.prepared(planned)
        ends = planned.base + np.stack([planned.runs[k].channel_bytes for k in planned.kind])
        for begin in found.begin.tolist():
            layer, kv, channel, tensor = stretches.named(planned, begin)
            plane = planned.planes.index((layer, kv))
            assert planned.base[plane, channel] <= begin < ends[plane, channel]
            assert tensor == "elements"


def test_what_is_taken_is_what_was_there(span):
    cache, planned = next(chunks(8, 37, 250, 1 << 16))
    found = stretches.landed(planned, cache.placement)
    some = np.arange(0, len(found), 3)
    taken = found.take(some)
    assert taken.begin.tolist() == found.begin[some].tolist()
    for i, number in enumerate(some):
        assert content(taken, i, cache.regions) == content(found, number, cache.regions)


def test_a_large_chunk_has_longer_ones_instead_of_too_many(monkeypatch):
    monkeypatch.setattr(stretches, "SPAN", 64)
    monkeypatch.setattr(stretches, "MOST", 40)
    (_, planned), *_ = chunks(8, 0, 512, 1 << 20)
    assert 8 < len(stretches.prepared(planned)) <= 40 + 8 * len(planned.planes)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 300), st.integers(1, 200), st.integers(1, 1 << 14))
def test_any_range_and_any_span(channels, first, tokens, size):
    before, stretches.SPAN = stretches.SPAN, size
    try:
        for cache, planned in chunks(channels, first, tokens, 1 << 15):
            sent, there = stretches.prepared(planned), stretches.landed(planned, cache.placement)
            np.testing.assert_array_equal(sent.begin, there.begin)
            total = direct(planned, cache.placement, 0).total
            assert sent.rows.total == there.rows.total == total
    finally:
        stretches.SPAN = before
