"""A link of a given rate, made of a faster one: bytes are held back until the slower one would have brought them."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_SPIN = 120e-6
"""Seconds before the time that are not slept: the system wakes a thread up to so much late."""

_LOOK = 0.02
"""Seconds between two looks at whether the read is still wanted."""


class Pace:
    """All reads that share it share one link of `rate` bytes a second, which carries them one after the other.

    The bytes themselves go as fast as they can while the slower link would carry them, so that a transfer takes what
    the slower link takes, or what the copy takes if that is longer.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def begin(self, nbytes: int) -> float:
        """Takes the link for so many bytes; when it will have carried them, by `time.perf_counter`."""
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + nbytes / self._rate
            return self._free

    @staticmethod
    def end(due: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Returns at that time, or soon after `stopped` says that nobody waits any more."""
        while (left := due - time.perf_counter()) > _SPIN:
            if stopped():
                return
            time.sleep(min(left - _SPIN, _LOOK))
        while time.perf_counter() < due:
            time.sleep(0)  # not `pass`, which would keep Python's lock from everybody else
