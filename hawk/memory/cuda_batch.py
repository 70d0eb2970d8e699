"""Calls of the CUDA driver that are made in one go: as rows for the C core, which holds no lock of Python's meanwhile.

A chunk of a job is some ten calls.  One at a time each of them would give Python's lock away and wait to have it back,
behind whatever else the process computes.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hawk.memory.cuda_driver import Call, Driver

ONCE, UNTIL = 0, 1
_WORDS = 13
"""How `hawk/retile/_calls.h` takes them."""

_SPIN, _NAP, _NAPS = 100_000, 50_000, 60_000_000
"""Nanoseconds: of asking for an event again and again, what waking a thread by the GPU's interrupt takes at least; of a
pause between two questions after that, at least; and until the thread sleeps until the interrupt, which some machines
deliver half a millisecond late."""

_PART = 256
"""A pause is this part of what was waited already, where that is longer: so nothing is told of much later than it took,
and whoever waits long for an engine's layers asks seldom."""

NOT_READY = 600

_SIMPLE: dict[str, tuple[str, tuple[int, ...]]] = {
    "wait": ("cuStreamWaitEvent", (0, 1, -1)),
    "record": ("cuEventRecord", (0, 1)),
    "synchronise": ("cuEventSynchronize", (0,)),
    "to_host": ("cuMemcpyDtoHAsync_v2", (0, 1, 2, 3)),
    "to_device": ("cuMemcpyHtoDAsync_v2", (0, 1, 2, 3)),
    "across": ("cuMemcpyAsync", (0, 1, 2, 3)),
    "fill": ("cuMemsetD8Async", (0, 1, 2, 3)),
}
"""Which of a method's arguments the driver is given, in its order; -1 is 0."""

Row = tuple[Any, ...]
"""What to do, the driver's function, and its arguments."""


def one_by_one(driver: Driver, calls: Iterable[Call]) -> None:
    """Makes the calls by a driver's own methods."""
    for name, *given in calls:
        getattr(driver, name)(*given)


def rows(call: Call, held: list[object]) -> Iterator[Row]:
    """The rows of one call; what their arguments point to is put into `held`."""
    name, *given = call
    if name == "launch":
        function, blocks, threads, arguments, stream, *shared = given
        room = ctypes.create_string_buffer(arguments, len(arguments))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(room))
        held += (room, pointers)
        sizes = (blocks, 1, 1, threads, 1, 1, *(shared or (0,)))
        yield ONCE, "cuLaunchKernel", function, *sizes, stream, ctypes.addressof(pointers), 0
    elif name == "outwait":
        yield UNTIL, "cuEventQuery", given[0], NOT_READY, _SPIN, _NAP, _NAPS, _PART
        yield ONCE, "cuEventSynchronize", given[0]
    else:
        function, order = _SIMPLE[name]
        yield ONCE, function, *(given[i] if i >= 0 else 0 for i in order)


def words(found: Iterable[Row], at: Mapping[str, int]) -> array[int]:
    """The rows as the C core takes them; `at` are the functions' addresses."""
    flat: list[int] = []
    for kind, name, *arguments in found:
        flat += (kind, at[name], *arguments)
        flat += (0,) * (-len(flat) % _WORDS)
    return array("Q", flat)


def until(reached: Callable[[], bool], spin: int, nap: int, most: int, part: int) -> None:
    """Asks again and again as the C core does; durations in nanoseconds."""
    began = time.monotonic_ns()
    while not reached() and (spent := time.monotonic_ns() - began) < most:
        if spent >= spin:
            time.sleep(max(nap, spent // part) * 1e-9)
