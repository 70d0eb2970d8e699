"""Programs whose elements have scales on the way: multiplied by the source's, divided by the target's, in one launch.

A scale of the target has to be known before the first element under it is written.  So a unit holds all elements of
each of its scales: programs are cut, and their pieces put together, so that it does.  Where a unit would be too large
for shared memory, or a scale is of what no unit can hold, steps go through rows as before.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.retile import numpy_core
from hawk.retile.cuda.spec import Scales
from hawk.retile.cuda.tables import UNIT_BYTES, in_units
from hawk.retile.program import Pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.retile.cuda.bound import Part
    from hawk.retile.program import Loop, Program
    from hawk.retile.rows import Direct, RowsStep, Tensor

    I64 = NDArray[np.int64]

MADE_BYTES = 2 * UNIT_BYTES
"""Source bytes of a unit whose scales are made: threads wait three times for each other, with more to do between."""

MOST_BYTES = 32 << 10
"""Source bytes of a unit that has to be large: several blocks of threads shall still share a processor's memory."""

_COLUMNS = tuple(f.name for f in fields(Pieces))


@dataclass(frozen=True)
class Ready:
    """A program and its pieces in units of `count` each; `numbers` of each piece the first scale, of either side."""

    program: Program
    pieces: Pieces
    count: int
    scales: Scales
    numbers: tuple[I64, ...]

    def part(self, sources: int, bases: I64) -> Part:
        """The part of a launch; behind the bases of each step's channels stand those of its scales, of both sides."""
        return in_units(self.program, self.pieces, self.count, bases, sources, self.scales, self.numbers)


def ready(step: RowsStep, one: Direct, sources: int, room: list[int]) -> Ready | None:
    """A step's program with its scales in place; None where that cannot be, and the step has to go through rows.

    room    bytes behind the base of each channel, those of the `sources` first

    Raises `InvalidArgument` where pieces do not fit.
    """
    near, far = step.reads[0].scales, step.writes[0].scales
    rule, program = step.writes[0].rule, one.program
    if rule not in ("none", "made") or program.src_codec.group > 1 or near is far is None:
        return None
    if far is not None and (far.per == "cache" or program.dst_codec.factor != 1.0):
        return None
    box = _Box.of(step, program, (near, far))
    if box is None:
        return None
    numpy_core.check(program, one.pieces, room[:sources], room[sources:])
    return box.ready(one.pieces, near, far)


class _Grain(NamedTuple):
    """What one step of a token, a head and a group counts in a tensor of scales, and how many dims a group has."""

    token: int
    head: int
    size: int

    @classmethod
    def of(cls, scales: Tensor, dim: int) -> _Grain:
        shape = scales.rows.shape
        slots = shape.block_size if scales.per == "token" else 1
        return cls(
            shape.dim if scales.per == "token" else 0,
            slots * shape.dim if shape.heads > 1 else 0,
            dim // shape.dim,
        )

    def step(self, loop: Loop, head: int) -> int:
        """Of a loop, whose steps are of tokens, of dims or of `head` heads."""
        if loop.row:
            return loop.row * self.token
        return loop.col // self.size if loop.col else head * self.head


@dataclass(frozen=True)
class _Box:
    """A program whose loops are cut where groups of scales end.

    head    heads that a step of its loop over heads counts
    rows    of each row of pieces the entry in the target's table, and the slot there
    """

    step: RowsStep
    program: Program
    loops: tuple[Loop, ...]
    head: int

    @classmethod
    def of(cls, step: RowsStep, program: Program, scales: tuple[Tensor | None, Tensor | None]) -> _Box | None:
        """None where scales change in the midst of a loop."""
        head, dim = _head_step(program), step.writes[0].rows.shape.dim
        loops: tuple[Loop, ...] | None = program.loops
        if head is None:
            return None
        for one in scales:
            size = dim if one is None else _Grain.of(one, dim).size
            loops = _cut_at(loops, size)
            if loops is None:
                return None
            inner = sum((p.ext - 1) * p.col for p in loops if p.col < size)
            if size < dim and (program.dims % size + inner >= size).any():
                return None
        return cls(step, program, loops or (), head)

    def ready(self, pieces: Pieces, near: Tensor | None, far: Tensor | None) -> Ready | None:
        p, step = self.program, self.step
        slots = step.writes[0].rows.shape.block_size
        heads, dims, each = len(p.heads), len(p.dims), len(p.slots)
        rows = len(pieces) // (heads * dims)
        missing = step.blocks * each - rows
        number = np.arange(rows, dtype=np.int64) + missing
        entry, slot = number // each, p.slots[number % each]
        numbers: dict[str, I64] = {}
        steps = {side: [0] * len(self.loops) for side in ("near", "far")}
        for side, scales in (("near", near), ("far", far)):
            if scales is None:
                continue
            found = self._numbers(scales, entry, slot, slots)
            if found is None:
                return None
            grain = _Grain.of(scales, step.writes[0].rows.shape.dim)
            numbers[side], steps[side] = found, [grain.step(loop, self.head) for loop in self.loops]
        shape: tuple[int, ...] = (rows, 1, heads, dims, 1)
        within: tuple[int, ...] = ()
        if far is not None:
            groups, missing = far.rows.shape.dim, missing if far.per == "block" else 0
            together = max(1, dims // groups)
            if not self._full(slots) or missing or dims % together:
                return None
            if far.per == "block":
                shape = (step.blocks, each, heads, dims, 1)
            shape = (*shape[:3], dims // together, together)
            within = (1, *((2,) if far.rows.shape.heads == 1 else ()), 4)
        return _Cut(p, self.loops, pieces, shape, numbers, steps).ready(within, far)

    def _numbers(self, scales: Tensor, entry: I64, slot: I64, slots: int) -> I64 | None:
        """Of the first element of each piece, `int64[rows, heads, dims]`; of padding any."""
        p, shape = self.program, scales.rows.shape
        grain = _Grain.of(scales, self.step.writes[0].rows.shape.dim)
        if scales.per == "token":
            row = entry * shape.heads * shape.block_size * shape.dim + slot * grain.token
            every = scales.blocks * shape.heads * shape.block_size * shape.dim
        elif scales is self.step.writes[0].scales:
            row, every = entry * shape.heads * shape.dim, scales.blocks * shape.heads * shape.dim
        else:
            size = scales.size if scales.per == "block" else 1 << 62
            token = entry * slots + slot + self.step.token - scales.token
            first, last = (
                np.where(t < 0, 0, np.minimum(t // size, scales.blocks - 1))
                for t in (token, token + p.rows - 1)
            )
            if (first != last).any():
                return None
            row, every = first * shape.heads * shape.dim, scales.blocks * shape.heads * shape.dim
        head = (p.heads - p.heads[0]) * grain.head
        found = row[:, None, None] + head[:, None] + p.dims // grain.size
        return np.asarray(found.clip(0, every - 1), np.int64)

    def _full(self, slots: int) -> bool:
        """Whether the program fills the target's box and no padding, so that every piece has scales."""
        p, rows = self.program, self.step.writes[0].rows.shape
        heads = prod(q.ext for q in p.loops if not q.row and not q.col)
        dims = prod(q.ext for q in p.loops if q.col)
        return (
            len(p.slots) * p.rows == slots
            and len(p.heads) * heads == rows.heads
            and len(p.dims) * dims == rows.dim
            and bool((p.cols == dims).all())
        )


def _head_step(program: Program) -> int | None:
    """Heads that a step of the only loop over heads counts; None where there are several or it does not tell."""
    loops = [p for p in program.loops if not p.row and not p.col]
    if len(loops) > 1:
        return None
    if not loops:
        return 1
    first, ext = program.heads - program.heads[0], loops[0].ext
    for step in range(1, len(first) * ext + 1):
        every = np.sort((first[:, None] + step * np.arange(ext)).ravel())
        if np.array_equal(every, np.arange(len(every))):
            return step
    return None


def _cut_at(loops: tuple[Loop, ...] | None, size: int) -> tuple[Loop, ...] | None:
    """Loops that step either within `size` dims or over whole ones."""
    found: list[Loop] = []
    for p in loops or ():
        if p.col >= size:
            if p.col % size:
                return None
        elif p.col * p.ext > size:
            n = size // p.col
            if size % p.col or p.ext % n:
                return None
            found.append(replace(p, ext=p.ext // n, src=p.src * n, dst=p.dst * n, col=p.col * n))
            found.append(replace(p, ext=n))
            continue
        found.append(p)
    return tuple(found)


class _Cut:
    """Pieces on their way into units, as arrays `[rows, slots, heads, groups, dims, cuts]`.

    numbers, steps    by side: of each piece the first scale, of each loop how many one step counts
    """

    def __init__(
        self,
        program: Program,
        loops: tuple[Loop, ...],
        pieces: Pieces,
        shape: tuple[int, ...],
        numbers: dict[str, I64],
        steps: dict[str, list[int]],
    ) -> None:
        self.program, self.loops, self.steps = program, list(loops), steps
        self.columns = {name: getattr(pieces, name).reshape(*shape, 1) for name in _COLUMNS}
        self.numbers = {side: n.reshape(*shape, 1) for side, n in numbers.items()}

    @property
    def nbytes(self) -> int:
        """Of a piece, in the source."""
        return prod(p.ext for p in self.loops) * self.program.src_codec.bits // 8

    def ready(self, within: tuple[int, ...], far: Tensor | None) -> Ready | None:
        """In units that hold all of the axes `within`; None where these are too large."""
        most = UNIT_BYTES if far is None else MADE_BYTES
        together = prod(self.columns["lo"].shape[axis] for axis in within)
        while self.nbytes * together > most and self._cut(most // together):
            pass
        if far is not None and self.nbytes * together > MOST_BYTES:
            return None
        across = [axis for axis in range(6) if axis not in within]
        columns, numbers = (
            {name: a.transpose(*across, *within) for name, a in arrays.items()}
            for arrays in (self.columns, self.numbers)
        )
        if far is not None:
            shared = numbers["far"].reshape(-1, together)
            if (shared != shared[:, :1]).any():
                return None
        count = together * _more(columns["lo"].shape[1 : len(across)], most // (self.nbytes * together))
        return Ready(
            program=replace(self.program, loops=tuple(self.loops)),
            pieces=Pieces(**{name: np.ascontiguousarray(a).ravel() for name, a in columns.items()}),
            count=count,
            scales=Scales(
                near="near" in numbers,
                made=None if far is None else far.codec.name,
                near_steps=tuple(self.steps["near"]),
                far_steps=tuple(self.steps["far"]),
                within=together,
            ),
            numbers=tuple(np.ascontiguousarray(a).ravel() for a in numbers.values()),
        )

    def _cut(self, most: int) -> bool:
        """Cuts a loop that no scale of the target is within, the coarsest of the source; whether there is one."""
        p, made = self.program, "far" in self.numbers
        coarse = [
            i
            for i, loop in enumerate(self.loops)
            if loop.src >= p.src_codec.group
            and loop.dst >= p.dst_codec.group
            and (self.steps["far"][i] or not made)
        ]
        if not coarse:
            return False
        i = max(coarse, key=lambda i: self.loops[i].src)
        loop, size = self.loops[i], self.nbytes
        cuts = next((k for k in range(2, loop.ext) if loop.ext % k == 0 and size // k <= most), loop.ext)
        ext = loop.ext // cuts
        at = np.arange(cuts, dtype=np.int64) * ext
        by = {
            "src_start": loop.src,
            "dst_start": loop.dst,
            "lo": -loop.row,
            "hi": -loop.row,
            "cols": -loop.col,
        }
        self.columns = {name: _spread(a, at * by.get(name, 0)) for name, a in self.columns.items()}
        self.numbers = {side: _spread(a, at * self.steps[side][i]) for side, a in self.numbers.items()}
        if ext > 1:
            self.loops[i] = replace(loop, ext=ext)
        else:
            self.loops.pop(i)
            for steps in self.steps.values():
                steps.pop(i)
        return True


def _spread(array: I64, by: I64) -> I64:
    """The array with its last axis cut, each part so much further on."""
    return np.asarray((array[..., None] + by).reshape(*array.shape[:-1], -1), np.int64)


def _more(extents: tuple[int, ...], most: int) -> int:
    """How many pieces that lie one behind the other in the last of these axes fit."""
    inner, best = 1, 1
    for extent in reversed(extents):
        fitting = [d for d in range(1, extent + 1) if extent % d == 0 and inner * d <= most]
        best = max(best, inner * max(fitting, default=1))
        if not fitting or fitting[-1] != extent:
            break
        inner *= extent
    return best
