"""Answers on their way to one client, in order, none of them lost while its queue is full."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from hawk.control.messages import Progress
from hawk.errors import Busy, HawkError
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.messages import LocalMessage

log = get_log("hawk.agent.outbox")

MOST = 4096
"""Answers kept for a client that does not read; one that still does not is taken for dead."""


class Outbox:
    """Puts messages on the way to one client.

    A client may compute for minutes without reading.  What its queue does not take is kept and sent later;
    progress is not, since a later state or the end of the fetch replaces it.

    send            sends one message or raises `Busy`
    on_overflow     called when the client has left too many answers unread
    """

    def __init__(self, send: Callable[[LocalMessage], None], on_overflow: Callable[[], None]) -> None:
        self._send = send
        self._on_overflow = on_overflow
        self._kept: deque[LocalMessage] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, message: LocalMessage) -> None:
        """Sends the message, now or once the client reads again."""
        if self._kept and isinstance(message, Progress):
            return
        self._kept.append(message)
        if len(self._kept) == 1:
            self._flush()
        elif len(self._kept) > MOST:
            self.close()
            self._on_overflow()

    def close(self) -> None:
        """Drops what is still here; the client is gone."""
        self._kept.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _flush(self) -> None:
        self._timer = None
        while self._kept:
            message = self._kept[0]
            try:
                self._send(message)
            except Busy as error:
                if isinstance(message, Progress):
                    self._kept.popleft()
                    continue
                self._timer = asyncio.get_running_loop().call_later(error.retry_after, self._flush)
                return
            except HawkError as error:
                log.warning("answer not delivered", message=type(message).__name__, reason=str(error))
            self._kept.popleft()
