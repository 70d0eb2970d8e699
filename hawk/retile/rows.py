"""Retile through rows: for what no single program does, because elements have to meet before they are written.

A group that shares an exponent may be of several pages of the source, and a scale of elements that another scale, or
none, covered before.  So a batch of blocks is read into plain rows `[block, head, slot, dim]` by one set of programs,
its values are put under the target's scales there, and another set writes the rows into the arena.  Rows hold the
elements' own bits where both sides store them alike, else binary32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hawk.errors import InvalidArgument
from hawk.retile.program import Pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.retile.program import Program

    U8 = NDArray[np.uint8]

BATCH_BYTES = 1 << 20
"""Rows held at a time, where a block is not larger: they and what is made of them stay in the caches."""

_COLUMNS = tuple(f.name for f in fields(Pieces))


class Run(Protocol):
    """How a program is carried out; `cpu.run` is one."""

    def __call__(self, program: Program, pieces: Pieces, src: Sequence[U8], dst: Sequence[U8], /) -> None:
        """From the channels `src` into the channels `dst`."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One program between a tensor and rows, its pieces in the order of the rows' blocks.

    region, offset    where the tensor lies, per channel: a region of the source and a byte offset in it; of a target
                      the offset alone, in the arena
    """

    program: Program
    pieces: Pieces
    region: tuple[int, ...]
    offset: tuple[int, ...]

    def within(self, begin: int, end: int, blocks: int) -> Pieces:
        """The pieces of the rows' blocks `[begin, end)` of `blocks`; their rows begin at the first of these."""
        p, columns = self.program, self.pieces
        each = len(p.heads) * len(p.slots) * len(p.dims)
        # Only the first block can have fewer: what lies before the token range is left out.
        first = len(columns) - (blocks - 1) * each
        at = [0 if n == 0 else first + (n - 1) * each for n in (begin, end)]
        return replace(columns, **{name: getattr(columns, name)[at[0] : at[1]] for name in _COLUMNS})


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of one side, seen from the rows.

    rows      the layout of its rows; a block is a page
    blocks    how many of them there are
    first     the first dim of the cache that it holds
    number    of the tensor among those of its side
    """

    rows: CompiledLayout
    blocks: int
    first: int
    number: int
    passes: tuple[Pass, ...]

    def lifted(
        self, place: Callable[[int, tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
    ) -> Tensor:
        """The same of another layer: `place` gives regions and offsets for the number of a tensor and its offsets."""
        moved = []
        for one in self.passes:
            region, offset = place(self.number, one.offset)
            moved.append(replace(one, region=region, offset=offset))
        return replace(self, passes=tuple(moved))


@dataclass(frozen=True, slots=True)
class RowsStep:
    """All of one (layer, kv) of a chunk, in batches of blocks of the target.

    blocks    entries of the target's block table
    """

    layer: int
    kv: int
    blocks: int
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]


def behind(array: U8, offset: int, field: str) -> U8:
    """The array from `offset` on; `InvalidArgument` naming `field` where that lies outside."""
    if not 0 <= offset <= len(array):
        raise InvalidArgument(
            "the offset lies outside its region", field=field, got=offset, expected=f"0..{len(array)}"
        )
    return array[offset:]


class RowsCall:
    """A `RowsStep` over its memory; batches are independent of each other."""

    slice = 1

    def __init__(self, step: RowsStep, regions: Sequence[U8], arena: U8, run: Run) -> None:
        self._step, self._regions, self._arena, self._run = step, regions, arena, run
        block = sum(t.rows.page_stride for t in (*step.reads, *step.writes))
        self._each = max(1, BATCH_BYTES // block)
        self.pieces_count = -(-step.blocks // self._each)

    def execute(self, begin: int, end: int) -> None:
        """Batches `[begin, end)`."""
        for number in range(begin, end):
            first = number * self._each
            self._batch(first, min(first + self._each, self._step.blocks))

    def _batch(self, first: int, last: int) -> None:
        step = self._step
        values = np.concatenate([self._read(t, first, last) for t in step.reads], axis=-1)
        for tensor in step.writes:
            dim = tensor.rows.shape.dim
            self._write(tensor, values[..., tensor.first : tensor.first + dim], first, last)

    def _read(self, tensor: Tensor, first: int, last: int) -> NDArray[np.generic]:
        """Blocks `[first, last)` of the rows, `[block, head, slot, dim]`; 0 where nothing was read."""
        rows = tensor.rows
        block = rows.page_stride
        raw = np.zeros((last - first) * block, np.uint8)
        for one in tensor.passes:
            pieces = one.within(first, last, tensor.blocks)
            pieces = replace(pieces, dst_page=pieces.dst_page - first * block)
            taken = [
                behind(self._regions[r], at, "step.reads")
                for r, at in zip(one.region, one.offset, strict=True)
            ]
            self._run(one.program, pieces, taken, [raw])
        return raw.view(_dtype(rows)).reshape(last - first, *_box(rows))

    def _write(self, tensor: Tensor, values: NDArray[np.generic], first: int, last: int) -> None:
        rows = tensor.rows
        raw = np.ascontiguousarray(values, _dtype(rows)).reshape(-1).view(np.uint8)
        for one in tensor.passes:
            pieces = one.within(first, last, tensor.blocks)
            # What reads nothing has no source; its page is 0.
            page = np.where(pieces.hi > 0, pieces.src_page - first * rows.page_stride, 0)
            into = [behind(self._arena, at, "step.writes") for at in one.offset]
            self._run(one.program, replace(pieces, src_page=page), [raw], into)


def _dtype(rows: CompiledLayout) -> np.dtype[np.generic]:
    return np.dtype(np.float32) if rows.codec.name == "fp32" else np.dtype(f"u{rows.codec.bits // 8}")


def _box(rows: CompiledLayout) -> tuple[int, int, int]:
    return rows.shape.heads, rows.shape.block_size, rows.shape.dim
