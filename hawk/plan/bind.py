"""Binding in the C core: the common case, blocks whose pages all move whole; the rest is numpy's, beside it.

Each function gives what its numpy counterpart does; a test compares them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from hawk.memory.groups import Groups
from hawk.retile import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.pattern import Pattern
    from hawk.plan.types import Placement, PlaneRuns

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]


def first_outside(blocks: I64, limit: int) -> int:
    """Index of the first block that is not in `[0, limit)`, or -1."""
    core = native.planner()
    if core is not None:
        return core.first_outside(blocks, limit)
    bad = np.flatnonzero((blocks < 0) | (blocks >= limit))
    return int(bad[0]) if len(bad) else -1


@lru_cache(maxsize=256)
def block_digits(layout: CompiledLayout, kv: int) -> I64:
    """Divisor, extent and stride of every digit of the block in a page number, `int64[digits, 3]`."""
    rows = [(d.div, d.ext, d.stride) for d in layout.piece(kv).page if d.axis == "block"]
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    table.flags.writeable = False
    return table


def terms(digits: I64, blocks: I64, add: int = 0) -> I64:
    """The page at which each block begins, and `add`; see `block_digits`."""
    core = native.planner()
    if core is not None:
        found = np.empty(len(blocks), np.int64)
        core.bind_terms(blocks, digits, add, found)
        return found
    found = np.full(len(blocks), add, np.int64)
    for div, ext, stride in digits.tolist():
        found += blocks // div % ext * stride
    return found


def bases(kind: I64, channel_bytes: I64) -> tuple[I64, int]:
    """Where each plane's part of each channel begins in the arena, `int64[planes, channels]`, and all their bytes.

    kind             of each plane
    channel_bytes    of a plane of each kind, `int64[kinds, channels]`
    """
    core = native.planner()
    channels = channel_bytes.shape[1]
    if core is not None:
        base = np.empty((len(kind), channels), np.int64)
        return base, core.bind_base(kind, channel_bytes, channels, base)
    own = channel_bytes[kind]
    ends = np.cumsum(own.T.ravel())
    return np.ascontiguousarray((ends - own.T.ravel()).reshape(channels, -1).T), int(ends[-1])


def groups(
    runs: Sequence[PlaneRuns],
    kind: I64,
    buffer: I64,
    shift: I64,
    base: I64,
    placement: Placement,
    arena_offset: int,
) -> Groups:
    """The rows of all planes, one group for each channel of each plane, ascending in the arena."""
    kinds, planes, channels = len(runs), len(kind), base.shape[1]
    if kinds == 1:
        channel, local, remote, nbytes = runs[0].channel, runs[0].target, runs[0].arena, runs[0].nbytes
    else:
        channel, local, remote, nbytes = (
            np.concatenate([getattr(r, name) for r in runs])
            for name in ("channel", "target", "arena", "nbytes")
        )
    ends = np.fromiter(accumulate(len(r.nbytes) for r in runs), np.int64, kinds)
    core = native.planner()
    if core is not None:
        lists, every = kinds * channels, planes * channels
        block, region = np.empty(2 * lists + 3 * every, np.int64), np.empty(every, np.int32)
        first, count = block[:lists], block[lists : 2 * lists]
        which, up, on = (block[2 * lists + k * every : 2 * lists + (k + 1) * every] for k in range(3))
        n = core.bind_groups(
            channels,
            arena_offset,
            channel,
            ends,
            kind,
            buffer,
            shift,
            base,
            np.ascontiguousarray(placement.region, np.int32),
            np.ascontiguousarray(placement.offset, np.int64),
            first,
            count,
            which,
            region,
            up,
            on,
        )
        return Groups(first, count, local, remote, nbytes, which[:n], region[:n], up[:n], on[:n])
    begin = ends - np.asarray([len(r.nbytes) for r in runs])
    parts = [channel[a:b] for a, b in zip(begin.tolist(), ends.tolist(), strict=True)]
    count = np.stack([np.bincount(part, minlength=channels) for part in parts]).astype(np.int64).ravel()
    which = (kind * channels + np.arange(channels, dtype=np.int64)[:, None]).ravel()
    region = placement.region[buffer].T.astype(np.int32).ravel()
    up = (placement.offset[buffer] + shift[:, None]).T.ravel()
    on = (base + arena_offset).T.ravel()
    first = np.cumsum(count) - count
    if not count.all():
        used = count[which] > 0
        which, region, up, on = which[used], region[used], up[used], on[used]
    return Groups(first, count, local, remote, nbytes, which, region, up, on)


def pages(term: I64, entry: I64, at: I64, stride: int) -> I64:
    """Byte offset of the source page of every piece, where the source has one channel.

    term     page at which each entry begins
    entry    entry of each row of pieces
    at       byte offset without the entry's, `int64[rows, ...]`
    """
    core = native.planner()
    if core is not None:
        found = np.empty(at.size, np.int64)
        core.bind_pages(term, entry, at, stride, found)
        return found
    return (at + (term * stride)[entry].reshape(-1, *(1,) * (at.ndim - 1))).ravel()


def whole_runs(
    layout: CompiledLayout, pat: Pattern, term: I64, align: int
) -> tuple[I32, I64, I64, I64, I64, I64] | None:
    """The runs of blocks that begin at pages `term`, or None where the C core is not to be had.

    Columns as in `PlaneRuns`: channel, arena, target, nbytes, channel_bytes; and for `pat.single` the distance from
    each block's pages to their places in the arena, in bytes, `int64[blocks * channels]` (else empty; 0 where
    the block has no page in the channel).
    """
    core = native.planner()
    if core is None or not pat.whole:
        return None
    channels, joined = layout.channels, layout.page_stride == layout.page_bytes
    most = pat.most if joined else pat.pages
    room = len(term) * most
    block = np.empty(3 * room, np.int64)
    arena, target, nbytes = block[:room], block[room : 2 * room], block[2 * room :]
    channel, channel_bytes = np.empty(room, np.int32), np.empty(channels, np.int64)
    moved = np.zeros(len(term) * channels if pat.single else 0, np.int64)
    n = core.bind_runs(
        term,
        pat.first,
        pat.channel,
        pat.slot,
        pat.count,
        layout.page_stride,
        layout.page_bytes,
        align,
        channel,
        arena,
        target,
        nbytes,
        channel_bytes,
        moved,
    )
    return channel[:n], arena[:n], target[:n], nbytes[:n], channel_bytes, moved


def dealt_pieces(layout: CompiledLayout, term: I64, channel: I64, page: I64, moved: I64) -> tuple[I64, I64]:
    """Channel and byte offset in the plane's part of the arena of every piece, where all entries have the same ones.

    term            page at which each entry begins, without the plane's own
    channel, page   for each residue of it, of every piece of an entry: `int64[channels, each]`; `page` in bytes
    moved           `PlaneRuns.moved`
    """
    core = native.planner()
    if core is not None:
        n = len(term) * channel.shape[1]
        to, at = np.empty(n, np.int64), np.empty(n, np.int64)
        core.bind_pieces(term, channel, page, moved, layout.channels, layout.page_stride, to, at)
        return to, at
    q, r = np.divmod(term, layout.channels)
    dealt = channel[r]
    first = np.arange(0, len(moved), layout.channels, dtype=np.int64)
    up = (q * layout.page_stride)[:, None] + moved[dealt + first[:, None]]
    return dealt.ravel(), (page[r] + up).ravel()
