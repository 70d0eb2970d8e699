"""Before a cache in a device's memory is a source: what processors are about to read of it is asked of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.memory.region import ByteRanges
from hawk.plan.types import RetileStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.jobs.caches import CacheEntry
    from hawk.memory.region import U8
    from hawk.plan.types import Step


async def refreshed(cache: CacheEntry, steps: Sequence[Step]) -> list[U8]:
    """The arrays of a source's regions, in which the pages that these steps read are as the device last wrote them."""
    memory = cache.memory
    if memory is None:
        return [region.array for region in cache.regions]
    if memory.refreshes:
        await memory.refresh(source_ranges(cache, steps))
    return [region.array for region in memory.readable]


def source_ranges(cache: CacheEntry, steps: Sequence[Step]) -> ByteRanges:
    """The pages that these steps read, each once; all of the cache where a step reads more than pages of elements."""
    found = []
    for step in steps:
        if not isinstance(step, RetileStep):
            return _whole(cache)
        pieces = step.pieces
        reads = pieces.hi > 0
        channel, page = pieces.src_channel[reads], pieces.src_page[reads]
        region = np.asarray(step.src_region, np.int64)[channel]
        start = np.asarray(step.src_offset, np.int64)[channel] + page
        size = step.program.src_codec.page_bytes(step.program.src_elements)
        rows = np.unique(np.stack((region, start), axis=1), axis=0)
        found.append(np.column_stack((rows, np.full(len(rows), size, np.int64))))
    table = np.concatenate(found) if found else np.empty((0, 3), np.int64)
    return ByteRanges(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy())


def _whole(cache: CacheEntry) -> ByteRanges:
    place = cache.placement
    sizes = np.repeat(np.asarray(cache.layout.buffer_bytes, np.int64), cache.layout.channels)
    return ByteRanges(place.region.ravel(), place.offset.ravel(), sizes)
