"""How many jobs an agent takes on: so many at work, so many in line, so many that wait for an offer to be made."""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING

from hawk.errors import Busy
from hawk.jobs.turns import Short, Turns

if TYPE_CHECKING:
    from hawk.jobs.scheduler import Ask

SOONEST, LATEST = 0.02, 5.0
"""Seconds: bounds of what a refused client is told to wait."""

_WEIGHT = 0.1
"""Of the newest of the times between two departures, in their mean."""


class Pace:
    """When to come again: who is refused is put behind those refused before, in a line that moves as jobs leave."""

    def __init__(self) -> None:
        self._interval = SOONEST
        self._last: float | None = None
        self._line = 0.0

    def left(self, now: float, *, busy: bool) -> None:
        """A job left; `busy` where others were waiting for that, without which the time says nothing."""
        if busy and self._last is not None:
            self._interval += _WEIGHT * (now - self._last - self._interval)
        self._last = now

    def retry_after(self, now: float) -> float:
        """Seconds after which the one who is refused now should find a place, from SOONEST to LATEST."""
        self._line = min(max(self._line, now) + self._interval, now + LATEST)
        return max(self._line - now, SOONEST)


class _At(enum.Enum):
    EARLY = "early"
    QUEUE = "queue"
    WORK = "work"
    PAST = "past"


class Place:
    """One job's place, from `Admission.enter` until it leaves."""

    def __init__(self, admission: Admission, at: _At) -> None:
        self._admission = admission
        self._at = at

    @property
    def must_wait(self) -> bool:
        """Whether everything is taken just now."""
        return self._admission.full

    def arrived(self) -> None:
        """What the job waited for is there; it stands in line now."""
        if self._at is _At.EARLY:
            self._admission._move(self, _At.QUEUE)

    async def work(self, ask: Ask) -> None:
        """Waits until the job may work.  Cancelled, it still stands in line."""
        if self._at is _At.QUEUE:
            await self._admission._turns.take(ask)
            self._admission._move(self, _At.WORK)

    def begin(self) -> None:
        """Works at once, even beyond the limit, for its other side has begun already and must not be kept waiting."""
        if self._at in (_At.EARLY, _At.QUEUE):
            self._admission._work += 1
            self._admission._move(self, _At.WORK)

    def leave(self) -> None:
        """Neither works nor waits any more.  Safe to call twice."""
        if self._at is not _At.PAST:
            self._admission._leave(self)


class Admission:
    """Places for jobs.

    working    jobs at work at a time
    queued     jobs that stand in line for that; of more, each is told when to come again
    early      jobs that wait for their offer to be made, and take nobody's place meanwhile
    what       what an agent does with these jobs ("serves"), and
    who        which agent, for error texts, which may be read at another one
    """

    def __init__(self, *, working: int, queued: int, early: int, what: str, who: str = "the agent") -> None:
        self._limits = {_At.WORK: working, _At.QUEUE: queued, _At.EARLY: early}
        self._what, self._who = what, who
        self._count = dict.fromkeys(_At, 0)
        self._work = 0
        self._paces = {_At.QUEUE: Pace(), _At.EARLY: Pace()}
        self._turns: Turns[None] = Turns(self._take, self._undo)

    @property
    def full(self) -> bool:
        """Whether a job that came now would have to wait."""
        return self._work >= self._limits[_At.WORK] or bool(len(self._turns))

    @property
    def working(self) -> int:
        """Jobs at work."""
        return self._count[_At.WORK]

    @property
    def queued(self) -> int:
        """Jobs in line."""
        return self._count[_At.QUEUE]

    @property
    def early(self) -> int:
        """Jobs whose offer was not made yet."""
        return self._count[_At.EARLY]

    def enter(self, *, early: bool) -> Place:
        """A place for one more job; raises `Busy`, whose `retry_after` is an estimate from how fast jobs leave."""
        at = _At.EARLY if early else _At.QUEUE
        limit = self._limits[at]
        if not early:
            # Who finds work free stands in line for no longer than a turn of the loop.
            limit += max(self._limits[_At.WORK] - self._work, 0)
        if self._count[at] >= limit:
            after = self._paces[at].retry_after(asyncio.get_running_loop().time())
            most = self._limits[at]
            working = self._limits[_At.WORK]
            full = (
                f"at most {most} jobs that {self._who} {self._what} may wait for their offers"
                if early
                else f"{self._who} {self._what} at most {working} jobs at a time, and {most} stand in line"
            )
            raise Busy(full, retry_after=round(after, 4))
        self._count[at] += 1
        return Place(self, at)

    def _take(self, ask: Ask) -> Short | None:
        if self._work >= self._limits[_At.WORK]:
            return Short("work")
        self._work += 1
        return None

    def _undo(self, ask: Ask, taken: None) -> None:
        self._work -= 1

    def _move(self, place: Place, to: _At) -> None:
        self._count[place._at] -= 1
        self._count[to] += 1
        place._at = to

    def _leave(self, place: Place) -> None:
        now = asyncio.get_running_loop().time()
        at = place._at
        if at is _At.EARLY:
            self._paces[at].left(now, busy=self._count[at] >= self._limits[at])
        else:
            self._paces[_At.QUEUE].left(now, busy=bool(self._count[_At.QUEUE]))
        self._move(place, _At.PAST)
        if at is _At.WORK:
            self._work -= 1
            self._turns.check()
