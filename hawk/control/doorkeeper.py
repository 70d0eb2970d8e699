"""Keeps local clients out while descriptors run short, because ZeroMQ does not survive it.

ZeroMQ accepts whoever connects to a local socket, and ends the whole process where there is no descriptor for it.
The kernel gives out the lowest descriptor that is free, so one in the reserve at the top is in use only while
nearly all are.  Then the socket's file is renamed, and whoever connects finds nobody there; who is in stays.

`look` has to be called often: it says how soon it wants to be called again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
from typing import TYPE_CHECKING

from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from hawk.control.local import LocalListener

log = get_log("hawk.control.doorkeeper")

_RATE = 50_000
"""Connections per second that ZeroMQ can accept; more than was measured."""

_MOST = 1 << 16
"""Descriptors that no agent needs; to try a higher one would only make the kernel's table larger."""

_SMALL = 1024
"""A limit below which only little is kept back."""

_SOONEST, _LATEST = 0.005, 0.25
"""Seconds between two looks: the fewer descriptors are free, the sooner."""


class Doorkeeper:
    """Watches the descriptors of this process on behalf of one listening socket.

    `shut` says whether nobody is let in just now.  A listener that is None is looked after by nobody.
    """

    def __init__(self, listener: LocalListener | None) -> None:
        self._listener = listener
        self._probe = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) if listener is not None else -1
        self.shut = False

    def look(self) -> float:
        """Shuts or opens the door as need be; returns the seconds after which to look again.  From one thread only."""
        if self._listener is None or self._probe < 0:
            return _LATEST
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = _MOST if limit == resource.RLIM_INFINITY else min(limit, _MOST)
        # Of a small limit most is taken by what an agent is made of.
        reserve = min(limit // 2, 8192) if limit >= _SMALL else limit // 16
        # Opened again only when there is a little more room, so that it does not swing.
        free = self._free(limit - reserve - (reserve // 4 if self.shut else 0))
        if free == self.shut:
            self.shut = not free
            with contextlib.suppress(OSError):
                if self.shut:
                    self._listener.hide()
                else:
                    self._listener.show()
            if self.shut:
                log.warning("descriptors run short: local clients are kept out", limit=limit, reserve=reserve)
            else:
                log.warning("local clients are let in again")
        return min(max(self._spare(limit, reserve) / _RATE, _SOONEST), _LATEST)

    def _free(self, number: int) -> bool:
        """Whether the descriptor `number` is free, and so all from there on, as far as can be told."""
        try:
            got = fcntl.fcntl(self._probe, fcntl.F_DUPFD_CLOEXEC, number)
        except OSError as error:
            # The limit may have been lowered just now; then the next look will see.
            return error.errno == errno.EINVAL
        os.close(got)
        return got == number

    def _spare(self, limit: int, reserve: int) -> int:
        """At least how many descriptors below the reserve are free, roughly: by halves."""
        room = limit - reserve
        while room > 64 and not self._free(limit - reserve - room // 2):
            room //= 2
        return room // 2

    def close(self) -> None:
        """Looks no more; an open door stays open."""
        probe, self._probe = self._probe, -1
        if probe >= 0:
            os.close(probe)
