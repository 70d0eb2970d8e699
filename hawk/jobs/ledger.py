"""Every job of an agent for whoever looks on: those under way as they are, the latest ended ones as they ended."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.control.messages import JobInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REMEMBERED = 1024
"""Ended jobs that are remembered."""

_REASON = 1000
"""Characters of an error's text that are kept."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a job is doing; see `JobInfo` for the fields.  `attempts` are those of its other parts."""

    state: str
    phase: str = ""
    attempt: str = ""
    transport: str = ""
    mode: str = ""
    nbytes: int = 0
    total: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    attempts: tuple[str, ...] = ()

    def known_as(self, prefix: str) -> bool:
        """Whether a job id on the wire begins like this."""
        return any(attempt.startswith(prefix) for attempt in (self.attempt, *self.attempts))


@dataclass(eq=False, slots=True)
class Entry:
    """One job in the ledger.  `look` asks the job; after its end the last answer is kept, and not the job."""

    job: str
    role: str
    request: str
    peer: str
    seconds: float
    look: Callable[[], Look]
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    ending: str = ""
    reason: str = ""

    def info(self) -> JobInfo:
        """The entry as clients are told of it."""
        look, now = self.look(), time.monotonic()
        over = now if self.ended is None else self.ended
        return JobInfo(
            job=self.job,
            role=self.role,
            request=self.request,
            peer=self.peer,
            state=look.state,
            phase=look.phase,
            attempt=look.attempt,
            transport=look.transport,
            mode=look.mode,
            nbytes=look.nbytes,
            total=max(look.total, look.nbytes),
            age=over - self.began,
            ended=None if self.ended is None else now - self.ended,
            deadline=self.began + self.seconds - now if self.ended is None else None,
            ending=self.ending,
            reason=self.reason,
            phases=dict(look.phases),
        )


class Ledger:
    """The jobs of both sides; at most `remembered` of those that have ended."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._live: dict[Entry, None] = {}
        self._past: OrderedDict[Entry, None] = OrderedDict()

    def __len__(self) -> int:
        """Jobs under way."""
        return len(self._live)

    def open(
        self, job: str, role: str, *, request: str, peer: str, seconds: float, look: Callable[[], Look]
    ) -> Entry:
        """A job begins, which may take `seconds`; `look` is asked what it does whenever somebody wants to know."""
        entry = Entry(job, role, request, peer, seconds, look)
        self._live[entry] = None
        return entry

    def close(self, entry: Entry, ending: str, reason: str = "") -> None:
        """The job has ended: `ending` is `ready`, `released` or an error's code, `reason` the error's text."""
        last = entry.look()
        entry.look = lambda: last
        entry.ended, entry.ending, entry.reason = time.monotonic(), ending, reason[:_REASON]
        self._live.pop(entry, None)
        self._past[entry] = None
        while len(self._past) > self._remembered:
            self._past.popitem(last=False)

    def states(self) -> Iterator[tuple[str, str, Look]]:
        """Role, peer and doing of every job under way."""
        for entry in list(self._live):
            yield entry.role, entry.peer, entry.look()

    def find(self, prefix: str = "", *, request: str = "", ended: bool = True) -> list[Entry]:
        """Jobs whose id here or on the wire begins with `prefix`: those under way, then the ended, the latest first.

        With `request` only those of that request.
        """
        entries = [*reversed(self._live)]
        if ended:
            entries += reversed(self._past)
        if request:
            entries = [e for e in entries if e.request == request]
        if not prefix:
            return entries
        return [e for e in entries if e.job.startswith(prefix) or e.look().known_as(prefix)]
