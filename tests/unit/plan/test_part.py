"""Parts of a model: what ranks hold, what two share, whether several make up one.  The oracle is a set of pairs."""

from __future__ import annotations

import contextlib
import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.cache import CacheSpec, KVCache
from hawk.errors import InvalidArgument, PartsMismatch, Unmappable
from hawk.jobs.caches import compile_descr, part_of, read_part, write_part
from hawk.plan.part import Coverage, Part, meets, selection, serves
from hawk.plan.shards import Grid, Model, parts

LAYERS, HEADS = 12, 8


def cells(part: Part) -> set[tuple[int, int]]:
    return set(product(part.layers, part.heads))


def group(tp: int, pp: int = 1) -> list[Part]:
    return [
        Part.of(HEADS, LAYERS, tp_rank=r, tp_size=tp, pp_rank=s, pp_size=pp)
        for s, r in product(range(pp), range(tp))
    ]


def some_part() -> st.SearchStrategy[Part]:
    def ranges(n: int) -> st.SearchStrategy[range]:
        return st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(
            lambda p: range(p[0], min(p[0] + p[1], n))
        )

    return st.builds(lambda h, n: Part(h, HEADS, n, LAYERS), ranges(HEADS), ranges(LAYERS))


@pytest.mark.parametrize(
    ("heads", "tp", "rank", "held"),
    [
        (8, 8, 3, range(3, 4)),
        (8, 16, 5, range(2, 3)),
        (2, 4, 1, range(1)),
        (2, 4, 2, range(1, 2)),
        (8, 3, 2, range(5, 8)),
    ],
)
def test_what_a_rank_holds(heads: int, tp: int, rank: int, held: range) -> None:
    assert Part.of(heads, 4, tp_rank=rank, tp_size=tp).heads == held


@given(st.integers(1, 20), st.integers(1, LAYERS))
def test_a_group_holds_the_model_and_replicas_are_whole(tp: int, pp: int) -> None:
    parts = group(tp, pp)
    different = {frozenset(cells(part)) for part in parts}
    assert frozenset().union(*different) == set(product(range(LAYERS), range(HEADS)))
    assert sum(map(len, different)) == LAYERS * HEADS


@given(some_part(), some_part())
def test_what_two_share(source: Part, target: Part) -> None:
    shared = cells(source) & cells(target)
    assert meets(source, target) == bool(shared)
    if not shared:
        with pytest.raises(Unmappable, match="nothing that the target needs"):
            selection(source, target, 0, 5)
        return
    chosen = selection(source, target, 3, 5)
    assert (chosen.token, chosen.tokens) == (3, 5)
    head, heads = chosen.head, chosen.heads or len(target.heads)
    found = set()
    for i, j in product(range(chosen.layers), range(heads)):
        layer = chosen.layer + i
        there = target.layers[layer], target.heads[head + j]
        here = source.layers[chosen.source_layer(layer)], source.heads[chosen.source_head + j]
        assert here == there
        found.add(there)
    assert found == shared


@given(st.lists(some_part(), max_size=8), some_part())
def test_coverage_counts_each_element_once(parts: list[Part], target: Part) -> None:
    coverage, there = Coverage(target), set()
    for part in parts:
        new = cells(part) & cells(target)
        if new & there and new - there:
            with pytest.raises(PartsMismatch, match="overlap"):
                coverage.take(part)
            return
        assert coverage.take(part) == bool(new - there)
        there |= new
    assert coverage.complete == (there == cells(target))
    if not coverage.complete:
        with pytest.raises(PartsMismatch, match="missing"):
            coverage.check()


@pytest.mark.parametrize(
    ("tp", "pp", "rank", "readers"),
    [(1, 1, 0, 16), (8, 1, 3, 2), (16, 1, 3, 1), (32, 1, 6, 1), (32, 1, 7, 0), (4, 3, 0, 4)],
)
def test_how_many_read_a_part(tp: int, pp: int, rank: int, readers: int) -> None:
    part = group(tp, pp)[rank]
    assert part.readers(16) == readers == sum(serves(part, other) for other in group(16))


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 40), st.integers(1, 3))
def test_every_worker_reads_each_element_from_one_copy(tp: int, pp: int, into_tp: int, into_pp: int) -> None:
    """As `hawk.plan.shards` deals them out, which knows both groups."""
    givers, takers = group(tp, pp), group(into_tp, into_pp)
    dealt = parts(Model("m", LAYERS, HEADS, 1), Grid(tp, pp), Grid(into_tp, into_pp))
    found = {
        (s, t) for s, t in product(range(len(givers)), range(len(takers))) if serves(givers[s], takers[t])
    }
    assert found == {(part.source, part.target) for part in dealt}
    for t, taker in enumerate(takers):
        coverage = Coverage(taker)
        assert all(coverage.take(givers[s]) for s, other in found if other == t)
        assert coverage.complete


def test_what_is_missing_is_named() -> None:
    coverage = Coverage(Part(range(8), 8, range(10, 12), 12))
    for heads in (range(2), range(3, 5)):
        coverage.take(Part(heads, 8, range(12), 12))
    coverage.take(Part(range(2, 3), 8, range(10, 11), 12))
    with pytest.raises(PartsMismatch) as caught:
        coverage.check()
    assert (caught.value.field, caught.value.got) == ("tickets", "nothing for heads 5..7 of layers 10")
    with pytest.raises(PartsMismatch, match="differ in heads") as caught:
        coverage.take(Part(range(5, 8), 16, range(12), 12), "tickets[3].part")
    assert caught.value.field == "tickets[3].part.heads"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"heads": range(3, 9)}, "part.heads"),
        ({"heads": range(3, 3)}, "part.heads"),
        ({"heads": range(0, 4, 2)}, "part.heads"),
        ({"heads": [0, 1]}, "part.heads"),
        ({"layers": range(-1, 2)}, "part.layers"),
        ({"of_layers": 0}, "part.of_layers"),
        ({"of_heads": 2.0}, "part.of_heads"),
        ({"of_heads": 70_000}, "part.of_heads"),
        ({"copy": 1}, "part.copy"),
        ({"copies": 0}, "part.copies"),
    ],
)
def test_parts_that_cannot_be(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        dataclasses.replace(Part(range(2), 8, range(2), 12), **changes)  # type: ignore[arg-type]
    assert caught.value.field == field


# -- caches that say which part they are -----------------------------------------------------------------------

WHOLE = CacheSpec(layers=LAYERS, heads=HEADS, dim=16, block_size=16, blocks=4)


def test_a_spec_is_sharded() -> None:
    spec = WHOLE.shard(tp_rank=1, tp_size=4, pp_rank=2, pp_size=3)
    assert (spec.heads, spec.layers, spec.part) == (2, 4, Part(range(2, 4), 8, range(8, 12), 12))
    assert WHOLE.shard(heads=range(2, 4), layers=range(8, 12)) == spec
    assert WHOLE.shard(heads=range(2, 4), pp_rank=2, pp_size=3) == spec
    assert spec.part is not None
    descr = spec.descr()
    assert (part_of(descr), write_part(spec.part)) == (spec.part, descr.part)
    assert part_of(WHOLE.descr()).whole
    assert WHOLE.descr().part is None
    with contextlib.closing(KVCache.alloc(spec)) as cache:
        assert "heads 2..3 of 8, layers 8..11 of 12" in repr(cache)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tp_rank": 4, "tp_size": 4}, "tp_rank"),
        ({"tp_rank": -1}, "tp_rank"),
        ({"tp_rank": True, "tp_size": 2}, "tp_rank"),
        ({"tp_size": 0}, "grid.tp"),
        ({"pp_size": 13}, "grid.pp"),
        ({"pp_rank": 1}, "pp_rank"),
        ({"heads": range(2), "tp_size": 2}, "heads"),
        ({"layers": range(2), "pp_size": 2}, "layers"),
        ({"heads": range(7, 9)}, "part.heads"),
        ({"layers": (0, 1)}, "part.layers"),
    ],
)
def test_shards_that_cannot_be(options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        WHOLE.shard(**options)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_spec_and_its_part_agree() -> None:
    spec = WHOLE.shard(tp_size=4)
    for changes, field in (
        ({"heads": 3}, "part.heads"),
        ({"layers": 5}, "part.layers"),
        ({"part": 3}, "part"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            spec.replace(**changes)
        assert caught.value.field == field
    with pytest.raises(InvalidArgument, match="a part already"):
        spec.shard(tp_size=2)


def test_a_description_and_its_part_agree() -> None:
    part = write_part(Part(range(2), 8, range(3), 12))
    descr = WHOLE.descr()
    fields = {name: getattr(descr, name) for name in descr.__struct_fields__}
    with pytest.raises(InvalidArgument) as caught:
        compile_descr(type(descr)(**{**fields, "part": part}))
    assert (caught.value.field, caught.value.expected) == ("cache.part.heads", "8 heads")
    beyond = type(part)(head=7, heads=8, of_heads=8, layer=0, layers=12, of_layers=12)
    with pytest.raises(InvalidArgument, match=r"cache\.part"):
        compile_descr(type(descr)(**{**fields, "part": beyond}))
    with pytest.raises(InvalidArgument, match="peer"):
        read_part(beyond, "peer.part")
