"""Waiting for one's turn at something that several jobs want: the scheduler's order, and the tasks that wait in it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Generic, TypeVar

from hawk.jobs.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from hawk.jobs.scheduler import Ask

T = TypeVar("T")


class Short(str):
    """The name, one of a ask's `uses`, of what there is too little of just now."""

    __slots__ = ()


class Turns(Generic[T]):
    """Gives what is contended to those who wait for it, in the scheduler's order.

    take    takes for a ask and returns what it took, or takes nothing and returns `Short`
    undo    gives back what was taken for a ask whose task was cancelled in the same turn of the loop

    Whoever gives something back calls `check`.
    """

    def __init__(self, take: Callable[[Ask], T | Short], undo: Callable[[Ask, T], None]) -> None:
        self._take = take
        self._undo = undo
        self._scheduler = Scheduler()
        self._waiting: dict[Ask, asyncio.Future[T]] = {}

    def __len__(self) -> int:
        """Asks that wait."""
        return len(self._scheduler)

    async def take(self, ask: Ask) -> T:
        """Waits for the ask's turn and returns what was taken for it.  Cancelled, it holds nothing."""
        if not self._waiting:
            took = self._take(ask)
            if not isinstance(took, Short):
                self._scheduler.served(ask)
                return took
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[ask] = turn
        self._scheduler.add(ask)
        self.check()
        if turn.done():
            return turn.result()  # at once: without another turn of the loop
        try:
            # Shielded, so that the turn is there to be given until its task has run and knows that it was cancelled.
            return await asyncio.shield(turn)
        except asyncio.CancelledError:
            if turn.done():
                # The turn and the cancellation met in one round of the loop: it is given on.
                self._undo(ask, turn.result())
            else:
                del self._waiting[ask]
                self._scheduler.discard(ask)
            self.check()
            raise

    def passed(self, ask: Ask) -> None:
        """The ask had what it wants while nobody waited, and has given it back."""
        self._scheduler.served(ask)

    def check(self) -> None:
        """Lets go whoever can go now."""
        now = asyncio.get_running_loop().time() if self._waiting else 0.0
        while self._waiting and self._scheduler.next(self._try, now) is not None:
            continue

    def _try(self, ask: Ask) -> str | None:
        took = self._take(ask)
        if isinstance(took, Short):
            return took
        self._waiting.pop(ask).set_result(took)
        return None


class Slots:
    """Work that goes on side by side: so many pieces, and so many bytes, at a time.

    A piece larger than all the bytes goes when nothing else does.
    """

    def __init__(self, count: int, nbytes: int | None = None) -> None:
        self._count = count
        self._nbytes = nbytes
        self.running = 0
        self.used = 0
        self._turns: Turns[int] = Turns(self._take, self._give)

    @property
    def waiting(self) -> int:
        """Pieces that wait for their turn."""
        return len(self._turns)

    @contextlib.asynccontextmanager
    async def turn(self, ask: Ask) -> AsyncIterator[None]:
        """The ask's turn, for as long as the block lasts."""
        taken = await self._turns.take(ask)
        try:
            yield
        finally:
            self._give(ask, taken)
            self._turns.check()

    def passes(self, ask: Ask) -> bool:
        """Whether a piece that is done before anybody else could begin may go now, and counts as having gone."""
        if len(self._turns) or isinstance(taken := self._take(ask), Short):
            return False
        self._give(ask, taken)
        self._turns.passed(ask)
        return True

    def _take(self, ask: Ask) -> int | Short:
        full = self._nbytes is not None and self.used + ask.nbytes > self._nbytes
        if self.running and (full or self.running >= self._count):
            return Short("slots")
        self.running += 1
        self.used += ask.nbytes
        return ask.nbytes

    def _give(self, ask: Ask, taken: int) -> None:
        self.running -= 1
        self.used -= taken
