"""Derive the retile program of two compiled layouts: which loops run inside a piece, and where pieces begin.

Both sides write an axis' index as digits.  Refined to their common boundaries, every digit is either inside
the page on both sides, and then one loop of a piece, or it selects a page on at least one side, and then each
of its values begins another piece.  Tokens are special: the two sides may cut them into blocks of different
sizes under any block table, so a piece is as many tokens high as fit into one block and page of either side.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InternalError, Unmappable
from hawk.retile.nests import MAX_PADDED, Nest, find
from hawk.retile.program import Loop, Program

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import Axis, CompiledLayout, Digit


def build_program(
    src: CompiledLayout, dst: CompiledLayout, kv: int, part: tuple[int, int, int] | None = None
) -> Program:
    """The program of `build_programs` where there is one; `Unmappable` where it takes several."""
    programs = build_programs(src, dst, kv, part)
    if len(programs) > 1:
        raise Unmappable(
            "parts of dim are stored in different orders, so one program does not do",
            field="dim",
            got=f"{len(programs)} programs",
            source=src.name,
            target=dst.name,
        )
    return programs[0]


@lru_cache(maxsize=256)
def build_programs(
    src: CompiledLayout, dst: CompiledLayout, kv: int, part: tuple[int, int, int] | None = None
) -> tuple[Program, ...]:
    """The programs that move K (`kv=0`) or V (`kv=1`) of a cache laid out as `src` into one laid out as `dst`.

    One, but where parts of `dim` are stored in different orders: then one for each kind of part, and together they
    fill the target.

    part    (first head of the target, how many, first head of the source) where only some heads move; without it
            both sides have the same heads

    Pure; results are cached by value, their arrays are read-only.  `heads`, `dims` and `slots` cover the
    target's index box with its padding, so entries at or beyond the shape's extent are padding throughout; with
    `part` the heads are those of the part, to which the padding belongs if it holds the last head.

    Raises
    ------
    Unmappable
        heads or dim differ, the digits of an axis have no common refinement, or a group of the target's codec
        is not filled by one token of one piece
    """
    first, count, source_first = part or (0, dst.shape.heads, 0)
    if part is not None:
        for field, last, extent in (
            ("heads", first + count, dst.shape.heads),
            ("source heads", source_first + count, src.shape.heads),
        ):
            if min(part) < 0 or count < 1 or last > extent:
                raise Unmappable(
                    "no such heads",
                    field=field,
                    got=f"{last - count}..{last - 1}",
                    expected=f"within 0..{extent - 1}",
                )
    for field, got, expected in (
        ("heads", src.shape.heads, dst.shape.heads if part is None else src.shape.heads),
        ("dim", src.shape.dim, dst.shape.dim),
        ("kvs", src.shape.kvs, dst.shape.kvs),
    ):
        if got != expected:
            raise Unmappable(
                "the caches differ", field=field, got=got, expected=expected, source=src.name, target=dst.name
            )
    a, b = _Side(src, kv), _Side(dst, kv)
    rows = _rows(a, b)
    loops = _slot_loops(a, b, rows)
    last = b.padded("head") if first + count == dst.shape.heads else first + count
    # Pieces lie within the part on both sides where their size divides all of these.
    common = gcd(first, count, source_first, last - first)
    heads = _split(a, b, "head", common, loops, part is not None)
    heads = heads[(heads >= first) & (heads < last)]
    slots = np.arange(0, b.padded("slot"), rows, dtype=np.int64)
    programs = []
    for nest in _dims(a, b):
        merged = merge_loops(sorted((*loops, *nest.loops), key=lambda loop: -loop.dst))
        _check_group(dst, merged)
        for array in (heads, nest.dims, nest.cols, slots):
            array.flags.writeable = False
        programs.append(
            Program(
                src_codec=src.codec,
                dst_codec=dst.codec,
                rows=rows,
                loops=merged,
                heads=heads,
                dims=nest.dims,
                cols=nest.cols,
                slots=slots,
                src_elements=src.piece(kv).elements,
                dst_elements=dst.piece(kv).elements,
            )
        )
    return tuple(programs)


def _dims(src: _Side, dst: _Side) -> tuple[Nest, ...]:
    dim, padded = dst.layout.shape.dim, dst.padded("dim")
    if src.piece.stored or dst.piece.stored:
        if padded > MAX_PADDED:
            raise Unmappable(
                "the target pads a head beyond all measure",
                field="dim",
                got=f"{padded} positions for {dim}",
                expected=f"at most {MAX_PADDED}",
                target=dst.layout.name,
            )
        return find(src.piece, dst.piece, dim, padded)
    loops: list[Loop] = []
    # A loop over `dim` may run into padding, for `cols` says where it ends; heads have no such mark.
    dims = _split(src, dst, "dim", padded, loops)
    width = 1 + sum((loop.ext - 1) * loop.col for loop in loops)
    return (Nest(tuple(loops), dims, np.clip(dim - dims, 0, width)),)


def merge_loops(loops: Iterable[Loop], *, full: bool = False) -> tuple[Loop, ...]:
    """`loops` with neighbours joined where the outer one goes on exactly where the inner one ends.

    With `full` the steps in tokens and dims need not chain: right only for pieces without a partial row or
    column.  Loops of one step fall away; the order is kept.
    """
    out: list[Loop] = []
    for loop in loops:
        if loop.ext == 1:
            continue
        if out and _chains(out[-1], loop, full):
            outer = out.pop()
            loop = Loop(outer.ext * loop.ext, loop.src, loop.dst, loop.row, loop.col)
        out.append(loop)
    return tuple(out)


def _chains(outer: Loop, inner: Loop, full: bool) -> bool:
    n = inner.ext
    if (outer.src, outer.dst) != (inner.src * n, inner.dst * n):
        return False
    return full or (outer.row, outer.col) == (inner.row * n, inner.col * n)


def piece_elements(program: Program) -> int:
    """Elements of one piece, padding included."""
    n = 1
    for loop in program.loops:
        n *= loop.ext
    return n


def piece_count(program: Program, blocks: int) -> int:
    """Pieces of one (layer, kv) that fill `blocks` whole blocks of the target."""
    return blocks * len(program.heads) * len(program.slots) * len(program.dims)


class _Side:
    """The digits of one side, asked by axis."""

    def __init__(self, layout: CompiledLayout, kv: int) -> None:
        self.layout = layout
        self.piece = piece = layout.piece(kv)
        self.page = tuple(d for d in piece.page if d.ext > 1)
        self.inside = tuple(d for d in piece.inside if d.ext > 1)

    def digits(self, axis: Axis) -> list[Digit]:
        """Digits of `axis`, least significant first."""
        return sorted((d for d in (*self.page, *self.inside) if d.axis == axis), key=lambda d: d.div)

    def padded(self, axis: Axis) -> int:
        """Indices along `axis`, padding included."""
        return max((d.div * d.ext for d in self.digits(axis)), default=1)

    def stride(self, axis: Axis, div: int) -> int | None:
        """Elements that a step of `div` indices is worth inside the page; None where it selects the page."""
        for d in reversed(self.digits(axis)):
            if d.div <= div:
                return d.stride * (div // d.div) if d in self.inside else None
        return None


def _boundaries(src: _Side, dst: _Side, axis: Axis) -> list[int]:
    return sorted({1, *(d.div for side in (src, dst) for d in side.digits(axis))})


def _show(side: _Side, axis: Axis) -> str:
    found = [f"{axis}/{d.div}%{d.ext}" for d in reversed(side.digits(axis))]
    return " ".join(found) or "none"


def _split(
    src: _Side, dst: _Side, axis: Axis, whole: int, loops: list[Loop], cut: bool = False
) -> NDArray[np.int64]:
    """Append the loops of `axis` to `loops`; the base indices of the pieces along it.

    The extent of a piece divides `whole`; with `cut` a digit may be split there.
    """
    bounds, padded = _boundaries(src, dst, axis), dst.padded(axis)
    if cut and all(b % whole == 0 or whole % b == 0 for b in bounds):
        bounds = sorted({*bounds, whole})
    for low, high in pairwise(bounds):
        if high % low and axis == "head":
            return np.arange(padded, dtype=np.int64)  # one head is a piece of any layout
        if high % low:
            raise Unmappable(
                "the digits have no common refinement",
                field=axis,
                got=f"{_show(src, axis)} in {src.layout.name}",
                expected=f"boundaries that nest with {_show(dst, axis)} in {dst.layout.name}",
            )
    bases = np.zeros(1, np.int64)
    for i, div in enumerate(bounds):
        # The most significant digit is open-ended: it reaches as far as the target's padding.
        ext = bounds[i + 1] // div if i + 1 < len(bounds) else -(-padded // div)
        if ext == 1:
            continue
        s, d = src.stride(axis, div), dst.stride(axis, div)
        if s is not None and d is not None and whole % (div * ext) == 0:
            loops.append(Loop(ext, s, d, 0, div if axis == "dim" else 0))
        else:
            bases = (np.arange(ext, dtype=np.int64)[:, None] * div + bases).ravel()
    return np.sort(bases[bases < padded])


def _rows(src: _Side, dst: _Side) -> int:
    """Tokens per piece: one block and one page on both sides, at any pair of block table entries."""
    rows = gcd(src.layout.shape.block_size, dst.layout.shape.block_size, dst.padded("slot"))
    for side in (src, dst):
        for d in side.page:
            if d.axis == "slot":
                rows = gcd(rows, d.div)
    # A piece ends where a digit above it does, and below `rows` the digits must nest, up to `rows` itself; where
    # they do not, the piece is lower.
    while True:
        lower = gcd(rows, *(b for b in _boundaries(src, dst, "slot") if b > rows))
        if lower < rows:  # of what is above it then, more has to be a multiple
            rows = lower
            continue
        chain = _chain(src, dst, rows)
        clash = [(low, high) for low, high in pairwise(chain) if high % low]
        if not clash:
            return rows
        rows = gcd(rows, *clash[0])


def _chain(src: _Side, dst: _Side, rows: int) -> list[int]:
    return [b for b in _boundaries(src, dst, "slot") if b < rows] + [rows]


def _slot_loops(src: _Side, dst: _Side, rows: int) -> list[Loop]:
    loops = []
    for low, high in pairwise(_chain(src, dst, rows)):
        s, d = src.stride("slot", low), dst.stride("slot", low)
        if s is None or d is None:
            raise InternalError("a page digit lies below the rows of a piece", slot=low, rows=rows)
        loops.append(Loop(high // low, s, d, low, 0))
    return loops


def _check_group(dst: CompiledLayout, loops: Sequence[Loop]) -> None:
    group, filled = dst.codec.group, 1
    for loop in reversed(loops):
        if filled == group:
            break
        if loop.dst != filled or loop.row:
            break
        filled = group if filled * loop.ext % group == 0 and group % filled == 0 else filled * loop.ext
    if filled != group:
        raise Unmappable(
            "a group that shares an exponent is not filled by one token of one piece",
            field="codec.group",
            got=f"{filled} elements side by side",
            expected=f"groups of {group} along dims that lie in one page of the source",
            target=dst.name,
        )
