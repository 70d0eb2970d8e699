"""Dealing rows out of the buffer in which they arrived, beside the thread that has the next ones arrive.

An engine whose bytes come through sockets receives them in the call that looks whether they are there, so a lane that
copied by itself would hold up what it waits for next.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import numpy as np

from hawk.endings import Threads
from hawk.transports import _copy

if TYPE_CHECKING:
    from hawk.memory.region import U8
    from hawk.transports._lanes import Work
    from hawk.transports._pieces import Piece


class Dealer:
    """The buffers of one lane, used in turn, and a thread that empties them, made when it is first wanted.

    beside    whether there is to be such a thread; else rows are dealt out by whoever asks for it
    """

    def __init__(self, buffers: int, nbytes: int, beside: bool = True) -> None:
        self._count, self._nbytes, self._beside = buffers, nbytes, beside
        self._buffers: list[U8] = []
        self._emptied: dict[int, Future[None]] = {}
        self._pool: Threads | None = None

    @property
    def buffers(self) -> list[U8]:
        """All of them."""
        if not self._buffers:
            self._buffers = [np.empty(self._nbytes, np.uint8) for _ in range(self._count)]
        return self._buffers

    def take(self, turn: int) -> U8:
        """The buffer of that turn, when it is empty."""
        number = turn % self._count
        if (emptying := self._emptied.pop(number, None)) is not None:
            emptying.result()
        return self.buffers[number]

    def deal(self, work: Work, rows: Piece, turn: int, *, at_once: bool) -> None:
        """Begins to bring rows, which lie one after the other in the buffer of that turn, to their places.

        at_once    nothing else is under way that could be held up: does it here and now
        """
        buffer = self.buffers[turn % self._count]
        if self._beside and not at_once:
            try:
                self._pool = self._pool or Threads(1, thread_name_prefix="hawk-engine-deal")
                self._emptied[turn % self._count] = self._pool.submit(_copied, work, rows, buffer)
                return
            except RuntimeError:  # the system gives no more threads, or Python is ending
                pass
        _copied(work, rows, buffer)

    def settle(self) -> None:
        """Returns when all that was begun is in its place: nothing lands after that."""
        emptied, self._emptied = self._emptied, {}
        wait(emptied.values())
        for emptying in emptied.values():
            emptying.result()

    def close(self) -> None:
        """Ends the thread."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)


def _copied(work: Work, rows: Piece, buffer: U8) -> None:
    at = np.cumsum(rows.nbytes) - rows.nbytes
    _copy.best()(work.bases, rows.region, rows.local, int(buffer.ctypes.data), at, rows.nbytes)
