"""The part of a target chunk that no block table changes: which pages one block has, and which bytes of them move.

The page of an element is a sum with one term per axis, so all blocks of a plane look alike but for one number:
the page at which the block begins.  Only that number's residue modulo the channels decides how the block's
pages are dealt, so one table with a row per residue answers for every block, and binding a block table is a
vectorised lookup in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument
from hawk.plan.keep import kept

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts.compiled import Axis, CompiledLayout

    I64 = NDArray[np.int64]

ARENA_ALIGN = 64
"""Every plane's part of every channel begins at a multiple of this many arena bytes (a cache line)."""


MAX_PATTERN = 1 << 22
"""Pages of a block times channels: what the table of residues may hold."""

MAX_PAGE = 1 << 26
"""Elements of a page that moves in part.  A layout comes from a peer: these bounds lie far above any cache."""

MAX_MASKS = 1 << 28
"""Kinds of partial pages times elements of a page."""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Pages of one block that a chunk moves, as stretches of neighbouring pages of one channel.

    pages       pages of the block that are touched
    first       stretches of residue r are rows `[first[r], first[r + 1])`, `int64[channels + 1]`
    channel, slot, count    channel, index of the first page in that channel counted from the block's own (page
                // channels), and how many pages
    even        stretches of each residue where all have as many, else 0
    most        stretches of the residue that has the most
    whole       whether all pages of all stretches move whole
    single      whether moreover each residue has as many stretches and none two of one channel
    cut         -1 where all of these pages move; else the page (one) holds neighbours' rows or heads, and only the
                byte runs `[cut_first[cut], cut_first[cut + 1])` of `cut_at` and `cut_bytes` move
    """

    pages: int
    even: int
    most: int
    whole: bool
    single: bool
    first: I64
    channel: I64
    slot: I64
    count: I64
    cut: I64
    cut_first: I64
    cut_at: I64
    cut_bytes: I64


def ragged(first: I64, count: I64) -> I64:
    """`first[0], first[0] + 1, ... (count[0] of them), first[1], ...`: the rows of a ragged lookup."""
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(first - (ends - count), count) + np.arange(total, dtype=np.int64)


def starts(change: NDArray[np.bool_]) -> I64:
    """Rows at which a group begins, given for every row but the first whether it differs from the one before."""
    return np.concatenate((np.zeros(1, np.int64), np.flatnonzero(change) + 1))


def padded_extent(layout: CompiledLayout, kv: int, axis: Axis) -> int:
    """Indices along `axis` that a page has room for: the axis' extent, padding included."""
    piece = layout.piece(kv)
    return max((d.div * d.ext for d in (*piece.page, *piece.inside) if d.axis == axis), default=1)


@lru_cache(maxsize=512)
def fixed_terms(layout: CompiledLayout, kv: int) -> I64:
    """`CompiledLayout.fixed_term` for every layer at once, `int64[layers]`."""
    piece = layout.piece(kv)
    total = np.zeros(layout.shape.layers, np.int64)
    if "layer" not in layout.buffers:
        total += piece.page_term("layer", np.arange(layout.shape.layers, dtype=np.int64))
    if "kv" not in layout.buffers:
        total += piece.page_term("kv", np.full(1, kv, np.int64))
    total.flags.writeable = False
    return total


@lru_cache(maxsize=512)
def leads(layout: CompiledLayout) -> tuple[int, ...]:
    """For each kv the first one whose blocks have the same pages, with the same rows and heads at the same places."""

    def facts(kv: int) -> object:
        piece = layout.piece(kv)
        blocks = tuple(d for d in piece.page if d.axis == "block")
        inside = tuple(d for d in piece.inside if d.axis in ("slot", "head"))
        # Which dims a page holds may differ, as where K is interleaved.
        pages = tuple(column.tobytes() for column in _block_pages(layout, kv))
        return blocks, pages, inside, piece.elements, piece.kvs if layout.shares_pages else ()

    for kv in range(layout.shape.kvs):
        _check_size(layout, kv, False)
    found = [facts(kv) for kv in range(layout.shape.kvs)]
    return tuple(found.index(f) for f in found)


def _block_pages(layout: CompiledLayout, kv: int) -> tuple[I64, I64, I64]:
    """Page numbers of a block counted from its own, ascending, and the slot and head at which each page begins."""
    page, slot, head = (np.zeros(1, np.int64) for _ in range(3))
    for d in layout.piece(kv).page:
        if d.axis in ("head", "slot", "dim"):
            step = np.arange(d.ext, dtype=np.int64)
            page = (page[:, None] + step * d.stride).ravel()
            slot = (slot[:, None] + step * (d.div if d.axis == "slot" else 0)).ravel()
            head = (head[:, None] + step * (d.div if d.axis == "head" else 0)).ravel()
    order = np.argsort(page)
    return page[order], slot[order], head[order]


def _inside(layout: CompiledLayout, kv: int, axis: Axis) -> I64:
    """How many indices along `axis` past the page's first each position of a page lies, `int64[elements]`."""
    piece = layout.piece(kv)
    position = np.arange(piece.elements, dtype=np.int64)
    index = np.zeros_like(position)
    # Where K and V share pages but lie differently in them, each position is one of either.
    pieces = layout.pieces if layout.shares_pages else (piece,)
    for own in pieces:
        ours = np.zeros_like(position)
        held = np.zeros_like(position)
        for d in own.inside:
            if d.axis == axis:
                ours += position // d.stride % d.ext * d.div
            elif d.axis == "kv":
                held += position // d.stride % d.ext * d.div
        index = ours if len(pieces) == 1 else np.where(np.isin(held, own.kvs), ours, index)
    return index


def _byte_runs(layout: CompiledLayout, moved: NDArray[np.bool_]) -> tuple[I64, I64]:
    """Start and length in bytes of what moves of a page, given which of its positions do."""
    codec = layout.codec
    # A group of elements lies in one row of one head, so it moves or stays as a whole.
    groups = moved[:: codec.group]
    edge = np.flatnonzero(np.diff(groups, prepend=False, append=False)).reshape(-1, 2).astype(np.int64)
    first, last = edge[:, 0], edge[:, 1]
    group_bytes = codec.group * codec.bits // 8
    header = codec.header_bytes(len(moved))
    at, nbytes = header + first * group_bytes, (last - first) * group_bytes
    if header:
        at, nbytes = np.concatenate((first, at)), np.concatenate((last - first, nbytes))
        if at[len(first)] == at[len(first) - 1] + nbytes[len(first) - 1]:
            # The last exponents border on the first elements: one run.
            nbytes[len(first) - 1] += nbytes[len(first)]
            keep = np.arange(len(at)) != len(first)
            at, nbytes = at[keep], nbytes[keep]
    return at, nbytes


def _check_size(layout: CompiledLayout, kv: int, partial: bool) -> None:
    piece = layout.piece(kv)
    pages = math.prod(d.ext for d in piece.page if d.axis in ("head", "slot", "dim"))
    for field, got, most in (
        ("pages of a block x channels", pages * layout.channels, MAX_PATTERN),
        ("elements of a page", piece.elements if partial else 0, MAX_PAGE),
    ):
        if got > most:
            raise InvalidArgument(
                "too large to plan", field=field, got=got, expected=f"{most} or less", layout=layout.name
            )


ALL_HEADS = (0, -1)
"""Every head of the target, padding included."""


@kept(256, lambda found: (found.channel.nbytes + found.cut_at.nbytes) * 4)
def pattern(layout: CompiledLayout, kv: int, cut: int, heads: tuple[int, int] = ALL_HEADS) -> Pattern:
    """What moves of one block of plane (any layer, `kv`) when its rows from slot `cut` on belong to the job.

    `cut` is 0 for every block but the one in which the token range begins.  `heads` is the first head that moves
    and one past the last; -1 for all from the first on, padding included.  Pages whose rows all lie before `cut`, or
    whose heads all lie outside `heads`, are left out.  Raises `InvalidArgument` for a layout beyond
    `MAX_PATTERN` or `MAX_PAGE`.
    """
    partial = cut > 0 or heads != ALL_HEADS
    _check_size(layout, kv, partial)
    page, slot, head = _block_pages(layout, kv)
    which = np.full(len(page), -1, np.int64)
    cut_at: list[I64] = []
    cut_bytes: list[I64] = []
    if partial:
        rows, inner = _inside(layout, kv, "slot"), _inside(layout, kv, "head")
        last = heads[1] if heads[1] >= 0 else padded_extent(layout, kv, "head")
        least, most = max(0, cut - int(rows.max())), last - int(inner.max())
        whole = (slot >= cut) & (head >= heads[0]) & (head < most)
        keep = (slot >= least) & (head + int(inner.max()) >= heads[0]) & (head < last)
        # Pages that begin at the same slot and head move alike.
        key = slot * (padded_extent(layout, kv, "head") + 1) + head
        kinds, example = np.unique(key[keep & ~whole], return_index=True)
        if len(kinds) * len(rows) > MAX_MASKS:
            raise InvalidArgument(
                "too large to plan in part",
                field="kinds of partial pages x elements of a page",
                got=f"{len(kinds)} x {len(rows)}",
                expected=f"{MAX_MASKS} or less",
                layout=layout.name,
            )
        rows_of = np.flatnonzero(keep & ~whole)[example]
        for number, i in zip(kinds.tolist(), rows_of.tolist(), strict=True):
            moved = rows + slot[i] >= cut
            moved &= (inner + head[i] >= heads[0]) & (inner + head[i] < last)
            if not moved.any():
                keep &= key != number
                continue
            at, nbytes = _byte_runs(layout, moved)
            which[(key == number) & ~whole] = len(cut_at)
            cut_at.append(at)
            cut_bytes.append(nbytes)
        page, which = page[keep], which[keep]
    lengths = np.asarray([0, *(len(a) for a in cut_at)], np.int64)
    c = layout.channels
    tables: list[tuple[I64, I64, I64, I64]] = []
    for residue in range(c):
        at_channel, at_slot = (page + residue) % c, (page + residue) // c
        order = np.lexsort((at_slot, at_channel))
        ch, sl, wh = at_channel[order], at_slot[order], which[order]
        new = (np.diff(ch) != 0) | (np.diff(sl) != 1) | (wh[1:] >= 0) | (wh[:-1] >= 0)
        begin = starts(new) if len(ch) else np.empty(0, np.int64)
        count = np.diff(np.append(begin, len(ch)))
        tables.append((ch[begin], sl[begin], count, wh[begin]))
    each, all_whole = {len(t[0]) for t in tables}, bool((which < 0).all())
    return Pattern(
        pages=len(page),
        even=max(each) if len(each) == 1 else 0,
        most=max(each),
        whole=all_whole,
        single=all_whole and len(each) == 1 and all(len(np.unique(t[0])) == len(t[0]) for t in tables),
        first=np.cumsum([0, *(len(t[0]) for t in tables)], dtype=np.int64),
        channel=np.concatenate([t[0] for t in tables]),
        slot=np.concatenate([t[1] for t in tables]),
        count=np.concatenate([t[2] for t in tables]),
        cut=np.concatenate([t[3] for t in tables]),
        cut_first=np.cumsum(lengths, dtype=np.int64),
        cut_at=np.concatenate([np.empty(0, np.int64), *cut_at]),
        cut_bytes=np.concatenate([np.empty(0, np.int64), *cut_bytes]),
    )
