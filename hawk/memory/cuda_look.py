"""Bytes of a GPU as processors look at them: a few MiB at a time, in one copy, however many rows they are."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import numpy as np

from hawk.memory.cuda_held import Held
from hawk.memory.cuda_rows import most_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.memory.cuda import CudaDevice

    I64 = NDArray[np.int64]
    U8 = NDArray[np.uint8]

AT_ONCE, _ROWS = 8 << 20, 1 << 14


class Look:
    """Brings rows of a GPU's memory to the host; from any thread, one at a time.

    Raises `DeviceLost`, `OutOfMemory` or `HawkMemoryError`; what it takes on the GPU is taken with the first rows.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._held = device, Held(device)
        self._lock = threading.Lock()
        self._host = self._room = self._stream = self._event = 0

    def bring(self, address: I64, nbytes: I64) -> U8:
        """The rows' bytes one behind the other, `uint8[sum(nbytes)]`; none is empty."""
        out = np.empty(int(nbytes.sum()), np.uint8)
        ends = np.cumsum(nbytes)
        row = done = 0
        with self._lock, self._device.current() as driver:
            if not self._host:
                self._begin()
            while done < len(out):
                # Rows are cut where the room ends; one that was begun goes on where it was left.
                stop = min(done + AT_ONCE, int(ends[min(row + _ROWS, len(ends)) - 1]))
                last = int(ends.searchsorted(stop, "left"))
                begin = np.maximum(ends[row : last + 1] - nbytes[row : last + 1], done)
                end = np.minimum(ends[row : last + 1], stop)
                source = address[row : last + 1] + (begin - (ends[row : last + 1] - nbytes[row : last + 1]))
                calls = self._rows.calls(source, self._room + begin - done, end - begin)
                calls.append(("to_host", self._host, self._room, stop - done, self._stream))
                driver.run([*calls, ("record", self._event, self._stream), ("outwait", self._event)])
                ctypes.memmove(out.ctypes.data + done, self._host, stop - done)
                row, done = last + (int(ends[last]) == stop), stop
        return out

    def _begin(self) -> None:
        try:
            room = self._held.allocate(AT_ONCE)
            host = self._held.allocate_host(AT_ONCE)
            self._stream, self._event = self._held.stream(), self._held.event()
            self._rows = self._held.rows(self._stream, most_rows(AT_ONCE, _ROWS))
        except BaseException:
            self._held.close()
            raise
        self._room, self._host = room, host

    def close(self) -> None:
        """Gives back what it has on the GPU.  Safe to call twice; nobody looks any more."""
        self._held.close()
