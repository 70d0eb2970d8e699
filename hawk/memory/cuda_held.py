"""What is taken of a GPU for a while, given back however that ends."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hawk.errors import HawkError
from hawk.memory.cuda_driver import CudaFault
from hawk.memory.cuda_rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from hawk.memory.cuda import CudaDevice
    from hawk.memory.cuda_driver import Driver


class Held:
    """Streams, events and memory of one GPU, given back by `close`, the last first: also those of a maker that failed.

    Methods want the device to be current and raise as the driver does; `close` makes it so itself, and raises nothing.
    `with device.current() as driver, Held(device) as held:` gives all back at the end of the block.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._back: list[Callable[[Driver], object]] = []

    def __enter__(self) -> Held:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give()

    @property
    def driver(self) -> Driver:
        """The device's."""
        return self._device.driver

    def stream(self, *, low: bool = False) -> int:
        """See `Driver.stream`."""
        made = self.driver.stream(low=low)
        self._back.append(lambda driver: driver.drop_stream(made))
        return made

    def event(self) -> int:
        """See `Driver.event`."""
        made = self.driver.event()
        self._back.append(lambda driver: driver.drop_event(made))
        return made

    def timer(self) -> int:
        """See `Driver.timer`."""
        made = self.driver.timer()
        self._back.append(lambda driver: driver.drop_event(made))
        return made

    def allocate(self, nbytes: int) -> int:
        """See `Driver.allocate`."""
        made = self.driver.allocate(nbytes)
        self._back.append(lambda driver: driver.free(made))
        return made

    def allocate_host(self, nbytes: int) -> int:
        """See `Driver.allocate_host`."""
        made = self.driver.allocate_host(nbytes)
        self._back.append(lambda driver: driver.free_host(made))
        return made

    def rows(self, stream: int, most: int) -> Rows:
        """See `Rows`."""
        made = Rows(self._device, self.driver, stream, most)
        self._back.append(made.close)
        return made

    def close(self) -> None:
        """Gives all back.  Safe to call twice.  Of a GPU that is lost the driver has taken all."""
        if self._back:
            with contextlib.suppress(HawkError), self._device.current():
                self._give()
        self._back = []

    def _give(self) -> None:
        back, self._back = self._back, []
        if self._device.lost is None:
            for give in reversed(back):
                with contextlib.suppress(CudaFault):
                    give(self.driver)
