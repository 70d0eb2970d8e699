"""From a chunk to what a transport and a memory are told: segments, moves, and the ranges that are touched."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.errors import InvalidArgument
from hawk.memory.region import ByteRanges, Moves, Segments
from hawk.plan.pattern import ragged, starts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.plan.types import Placement, TargetChunk

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]


class _Rows(NamedTuple):
    """Every run of every plane, channel by channel and plane by plane: ascending in the arena."""

    channel: I64
    region: I64
    local: I64
    arena: I64
    nbytes: I64


def _buffers(target: TargetChunk, placement: Placement) -> I64:
    """Number of each plane's buffer, after checking that the placement is one of this layout."""
    layout = target.layout
    expected = (len(layout.buffer_bytes), layout.channels)
    for name in ("region", "offset"):
        got = getattr(placement, name).shape
        if got != expected:
            raise InvalidArgument(
                "the placement is not one of this layout",
                field=f"placement.{name}",
                got=f"shape {got}",
                expected=f"shape {expected} (buffers, channels)",
                layout=layout.name,
            )
    return target.buffers


def _rows(target: TargetChunk, placement: Placement) -> _Rows:
    buffer, channels = _buffers(target, placement), target.layout.channels
    kind = np.asarray(target.kind, np.int64)
    per_channel = np.stack([np.bincount(r.channel, minlength=channels) for r in target.runs]).astype(np.int64)
    kind_first = np.cumsum(per_channel.ravel()).reshape(per_channel.shape) - per_channel

    def spread(table: I64) -> I64:
        """A `[planes, channels]` table, one entry for every row."""
        return np.repeat(table.T.ravel(), count)

    count = per_channel[kind].T.ravel()
    row = ragged(kind_first[kind].T.ravel(), count)
    arena, local, nbytes = (
        np.concatenate([getattr(r, name) for r in target.runs])[row] for name in ("arena", "target", "nbytes")
    )
    local += spread(placement.offset[buffer] + target.shift[:, None])
    arena += spread(target.base)
    channel = np.repeat(np.arange(channels, dtype=np.int64), count.reshape(channels, -1).sum(axis=1))
    return _Rows(channel, spread(placement.region[buffer].astype(np.int64)), local, arena, nbytes)


def _joined(region: I64, local: I64, remote: I64, nbytes: I64) -> tuple[I64, I64, I64, I64]:
    """Joins rows that are contiguous on both sides."""
    if len(nbytes) == 0:
        return region, local, remote, nbytes
    new = remote[1:] != remote[:-1] + nbytes[:-1]
    new |= local[1:] != local[:-1] + nbytes[:-1]
    new |= region[1:] != region[:-1]
    if new.all():
        return region, local, remote, nbytes
    begin = starts(new)
    return region[begin], local[begin], remote[begin], np.add.reduceat(nbytes, begin)


def _cut(
    region: I64, local: I64, remote: I64, nbytes: I64, extents: Sequence[tuple[int, ...]]
) -> tuple[I64, I64, I64, I64]:
    """Cuts rows where a region's registration begins anew."""
    for number, offsets in enumerate(extents):
        if len(offsets) < 2:
            continue
        # Behind the last extent nothing is cut: a guard keeps every lookup in range.
        edges = np.append(np.asarray(offsets, np.int64), np.iinfo(np.int64).max)
        first = np.searchsorted(edges, local, side="right")
        inner = np.where(region == number, np.searchsorted(edges, local + nbytes, side="left") - first, 0)
        if not inner.any():
            continue
        row = np.repeat(np.arange(len(inner)), inner + 1)
        step = ragged(np.zeros_like(inner), inner + 1)
        edge = first[row] + step
        begin = np.where(step == 0, local[row], edges[edge - 1])
        end = np.where(step == inner[row], (local + nbytes)[row], edges[edge])
        region, remote, local, nbytes = region[row], remote[row] + begin - local[row], begin, end - begin
    return region, local, remote, nbytes


def _segments(rows: tuple[I64, I64, I64, I64]) -> Segments:
    region, local, remote, nbytes = rows
    return Segments(region.astype(np.int32), local, remote, nbytes)


def direct(
    target: TargetChunk,
    placement: Placement,
    arena_offset: int,
    regions_extents: Sequence[tuple[int, ...]] = (),
) -> Segments:
    """Every run straight from the arena into the cache.

    placement          where the target cache lies; `Segments.region` takes its region numbers
    arena_offset       byte offset of the chunk in the remote arena region
    regions_extents    `Region.extents` of each region that the placement names, in their order; regions past the
                       end of this list have one extent

    Sorted by `remote`, joined where both sides are contiguous, cut at extents.  Raises `InvalidArgument` if
    the placement is not one of the chunk's layout.
    """
    rows = _rows(target, placement)
    joined = _joined(rows.region, rows.local, rows.arena + arena_offset, rows.nbytes)
    return _segments(_cut(*joined, regions_extents))


def staged(
    target: TargetChunk,
    placement: Placement,
    arena_offset: int,
    staging_region: I32,
    staging_offset: I64,
    regions_extents: Sequence[tuple[int, ...]] = (),
) -> tuple[Segments, Moves]:
    """One segment a channel into staging, and the moves that finish inside each channel.

    staging_region, staging_offset    where each channel's staging begins, `int32[channels]` and
                                      `int64[channels]`; it has to hold `target.channel_bytes`
    others                            as for `direct`

    `Moves.channel` is the memory's channel (the layout's, or the bank it names); offsets count from the start of
    that channel's region.  Bytes of the arena that are in no run (neighbours' rows, the gaps between aligned
    pages) reach the staging but are never moved out of it.

    Raises
    ------
    InvalidArgument
        a channel's staging and its part of the cache lie in different regions, or a table has the wrong shape.
    """
    rows = _rows(target, placement)
    channels = target.layout.channels
    for name, table in (("staging_region", staging_region), ("staging_offset", staging_offset)):
        if table.shape != (channels,):
            raise InvalidArgument(
                "one staging range a channel is needed",
                field=name,
                got=f"shape {table.shape}",
                expected=f"shape ({channels},)",
            )
    apart = rows.region != staging_region[rows.channel]
    if apart.any():
        c = int(rows.channel[np.argmax(apart)])
        raise InvalidArgument(
            "staging and cache of a channel lie in different regions: bytes cannot be moved between them",
            field=f"staging_region[{c}]",
            got=int(staging_region[c]),
            expected=int(rows.region[np.argmax(apart)]),
        )
    nbytes = target.channel_bytes
    used = np.flatnonzero(nbytes > 0)
    first = target.base[0]
    segments = _cut(
        staging_region[used].astype(np.int64),
        staging_offset[used].astype(np.int64),
        first[used] + arena_offset,
        nbytes[used],
        regions_extents,
    )
    source = rows.arena + (staging_offset - first)[rows.channel]
    channel, moved_to, moved_from, length = _joined(rows.channel, rows.local, source, rows.nbytes)
    if target.layout.banks:
        channel = np.asarray(target.layout.banks, np.int64)[channel]
    return _segments(segments), Moves(channel.astype(np.int32), moved_from, moved_to, length)


def touched(target: TargetChunk, placement: Placement) -> ByteRanges:
    """Exactly the bytes of the cache that the chunk writes, sorted by region and start, joined.

    What a flush has to make visible, and what the job owns.  Neighbours' rows are not in it.
    """
    rows = _rows(target, placement)
    region, start, nbytes = rows.region, rows.local, rows.nbytes
    ascending = (region[1:] > region[:-1]) | ((region[1:] == region[:-1]) & (start[1:] > start[:-1]))
    if not ascending.all():
        # Only where buffers do not lie in the order of their planes, for sorting costs more than all the rest.
        order = np.lexsort((start, region))
        region, start, nbytes = region[order], start[order], nbytes[order]
    begin = starts((region[1:] != region[:-1]) | (start[1:] != start[:-1] + nbytes[:-1]))
    return ByteRanges(region[begin].astype(np.int32), start[begin], np.add.reduceat(nbytes, begin))
