"""Waiting for what was put onto a stream of a GPU, also where something went wrong on the way."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hawk.memory.cuda_driver import CudaFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.memory.cuda_driver import Driver


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
