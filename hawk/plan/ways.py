"""Which way a cache goes: by one program from its pages into those of the target, or through rows.

Rows are the heads that move, plain `[block, head, slot, dim]` in blocks of the target's size.  Elements meet there that
no single program brings together, such as those of several pages that are to share an exponent.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from hawk.errors import Unmappable
from hawk.layouts.codecs import CODECS
from hawk.layouts.compiled import CompiledLayout, CompiledPiece, Digit
from hawk.plan.scales import rule
from hawk.retile.build import build_programs

if TYPE_CHECKING:
    from hawk.layouts.compiled import CacheShape, CodecInfo
    from hawk.plan.types import Selection
    from hawk.retile.rows import Rule

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


def rows_of(
    tensor: CompiledLayout, cache: CompiledLayout, like: CacheShape, heads: int, codec: CodecInfo
) -> CompiledLayout:
    """Rows of a tensor of `cache`, with `heads` heads where it has rows for each, in blocks of the shape `like`."""
    return rows_layout(
        replace(
            like,
            heads=heads if tensor.shape.heads == cache.shape.heads else 1,
            block_size=like.block_size if tensor.per == "token" else 1,
            dim=tensor.shape.dim,
        ),
        codec,
    )


def _check_rows(
    side: CompiledLayout, number: int, dst: CompiledLayout, part: Part | None, *, source: bool
) -> None:
    """Raises `Unmappable` unless elements and their scales can be read into rows, or written out of them."""
    first, heads, source_first = part or (0, dst.shape.heads, 0)
    for tensor in side.tensors[number : number + (1 if side.tensors[number].scale is None else 2)]:
        rows = rows_of(tensor, side, dst.shape, heads, CODECS["fp32"])
        own = None if part is None or tensor.shape.heads != side.shape.heads else part
        for kv in range(dst.shape.kvs):
            if source:
                build_programs(tensor, rows, kv, None if own is None else (0, heads, source_first))
            else:
                build_programs(rows, tensor, kv, None if own is None else (first, heads, 0))


class Way(NamedTuple):
    """How some tensors of a cache go: by programs, or through rows.

    sources, targets    numbers among the tensors of either side
    kvs                 values of kv that go so
    rows                whether through rows; else there is one source and one target
    rules               what becomes of each target's scales, where rows see to them; else empty
    """

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    kvs: tuple[int, ...]
    rows: bool
    rules: tuple[Rule, ...] = ()


@lru_cache(maxsize=256)
def ways(src: CompiledLayout, dst: CompiledLayout, part: Part | None) -> tuple[Way, ...]:
    """How every tensor of `dst` is filled; raises `Unmappable` as `build_programs` and `scales.rule` do.

    part    as for `build_programs`
    """
    found: list[Way] = []
    for sources, targets in _paired(src, dst):
        ours = tuple(src.tensors[i] for i in sources)
        rules = tuple(rule(ours, dst.tensors[i]) for i in targets)
        kept = rules == ("moved",) or (rules == ("none",) and ours[0].scale is None)
        if len(sources) == len(targets) == 1 and kept:
            pairs = [(sources[0], targets[0])]
            if rules == ("moved",):
                pairs.append((sources[0] + 1, targets[0] + 1))
            for i, j in pairs:
                a, b = src.tensors[i], dst.tensors[j]
                apart = through_rows(a, b, part if a.shape.heads == src.shape.heads else None)
                rest = tuple(kv for kv in range(b.shape.kvs) if kv not in apart)
                found += [Way((i,), (j,), rest, rows=False)] if rest else []
                found += [Way((i,), (j,), apart, rows=True)] if apart else []
        else:
            found.append(Way(sources, targets, tuple(range(dst.shape.kvs)), rows=True, rules=rules))
            for side, numbers in ((src, sources), (dst, targets)):
                for number in numbers:
                    _check_rows(side, number, dst, part, source=side is src)
    return tuple(found)


def _paired(src: CompiledLayout, dst: CompiledLayout) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Numbers of tensors of elements that go together: those of the same dims, or all."""
    ours, theirs = ([i for i, t in enumerate(x.tensors) if not t.of_scales] for x in (src, dst))
    if [_dims(src, i) for i in ours] == [_dims(dst, i) for i in theirs]:
        return tuple(((i,), (j,)) for i, j in zip(ours, theirs, strict=True))
    return ((tuple(ours), tuple(theirs)),)


def _dims(layout: CompiledLayout, number: int) -> tuple[int, int]:
    return layout.tensors[number].first, layout.tensors[number].shape.dim


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
            rows = rows_of(dst, dst, dst.shape, heads, CODECS["fp32"])
            build_programs(src, rows, kv, None if part is None else (0, heads, source_first))
            build_programs(rows, dst, kv, None if part is None else (first, heads, 0))
            found.append(kv)
    return tuple(found)
