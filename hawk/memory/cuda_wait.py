"""Waiting for an event of a GPU in a thread: quick where it is soon reached, without a processor where it is not."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from hawk.memory.cuda_driver import CudaFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.memory.cuda_driver import Driver

_SPIN = 100e-6
"""Seconds of asking again and again: what waking a sleeping thread by the GPU's interrupt takes at least."""

_NAPS = 3e-3
"""Seconds of asking after naps, before the thread sleeps until the interrupt, which some machines deliver late."""

_NAP = 50e-6


def outwait(driver: Driver, event: int) -> None:
    """Returns when the event is reached; raises `CudaFault`."""
    began = time.perf_counter()
    while not driver.reached(event):
        spent = time.perf_counter() - began
        if spent > _NAPS:
            driver.synchronise(event)
            return
        if spent > _SPIN:
            time.sleep(_NAP)


@contextlib.contextmanager
def none_left(driver: Driver, stream: int, event: int) -> Iterator[None]:
    """A block that waits for what it puts onto the stream: if it fails, that has been done, too, or the device is lost.

    For memory that is given to others then, in which nothing must land any more.
    """
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, CudaFault) and error.sticky):
            driver.record(event, stream)
            driver.synchronise(event)
        raise
