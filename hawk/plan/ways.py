"""Which way a cache goes: by one program from its pages into those of the target, or through rows.

Rows are the heads that move, plain `[block, head, slot, dim]` in blocks of the target's size.  Elements meet there that
no single program brings together, such as those of several pages that are to share an exponent.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hawk.errors import Unmappable
from hawk.layouts.codecs import CODECS
from hawk.layouts.compiled import CompiledLayout, CompiledPiece, Digit
from hawk.retile.build import build_programs

if TYPE_CHECKING:
    from hawk.layouts.compiled import CacheShape, CodecInfo
    from hawk.plan.types import Selection

    Part = tuple[int, int, int]

_BLOCKS = 1 << 31
"""Blocks of a rows' layout: more than any chunk has, so that one layout does for all."""


def program_part(
    src: CompiledLayout, dst: CompiledLayout, selection: Selection
) -> tuple[int, int, int] | None:
    """The heads of the selection as `build_programs` takes them: None where all of both sides move."""
    if not selection.heads:
        return None
    if selection.heads == src.shape.heads == dst.shape.heads:
        return None
    return selection.head, selection.heads, selection.source_head


@lru_cache(maxsize=256)
def rows_layout(shape: CacheShape, codec: CodecInfo) -> CompiledLayout:
    """Plain rows of this box: a buffer for each layer and kv, a page for each block, in it `[head, slot, dim]`."""
    heads, slots, dim = shape.heads, shape.block_size, shape.dim
    elements = heads * slots * dim
    piece = CompiledPiece(
        kvs=tuple(range(shape.kvs)),
        page=(Digit("block", 1, _BLOCKS, 1),),
        inside=(Digit("head", 1, heads, slots * dim), Digit("slot", 1, slots, dim), Digit("dim", 1, dim, 1)),
        elements=elements,
        padded=False,
    )
    return CompiledLayout(
        name="rows",
        shape=replace(shape, blocks=_BLOCKS),
        codec=codec,
        buffers=("layer", "kv"),
        pieces=(piece,),
        pages=_BLOCKS,
        page_bytes=codec.page_bytes(elements),
        page_stride=codec.page_bytes(elements),
        channels=1,
    )


def rows_between(src: CompiledLayout, dst: CompiledLayout, heads: int) -> CompiledLayout:
    """Rows of that many heads of `dst`: with the elements' own bits where both sides store them alike."""
    alike = src.codec == dst.codec and src.codec.group == 1
    return rows_layout(replace(dst.shape, heads=heads), src.codec if alike else CODECS["fp32"])


@lru_cache(maxsize=256)
def through_rows(src: CompiledLayout, dst: CompiledLayout, part: Part | None) -> tuple[int, ...]:
    """The values of kv that no program brings over by itself; raises `Unmappable` where rows do not help either.

    part    as for `build_programs`
    """
    found = []
    for kv in range(dst.shape.kvs):
        try:
            build_programs(src, dst, kv, part)
        except Unmappable:
            first, heads, source_first = part or (0, dst.shape.heads, 0)
            same = part is not None or src.shape.heads == dst.shape.heads
            if not same or (src.shape.dim, src.shape.kvs) != (dst.shape.dim, dst.shape.kvs):
                raise
            rows = rows_between(src, dst, heads)
            build_programs(src, rows, kv, None if part is None else (0, heads, source_first))
            build_programs(rows, dst, kv, None if part is None else (first, heads, 0))
            found.append(kv)
    return tuple(found)
