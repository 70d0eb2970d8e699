"""Who goes next where several jobs want the same thing: a pure order, without clocks, tasks or bytes.

Between peers: start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing", 1996).  Each peer has a line
and a virtual start time, which grows by the bytes that it was given; the smallest goes first.  Peers that
always have something waiting get equal bytes, within one largest piece of each; one that comes back after a pause
starts level with the others.

Within a peer: the higher priority first, then the earlier deadline that is still ahead, then the job that lacks fewest
bytes, then the older ask.  One that was overtaken `overtakes` times by younger ones goes next whatever its rank, so
nobody waits for ever.  A deadline that has passed gives no precedence: it cannot be kept any more, others can.

A ask whose turn it is may want more than there is.  Then others go before it, for as many as `overtakes` turns; from
then on nobody takes of what it lacks until it has its share.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OVERTAKES = 32
"""How often a ask may be overtaken: by better ones of its own peer, and by others while what it lacks is short."""

LOOK = 32
"""Lines that are looked at for one whose ask can go, where the first cannot."""

_REMEMBERED = 1024
"""Peers without a waiting ask whose share is remembered."""


@dataclass(eq=False, slots=True)
class Ask:
    """One thing that a job wants once.

    peer       whose share it counts against
    nbytes     bytes that it takes of that share
    priority   higher goes first among the asks of a peer
    due        clock time by which it is wanted; `inf` where nobody said
    left       bytes that its job still lacks, these included
    uses       names of what it takes from and others do, too
    """

    peer: str
    nbytes: int
    priority: int = 0
    due: float = math.inf
    left: int = 0
    uses: tuple[str, ...] = ()
    _waits: bool = field(default=False, init=False)
    _number: int = field(default=0, init=False)
    _passed: int = field(default=0, init=False)


class _Line:
    """The waiting asks of one peer: by rank, and by age."""

    def __init__(self, peer: str, start: int) -> None:
        self.peer = peer
        self.start = start
        self.waiting = 0
        self._ranked: list[tuple[int, float, int, int, Ask]] = []
        self._aged: deque[Ask] = deque()
        self._overtaken = 0

    def add(self, ask: Ask, due: float | None = None) -> None:
        if due is None:
            self._aged.append(ask)
            self.waiting += 1
            due = ask.due
        heapq.heappush(self._ranked, (-ask.priority, due, ask.left, ask._number, ask))

    def head(self, now: float, overtakes: int) -> Ask | None:
        """Who goes next of this peer."""
        while self._aged and not self._aged[0]._waits:
            self._aged.popleft()
            self._overtaken = 0
        if not self._aged:
            return None
        if self._overtaken >= overtakes:
            return self._aged[0]
        while True:
            _, due, _, _, ask = self._ranked[0]
            if not ask._waits:
                heapq.heappop(self._ranked)
            elif due <= now:
                heapq.heappop(self._ranked)
                self.add(ask, math.inf)
            else:
                return ask

    def gone(self, ask: Ask, *, served: bool) -> None:
        """A ask of this line waits no more."""
        if served and self._aged and self._aged[0] is not ask:
            self._overtaken += 1
        ask._waits = False
        self.waiting -= 1
        if len(self._ranked) > 2 * self.waiting + 8:
            # What went out of turn must not pile up.
            self._ranked = [entry for entry in self._ranked if entry[-1]._waits]
            heapq.heapify(self._ranked)
            oldest = self._aged[0] if self._aged else None
            self._aged = deque(c for c in self._aged if c._waits)
            if not self._aged or self._aged[0] is not oldest:
                self._overtaken = 0


class Scheduler:
    """Waiting asks, and which of them goes next.  Adding and choosing cost the logarithm of what waits."""

    def __init__(self, overtakes: int = OVERTAKES) -> None:
        self._overtakes = overtakes
        self._lines: dict[str, _Line] = {}
        self._order: list[tuple[int, int, _Line]] = []
        self._numbers = itertools.count()
        self._virtual = 0
        self._ends: dict[str, int] = {}
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    @property
    def remembered(self) -> int:
        """Peers that something is kept of."""
        return len(self._lines) + len(self._ends)

    def add(self, ask: Ask) -> None:
        """The ask waits from now on."""
        ask._waits, ask._number, ask._passed = True, next(self._numbers), 0
        line = self._lines.get(ask.peer)
        if line is None:
            start = max(self._virtual, self._ends.pop(ask.peer, 0))
            line = self._lines[ask.peer] = _Line(ask.peer, start)
            heapq.heappush(self._order, (start, ask._number, line))
        line.add(ask)
        self._waiting += 1

    def served(self, ask: Ask) -> None:
        """The ask got what it wants while nobody waited: as `add` and `next`, without the line in between."""
        start = max(self._virtual, self._ends.pop(ask.peer, 0))
        self._virtual = start
        self._remember(ask.peer, start + max(ask.nbytes, 1))

    def discard(self, ask: Ask) -> None:
        """The ask waits no more, and was not served; nothing happens if it did not wait."""
        if ask._waits:
            self._lines[ask.peer].gone(ask, served=False)
            self._waiting -= 1

    def next(self, take: Callable[[Ask], str | None], now: float = 0.0) -> Ask | None:
        """Chooses the next ask, for which `take` could take what it wants; None where none can go.

        take     takes for a ask and returns None, or takes nothing and returns which of its `uses` is short
        now      clock time that `Ask.due` is compared with
        """
        looked: list[tuple[int, int, _Line]] = []
        passed: list[Ask] = []
        closed: set[str] = set()
        chosen: Ask | None = None
        for entry in self._in_order():
            looked.append(entry)
            ask = entry[2].head(now, self._overtakes)
            if ask is not None and closed.isdisjoint(ask.uses):
                short = take(ask)
                if short is None:
                    chosen = ask
                    break
                passed.append(ask)
                if ask._passed >= self._overtakes:
                    closed.add(short)
            if len(looked) >= LOOK:
                break
        for entry in looked:
            line = entry[2]
            if chosen is not None and line.peer == chosen.peer:
                self._serve(line, chosen)
            elif line.waiting:
                heapq.heappush(self._order, entry)
            else:
                self._forget(line)
        if chosen is not None:
            for ask in passed:
                ask._passed += 1
        return chosen

    def _in_order(self) -> Iterator[tuple[int, int, _Line]]:
        while self._order:
            yield heapq.heappop(self._order)

    def _serve(self, line: _Line, ask: Ask) -> None:
        self._virtual = max(self._virtual, line.start)
        line.start += max(ask.nbytes, 1)
        line.gone(ask, served=True)
        self._waiting -= 1
        if line.waiting:
            heapq.heappush(self._order, (line.start, next(self._numbers), line))
        else:
            self._forget(line)

    def _forget(self, line: _Line) -> None:
        """Nothing of a peer waits: only what it got beyond the others is remembered."""
        del self._lines[line.peer]
        if line.start > self._virtual:
            self._remember(line.peer, line.start)

    def _remember(self, peer: str, end: int) -> None:
        self._ends[peer] = end
        if len(self._ends) > _REMEMBERED:
            self._ends = {peer: end for peer, end in self._ends.items() if end > self._virtual}
            while len(self._ends) > _REMEMBERED:
                del self._ends[min(self._ends, key=self._ends.__getitem__)]
