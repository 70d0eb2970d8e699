"""Before a cache in a device's memory is a source: what processors are about to read of it is asked of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.memory.region import ByteRanges
from hawk.plan.types import RetileStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hawk.jobs.caches import CacheEntry
    from hawk.memory.region import U8
    from hawk.plan.types import Step
    from hawk.retile.program import Pieces, Program


async def refreshed(cache: CacheEntry, steps: Sequence[Step]) -> list[U8]:
    """The arrays of a source's regions, in which the pages that these steps read are as the device last wrote them."""
    memory = cache.memory
    if memory is None:
        return [region.array for region in cache.regions]
    if memory.refreshes:
        await memory.refresh(source_ranges(cache, steps))
    return [region.array for region in memory.readable]


def source_ranges(cache: CacheEntry, steps: Sequence[Step]) -> ByteRanges:
    """The pages that these steps read, each once, and no others: what arrives there now the device may not know."""
    found = []
    for step in steps:
        for program, pieces, regions, offsets in _reads(step):
            reads = pieces.hi > 0
            channel, page = pieces.src_channel[reads], pieces.src_page[reads]
            region = np.asarray(regions, np.int64)[channel]
            start = np.asarray(offsets, np.int64)[channel] + page
            size = program.src_codec.page_bytes(program.src_elements)
            rows = np.unique(np.stack((region, start), axis=1), axis=0)
            found.append(np.column_stack((rows, np.full(len(rows), size, np.int64))))
    table = np.concatenate(found) if found else np.empty((0, 3), np.int64)
    return ByteRanges(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy())


def _reads(step: Step) -> Iterator[tuple[Program, Pieces, tuple[int, ...], tuple[int, ...]]]:
    """What a step reads by: programs, their pieces, and region and offset of the tensor for each channel."""
    if isinstance(step, RetileStep):
        yield step.program, step.pieces, step.src_region, step.src_offset
        return
    for tensor in step.reads:
        for one in (*tensor.passes, *(tensor.scales.passes if tensor.scales else ())):
            yield one.program, one.pieces, one.region, one.offset
