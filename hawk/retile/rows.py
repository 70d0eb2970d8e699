"""Retile through rows: for what no single program does, because elements have to meet before they are written.

A group that shares an exponent may be of several pages of the source, and a scale of elements that another scale, or
none, covered before.  So a batch of blocks is read into plain rows `[block, head, slot, dim]` by one set of programs,
its values are put under the target's scales there, and another set writes the rows into the arena.  Rows hold the
elements' own bits where both sides store them alike, else binary32.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from hawk.errors import InvalidArgument
from hawk.retile import scaling
from hawk.retile.program import Pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CodecInfo, CompiledLayout, Per
    from hawk.retile.program import Program

    U8 = NDArray[np.uint8]
    F32 = NDArray[np.float32]
    Place = Callable[[int, tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

Rule = Literal["none", "moved", "spread", "made", "ranged"]
"""What becomes of scales, see `hawk.plan.scales`."""

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
    codec     how the tensor's elements are stored
    scales    the tensor of its scales, where rows are to see to them
    rule      what becomes of these, in a target
    per       what a row of it is of
    size      tokens of a block, where its rows are of blocks
    token     the first token of its first row, counted from the request's first
    """

    rows: CompiledLayout
    blocks: int
    first: int
    number: int
    codec: CodecInfo
    passes: tuple[Pass, ...]
    scales: Tensor | None = None
    rule: Rule = "none"
    per: Per = "token"
    size: int = 1
    token: int = 0

    def lifted(self, place: Place) -> Tensor:
        """The same of another layer: `place` gives regions and offsets for the number of a tensor and its offsets."""
        moved = []
        for one in self.passes:
            region, offset = place(self.number, one.offset)
            moved.append(replace(one, region=region, offset=offset))
        scales = None if self.scales is None else self.scales.lifted(place)
        return replace(self, passes=tuple(moved), scales=scales)


@dataclass(frozen=True, slots=True)
class Direct:
    """One program straight from the source's elements to the target's: what would be done if they had no scales.

    src_region, src_offset, dst_offset    as a `hawk.retile.cpu.Step` has them
    """

    program: Program
    pieces: Pieces
    src_region: tuple[int, ...]
    src_offset: tuple[int, ...]
    dst_offset: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowsStep:
    """All of one (layer, kv) of a chunk, in batches of blocks of the target.

    blocks    entries of the target's block table
    token     the first token of the first of them
    direct    makes the programs that bring the elements over without rows, where there are some and one tensor becomes
              one; for who puts them under scales on the way
    """

    layer: int
    kv: int
    blocks: int
    token: int
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    direct: Callable[[], tuple[Direct, ...]] | None = field(default=None, compare=False)

    def lifted(self, layer: int, place: Place) -> RowsStep:
        """The same of another layer; `place` as for `Tensor.lifted`."""
        make, number = self.direct, self.reads[0].number

        def lift() -> tuple[Direct, ...]:
            assert make is not None
            found = []
            for one in make():
                region, offset = place(number, one.src_offset)
                found.append(replace(one, src_region=region, src_offset=offset))
            return tuple(found)

        return replace(
            self,
            layer=layer,
            reads=tuple(t.lifted(place) for t in self.reads),
            direct=None if make is None else lift,
        )


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
            with np.errstate(all="ignore"):
                self._batch(first, min(first + self._each, self._step.blocks))

    def _batch(self, first: int, last: int) -> None:
        step = self._step
        spread = all(t.rule == "spread" for t in step.writes)
        read, covered = [], []
        for tensor in step.reads:
            values = self._read(tensor, first, last)
            if tensor.scales is not None or tensor.codec.bits == 8:
                scales = self._source_scales(tensor, first, last, values.shape)
                if tensor.scales is not None and not spread:
                    values = values * scales
                covered.append(scales)
            read.append(values)
        values = _side_by_side(read)
        for tensor in step.writes:
            at = tensor.first - step.reads[0].first
            dims = slice(at, at + tensor.rows.shape.dim)
            own = values[..., dims]
            if tensor.scales is not None:
                own = self._scaled(tensor, own, covered, dims, first, last)
            self._write(tensor, own, first, last)

    def _source_scales(
        self, tensor: Tensor, first: int, last: int, shape: tuple[int, ...]
    ) -> NDArray[np.float32]:
        """What each element of these rows is multiplied by, in their shape (a view)."""
        scales = tensor.scales
        if scales is None:
            return np.broadcast_to(np.float32(tensor.codec.factor), shape)
        blocks, _, slots, dim = shape
        if scales.per == "token":
            found = self._read(scales, first, last)
        else:
            token = np.arange(first * slots, last * slots) + self._step.token - scales.token
            row = token // scales.size if scales.per == "block" else np.zeros_like(token)
            row = row.clip(0, scales.blocks - 1)  # rows outside of the request have no scale, and need none
            begin, end = int(row.min()), int(row.max()) + 1
            rows = self._read(scales, begin, end)[row - begin, :, 0]
            found = rows.reshape(blocks, slots, *rows.shape[1:]).transpose(0, 2, 1, 3)
        found = np.repeat(found, dim // found.shape[-1], axis=-1)
        return np.broadcast_to(found, shape)

    def _scaled(
        self, tensor: Tensor, values: Any, covered: list[F32], dims: Any, first: int, last: int
    ) -> Any:
        """The values as they are written under the target's scales, which are written as well."""
        scales = tensor.scales
        assert scales is not None
        rows = scales.rows.shape
        blocks, heads, slots, dim = values.shape
        # The box that one scale covers: [scale's blocks, blocks, heads, ...] each split into (scales, under each).
        whole = scales.per == "cache"
        box = (
            (1, blocks) if whole else (blocks, 1),
            (heads, 1) if rows.heads == heads else (1, heads),
            (slots, 1) if scales.per == "token" else (1, slots),
            (rows.dim, dim // rows.dim),
        )
        split = tuple(n for pair in box for n in pair)
        if tensor.rule == "spread":
            found = covered[0][..., dims].reshape(split)[:, 0, :, 0, :, 0, :, 0]
        elif tensor.rule == "ranged":
            each = [
                c.astype(np.float64) * scaling.most(t.codec)
                for c, t in zip(covered, self._step.reads, strict=True)
            ]
            most = _side_by_side(each)[..., dims].reshape(split).max(axis=(1, 3, 5, 7))
            found = scaling.scales(most, tensor.codec, scales.codec)
        else:
            most = scaling.largest(values).reshape(split).max(axis=(1, 3, 5, 7))
            found = scaling.scales(most, tensor.codec, scales.codec)
        if not whole:
            self._write(scales, found, first, last)
        elif first == 0:
            self._write(scales, found, 0, 1)
        if tensor.rule == "spread":
            return values
        return (values.reshape(split) / found[:, None, :, None, :, None, :, None]).reshape(values.shape)

    def _read(self, tensor: Tensor, first: int, last: int) -> Any:
        """Blocks `[first, last)` of the rows, `[block, head, slot, dim]`; rows before the request are rubbish."""
        rows = tensor.rows
        block = rows.page_stride
        raw = np.empty((last - first) * block, np.uint8)
        for one in tensor.passes:
            pieces = one.within(first, last, tensor.blocks)
            pieces = replace(pieces, dst_page=pieces.dst_page - first * block)
            taken = [
                behind(self._regions[r], at, "step.reads")
                for r, at in zip(one.region, one.offset, strict=True)
            ]
            self._run(one.program, pieces, taken, [raw])
        return raw.view(_dtype(rows)).reshape(last - first, *_box(rows))

    def _write(self, tensor: Tensor, values: Any, first: int, last: int) -> None:
        rows = tensor.rows
        raw = np.ascontiguousarray(values, _dtype(rows)).reshape(-1).view(np.uint8)
        for one in tensor.passes:
            pieces = one.within(first, last, tensor.blocks)
            # What reads nothing has no source; its page is 0.
            page = np.where(pieces.hi > 0, pieces.src_page - first * rows.page_stride, 0)
            into = [behind(self._arena, at, "step.writes") for at in one.offset]
            self._run(one.program, replace(pieces, src_page=page), [raw], into)


def _side_by_side(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)


def _dtype(rows: CompiledLayout) -> np.dtype[Any]:
    return np.dtype(np.float32) if rows.codec.name == "fp32" else np.dtype(f"u{rows.codec.bits // 8}")


def _box(rows: CompiledLayout) -> tuple[int, int, int]:
    return rows.shape.heads, rows.shape.block_size, rows.shape.dim
