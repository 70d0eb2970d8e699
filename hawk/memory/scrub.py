"""Zeroing bytes before somebody else gets them."""

from __future__ import annotations

import asyncio
import ctypes
from typing import TYPE_CHECKING

import numpy as np

from hawk.memory.region import ByteRanges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.base import Allocation
    from hawk.memory.region import Region


async def zero(regions: Sequence[Region], ranges: ByteRanges) -> None:
    """Zeroes these bytes in a thread, without the GIL.

    Returns, or passes a cancellation on, only when all of them are zero: the caller is about to give them away.
    """
    # The thread keeps the arrays, and with them the memory, whoever lets go of the regions meanwhile.
    arrays = [region.array for region in regions]
    work = asyncio.get_running_loop().run_in_executor(None, _zero, arrays, ranges)
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    work.result()
    if cancelled is not None:
        raise cancelled


def _zero(arrays: Sequence[np.ndarray], ranges: ByteRanges) -> None:
    base = np.asarray([array.ctypes.data for array in arrays], np.int64)
    address = base[ranges.region] + ranges.start
    for at, nbytes in zip(address.tolist(), ranges.nbytes.tolist(), strict=True):
        ctypes.memset(at, 0, nbytes)


def of_allocation(allocation: Allocation) -> ByteRanges:
    """Its bytes in every channel, as ranges of the memory's regions."""
    count = len(allocation.channels)
    return ByteRanges(
        np.asarray(allocation.channels, np.int32),
        np.full(count, allocation.offset, np.int64),
        np.full(count, allocation.nbytes, np.int64),
    )
