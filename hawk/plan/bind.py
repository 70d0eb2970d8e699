"""Binding in the C core: the common case, blocks whose pages all move whole; the rest is numpy's, beside it.

Each function gives what its numpy counterpart does; a test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.retile import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.pattern import Pattern

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]


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
