"""Launches on streams that chunk after chunk goes over: their tables stay on the GPU, and what changes is brought.

Nothing is launched here: what a driver has to be told is listed, so that whoever has more to tell tells all at once.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from hawk.retile.cuda.spec import THREADS

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from hawk.retile.cuda.bound import Bound
    from hawk.retile.cuda.through import Between

_LEAST = 64 << 10
"""Bytes of a table's room at least, which doubles until a table fits."""


class Device(Protocol):
    """What of a driver is needed here, see `hawk.memory.cuda_driver.Driver`."""

    def allocate(self, nbytes: int) -> int:
        """Memory of the current device."""

    def free(self, address: int) -> None:
        """Gives that back."""

    def allocate_host(self, nbytes: int) -> int:
        """Locked memory of the host."""

    def free_host(self, address: int) -> None:
        """Gives that back."""


@dataclass
class Calls:
    """Of a driver, by the names of its methods.

    held      what has to live until all has been done
    first     bring tables; they need not wait for anything
    then      start kernels
    """

    held: object = None
    first: list[tuple[Any, ...]] = field(default_factory=list)
    then: list[tuple[Any, ...]] = field(default_factory=list)
    brought: list[tuple[Table, Bound | Between]] = field(default_factory=list)

    def done(self) -> None:
        """All of it has been done, so what was brought lies where it was brought to."""
        for table, bound in self.brought:
            table.holds = bound.rest


class Table:
    """Room for the table of a launch, on the GPU and in locked memory of the host.

    holds    what lies behind the front of it, there
    """

    def __init__(self) -> None:
        self.holds: object = None
        self._room = self._host = self._there = 0
        self._view: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._known: tuple[object, int, int, bytes] = (None, 0, 0, b"")

    def put(
        self,
        bound: Bound | Between,
        kernel: Callable[[Any], Any],
        calls: Calls,
        stream: int,
        driver: Device,
    ) -> None:
        """Adds what one launch takes to `calls`; `kernel` compiles it."""
        front, rest = bound.front.view(np.uint8), bound.rest
        whole = len(front) + len(rest)
        if whole > self._room:
            self._grow(whole, driver)
        if self._known[0] is not rest:
            function = int(kernel(bound).kernel.ptr)
            self._known = rest, function, bound.shared_bytes, bound.parts.tobytes()
        self._view[: len(front)] = front
        if self.holds is rest:
            whole = len(front)
        else:
            self.holds = None
            self._view[len(front) : whole] = rest
            calls.brought.append((self, bound))
        _, function, shared, parts = self._known
        if whole:
            calls.first.append(("to_device", self._there, self._host, whole, stream))
        arguments = struct.pack("<Q", self._there) + parts
        calls.then.append(("launch", function, bound.blocks, THREADS, arguments, stream, shared))

    def _grow(self, nbytes: int, driver: Device) -> None:
        room = max(_LEAST, self._room)
        while room < nbytes:
            room *= 2
        self.close(driver)
        self._host = driver.allocate_host(room)
        self._there = driver.allocate(room)
        self._room = room
        self._view = np.ctypeslib.as_array((ctypes.c_uint8 * room).from_address(self._host))

    def close(self, driver: Device) -> None:
        """Gives the room back.  Safe to call twice."""
        host, there, self._host, self._there, self._room = self._host, self._there, 0, 0, 0
        self.holds, self._view = None, np.zeros(0, np.uint8)
        if there:
            driver.free(there)
        if host:
            driver.free_host(host)
