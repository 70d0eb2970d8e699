"""Zeroing of what jobs leave behind on the receiving side; the arena does its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from hawk.memory.region import ByteRanges
from hawk.memory.scrub import zero

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.jobs.caches import CacheEntry
    from hawk.memory.base import Memory
    from hawk.memory.region import Region


async def wipe(regions: Sequence[Region], ranges: ByteRanges, memory: Memory | None) -> None:
    """Zeroes these bytes, all of them even if cancelled, and makes that visible where they are a memory's."""
    again: tuple[object, ...] | None = None
    try:
        await zero(regions, ranges)
    except asyncio.CancelledError as error:
        again = error.args  # what the device still has would be the next owner's to read
    if memory is not None:
        await memory.flush(ranges)
    if again is not None:
        raise asyncio.CancelledError(*again)


async def wipe_cache(entry: CacheEntry) -> None:
    """Zeroes every buffer of a cache in one of the agent's memories."""
    place, channels = entry.placement, entry.layout.channels
    sizes = np.repeat(np.asarray(entry.layout.buffer_bytes, np.int64), channels)
    ranges = ByteRanges(place.region.ravel(), place.offset.ravel(), sizes)
    await wipe(entry.regions, ranges, entry.memory)
