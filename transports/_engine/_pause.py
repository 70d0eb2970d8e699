"""How long to wait between two looks at an engine that cannot be waited for."""

from __future__ import annotations

import ctypes
import os
import time

SPIN = 0.001
"""Seconds after the last event in which there is no pause at all: what is under way is mostly over by then."""

_LEAST, _MOST = 5e-5, 2e-3

_BUSY = 5e-5
"""Seconds of the processor in a look that has moved bytes: one that finds nothing takes a fraction of it, mostly."""

_COLD = 0.1
"""By this part of the sleep before it a look has to take longer: caches are cold after one.  What comes by the gigabyte
has piled up for longer meanwhile."""

_DOUBT = 1e-4
"""Seconds within which a second such look has to follow: interrupts count as the thread's, and make any look one."""


class _Poll(ctypes.Structure):
    """`struct pollfd`."""

    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


class _Time(ctypes.Structure):
    """`struct timespec` of 64-bit Linux."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_ppoll = ctypes.CDLL(None).ppoll
_READABLE = 1


class Pause:
    """Looks again at once while things happen, and seldom when nothing has happened for long.

    What happens is seen by how much of the processor a look takes, too: some engines move bytes in the very call that
    asks for them.  What others take of it meanwhile does not count, else a busy machine would keep everybody looking.
    """

    __slots__ = ("_busy", "_doubt", "_since", "_spent")

    def __init__(self) -> None:
        self.touch()

    def touch(self) -> None:
        """Something happened."""
        self._since = time.monotonic()
        self._doubt, self._busy = -_DOUBT, _BUSY
        self._spent = time.thread_time()

    def _moved(self, spent: float) -> None:
        """A look took as long as one that moves bytes; where bytes come, the next ones soon do so, too."""
        now = time.monotonic()
        if now - spent - self._doubt <= _DOUBT:
            self.touch()
        else:
            self._doubt = now

    def seconds(self) -> float:
        """How long to leave it alone now: a fraction of the time since the last event."""
        now = time.monotonic()
        quiet = now - self._since
        if quiet < SPIN or now - self._doubt <= _DOUBT:
            return 0.0
        return min(max(quiet / 400, _LEAST), _MOST)

    def linger(self) -> bool:
        """Whether something has happened so lately that to sleep and wake up would take longer than what comes next."""
        if self.seconds() > 0:
            return False
        os.sched_yield()
        return True

    def wait(self, descriptor: int = -1) -> None:
        """Sleeps for so long after a look, but no longer than until a descriptor can be read.

        Others run meanwhile, however short it is: both Python's lock and the processor are given up.
        """
        spent = time.thread_time() - self._spent
        if spent > self._busy:
            self._moved(spent)
        seconds = self.seconds()
        if seconds == 0:
            os.sched_yield()
        elif descriptor < 0:
            time.sleep(seconds)
        else:
            # A selector of Python's waits for whole milliseconds.
            there = _Poll(descriptor, _READABLE, 0)
            _ppoll(ctypes.byref(there), 1, ctypes.byref(_Time(0, int(seconds * 1e9))), None)
        self._busy = _BUSY + seconds * _COLD
        self._spent = time.thread_time()
