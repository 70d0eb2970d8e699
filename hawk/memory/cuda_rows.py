"""Many rows from addresses to addresses of GPUs: by a kernel where one can be had, else by the copy engines."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hawk.memory.cuda_driver import CudaFault
from hawk.retile.cuda import copies

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.memory.cuda import CudaDevice
    from hawk.memory.cuda_driver import Call, Driver
    from hawk.memory.region import I64

LONG = 1 << 20
"""Mean length of rows, bytes, from which copy engines take them one by one: they are faster then, and use no kernel."""

READ_THERE = 8 << 10
"""Mean length of rows, bytes, from which the kernel reads its table where the host wrote it: a block reads a row of the
table as it goes, while others copy, and nothing has to be copied before the first of them begins."""


class Kernel(Protocol):
    """Copies the rows of a table, `hawk.retile.cuda.copies`: `function` is its handle."""

    function: int


def kernel(device: CudaDevice) -> Kernel | None:
    """The kernel of that GPU; None where there is nothing to compile it with."""
    if device.number not in _kernels:
        try:
            _kernels[device.number] = make(device.number)
        except Exception:  # noqa: BLE001 - whatever CuPy has: without it rows go one by one
            _kernels[device.number] = None
    return _kernels[device.number]


make: Callable[[int], Kernel] = copies.CopyKernel
_kernels: dict[int, Kernel | None] = {}


class Rows:
    """Puts copies of rows onto one stream.  For one thread.

    most       rows of one call at most, after cutting (see `copies.table`)
    kernels    whether a kernel may be used

    The constructor and all methods want the device to be current.
    """

    def __init__(
        self, device: CudaDevice, driver: Driver, stream: int, most: int, *, kernels: bool = True
    ) -> None:
        self._stream, self._most = stream, most
        self._kernel = kernel(device) if kernels else None
        self._host = self._there = 0
        if self._kernel is not None:
            nbytes = most * copies.COLUMNS * 8
            self._host = driver.allocate_host(nbytes)
            try:
                self._there = driver.allocate(nbytes)
            except BaseException:
                driver.free_host(self._host)
                raise
            self._table = _words(self._host, most * copies.COLUMNS).reshape(most, copies.COLUMNS)

    def put(self, driver: Driver, source: I64, target: I64, nbytes: I64) -> None:
        """Puts copies of these rows, none empty, onto the stream; what the last call put there has been done by now."""
        driver.run(self.calls(source, target, nbytes))

    def calls(self, source: I64, target: I64, nbytes: I64, begin: int = 0) -> list[Call]:
        """The calls of the driver that do what `put` does, for `Driver.run`.

        begin    an event that is recorded before the first byte moves, and after what has to be prepared for that
        """
        stream = self._stream
        first: list[Call] = [("record", begin, stream)] if begin else []
        if self._kernel is None or int(nbytes.sum()) >= LONG * len(nbytes):
            rows = zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True)
            return first + [("across", to, at, n, stream) for to, at, n in rows]
        count = len(nbytes)
        if int(nbytes.max()) <= copies.LONGEST:
            table = self._table[:count]
            table[:, 0], table[:, 1], table[:, 2] = source, target, nbytes
        else:
            cut = copies.table(source, target, nbytes)
            count = len(cut)
            self._table[:count] = cut
        assert count <= self._most
        at, up = self._host, []
        if int(nbytes.sum()) < READ_THERE * count:
            at, up = self._there, [("to_device", self._there, self._host, count * copies.COLUMNS * 8, stream)]
        arguments = copies.arguments(at, count)
        return [*up, *first, ("launch", self._kernel.function, count, copies.THREADS, arguments, stream)]

    def close(self, driver: Driver) -> None:
        """Gives its tables back."""
        host, there, self._host, self._there = self._host, self._there, 0, 0
        with contextlib.suppress(CudaFault):
            if host:
                driver.free_host(host)
            if there:
                driver.free(there)


def most_rows(nbytes: int, rows: int) -> int:
    """Rows that a call makes at most of so many rows with so many bytes together."""
    return rows + nbytes // copies.LONGEST


def _words(address: int, count: int) -> I64:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))
