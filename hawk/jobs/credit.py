"""How many bytes the jobs of one peer may have prepared and not yet consumed, all together."""

from __future__ import annotations

import asyncio
from collections import deque


class Credit:
    """A count of bytes in use up to `limit`, handed out first come, first served.

    A piece larger than the limit gets its turn when nothing else is in use, so nobody waits for ever for a limit
    that was set too low.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int) -> None:
        """Returns when `nbytes` more may be in use; they are until `give`.  Cancelled, it holds nothing."""
        if not self._waiting and self._fits(nbytes):
            self.used += nbytes
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # The turn and the cancellation met in one round of the loop: it is given on.
                self.used -= nbytes
            elif entry in self._waiting:
                self._waiting.remove(entry)
            self._serve()
            raise

    def give(self, nbytes: int) -> None:
        """`nbytes` are in use no more."""
        self.used -= nbytes
        self._serve()

    def _fits(self, nbytes: int) -> bool:
        return self.used == 0 or self.used + nbytes <= self.limit

    def _serve(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if not turn.done():
                if not self._fits(nbytes):
                    return
                self.used += nbytes
                turn.set_result(None)
            self._waiting.popleft()
