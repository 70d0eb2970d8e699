"""How long to wait between two looks at an engine that cannot be waited for."""

from __future__ import annotations

import time

SPIN = 0.002
"""Seconds after the last event in which there is no pause at all: what is under way is mostly over by then."""

_LEAST, _MOST = 5e-5, 2e-3


class Pause:
    """Looks again at once while things happen, and seldom when nothing has happened for long."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = time.monotonic()

    def touch(self) -> None:
        """Something happened."""
        self._since = time.monotonic()

    def seconds(self) -> float:
        """How long to leave it alone now: a fraction of the time since the last event."""
        quiet = time.monotonic() - self._since
        return 0.0 if quiet < SPIN else min(max(quiet / 400, _LEAST), _MOST)

    def wait(self) -> None:
        """Sleeps for so long; for at least as long as another thread needs to run."""
        time.sleep(self.seconds())
