"""What other programs take of the processors meanwhile, from Linux's own counts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")


class Others:
    """Counts from its making, or from the last `part`, on.

    processors  those that are looked at: all that this program and those that it has started run on
    proc        where the system tells it
    """

    def __init__(self, processors: Iterable[int], proc: Path = _PROC) -> None:
        self._lines = {f"cpu{number}" for number in processors}
        self._proc = proc
        self._last = self._read()

    def part(self) -> float:
        """Of the time of these processors, what was neither idle nor ours, interrupts left out; 0 to 1."""
        before, self._last = self._last, self._read()
        when, busy, ours = (new - old for new, old in zip(self._last, before, strict=True))
        return min(max((busy - ours) / max(when * len(self._lines), 1e-9), 0.0), 1.0)

    def _read(self) -> tuple[float, float, float]:
        """The time, seconds that the processors were busy in all, and for us."""
        tick = os.sysconf("SC_CLK_TCK")
        busy = 0
        for line in (self._proc / "stat").read_text().splitlines():
            name, *counts = line.split()
            if name in self._lines:
                busy += sum(map(int, counts[:3]))  # user, nice, system
        return time.monotonic(), busy / tick, self._ours() / tick

    def _ours(self) -> int:
        """Ticks of this process and all that it has started, with those of them that have ended."""
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        for number in os.listdir(self._proc):
            if not number.isdecimal():
                continue
            try:
                text = (self._proc / number / "stat").read_text()
            except OSError:  # it has ended
                continue
            words = text[text.rindex(")") + 2 :].split()  # a name may have brackets in it
            parents[int(number)] = int(words[1])
            ticks[int(number)] = sum(
                map(int, words[11:15])
            )  # its own and its ended children's, user and system
        found, left = 0, [os.getpid()]
        while left:
            one = left.pop()
            found += ticks.get(one, 0)
            left += [child for child, parent in parents.items() if parent == one]
        return found
