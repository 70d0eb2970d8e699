"""Zeroing bytes before somebody else gets them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import DeviceLost
from hawk.memory.cuda import device
from hawk.memory.cuda_wait import none_left
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
    arrays = [region.array if region.gpu < 0 else region for region in regions]
    work = asyncio.get_running_loop().run_in_executor(None, _zero, arrays, ranges)
    cancelled: tuple[object, ...] | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error.args
    work.result()
    if cancelled is not None:
        raise asyncio.CancelledError(*cancelled)


def _zero(places: Sequence[np.ndarray | Region], ranges: ByteRanges) -> None:
    base = np.asarray([p.ctypes.data if isinstance(p, np.ndarray) else p.address for p in places], np.int64)
    gpu = np.asarray([-1 if isinstance(p, np.ndarray) else p.gpu for p in places], np.int32)[ranges.region]
    address = base[ranges.region] + ranges.start
    for at, nbytes in zip(address[gpu < 0].tolist(), ranges.nbytes[gpu < 0].tolist(), strict=True):
        ctypes.memset(at, 0, nbytes)
    for number in np.unique(gpu[gpu >= 0]).tolist():
        _zero_there(number, address[gpu == number].tolist(), ranges.nbytes[gpu == number].tolist())


def _zero_there(gpu: int, addresses: Sequence[int], sizes: Sequence[int]) -> None:
    """The same in memory of a GPU; of one that is lost the driver has taken all."""
    with contextlib.suppress(DeviceLost), device(gpu).current() as driver:
        with contextlib.ExitStack() as stack:
            stream = driver.stream(low=True)
            stack.callback(driver.drop_stream, stream)
            event = driver.event()
            stack.callback(driver.drop_event, event)
            with none_left(driver, stream, event):
                for at, nbytes in zip(addresses, sizes, strict=True):
                    driver.fill(at, 0, nbytes, stream)
                driver.record(event, stream)
                driver.synchronise(event)


def of_allocation(allocation: Allocation) -> ByteRanges:
    """Its bytes in every channel, as ranges of the memory's regions."""
    count = len(allocation.channels)
    return ByteRanges(
        np.asarray(allocation.channels, np.int32),
        np.full(count, allocation.offset, np.int64),
        np.full(count, allocation.nbytes, np.int64),
    )
