"""Launches of chunks that differ from one before in where they lie, and in nothing else: worked out once for each kind.

For such a chunk nothing is made step by step: its bases are a few operations on all of them at once, and everything
else is what it was.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.retile.cuda.bases import table_of
from hawk.retile.cuda.bound import front_of, joined
from hawk.retile.cuda.shelf import Shelf
from hawk.retile.cuda.spec import VECTOR
from hawk.retile.cuda.tables import MAX_PARTS, Kind, bind, coupled, kind_of, part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from hawk.retile.cpu import Step
    from hawk.retile.cuda.bases import Span
    from hawk.retile.cuda.bound import Bound
    from hawk.retile.lies import Lies
    from hawk.retile.program import Pieces, Program
    from hawk.retile.rows import RowsStep

    I64 = NDArray[np.int64]


class Lying(NamedTuple):
    """Of each step and channel, the source's and then the target's: the address, and bytes from there on."""

    address: I64
    room: I64

    @classmethod
    def of(cls, lies: Lies, regions: Sequence[Span], arena: Span) -> Lying | None:
        """Where a chunk lies; None where that is nowhere."""
        memory, region, offset = table_of(regions), lies.region, lies.offset
        if not region.size or region.min() < 0 or region.max() >= len(memory) or offset.min() < 0:
            return None
        there = memory[region]
        return cls(
            np.concatenate((there[..., 0] + offset, arena.address + lies.target), axis=1),
            np.concatenate((there[..., 1] - offset, arena.nbytes - lies.target), axis=1),
        )


@dataclass(frozen=True)
class Recipe:
    """What was worked out for a chunk.

    kinds       see `hawk.retile.lies.Lies`
    launches    with the bases of that chunk
    parts       of each launch the steps of each part
    beside      steps, those that are moved with them, and how much farther on in the source these begin
    least       bytes that have to lie behind each base, `int64[steps, channels]`
    odd         bits that no address there may have: the kernels count on their being 0
    """

    kinds: object
    launches: tuple[Bound, ...]
    parts: tuple[tuple[I64, ...], ...]
    beside: tuple[tuple[I64, I64, int], ...]
    least: I64
    odd: I64

    def again(self, lies: Lies, lying: Lying) -> list[Bound] | None:
        """The launches of another chunk, or None where it differs in more than the places."""
        if lies.kinds is not self.kinds or lying.address.shape != self.odd.shape:
            return None
        if (lying.room < self.least).any() or (lying.address & self.odd).any():
            return None
        for first, second, shift in self.beside:
            if (
                (lies.region[second] != lies.region[first]).any()
                or (lies.offset[second] != lies.offset[first] + shift).any()
                or (lies.target[second] != lies.target[first]).any()
            ):
                return None
        return [
            replace(launch, front=front_of([lying.address[rows] for rows in parts]))
            for launch, parts in zip(self.launches, self.parts, strict=True)
        ]


class _First(NamedTuple):
    """A chunk of which it is not known whether there will be others like it: what a recipe is made of."""

    lies: Lies
    lying: Lying
    launches: list[Bound]
    parts: list[tuple[Kind, Kind | None, Pieces | None]]

    def recipe(self) -> Recipe:
        """What the next ones like it are made by."""
        lies, lying = self.lies, self.lying
        sources = lies.region.shape[1]
        least, odd = np.zeros_like(lying.room), np.zeros_like(lying.address)
        for kind, _, others in self.parts:
            rows = kind.own
            for pieces in (kind.pieces, *([] if others is None else [others])):
                least[rows] = np.maximum(least[rows], _least(kind.program, pieces, least.shape[1], sources))
            for side in (slice(sources), slice(sources, None)):
                bits = int(np.bitwise_or.reduce(lying.address[rows, side], axis=None)) | VECTOR
                odd[rows, side] = (bits & -bits) - 1
        numbers = [kind.own for kind, _, _ in self.parts]
        return Recipe(
            lies.kinds,
            tuple(self.launches),
            tuple(tuple(numbers[i : i + MAX_PARTS]) for i in range(0, len(numbers), MAX_PARTS)),
            tuple(
                (kind.own, beside.own, int(_shifted(lies, kind.own, beside.own)[0, 0]))
                for kind, beside, _ in self.parts
                if beside is not None
            ),
            least,
            odd,
        )


class Recipes:
    """Those of the latest kinds of chunks; from any thread."""

    def __init__(self, most: int = 64) -> None:
        self._shelf: Shelf[Recipe | _First] = Shelf(most)

    def bind(
        self,
        steps: Iterable[Step | RowsStep],
        lies: Callable[[], Lies],
        regions: Sequence[Span],
        arena: Span,
        shelf: Shelf[Any] | None = None,
    ) -> list[Bound]:
        """`hawk.retile.cuda.tables.bind` of steps that tell at once where they lie."""
        at = lies()
        lying = Lying.of(at, regions, arena)
        if lying is None or lying.room.min() < 0:
            return bind(steps, regions, arena, shelf)  # which names what is wrong
        key = (id(at.kinds),)
        known = self._shelf.find(key, [])
        if isinstance(known, _First):
            known = known.recipe()
            self._shelf.keep(key, [], known, at.kinds)
        if known is not None and (found := known.again(at, lying)) is not None:
            return found
        first = _worked(at, lying, shelf)
        self._shelf.keep(key, [], first, at.kinds)
        return first.launches


def _worked(lies: Lies, lying: Lying, shelf: Shelf[Any] | None) -> _First:
    """The launches of a chunk, worked out."""
    alike: dict[object, list[int]] = {}
    for number, (program, pieces) in enumerate(lies.kinds):
        if len(pieces):
            alike.setdefault(kind_of(program, pieces), []).append(number)
    kinds, sources = [], lies.region.shape[1]
    for numbers in alike.values():
        which = lies.which == numbers[0]
        for more in numbers[1:]:
            which |= lies.which == more
        rows = np.flatnonzero(which)
        room = lying.room[rows].min(axis=0).tolist()
        kinds.append(Kind(*lies.kinds[numbers[0]], sources, lying.address[rows], room, rows))

    def shift(a: Kind, b: Kind) -> int | None:
        shifted = _shifted(lies, a.own, b.own)
        same = sources == 1 and (lies.region[a.own] == lies.region[b.own]).all()
        same = same and (lies.target[a.own] == lies.target[b.own]).all() and (shifted == shifted[0]).all()
        return int(shifted[0, 0]) if same else None

    parts = coupled(kinds, shift)
    found = [part(*one, shelf) for one in parts]
    launches = [joined(found[i : i + MAX_PARTS]) for i in range(0, len(found), MAX_PARTS)]
    return _First(lies, lying, launches, parts)


def _shifted(lies: Lies, first: I64, second: I64) -> I64:
    """How much farther on steps lie than others, bytes."""
    return lies.offset[second] - lies.offset[first]


def _least(program: Program, pieces: Pieces, channels: int, sources: int) -> I64:
    """Bytes that the pieces take from each channel's base on, `int64[channels]`, the target's behind the source's."""
    found = np.zeros(channels, np.int64)
    reads = (pieces.hi > np.maximum(pieces.lo, 0)) & (pieces.cols > 0)
    page = program.src_codec.page_bytes(program.src_elements)
    np.maximum.at(found, pieces.src_channel[reads], pieces.src_page[reads] + page)
    page = program.dst_codec.page_bytes(program.dst_elements)
    np.maximum.at(found, sources + pieces.dst_channel, pieces.dst_page + page)
    return found
