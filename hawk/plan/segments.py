"""From a chunk to what a transport and a memory are told: segments, moves, and the ranges that are touched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hawk.errors import InvalidArgument
from hawk.memory.groups import GroupedRanges, GroupedSegments, Groups
from hawk.memory.region import ByteRanges, Moves, Segments
from hawk.plan.bind import groups
from hawk.plan.check import check_placement_shape
from hawk.plan.pattern import ragged, starts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.plan.types import Placement, PlaneRuns, TargetChunk

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]


class _Rows(NamedTuple):
    """Every run of every plane, channel by channel and plane by plane: ascending in the arena.

    begin    the first row of each channel of each plane.  The rows of one plane in one channel rise in the target
             and do not border there, so only these have to be looked at for what borders
    of       rows of each channel, all planes together
    """

    region: I32
    local: I64
    arena: I64
    nbytes: I64
    begin: I64
    of: I64

    @property
    def channel(self) -> I64:
        """Channel of each row."""
        return np.repeat(np.arange(len(self.of), dtype=np.int64), self.of)


def _buffers(target: TargetChunk, placement: Placement) -> I64:
    """Number of each plane's buffer, after checking that the placement is one of this layout."""
    check_placement_shape(target.layout, placement)
    return target.buffers


GROUPED_FROM = 1 << 13
"""Rows from which they are left as groups, see `hawk.memory.groups`; fewer are as quickly written out, and joined."""


def _many(target: TargetChunk) -> bool:
    """Whether there are many rows, and so many in a group that it does not matter if those of two could be joined."""
    if len(target.runs) == 1:
        total = len(target.kind) * len(target.runs[0].nbytes)
    else:
        planes = np.bincount(target.kinds, minlength=len(target.runs)).tolist()
        total = sum(n * len(runs.nbytes) for n, runs in zip(planes, target.runs, strict=True))
    return total >= GROUPED_FROM and total >= 4 * len(target.kind) * target.layout.channels


def groups_of(target: TargetChunk, placement: Placement, arena_offset: int = 0) -> Groups:
    """The rows of all planes, one group for each channel of each plane, ascending in the arena."""
    buffer = _buffers(target, placement)
    base, shift = np.ascontiguousarray(target.base), np.ascontiguousarray(target.shift)
    return groups(target.runs, target.kinds, buffer, shift, base, placement, arena_offset)


def _crosses(groups: Groups, extents: Sequence[tuple[int, ...]]) -> bool:
    """Whether the rows of a group reach from one extent of its region into another."""
    for number, offsets in enumerate(extents):
        if len(offsets) > 1:
            low, high, _ = groups.extents()
            edges = np.asarray(offsets, np.int64)
            inside = edges.searchsorted(low, "right") == edges.searchsorted(high - 1, "right")
            if not inside[groups.region == number].all():
                return True
    return False


def _rows(target: TargetChunk, placement: Placement, arena_offset: int = 0) -> _Rows:
    buffer, channels = _buffers(target, placement), target.layout.channels
    per_channel = np.stack([np.bincount(r.channel, minlength=channels) for r in target.runs]).astype(np.int64)
    region = placement.region[buffer].astype(np.int32)
    offset = placement.offset[buffer] + target.shift[:, None]
    base = target.base + arena_offset
    if len(target.runs) == 1:
        return _alike(target.runs[0], per_channel[0], region, offset, base)
    kind = np.asarray(target.kind, np.int64)
    kind_first = np.cumsum(per_channel.ravel()).reshape(per_channel.shape) - per_channel
    count = per_channel[kind].T.ravel()

    def spread(table: NDArray[Any]) -> NDArray[Any]:
        """A `[planes, channels]` table, one entry for every row."""
        return np.repeat(table.T.ravel(), count)

    row = ragged(kind_first[kind].T.ravel(), count)
    arena, local, nbytes = (
        np.concatenate([getattr(r, name) for r in target.runs])[row] for name in ("arena", "target", "nbytes")
    )
    local += spread(offset)
    arena += spread(base)
    begin = np.cumsum(count) - count
    per = count.reshape(channels, -1).sum(axis=1)
    return _Rows(spread(region), local, arena, nbytes, begin[count > 0], per)


def _alike(runs: PlaneRuns, count: I64, region: I32, offset: I64, base: I64) -> _Rows:
    """`_rows` where all planes have the same runs: each is written once, straight to its place."""
    planes = len(offset)
    total = planes * len(runs.nbytes)
    # One block of memory for all columns: where it is large the system gives large pages for it, and touching many
    # small ones for the first time would cost more than all the rest.
    block = np.empty(4 * total, np.int64)
    local, arena, nbytes = (block[k * total : (k + 1) * total] for k in range(3))
    regions = block[3 * total :].view(np.int32)[:total]
    begin, at, first = [], 0, 0
    for c, n in enumerate(count.tolist()):
        if n == 0:
            continue
        part, own = slice(at, at + planes * n), slice(first, first + n)
        np.add(offset[:, c, None], runs.target[own], out=local[part].reshape(planes, n))
        np.add(base[:, c, None], runs.arena[own], out=arena[part].reshape(planes, n))
        nbytes[part].reshape(planes, n)[:] = runs.nbytes[own]
        regions[part].reshape(planes, n)[:] = region[:, c, None]
        begin.append(np.arange(at, at + planes * n, n, dtype=np.int64))
        at, first = at + planes * n, first + n
    return _Rows(regions, local, arena, nbytes, np.concatenate(begin), count * planes)


_Columns = tuple["NDArray[Any]", "I64", "I64", "I64"]


def _joined(region: NDArray[Any], local: I64, remote: I64, nbytes: I64, begin: I64) -> _Columns:
    """Joins rows that are contiguous on both sides; only rows of `begin` can be so with the one before."""
    if len(begin) < 2:
        return region, local, remote, nbytes
    at = begin[1:]
    join = remote[at] == remote[at - 1] + nbytes[at - 1]
    join &= local[at] == local[at - 1] + nbytes[at - 1]
    join &= region[at] == region[at - 1]
    if not join.any():
        return region, local, remote, nbytes
    new = np.ones(len(nbytes), bool)
    new[at[join]] = False
    first = np.flatnonzero(new)
    return region[first], local[first], remote[first], np.add.reduceat(nbytes, first)


def _cut(
    region: NDArray[Any], local: I64, remote: I64, nbytes: I64, extents: Sequence[tuple[int, ...]]
) -> _Columns:
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


def _segments(rows: _Columns) -> Segments:
    region, local, remote, nbytes = rows
    return Segments(region.astype(np.int32, copy=False), local, remote, nbytes)


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

    Sorted by `remote`, joined where both sides are contiguous, cut at extents; many rows that repeat from plane to
    plane stay groups, and the last row of one group is not joined to the first of the next.  Raises
    `InvalidArgument` if the placement is not one of the chunk's layout.
    """
    if _many(target):
        found = groups_of(target, placement, arena_offset)
        if not _crosses(found, regions_extents):
            return GroupedSegments(found)
    return _direct(_rows(target, placement, arena_offset), regions_extents)


def _direct(rows: _Rows, extents: Sequence[tuple[int, ...]]) -> Segments:
    joined = _joined(rows.region, rows.local, rows.arena, rows.nbytes, rows.begin)
    return _segments(_cut(*joined, extents))


def laid(
    target: TargetChunk, placement: Placement, regions_extents: Sequence[tuple[int, ...]] = ()
) -> tuple[Segments, ByteRanges]:
    """`direct` of a chunk at the beginning of the arena, and `touched`; what both are made of is made once."""
    if _many(target):
        return direct(target, placement, 0, regions_extents), touched(target, placement)
    rows = _rows(target, placement)
    return _direct(rows, regions_extents), _touched(rows)


def laid_again(
    known: tuple[TargetChunk, Segments, ByteRanges], target: TargetChunk, placement: Placement
) -> tuple[Segments, ByteRanges] | None:
    """`laid` of a chunk that differs from a known one in its layers, where regions have one extent each.

    None unless all that it writes lies equally far from what the known one writes.
    """
    like, segments, ranges = known
    if target.runs is not like.runs or target.base is not like.base or target.shift is not like.shift:
        return None
    here, there = like.buffers, target.buffers
    apart = placement.offset[there] - placement.offset[here]
    by = int(apart.flat[0])
    if (apart != by).any() or (placement.region[there] != placement.region[here]).any():
        return None
    if isinstance(segments, GroupedSegments) != isinstance(ranges, GroupedRanges):
        return None
    if isinstance(segments, GroupedSegments) and isinstance(ranges, GroupedRanges):
        return (
            GroupedSegments(replace(segments.groups, up=segments.groups.up + by)),
            GroupedRanges(replace(ranges.groups, up=ranges.groups.up + by)),
        )
    return (
        Segments(segments.region, segments.local + by, segments.remote, segments.nbytes),
        ByteRanges(ranges.region, ranges.start + by, ranges.nbytes),
    )


def moved(segments: Segments, by: int) -> Segments:
    """The same for a chunk that lies `by` bytes farther on in the arena."""
    if by == 0:
        return segments
    if isinstance(segments, GroupedSegments):
        return GroupedSegments(replace(segments.groups, on=segments.groups.on + by))
    return Segments(segments.region, segments.local, segments.remote + by, segments.nbytes)


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
    of_row = rows.channel
    apart = rows.region != staging_region[of_row]
    if apart.any():
        c = int(of_row[np.argmax(apart)])
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
    source = rows.arena + (staging_offset - first)[of_row]
    channel, moved_to, moved_from, length = _joined(of_row, rows.local, source, rows.nbytes, rows.begin)
    if target.layout.banks:
        channel = np.asarray(target.layout.banks, np.int64)[channel]
    return _segments(segments), Moves(channel.astype(np.int32, copy=False), moved_from, moved_to, length)


def touched(target: TargetChunk, placement: Placement) -> ByteRanges:
    """Exactly the bytes of the cache that the chunk writes, sorted by region and start, joined.

    What a flush has to make visible, and what the job owns.  Neighbours' rows are not in it.  Many rows that repeat
    stay groups, as in `direct`.
    """
    if _many(target) and (found := ascending(groups_of(target, placement))) is not None:
        return GroupedRanges(found)
    return _touched(_rows(target, placement))


def _touched(rows: _Rows) -> ByteRanges:
    region, start, nbytes = rows.region, rows.local, rows.nbytes
    at = rows.begin[1:]
    rising = (region[at] > region[at - 1]) | ((region[at] == region[at - 1]) & (start[at] > start[at - 1]))
    if rising.all():
        region, start, _, nbytes = _joined(region, start, start, nbytes, rows.begin)
        return ByteRanges(region, start, nbytes)
    # Only where buffers do not lie in the order of their planes, for sorting costs more than all the rest.
    order = np.lexsort((start, region))
    region, start, nbytes = region[order], start[order], nbytes[order]
    begin = starts((region[1:] != region[:-1]) | (start[1:] != start[:-1] + nbytes[:-1]))
    return ByteRanges(region[begin], start[begin], np.add.reduceat(nbytes, begin))


def ascending(groups: Groups) -> Groups | None:
    """The groups sorted by region and place, or None where rows of one lie between those of another."""
    low, high, _ = groups.extents()
    region = groups.region

    def apart() -> bool:
        same = region[1:] == region[:-1]
        return bool(((region[1:] > region[:-1]) | (same & (low[1:] >= high[:-1]))).all())

    if apart():
        return groups
    order = np.lexsort((low, region))
    low, high, region = low[order], high[order], region[order]
    if not apart():
        return None
    moved = {name: getattr(groups, name)[order] for name in ("which", "region", "up", "on")}
    return replace(groups, **moved)
