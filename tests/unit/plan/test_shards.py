"""Which worker sends what to which: tiled exactly once, replicated heads shared out, windows and stages."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.errors import InternalError, InvalidArgument
from hawk.plan.shards import Grid, Kind, Model, cache_layers, check_parts, parts, shard
from hawk.plan.types import Selection


def model(layers=4, heads=8, kinds=()):
    return Model("m", layers=layers, heads=heads, dim=64, kinds=kinds)


def hybrid(layers, every, window=100):
    """Every n-th layer sees all, the others a window."""
    whole = tuple(n for n in range(layers) if n % every == every - 1)
    rest = tuple(n for n in range(layers) if n not in whole)
    return (Kind("whole", whole), Kind("window", rest, window))


@pytest.mark.parametrize(
    ("heads", "tp", "want"),
    [
        (8, 8, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8)]),
        (8, 2, [(0, 4), (4, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
        (8, 3, [(0, 2), (2, 5), (5, 8)]),
        (2, 3, [(0, 1), (0, 1), (1, 2)]),
    ],
)
def test_heads_are_split_and_replicated(heads, tp, want):
    got = [shard(model(heads=heads), Grid(tp), rank).heads for rank in range(tp)]
    assert [(h.start, h.stop) for h in got] == want


def test_eight_heads_from_eight_workers_to_sixteen():
    """F3: each of sixteen gets one head, from the one worker that has it."""
    got = parts(model(heads=8), Grid(8), Grid(16))
    assert [(p.source, p.target, p.head, p.heads, p.source_head) for p in got] == [
        (t // 2, t, 0, 1, 0) for t in range(16)
    ]


def test_two_heads_from_one_worker_to_four():
    """F3: 2 heads, TP 1 to 4."""
    got = parts(model(heads=2), Grid(1), Grid(4))
    assert [(p.source, p.target, p.head, p.heads, p.source_head) for p in got] == [
        (0, 0, 0, 1, 0),
        (0, 1, 0, 1, 0),
        (0, 2, 0, 1, 1),
        (0, 3, 0, 1, 1),
    ]


def test_copies_of_a_head_take_turns():
    got = parts(model(heads=2), Grid(8), Grid(4))
    assert [p.source for p in got] == [0, 2, 4, 6]
    got = parts(model(heads=2), Grid(4), Grid(8))
    assert [p.source for p in got] == [0, 0, 1, 1, 2, 2, 3, 3]
    # Merged heads need one copy of each.
    got = parts(model(heads=2), Grid(4), Grid(1))
    assert [(p.source, p.head) for p in got] == [(0, 0), (2, 1)]


def test_stages_that_differ():
    got = parts(model(layers=10, heads=1), Grid(pp=3), Grid(pp=2, stages=(7, 3)))
    # Stages of 3, 3 and 4 layers.
    assert [(p.source, p.target, p.layer, p.source_layers) for p in got] == [
        (0, 0, 0, (0, 1, 2)),
        (1, 0, 3, (0, 1, 2)),
        (2, 0, 6, (0,)),
        (2, 1, 0, (1, 2, 3)),
    ]


def test_kinds_have_their_own_caches_and_windows():
    m = model(layers=6, heads=1, kinds=hybrid(6, 3, window=33))
    got = parts(m, Grid(), Grid())
    assert [(p.kind.name, p.layer, p.source_layers) for p in got] == [
        ("whole", 0, (0, 1)),
        ("window", 0, (0, 1, 2, 3)),
    ]
    whole, window = got
    assert whole.selection(100) == Selection(0, 2, 0, 100, (), 0, 1, 0)
    # A token sees itself and 32 before it: those are what the next one needs.
    assert window.selection(100) == Selection(0, 4, 68, 32, (), 0, 1, 0)
    assert window.selection(20) == Selection(0, 4, 0, 20, (), 0, 1, 0)
    assert window.selection(100, first=90).token == 90
    assert window.selection(100, first=10).token == 68
    assert whole.selection(64, first=64) is None


def test_a_source_that_keeps_all_kinds_in_one_cache():
    m = model(layers=6, heads=1, kinds=hybrid(6, 3))
    got = parts(m, Grid(apart=False), Grid())
    assert [(p.kind.name, p.layer, p.source_layers) for p in got] == [
        ("whole", 0, (2, 5)),
        ("window", 0, (0, 1, 3, 4)),
    ]
    assert got[0].selection(8).source_layers == (2, 5)
    back = parts(m, Grid(), Grid(apart=False))
    assert [(p.kind.name, p.layer, p.source_layers) for p in back] == [
        ("whole", 2, (0,)),
        ("whole", 5, (1,)),
        ("window", 0, (0, 1)),
        ("window", 3, (2, 3)),
    ]


@st.composite
def grids(draw, layers):
    pp = draw(st.integers(1, min(layers, 4)))
    stages = ()
    if draw(st.booleans()):
        cuts = sorted(
            draw(st.sets(st.integers(1, layers - 1), min_size=pp - 1, max_size=pp - 1)) if pp > 1 else []
        )
        stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    return Grid(draw(st.integers(1, 12)), pp, stages, draw(st.booleans()))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_parts_fill_everything_exactly_once(data):
    layers = data.draw(st.integers(1, 9))
    kinds = data.draw(st.sampled_from([(), hybrid(layers, 2)])) if layers > 1 else ()
    m = model(layers, data.draw(st.integers(1, 8)), kinds)
    source, target = data.draw(grids(layers)), data.draw(grids(layers))
    found = parts(m, source, target)
    check_parts(m, source, target, found)
    # An account of its own: every (target, layer, head) of the model, from a sender that has both.
    seen = Counter()
    for part in found:
        wanted, held = (
            cache_layers(m, grid, rank, part.kind)
            for grid, rank in ((target, part.target), (source, part.source))
        )
        for i, layer in enumerate(part.source_layers):
            assert wanted[part.layer + i] == held[layer]
            for h in range(part.heads):
                mine = shard(m, target, part.target).heads[part.head + h]
                assert shard(m, source, part.source).heads[part.source_head + h] == mine
                seen[part.target, held[layer], mine] += 1
    stage_of = {n: rank // target.tp for rank in range(target.ranks) for n in shard(m, target, rank).layers}
    want = {
        (stage_of[n] * target.tp + r, n, h)
        for n in range(layers)
        for r in range(target.tp)
        for h in shard(m, target, r).heads
    }
    assert set(seen) == want
    assert set(seen.values()) == {1}


def test_the_checker_finds_what_is_wrong():
    m, a, b = model(layers=4, heads=4), Grid(2), Grid(4, 2)
    good = parts(m, a, b)
    check_parts(m, a, b, good)
    for wrong in (
        good[1:],
        (*good, good[0]),
        (replace(good[0], source_head=1), *good[1:]),
        (replace(good[0], source=1), *good[1:]),
        (replace(good[0], source_layers=(1, 1)), *good[1:]),
    ):
        with pytest.raises(InternalError):
            check_parts(m, a, b, wrong)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Grid(0), "grid.tp"),
        (lambda: Grid(1, 2, (3,)), "grid.stages"),
        (lambda: shard(model(), Grid(2), 2), "rank"),
        (lambda: shard(model(layers=2), Grid(1, 3), 0), "grid.pp"),
        (lambda: shard(model(layers=4), Grid(1, 2, (1, 2)), 0), "grid.stages"),
        (lambda: model(kinds=(Kind("a", (0, 1, 2)),)), "model.kinds"),
        (lambda: model(kinds=(Kind("a", (0, 1)), Kind("b", (1, 2, 3)))), "model.kinds"),
        (lambda: model(kinds=(Kind("a", (0, 1)), Kind("a", (2, 3)))), "model.kinds"),
        (lambda: model(kinds=(Kind("a", (0, 1, 2, 3), window=1),)), r"model\.kinds\.a\.window"),
        (lambda: model(heads=0), "model.heads"),
        (lambda: Selection(0, 2, 0, 1, (0,)), "selection.source_layers"),
        (lambda: Selection(0, 2, 0, 1, (0, -1)), "selection.source_layers"),
        (lambda: Selection(0, 2, 0, 1, head=1), "selection.heads"),
        (lambda: Selection(0, 2, 0, 1, heads=-1), "selection.heads"),
    ],
)
def test_what_cannot_be_is_refused(make, field):
    with pytest.raises(InvalidArgument, match=field):
        make()
