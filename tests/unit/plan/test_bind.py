"""Binding a plan to block tables: the C core gives what numpy does, and refuses tables that do not fit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.layouts import load
from hawk.plan import bind, target
from hawk.plan.pattern import ALL_HEADS, ARENA_ALIGN, pattern
from hawk.retile import native
from tests.unit.plan import support as s

built = pytest.mark.skipif(native.planner() is None, reason="the C core is not built")

LAYOUTS = {
    "tiles": load("tenstorrent/kv"),
    "heads first": s.declare("own/heads-first", "head block slot dim", buffers="layer kv"),
    "gaps between pages": s.declare(
        "own/gaps", "block head slot/8 | dim slot%8", buffers="layer kv", align=96
    ),
    "uneven stretches": s.declare("own/uneven", "slot/8 block head | slot%8 dim", buffers="layer kv"),
    "blocks apart": s.declare("own/apart", "block%4 head slot/8 block/4 | slot%8 dim", buffers="layer kv"),
}


@built
@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)),
    st.sampled_from([1, 2, 3, 7, 8, 12]),
    st.integers(1, 12),
    st.integers(0, 40),
    st.integers(0, 2**32),
)
def test_runs_are_those_of_numpy(name, channels, heads, residue, seed):
    layout = LAYOUTS[name].compile(s.shape(heads=heads, block_size=32, blocks=40), channels=channels)
    rng = np.random.default_rng(seed)
    table = rng.permutation(40)[: rng.integers(1, 41)].astype(np.int64)
    term = layout.piece(0).page_term("block", table) + residue
    found = bind.whole_runs(layout, pattern(layout, 0, 0), term, ARENA_ALIGN)
    assert found is not None
    for got, want in zip(found, target.numpy_runs(layout, 0, 0, ALL_HEADS, term), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == want.dtype


@built
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 3, 7, 8]), st.integers(1, 9), st.integers(1, 40), st.integers(0, 2**32))
def test_pieces_are_those_of_numpy(channels, blocks, each, seed):
    layout = LAYOUTS["tiles"].compile(s.shape(block_size=32, blocks=40), channels=channels)
    rng = np.random.default_rng(seed)
    term = rng.integers(0, 1000, blocks)
    channel, page = rng.integers(0, channels, (channels, each)), rng.integers(0, 1 << 40, (channels, each))
    moved = rng.integers(-(1 << 40), 1 << 40, blocks * channels)
    with native.using("c"):
        found = bind.dealt_pieces(layout, term, channel, page, moved)
    with native.using("numpy"):
        wanted = bind.dealt_pieces(layout, term, channel, page, moved)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def runs_call(**other):
    """Tables of two channels and three blocks that fit each other, but for `other`."""
    n = 8
    tables = {
        "term": np.asarray([6, 1, 2]),
        "first": np.asarray([0, 1, 2]),
        "channel": np.asarray([0, 1]),
        "slot": np.zeros(2, np.int64),
        "count": np.ones(2, np.int64),
        "stride": 64,
        "page_bytes": 64,
        "align": 64,
        "to_channel": np.empty(n, np.int32),
        "arena": np.empty(n, np.int64),
        "target": np.empty(n, np.int64),
        "nbytes": np.empty(n, np.int64),
        "channel_bytes": np.empty(2, np.int64),
        "moved": np.empty(6, np.int64),
    } | other
    return native.core().bind_runs(*tables.values())


@built
@pytest.mark.parametrize(
    "other",
    [
        {"term": np.asarray([6, -1, 2])},
        {"first": np.asarray([0, 3, 2])},
        {"first": np.asarray([0, 1, 9])},
        {"first": np.asarray([0])},
        {"channel": np.asarray([0, 2])},
        {"channel": np.asarray([0, -1])},
        {"slot": np.zeros(1, np.int64)},
        {"to_channel": np.empty(2, np.int32)},
        {"arena": np.empty(7, np.int64)},
        {"channel_bytes": np.empty(1, np.int64)},
        {"moved": np.empty(5, np.int64)},
        {"stride": 0},
        {"align": 0},
        {"page_bytes": 32, "count": np.asarray([1, 9])},
    ],
    ids=lambda other: next(iter(other)),
)
def test_tables_that_do_not_fit_are_refused(other):
    assert runs_call() == 3
    with pytest.raises(ValueError, match=r"fit|room|short"):
        runs_call(**other)


@built
@pytest.mark.parametrize("field", range(6))
def test_pieces_that_do_not_fit_are_refused(field):
    def tables():
        one = np.zeros(4, np.int64)
        return [
            np.zeros(3, np.int64),
            one,
            one,
            np.zeros(6, np.int64),
            *(np.empty(6, np.int64) for _ in range(2)),
        ]

    good = tables()
    native.core().bind_pieces(*good[:4], 2, 64, *good[4:])
    bad = tables()
    bad[field] = bad[field][:-1]
    with pytest.raises(ValueError, match="fit"):
        native.core().bind_pieces(*bad[:4], 2, 64, *bad[4:])
    for field in (0, 1):
        bad = tables()
        bad[field] = np.full_like(bad[field], -1)
        with pytest.raises(ValueError, match="fit"):
            native.core().bind_pieces(*bad[:4], 2, 64, *bad[4:])


def test_a_layout_is_looked_up_by_its_content_in_every_process():
    one, same = (load("tenstorrent/kv").compile(s.shape(), channels=7) for _ in range(2))
    other = load("tenstorrent/kv").compile(s.shape(), channels=8)
    assert hash(one) == hash(same)
    assert one == same != other
    # A hash of strings holds in one process only, so it does not travel.
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one
    assert copy._hash == 0
