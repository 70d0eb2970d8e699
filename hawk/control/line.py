"""The connection under a channel: whether it stands, why it does not, and made anew where ZeroMQ gives up.

Two things look alike from above and are not: nobody is at the address, and somebody is who does not answer because
its event loop stands still.  The far side's kernel takes a connection without its program, and with CURVE even the
handshake waits for that program, since it is asked whether the key is admitted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from hawk.control.monitor import BROKE, LATE, REFUSED, Monitor

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.sockets import Endpoint

SILENT = "it is connected and says nothing"
"""The reason where somebody is there, and too busy to answer."""

_TOLD = 12
"""Things kept that happened to a connection: those of the last two or three."""


class Line:
    """What happens to the connection of one DEALER.

    on_up       a handshake succeeded
    on_down     the connection broke, or none came about; `refused` where the far side does not accept our key
    on_used     the socket was used; see `ReceiveLoop.poke`
    trouble     what keeps the far side from being heard, as far as that is known; else empty
    """

    def __init__(
        self,
        endpoint: Endpoint,
        on_up: Callable[[], None],
        on_down: Callable[[bool], None],
        on_used: Callable[[], None],
    ) -> None:
        self.trouble = ""
        self._endpoint = endpoint
        self._on_up = on_up
        self._on_down = on_down
        self._on_used = on_used
        self._there = False
        self._reached = 0.0
        self._retry: asyncio.TimerHandle | None = None
        self._told: deque[tuple[float, str]] = deque(maxlen=_TOLD)
        self._monitor = Monitor(endpoint, self._connected, self._shaken, self._down)

    def start(self) -> None:
        """Begins to watch, on the running event loop."""
        self.note("begun")
        self._monitor.start()

    def close(self) -> None:
        """Stops; call it before the endpoint is closed.  Safe to call twice."""
        self._monitor.close()
        self._stop_retry()

    @property
    def reason(self) -> str:
        """Why a question has no answer, as far as that is known; else empty."""
        return self.trouble or (SILENT if self._there else "")

    def story(self) -> str:
        """What has happened lately, in words, with the seconds since: `broke 3.2 s ago, connected 3.1 s ago`."""
        now = asyncio.get_running_loop().time()
        return ", ".join(f"{what} {now - when:.1f} s ago" for when, what in self._told)

    def note(self, what: str) -> None:
        """Something has happened that belongs into the story."""
        self._told.append((asyncio.get_running_loop().time(), what))

    def heard(self) -> None:
        """The far side was heard, so nothing keeps it from that."""
        self.trouble = ""

    # -- what the monitor says ---------------------------------------------------------------------------

    def _connected(self) -> None:
        self._there = True
        self._reached = asyncio.get_running_loop().time()
        self.note("connected")

    def _shaken(self) -> None:
        self._stop_retry()
        self._there = True
        self.trouble = ""
        self.note("shook hands")
        self._on_up()

    def _down(self, why: str) -> None:
        limits = self._endpoint.limits
        if why == LATE or (why not in (BROKE, REFUSED) and self._waited(limits.handshake)):
            # Nobody hung up before it was time to: it is there, and did not come to answering.
            why = SILENT
        self._there = False
        # Why a handshake failed is followed by the end of the connection, which says less.
        if why != BROKE or not self.trouble:
            self.trouble = why
        self.note(why)
        # What ZeroMQ does not mend by itself is mended here; see `Endpoint.reconnect`.  What it does mend gets the
        # time that a slow handshake may take.
        if why == SILENT:
            self._stop_retry()
        mends = why in (BROKE, SILENT)
        self._retry_in(limits.reconnect_most + (limits.handshake if mends else 0))
        self._on_down(why == REFUSED)

    def _waited(self, handshake: float) -> bool:
        """Whether a handshake that failed had nearly all the time it may take; the far side's clock is its own."""
        return self._there and asyncio.get_running_loop().time() - self._reached >= 0.8 * handshake

    # -- once more ---------------------------------------------------------------------------------------

    def _retry_in(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if self._retry is not None and self._retry.when() <= loop.time() + seconds:
            return
        self._stop_retry()
        self._retry = loop.call_later(seconds, self._reconnect)

    def _stop_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _reconnect(self) -> None:
        self._retry = None
        self.note("connecting anew")
        self._endpoint.reconnect()
        self._on_used()
        self._retry_in(self._endpoint.limits.reconnect_most + self._endpoint.limits.handshake)
