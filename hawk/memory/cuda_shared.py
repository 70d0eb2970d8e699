"""Memory of a GPU that other processes can open, and keep for as long as they want whatever becomes of this one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hawk.errors import HawkMemoryError, OutOfMemory
from hawk.memory.cuda import PAGE, DeviceRegion
from hawk.memory.cuda_driver import CudaFault
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hawk.memory.cuda import CudaDevice
    from hawk.memory.cuda_driver import Driver


class SharedDeviceMemory:
    """Physical memory of a GPU, mapped here, that goes to others as a descriptor (see `hawk.memory.cuda_share`).

    Unlike a plain allocation's, its bytes stay where they are until the last process that has mapped them is gone: who
    frees it takes nothing away under a peer's copy.

    others    GPUs of this process that shall reach it, too, where the driver lets them: `region.reached_by` says which

    Raises `OutOfMemory`, `DeviceLost`, or `HawkMemoryError` where the driver makes none.
    """

    def __init__(self, device: CudaDevice, nbytes: int, name: str, others: Iterable[int] = ()) -> None:
        self._device = device
        self._whole = -(-nbytes // PAGE) * PAGE
        self._base, self._mapped = 0, False
        try:
            with device.current() as driver:
                handle = driver.create(self._whole, device.number)
                try:
                    self._base = driver.reserve(self._whole)
                    driver.map(self._base, self._whole, handle, device.number)
                    self._mapped = True
                finally:
                    driver.release(handle)  # the mapping keeps the memory
                reached = frozenset(n for n in others if n != device.number and self._allowed(driver, n))
        except BaseException as error:
            self.close()
            if isinstance(error, OutOfMemory):
                error.hint = (
                    f"{approximate_size(self._whole)} were asked for; leave the engine that much less"
                )
            raise
        self.region = DeviceRegion(name, self._base, nbytes, device.number, reached_by=reached)

    def _allowed(self, driver: Driver, number: int) -> bool:
        try:
            driver.allow(self._base, self._whole, number)
        except CudaFault as fault:
            if fault.sticky:
                raise
            return False
        return True

    def close(self) -> None:
        """Unmaps it.  Safe to call twice; nothing of this process may be on its way to or from it any more."""
        base, self._base = self._base, 0
        if not base or self._device.lost is not None:
            return
        with contextlib.suppress(HawkMemoryError), self._device.current() as driver:
            if self._mapped:
                driver.unmap(base, self._whole)
            driver.unreserve(base, self._whole)
