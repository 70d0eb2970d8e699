"""Binding a plan to block tables: the C core gives what numpy does, and refuses tables that do not fit."""

from __future__ import annotations

import pickle
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.layouts import load
from hawk.plan import bind, target
from hawk.plan.pattern import ALL_HEADS, ARENA_ALIGN, pattern
from hawk.plan.types import Placement, PlaneRuns
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


# -- the rest of a plan --------------------------------------------------------------------------------------


def alike(function, *arguments):
    """Both cores give the same."""
    with native.using("c"):
        found = function(*arguments)
    with native.using("numpy"):
        wanted = function(*arguments)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.asarray(got).dtype == np.asarray(want).dtype
    return found


@built
@given(st.lists(st.integers(-3, 9), max_size=20), st.integers(0, 9))
def test_the_first_that_leaves_its_bounds(blocks, limit):
    alike(lambda: [bind.first_outside(np.asarray(blocks, np.int64), limit)])


@built
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(LAYOUTS)), st.integers(0, 40), st.integers(0, 2**32))
def test_where_blocks_begin(name, add, seed):
    layout = LAYOUTS[name].compile(s.shape(block_size=32, blocks=40), channels=7)
    table = np.random.default_rng(seed).permutation(40).astype(np.int64)
    (found,) = alike(lambda: [bind.terms(bind.block_digits(layout, 0), table, add)])
    np.testing.assert_array_equal(found, layout.piece(0).page_term("block", table) + add)


@built
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 2**32))
def test_where_planes_begin(kinds, channels, seed):
    nbytes = np.random.default_rng(seed).integers(0, 1 << 40, (3, channels))
    base, total = alike(bind.bases, np.asarray(kinds, np.int64), nbytes)
    assert total == nbytes[kinds].sum()
    assert base[0, 0] == 0


@built
@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.integers(0, 2), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(0, 2**32),
)
def test_rows_as_groups(kinds, kind, channels, seed):
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(kinds):
        n = int(rng.integers(1, 12))
        columns = (rng.integers(0, 1 << 40, n) for _ in range(3))
        channel = np.sort(rng.integers(0, channels, n)).astype(np.int32)
        runs.append(PlaneRuns(channel, *columns, np.zeros(channels, np.int64), np.empty(0, np.int64)))
    planes = np.asarray(kind, np.int64) % kinds
    count, buffers = len(planes), 4
    placement = Placement(
        rng.integers(0, 9, (buffers, channels)).astype(np.int32),
        rng.integers(0, 1 << 40, (buffers, channels)),
    )
    buffer, shift = rng.integers(0, buffers, count), rng.integers(0, 1 << 20, count)
    base = rng.integers(0, 1 << 40, (count, channels))

    def made():
        found = bind.groups(runs, planes, buffer, shift, base, placement, 640)
        return [getattr(found, f.name) for f in fields(found)]

    alike(made)


@built
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 20), st.integers(0, 2**32))
def test_where_source_pages_are(entries, each, rows, seed):
    rng = np.random.default_rng(seed)
    term, entry = rng.integers(0, 1 << 30, entries), rng.integers(0, entries, rows)
    at = rng.integers(0, 1 << 40, (rows, each, 1))
    alike(lambda: [bind.pages(term, entry, at, 4096)])


WORD = np.int64
ONE, TWO = np.zeros(1, WORD), np.zeros(2, WORD)


def groups_call(**other):
    """One plane of two channels, with a row in each, that fits but for `other`."""
    tables = {
        "channels": 2,
        "arena": 0,
        "channel": np.asarray([0, 1], np.int32),
        "ends": np.asarray([2], WORD),
        "kind": ONE,
        "buffer": ONE,
        "shift": ONE,
        "base": TWO,
        "region": np.zeros(2, np.int32),
        "offset": TWO,
        "first": np.zeros(2, WORD),
        "count": np.zeros(2, WORD),
        "which": np.zeros(2, WORD),
        "to_region": np.zeros(2, np.int32),
        "up": np.zeros(2, WORD),
        "on": np.zeros(2, WORD),
    }
    return native.core().bind_groups(*(tables | other).values())


@built
@pytest.mark.parametrize(
    "call",
    [
        lambda core: core.bind_terms(np.asarray([-1]), np.asarray([1, 9, 1]), 0, np.zeros(1, WORD)),
        lambda core: core.bind_terms(ONE, np.asarray([0, 9, 1]), 0, np.zeros(1, WORD)),
        lambda core: core.bind_terms(ONE, np.asarray([1, 0, 1]), 0, np.zeros(1, WORD)),
        lambda core: core.bind_terms(ONE, np.asarray([1, 9]), 0, np.zeros(1, WORD)),
        lambda core: core.bind_terms(TWO, np.asarray([1, 9, 1]), 0, np.zeros(1, WORD)),
        lambda core: core.bind_base(np.asarray([1]), TWO, 2, np.zeros(2, WORD)),
        lambda core: core.bind_base(np.asarray([-1]), TWO, 2, np.zeros(2, WORD)),
        lambda core: core.bind_base(ONE, TWO, 2, np.zeros(1, WORD)),
        lambda core: core.bind_base(ONE, TWO, 0, np.zeros(0, WORD)),
        lambda core: core.bind_pages(ONE, np.asarray([1]), ONE, 1, np.zeros(1, WORD)),
        lambda core: core.bind_pages(ONE, np.asarray([-1]), ONE, 1, np.zeros(1, WORD)),
        lambda core: core.bind_pages(ONE, TWO, np.zeros(3, WORD), 1, np.zeros(3, WORD)),
        lambda core: core.bind_pages(ONE, ONE, ONE, 1, np.zeros(2, WORD)),
        lambda core: groups_call(channels=0),
        lambda core: groups_call(channel=np.asarray([0, 2], np.int32)),
        lambda core: groups_call(channel=np.asarray([-1, 1], np.int32)),
        lambda core: groups_call(ends=np.asarray([1], WORD)),
        lambda core: groups_call(ends=np.asarray([3], WORD)),
        lambda core: groups_call(ends=np.zeros(0, WORD)),
        lambda core: groups_call(
            ends=np.asarray([3, 2], WORD), first=np.zeros(4, WORD), count=np.zeros(4, WORD)
        ),
        lambda core: groups_call(kind=np.asarray([1])),
        lambda core: groups_call(buffer=np.asarray([1])),
        lambda core: groups_call(buffer=np.asarray([-1])),
        lambda core: groups_call(base=ONE),
        lambda core: groups_call(offset=ONE),
        lambda core: groups_call(on=np.zeros(1, WORD)),
        lambda core: groups_call(to_region=np.zeros(1, np.int32)),
    ],
)
def test_other_tables_that_do_not_fit_are_refused(call):
    assert groups_call() == 2
    with pytest.raises(ValueError, match="do not fit"):
        call(native.core())
