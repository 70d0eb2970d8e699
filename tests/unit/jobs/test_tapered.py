"""Chunks of layers that are still being written: large at first, small at the end, each layer once."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hawk.control.messages import Prepared
from hawk.jobs.chunks import tapered
from hawk.jobs.cover import Cover
from hawk.plan.types import Chunk, Selection


def chunks(first: int, layers: int, most: int) -> tuple[Chunk, ...]:
    last = first + layers
    return tuple(Chunk(at, min(most, last - at), 3, 7) for at in range(first, last, most))


def test_the_last_ones_are_small() -> None:
    assert [c.layers for c in tapered(chunks(0, 32, 6))] == [6, 6, 6, 6, 4, 2, 1, 1]
    assert [c.layers for c in tapered(chunks(0, 3, 8))] == [1, 1, 1]


@given(st.integers(0, 9), st.integers(1, 99), st.integers(1, 40))
def test_each_layer_comes_once_and_no_chunk_is_larger_than_allowed(
    first: int, layers: int, most: int
) -> None:
    found = tapered(chunks(first, layers, most))
    covered = [layer for c in found for layer in range(c.layer, c.layer + c.layers)]
    assert covered == list(range(first, first + layers))
    assert all(1 <= c.layers <= most and (c.block, c.blocks) == (3, 7) for c in found)
    for c in found:
        assert c.layers <= max(1, (first + layers - c.layer) // 2)


def test_layers_that_are_cut_themselves_stay_as_they_are() -> None:
    cut = tuple(Chunk(layer, 1, block, 4) for layer in range(3) for block in (0, 4))
    assert tapered(cut) == cut


def cover_of(layers: int) -> Cover:
    return Cover(Selection(layer=4, layers=layers, token=0, tokens=64), 3, 10)


def taken(cover: Cover, chunk: Chunk) -> Chunk | None:
    where = {"layer": chunk.layer, "layers": chunk.layers, "block": chunk.block, "blocks": chunk.blocks}
    said = Prepared(job="job", chunk=0, offset=0, nbytes=1, key=b"", **where)
    return cover.following(cover.take(said))


def test_after_whole_layers_as_many_follow_or_those_that_are_left() -> None:
    cover = cover_of(9)
    assert taken(cover, Chunk(4, 4, 3, 7)) == Chunk(8, 4, 3, 7)
    assert taken(cover, Chunk(8, 4, 3, 7)) == Chunk(12, 1, 3, 7)
    assert taken(cover, Chunk(12, 1, 3, 7)) is None


def test_nothing_is_guessed_after_a_part_of_layers() -> None:
    assert taken(cover_of(9), Chunk(4, 1, 3, 4)) is None
    assert Cover().following(Chunk(0, 1, 0, 0)) is None


@given(st.integers(1, 99), st.integers(1, 40))
def test_once_chunks_become_smaller_all_that_follow_are_guessed(layers: int, most: int) -> None:
    found = tapered(chunks(4, layers, most))
    cover = cover_of(layers)
    for chunk, following in pairwise(found):
        guessed = taken(cover, chunk)
        if chunk.layers < found[0].layers:
            assert guessed == following
