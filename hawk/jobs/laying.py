"""What chunks write, and how many bytes of each channel: worked out once for all of an attempt that are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.plan.segments import laid, laid_again

if TYPE_CHECKING:
    from hawk.jobs.caches import CacheEntry
    from hawk.memory.region import ByteRanges, Segments
    from hawk.plan.types import TargetChunk

_SHAPES = 16
"""Shapes of chunks remembered; a job has a handful."""


class Laying:
    """For the chunks of one attempt that are written directly; from any thread."""

    def __init__(self, cache: CacheEntry) -> None:
        self._placement = cache.placement
        self._extents = [region.extents for region in cache.regions]
        self._plain = all(len(offsets) == 1 for offsets in self._extents)
        self._known: dict[tuple[int, int, int], tuple[TargetChunk, Segments, ByteRanges]] = {}
        self._bytes: tuple[object, object, list[int]] = ((), (), [])

    def of(self, planned: TargetChunk) -> tuple[Segments, ByteRanges]:
        """As `hawk.plan.segments.laid` has it."""
        chunk = planned.chunk
        shape = chunk.block, chunk.blocks, chunk.layers
        known = self._known.get(shape)
        again = None if known is None else laid_again(known, planned, self._placement)
        if again is not None:
            return again
        segments, ranges = laid(planned, self._placement, self._extents)
        if self._plain and len(self._known) < _SHAPES:
            self._known[shape] = planned, segments, ranges
        return segments, ranges

    def channel_bytes(self, planned: TargetChunk) -> list[int]:
        """`TargetChunk.channel_bytes`, for as long as chunks are alike."""
        runs, kind, found = self._bytes
        if runs is not planned.runs or kind is not planned.kind:
            found = planned.channel_bytes.tolist()
            self._bytes = planned.runs, planned.kind, found
        return found
