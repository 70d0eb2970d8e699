"""The last word of an attempt that was given up, said until it is heard."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hawk.control.messages import Abort, Ended, Released

if TYPE_CHECKING:
    from hawk.control.messages import PeerMessage
    from hawk.errors import HawkError
    from hawk.jobs.peers import PeerSession

AGAIN = 4
"""How often an Abort is said again; who has not answered by then gives the offer back when the lease has run out."""


class Farewell:
    """Says `abort` again every `pause` seconds until the prefill side has said how the job ended, or is lost.

    Nobody waits for it.  It refers to the session alone, and the session to it.
    """

    def __init__(self, session: PeerSession, abort: Abort, pause: float) -> None:
        self._session = session
        self._abort = abort
        self._pause = pause
        self._left = AGAIN
        session.attach(abort.job, self._heard, self._lost)
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._again)

    def _again(self) -> None:
        if self._left == 0:
            self._end()
            return
        self._left -= 1
        self._session.send(self._abort)
        self._timer = asyncio.get_running_loop().call_later(self._pause, self._again)

    def _heard(self, message: PeerMessage) -> None:
        if isinstance(message, Ended | Released):
            self._end()

    def _lost(self, error: HawkError) -> None:
        self._end()

    def _end(self) -> None:
        self._timer.cancel()
        self._session.detach(self._abort.job)
