"""The target's side of the plan: chunks, their size, and where each byte of the arena goes in the target.

Which pages a chunk touches follows from the token range `[t0, t1)` alone:

- blocks that hold no token of it, and pages whose rows all lie before t0, are left as they are;
- rows before t0 in a page that is touched are neighbours: the page has its place in the arena, but their bytes
  are in no run, so whatever the target holds there stays;
- rows from t1 to the end of the last touched block are padding: they are moved, as zeros.

Where only some heads move, the others are neighbours too; heads that exist for padding only go with the last one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.errors import InvalidArgument, OutOfMemory, counted
from hawk.plan.bind import bases, block_digits, first_outside, terms, whole_runs
from hawk.plan.check import check_selection, entries
from hawk.plan.keep import kept
from hawk.plan.pattern import ARENA_ALIGN, fixed_terms, leads, pattern, ragged, starts
from hawk.plan.scales import check_selected
from hawk.plan.tensors import carrier, join, riding, view
from hawk.plan.types import Chunk, PlaneRuns, Selection, TargetChunk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.pattern import Pattern

    I64 = NDArray[np.int64]


_NO_BLOCKS = np.empty(0, np.int64)


def cut_of(layout: CompiledLayout, selection: Selection, chunk: Chunk) -> int:
    """Rows at the start of the chunk's first block that lie before the token range."""
    return max(0, selection.token - chunk.block * layout.shape.block_size)


def heads_moved(layout: CompiledLayout, selection: Selection) -> tuple[int, int]:
    """The target's heads as `pattern` takes them."""
    first, count = selection.target_heads(layout)
    last = first + count
    return (first, last) if last < layout.shape.heads else (first, -1)


def _plane_bytes(
    layout: CompiledLayout, kv: int, cut: int, heads: tuple[int, int], blocks: int, align: int
) -> int:
    pages = pattern(layout, kv, cut, heads).pages + (blocks - 1) * pattern(layout, kv, 0, heads).pages
    # How the pages spread over the channels depends on the block table; each channel in use rounds up once.
    waste = align - math.gcd(align, layout.page_stride)
    return pages * layout.page_stride + min(layout.channels, pages) * waste


@lru_cache(maxsize=256)
def chunk_bytes(dst: CompiledLayout, selection: Selection, chunk: Chunk, *, align: int = ARENA_ALIGN) -> int:
    """Arena bytes that suffice for the chunk whatever the block table holds.

    Exact where `page_stride` is a multiple of `align`; otherwise up to `align` bytes more per plane and channel.
    """
    found = 0
    for tensor, host in zip(dst.tensors, riding(dst), strict=True):
        if host is not None:
            continue
        part, within, _ = view(tensor, dst, selection, chunk, _NO_BLOCKS)
        cut, heads = cut_of(tensor, part, within), heads_moved(tensor, part)
        for kv in tensor.plane_kvs:
            found += chunk.layers * _plane_bytes(tensor, kv, cut, heads, within.blocks, align)
    return found


def split(
    dst: CompiledLayout, selection: Selection, *, max_bytes: int, align: int = ARENA_ALIGN
) -> tuple[Chunk, ...]:
    """The selection as chunks of at most `max_bytes` arena bytes, in the order in which layers become ready.

    As many whole layers as fit go into one chunk; where one layer does not fit, it is cut by entries of the
    target's block table.

    Raises
    ------
    OutOfMemory
        one block of one layer is larger than `max_bytes`; `expected` names the smallest size that works.
    InvalidArgument
        the selection names layers that the target does not have, or the layout is too large to plan.
    """
    check_selection(dst, selection)
    begin, end = entries(dst, selection)
    last = selection.layer + selection.layers

    def size(layers: int, block: int, blocks: int) -> int:
        return chunk_bytes(dst, selection, Chunk(selection.layer, layers, block, blocks), align=align)

    fit = max_bytes // size(1, begin, end - begin)
    if fit > 0:
        return tuple(
            Chunk(layer, min(fit, last - layer), begin, end - begin)
            for layer in range(selection.layer, last, fit)
        )
    smallest = max(size(1, begin, 1), size(1, end - 1, 1))
    if smallest > max_bytes:
        raise OutOfMemory(
            "one block of one layer does not fit into a chunk",
            field="max_bytes",
            got=max_bytes,
            expected=f"{smallest} or more",
            layout=dst.name,
        )

    def most(block: int) -> int:
        """The largest number of entries from `block` on that fits; the size grows with the number."""
        low, high = 1, end - block
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if size(1, block, middle) <= max_bytes else (low, middle - 1)
        return low

    # Only the first entry can hold neighbours' pages, so all chunks but the first one are alike.
    cuts = [(begin, most(begin))]
    block = begin + cuts[0][1]
    if block < end:
        step = most(block)
        cuts += [(at, min(step, end - at)) for at in range(block, end, step)]
    return tuple(Chunk(layer, 1, at, n) for layer in range(selection.layer, last) for at, n in cuts)


def _stretches(pat: Pattern, term: I64, channels: int) -> tuple[I64, I64, I64, I64]:
    """(channel, slot, count, cut) of the page stretches of the blocks that begin at pages `term`."""
    residue = term % channels
    if pat.even:
        row = (residue[:, None] * pat.even + np.arange(pat.even, dtype=np.int64)).ravel()
        slot = (pat.slot[row].reshape(-1, pat.even) + (term // channels)[:, None]).ravel()
        return pat.channel[row], slot, pat.count[row], pat.cut[row]
    count = pat.first[residue + 1] - pat.first[residue]
    row = ragged(pat.first[residue], count)
    return pat.channel[row], pat.slot[row] + np.repeat(term // channels, count), pat.count[row], pat.cut[row]


def _coalesce(channel: I64, arena: I64, target: I64, nbytes: I64) -> tuple[I64, I64, I64, I64]:
    """Joins rows that follow each other in one channel of the target.

    They do so in the arena too, which holds the same pages in the same order at the same distance.
    """
    new = channel[1:] != channel[:-1]
    new |= target[1:] != target[:-1] + nbytes[:-1]
    if new.all():
        return channel, arena, target, nbytes
    begin = starts(new)
    return channel[begin], arena[begin], target[begin], np.add.reduceat(nbytes, begin)


@kept(16, lambda runs: runs.nbytes.nbytes * 4)
def plane_runs(
    layout: CompiledLayout, kv: int, residue: int, cut: int, heads: tuple[int, int], table: bytes
) -> PlaneRuns:
    """The runs of a plane in the blocks of `table`; the first block's rows before `cut` are not ours.

    Kept for a few tables, for the chunks of one request follow each other with the same blocks in other layers.
    """
    term = terms(block_digits(layout, kv), np.frombuffer(table, np.int64), residue)
    rest = pattern(layout, kv, 0, heads)
    found = None if cut else whole_runs(layout, rest, term, ARENA_ALIGN)
    runs = PlaneRuns(*(found or numpy_runs(layout, kv, cut, heads, term)))
    for column in (runs.channel, runs.arena, runs.target, runs.nbytes, runs.channel_bytes, runs.moved):
        column.flags.writeable = False  # several chunks share them
    return runs


def numpy_runs(
    layout: CompiledLayout, kv: int, cut: int, heads: tuple[int, int], term: I64
) -> tuple[NDArray[np.int32], I64, I64, I64, I64, I64]:
    """The columns of `PlaneRuns` for blocks that begin at pages `term`."""
    channels, stride, page_bytes = layout.channels, layout.page_stride, layout.page_bytes
    rest = pattern(layout, kv, 0, heads)
    cut_first, cut_at, cut_bytes = rest.cut_first, rest.cut_at, rest.cut_bytes
    channel, slot, count, which = _stretches(rest, term[1:] if cut else term, channels)
    if cut:
        parts = [(channel, slot, count, which)]
        first = pattern(layout, kv, cut, heads)
        channel, slot, count, which = _stretches(first, term[:1], channels)
        # Both tables of partial pages as one, the first block's behind the others'.
        parts.append((channel, slot, count, np.where(which < 0, which, which + len(cut_first) - 1)))
        cut_first = np.concatenate((cut_first, first.cut_first[1:] + cut_first[-1]))
        cut_at = np.concatenate((cut_at, first.cut_at))
        cut_bytes = np.concatenate((cut_bytes, first.cut_bytes))
        channel, slot, count, which = (np.concatenate([p[i] for p in parts]) for i in range(4))
    order = np.argsort(channel * (int(slot.max()) + 1) + slot)
    channel, slot, count = channel[order], slot[order], count[order]
    # Rank of each page among the plane's pages of its channel, hence its place in the arena.
    total = np.concatenate((np.zeros(1, np.int64), np.cumsum(count)))
    channel_first = total[np.searchsorted(channel, np.arange(channels + 1))]
    rank = total[:-1] - channel_first[channel]
    arena, target = rank * stride, slot * stride
    all_whole = rest.whole and not cut
    moved = np.empty(0, np.int64)
    if rest.single and rest.even and not cut:
        # Row i of the stretches is of block i // even.
        moved = np.zeros(len(term) * channels, np.int64)
        moved[order // rest.even * channels + channel] = (rank - slot) * stride
    which = which if all_whole else which[order]
    whole = which < 0
    if all_whole and stride == page_bytes:
        rows = (channel, arena, target, count * stride)
    elif stride == page_bytes:
        rows = (channel[whole], arena[whole], target[whole], count[whole] * stride)
    else:
        # The bytes between two pages are nobody's: the arena has rubbish there, so they stay out.
        n = count[whole]
        step = ragged(np.zeros_like(n), n) * stride
        rows = (
            np.repeat(channel[whole], n),
            np.repeat(arena[whole], n) + step,
            np.repeat(target[whole], n) + step,
            np.full(int(n.sum()), page_bytes, np.int64),
        )
    if not all_whole and not whole.all():
        part = which[~whole]
        n = cut_first[part + 1] - cut_first[part]
        row = ragged(cut_first[part], n)
        at = cut_at[row]
        extra = (
            np.repeat(channel[~whole], n),
            np.repeat(arena[~whole], n) + at,
            np.repeat(target[~whole], n) + at,
            cut_bytes[row],
        )
        joined = [np.concatenate(pair) for pair in zip(rows, extra, strict=True)]
        order = np.lexsort((joined[1], joined[0]))
        rows = (joined[0][order], joined[1][order], joined[2][order], joined[3][order])
    channel, arena, target, nbytes = _coalesce(*rows)
    pages = np.diff(channel_first)
    channel_bytes = -(-pages * stride // ARENA_ALIGN) * ARENA_ALIGN
    return channel.astype(np.int32), arena, target, nbytes, channel_bytes, moved


@lru_cache(maxsize=256)
def _check_shape(dst: CompiledLayout, selection: Selection, chunk: Chunk) -> None:
    """Raises `InvalidArgument` for a chunk that is no part of the selection, whatever the block table holds."""
    check_selection(dst, selection)
    check_selected(dst, selection)
    begin, end = entries(dst, selection)
    if chunk.blocks < 1 or chunk.block < begin or chunk.block + chunk.blocks > end:
        raise InvalidArgument(
            "the chunk reaches past the selection",
            field="chunk.block",
            got=f"entries {chunk.block}..{chunk.block + chunk.blocks - 1}",
            expected=f"within {begin}..{end - 1}",
        )
    last = selection.layer + selection.layers
    if chunk.layers < 1 or chunk.layer < selection.layer or chunk.layer + chunk.layers > last:
        raise InvalidArgument(
            "the chunk reaches past the selection",
            field="chunk.layer",
            got=f"layers {chunk.layer}..{chunk.layer + chunk.layers - 1}",
            expected=f"within {selection.layer}..{last - 1}",
        )


def _check_chunk(dst: CompiledLayout, blocks: I64, selection: Selection, chunk: Chunk) -> None:
    _check_shape(dst, selection, chunk)
    if len(blocks) < chunk.block + chunk.blocks:
        raise InvalidArgument(
            "the block table is too short",
            field="blocks",
            got=counted(len(blocks), "entry", "entries"),
            expected=f"{chunk.block + chunk.blocks} or more",
        )
    used = blocks[chunk.block : chunk.block + chunk.blocks]
    bad = first_outside(used, dst.shape.blocks)
    if bad >= 0:
        raise InvalidArgument(
            "no such block",
            field=f"blocks[{chunk.block + bad}]",
            got=int(used[bad]),
            expected=f"0..{dst.shape.blocks - 1}",
        )


class _Frame(NamedTuple):
    """What no block table changes: the planes, their kinds, and each kind as (kv that stands for it, residue).

    kind_of    the same as `kind`, `int64[planes]`; `buffers` the number of each plane's buffer
    """

    planes: tuple[tuple[int, int], ...]
    kinds: tuple[tuple[int, int], ...]
    kind: tuple[int, ...]
    kind_of: I64
    shift: I64
    buffers: I64


@lru_cache(maxsize=256)
def _frame(dst: CompiledLayout, layer: int, layers: int) -> _Frame:
    kvs = dst.plane_kvs
    fixed = np.stack([fixed_terms(dst, kv)[layer : layer + layers] for kv in kvs], axis=1)
    lead = np.asarray([leads(dst)[kv] for kv in kvs], np.int64)
    pairs = [(a, b) for row in fixed % dst.channels for a, b in zip(lead.tolist(), row.tolist(), strict=True)]
    kinds = tuple(dict.fromkeys(pairs))
    kind = tuple(kinds.index(pair) for pair in pairs)
    shift = (fixed // dst.channels * dst.page_stride).ravel()
    planes = tuple(product(range(layer, layer + layers), kvs))
    kind_of = np.asarray(kind, np.int64)
    buffers = np.asarray([dst.buffer(*plane) for plane in planes], np.int64)
    for table in (kind_of, shift, buffers):
        table.flags.writeable = False
    return _Frame(planes, kinds, kind, kind_of, shift, buffers)


@lru_cache(maxsize=256)
def _bounds(dst: CompiledLayout, selection: Selection, chunk: Chunk) -> tuple[int, tuple[int, int], _Frame]:
    """Rows that are cut off, the heads that move, and the planes."""
    return cut_of(dst, selection, chunk), heads_moved(dst, selection), _frame(dst, chunk.layer, chunk.layers)


def target_chunk(dst: CompiledLayout, blocks: I64, selection: Selection, chunk: Chunk) -> TargetChunk:
    """Lays out the arena of a chunk and says where its bytes go in the target.

    blocks    the target's whole block table, `int64[n]`, without duplicates (see `check_blocks`)

    Raises `InvalidArgument` if the chunk is no part of the selection, or if the table is too short or names a
    block that the target does not have.
    """
    blocks = np.ascontiguousarray(blocks, dtype=np.int64)
    _check_chunk(dst, blocks, selection, chunk)
    if len(dst.tensors) == 1:
        return tensor_chunk(dst, blocks, selection, chunk)
    found: list[TargetChunk | None] = []
    for number, host in enumerate(riding(dst)):
        tensor = carrier(dst, number)
        own = view(tensor, dst, selection, chunk, blocks)
        found.append(None if host is not None else tensor_chunk(tensor, own.blocks, own.selection, own.chunk))
    return replace(join(dst, found), selection=selection, chunk=chunk)


def tensor_chunk(dst: CompiledLayout, blocks: I64, selection: Selection, chunk: Chunk) -> TargetChunk:
    """`target_chunk` of a layout's elements alone, unchecked."""
    table = blocks[chunk.block : chunk.block + chunk.blocks].tobytes()
    cut, heads, frame = _bounds(dst, selection, chunk)
    runs = tuple(plane_runs(dst, lead, residue, cut, heads, table) for lead, residue in frame.kinds)
    each = runs[0].channel_bytes[None] if len(runs) == 1 else np.stack([r.channel_bytes for r in runs])
    base, nbytes = bases(frame.kind_of, each)
    return TargetChunk(
        layout=dst,
        selection=selection,
        chunk=chunk,
        planes=frame.planes,
        kind=frame.kind,
        runs=runs,
        base=base,
        shift=frame.shift,
        nbytes=nbytes,
        tables=(frame.planes, frame.kind_of, frame.buffers),
    )
