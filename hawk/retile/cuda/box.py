"""How one block of threads does its share: a *unit* of several pieces, as axes with a step on either side.

A unit is read in the source's order, kept in shared memory in that order, and written in the target's.  Where the
pieces of all units lie alike on a side, seen from the first of them, their numbers are axes with steps of their own
there, and one address serves the unit; else every piece has its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING, Literal

import numpy as np

from hawk.retile.cuda.spec import THREADS, VECTOR, Axis

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from hawk.retile.cuda.spec import Scales, SideName, Spec

    I64 = NDArray[np.int64]

PADS = (16, 32, 48, 4, 8, 12)
"""Bytes that may be left free behind the rows of shared memory, so that neighbours lie in different banks."""


@dataclass(frozen=True, slots=True)
class Vector:
    """Elements that a thread handles at once: `outer` axes count vectors, `inner` ones the elements of one."""

    elements: int
    outer: tuple[Axis, ...]
    inner: tuple[Axis, ...]

    @property
    def count(self) -> int:
        """Vectors of a unit."""
        return prod(a.ext for a in self.outer)

    def offsets(
        self, name: Literal["src", "dst", "dense", "room", "piece", "near", "box"]
    ) -> tuple[int, ...]:
        """Of each element from the first: elements, or bits of shared memory."""
        found = np.zeros(1, np.int64)
        for a in self.inner:
            found = (found[:, None] + np.arange(a.ext) * int(getattr(a, name))).ravel()
        return tuple(found.tolist())


def vector(order: Iterable[Axis], elements: int) -> Vector | None:
    """The innermost `elements` of axes in this order, None where they are no whole number of steps of one axis."""
    outer, inner, left = list(order), [], elements
    while left > 1:
        if not outer:
            return None
        axis = outer.pop()
        if left % axis.ext == 0:
            inner.append(axis)
            left //= axis.ext
        elif axis.ext % left == 0:
            above, below = axis.cut(left)
            outer.append(above)
            inner.append(below)
            left = 1
        else:
            return None
    return Vector(elements, tuple(outer), tuple(reversed(inner)))


class Box:
    """The axes of a unit in both orders, their places in shared memory, and the vectors of either side.

    `take` and `give` are None where vectors do not fit; then `slow` holds.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.loops: tuple[Axis, ...] = tuple(Axis(p.ext, p.src, p.dst, p.row, p.col) for p in spec.loops)
        self.pieces = spec.axes
        self.boxes = 0
        if spec.scales is not None:
            self._count_scales(spec.scales)
        self.axes = (*self.pieces, *self.loops)
        self.pad = 0
        self.row_bits = 0
        self.take: Vector | None = None
        self.give: Vector | None = None
        if spec.fast and self._vectors():
            self._choose_pad()

    @property
    def fast(self) -> bool:
        """Whether whole units are moved in vectors through shared memory."""
        return self.take is not None and self.give is not None

    def order(self, side: SideName, axes: Iterable[Axis] | None = None) -> list[Axis]:
        """Axes, most significant first, as they lie on that side; those of pieces first where each has an address."""
        spec, key = self.spec, lambda a: -a.step(side)
        chosen = [a for a in (self.axes if axes is None else axes) if a.ext > 1]
        if not spec.own(side):
            return sorted(chosen, key=key)
        numbers = sorted((a for a in chosen if a.piece), key=lambda a: -a.piece)
        return [*numbers, *sorted((a for a in chosen if not a.piece), key=key)]

    def _count_scales(self, scales: Scales) -> None:
        """Tells axes how many scales they count, and numbers those that the unit's elements are to be put under."""
        steps = zip(self.loops, scales.near_steps, scales.far_steps, strict=True)
        self.loops = tuple(replace(axis, near=near, far=far) for axis, near, far in steps)
        if scales.made is None:
            return
        number = 1
        boxes: dict[Axis, int] = {}
        for axis in reversed(self.order("src", (*self.pieces, *self.loops))):
            if axis.far or (axis.piece and axis.piece % scales.within == 0):
                boxes[axis] = number
                number *= axis.ext
        self.boxes = number
        self.pieces, self.loops = (
            tuple(replace(axis, box=boxes.get(axis, 0)) for axis in axes)
            for axes in (self.pieces, self.loops)
        )

    @property
    def lanes(self) -> int:
        """Threads that look for the largest number under one scale."""
        return max(1, THREADS // self.boxes)

    @property
    def look(self) -> Vector:
        """How they do: scale after scale, vectors of elements that share all scales."""
        order = sorted(self.order("src"), key=lambda a: a.box == 0)
        n = 8 * VECTOR // self.spec.src_codec.bits
        while n > 1:
            found = vector(order, n)
            if found is not None and not any(a.box or a.near or a.piece for a in found.inner):
                return found
            n //= 2
        return Vector(1, tuple(order), ())

    def _vectors(self) -> bool:
        spec = self.spec
        bits = spec.src_codec.bits
        room, inner = [], 1
        for axis in reversed(self.order("src")):
            room.append(replace(axis, dense=inner, room=inner * bits))
            inner *= axis.ext
        self.axes = tuple(reversed(room))
        self.give = self._give()
        self.take = self._take()
        return self.fast

    def _run(self, side: SideName) -> int:
        """Elements that lie side by side in every stretch of them."""
        run = 1
        for axis in reversed(self.order(side)):
            if axis.step(side) != run or (axis.piece and self.spec.own(side)):
                break
            run *= axis.ext
        return run

    def _fits(self, side: SideName, found: Vector | None, nbytes: int) -> bool:
        """Whether all vectors begin at multiples of their size."""
        if found is None or self.spec.align(side) % nbytes:
            return False
        bits = self.spec.codec(side).bits
        return all(
            a.step(side) * bits % (8 * nbytes) == 0
            for a in found.outer
            if not (a.piece and self.spec.own(side))
        )

    def _take(self) -> Vector | None:
        spec = self.spec
        codec, run = spec.src_codec, self._run("src")
        if codec.group > 1 and (run % codec.group or not self._whole_groups()):
            return None
        nbytes = VECTOR
        while nbytes:
            n = 8 * nbytes // codec.bits
            found = vector(self.order("src"), n) if n and run % n == 0 else None
            if self._fits("src", found, nbytes):
                return found
            nbytes //= 2
        return None

    def _whole_groups(self) -> bool:
        group = self.spec.src_codec.group
        loops = [a for a in self.order("src") if not a.piece]
        inner = vector(loops, group)
        return inner is not None and all(a.src % group == 0 for a in inner.outer)

    def _give(self) -> Vector | None:
        spec = self.spec
        codec, run = spec.dst_codec, self._run("dst")
        if codec.group > 1:
            found = vector(self.order("dst"), codec.group) if run % codec.group == 0 else None
            nbytes = min(VECTOR, codec.group * codec.bits // 8)
            while nbytes and not self._fits("dst", found, nbytes):
                nbytes //= 2
            self.store_bytes = nbytes
            return found if nbytes else None
        nbytes = VECTOR
        while nbytes:
            n = 8 * nbytes // codec.bits
            found = vector(self.order("dst"), n) if n and run % n == 0 else None
            if self._fits("dst", found, nbytes):
                self.store_bytes = nbytes
                return found
            nbytes //= 2
        return None

    # -- shared memory -----------------------------------------------------------------------------------

    @cached_property
    def room_bytes(self) -> int:
        """Shared memory of the unit's elements, in whole vectors."""
        nbytes = self.spec.elements * self.spec.src_codec.bits // 8
        rows = nbytes * 8 // self.row_bits if self.pad else 0
        return -(-(nbytes + rows * self.pad) // VECTOR) * VECTOR

    @property
    def exponents_at(self) -> int:
        """Where the source's exponents lie in shared memory."""
        return self.room_bytes

    @property
    def exponent_bytes(self) -> int:
        """Bytes of them in a piece."""
        codec = self.spec.src_codec
        return self.spec.piece_elements // codec.group if codec.group > 1 else 0

    @property
    def exponents(self) -> Vector | None:
        """How they are read: vectors of as many groups as lie side by side; None where elements share nothing."""
        spec, group, nbytes = self.spec, self.spec.src_codec.group, VECTOR
        while group > 1 and nbytes:
            n = group * nbytes
            found = vector(self.order("src"), n) if self._run("src") % n == 0 else None
            fits = found is not None and all(a.src % n == 0 for a in found.outer if not a.piece)
            if fits and spec.shared_align % nbytes == 0:
                return found
            nbytes //= 2
        return None

    @property
    def addresses_at(self) -> int:
        """Where the target's addresses lie in shared memory."""
        return self.room_bytes + -(-self.exponent_bytes * self.spec.pieces // VECTOR) * VECTOR

    @property
    def largest_at(self) -> int:
        """Where the largest numbers lie that threads found, in shared memory."""
        return -(-(self.addresses_at + 8 * self.spec.dst_words) // VECTOR) * VECTOR if self.fast else 0

    @property
    def scales_at(self) -> int:
        """Where the scales lie that were made of them, each with what a quick division takes."""
        return self.largest_at + -(-4 * self.boxes * self.lanes // VECTOR) * VECTOR

    @property
    def shared_bytes(self) -> int:
        """All of the shared memory that a unit needs."""
        if self.boxes:
            return self.scales_at + 8 * self.boxes
        return self.addresses_at + 8 * self.spec.dst_words if self.fast else 0

    def _choose_pad(self) -> None:
        """The rows and the gap behind them that cost the least time in shared memory, by counting on samples."""
        bits = self.spec.src_codec.bits
        rows = {a.room for a in self.axes if a.room >= 512} - {bits}
        plain = self.axes
        best, choice = _cost(self, self.take, 16) + _cost(self, self.give, None), (0, 0)
        assert self.take is not None
        least = self.take.elements * bits // 8
        for row in sorted(rows):
            for pad in PADS:
                if pad % min(least, VECTOR) or row % (8 * least):
                    continue
                self._padded(plain, row, pad)
                cost = _cost(self, self.take, 16) + _cost(self, self.give, None)
                # A gap costs room, so that it has to be worth it.
                if cost < 0.95 * best:
                    best, choice = cost, (row, pad)
        self._padded(plain, *choice)

    def _padded(self, plain: tuple[Axis, ...], row: int, pad: int) -> None:
        self.pad, self.row_bits = pad, row
        self.axes = tuple(
            replace(a, room=a.room + a.room // row * 8 * pad) if pad and a.room >= row else a for a in plain
        )
        self.give, self.take = self._give(), self._take()
        self.__dict__.pop("room_bytes", None)

    def room_align(self, found: Vector) -> int:
        """Bytes that divide the places of all vectors in shared memory, up to `VECTOR`."""
        # A step of half a byte over two nibbles stays within the byte.
        bits = gcd(8 * VECTOR, *(a.room for a in found.outer if (a.room, a.ext) != (4, 2)))
        return max(1, bits // 8)


@lru_cache(maxsize=256)
def box_of(spec: Spec) -> Box:
    """The spec's axes; kept, for the gaps in shared memory are found by trying."""
    return Box(spec)


def _cost(box: Box, found: Vector | None, width: int | None) -> float:
    """Cycles that a warp's accesses take on average: how many different words the busiest bank is asked for."""
    if found is None:
        return float("inf")
    align = box.room_align(found)
    bits = box.spec.src_codec.bits
    total = 0.0
    if width is not None:
        accesses = [(0, found.elements * bits // 8)]
    else:
        accesses = [(c.at, c.width) for c in chunks(found.offsets("room"), bits, align, odd(found))]
    # The first warp and one in the middle stand for all.
    firsts = {0, found.count // 64 * 32}
    for first in firsts:
        at = _places(found, np.arange(first, min(first + 32, found.count)))
        for offset, nbytes in accesses:
            lanes = max(1, 128 // max(nbytes, 4))  # so many are served at once
            for part in range(0, len(at), lanes):
                words = {
                    (a + offset) // 4 + w
                    for a in at[part : part + lanes].tolist()
                    for w in range(-(-nbytes // 4))
                }
                busy = [0] * 32
                for word in words:
                    busy[word % 32] += 1
                total += max(busy)
    return total / len(firsts)


def _places(found: Vector, number: I64) -> I64:
    """Bytes of shared memory at which vectors begin."""
    at = np.zeros(len(number), np.int64)
    for axis in reversed(found.outer):
        number, digit = np.divmod(number, axis.ext)
        at += digit * axis.room
    return at // 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of shared memory that are loaded at once: `at` from the vector's place, `width` of them."""

    at: int
    width: int


def odd(found: Vector) -> bool:
    """Whether some vectors begin in the midst of a byte."""
    return any(a.room % 8 for a in found.outer)


def chunks(offsets: tuple[int, ...], bits: int, align: int, odd: bool = False) -> list[Chunk]:
    """Aligned loads that bring all elements at these bit offsets, as wide as at least half of their bytes are wanted.

    With `odd` the elements may also be half a byte further on.
    """
    more = 4 if odd else 0
    wanted = {b for o in offsets for b in range(o // 8, (o + bits + more + 7) // 8)}
    found: list[Chunk] = []
    left = set(wanted)
    while left:
        first = min(left)
        for width in _widths(align):
            at = first // width * width
            span = set(range(at, at + width))
            if 2 * len(span & wanted) >= width or width == 1:
                found.append(Chunk(at, width))
                left -= span
                break
    return found


def _widths(align: int) -> Iterator[int]:
    width = VECTOR
    while width:
        if align % width == 0:
            yield width
        width //= 2
