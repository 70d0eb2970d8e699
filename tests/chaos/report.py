"""What a chaos run saw: counts, and the promises that were broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.chaos import weather

if TYPE_CHECKING:
    from pathlib import Path

    from tests.chaos.site import AgentLife


class BrokenPromise(Exception):
    """Something happened that must not."""


@dataclass
class Report:
    """Counts of one run; `broken` is what went wrong, in words, `on_purpose` the promise that agents had to break."""

    seed: int
    minutes: float
    on_purpose: str = ""
    rounds: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)
    offers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    frames: Counter[str] = field(default_factory=Counter)
    parts: int = 0
    quarantined: int = 0
    good: int = 0
    again: int = 0
    grown: dict[str, float] = field(default_factory=dict)
    lives: int = 0
    carried: int = 0
    broken: list[str] = field(default_factory=list)

    def broke(self, what: str) -> None:
        """A promise was broken."""
        self.broken.append(what)

    def count_frames(self, life: AgentLife) -> None:
        """Adds what a life's weather did."""
        for name in weather.COUNTS:
            self.frames[name] += getattr(life.weather, name)

    def grew(self, what: str, by: float) -> None:
        """The largest growth of something since the first jobs of a life."""
        self.grown[what] = max(self.grown.get(what, 0), by)

    def text(self, folder: Path) -> str:
        """The report, for people."""
        fetches = sum(self.endings.values())
        lines = [
            f"chaos: seed {self.seed}, {self.minutes:g} minutes, {self.rounds} rounds, {self.lives} agent processes",
            f"  fetches    {fetches}: {_listed(self.endings)}",
            f"  given up   {sum(self.given_up.values())} by their clients: {_listed(self.given_up)}",
            f"  parts      {self.parts} of the ready ones came in parts from both prefill agents",
            f"  offers     {sum(self.offers.values())}: {_listed(self.offers)}",
            f"  faults     {sum(self.faults.values())}: {_listed(self.faults)}; {self.left_out} left out",
            f"  frames     {_listed(self.frames)}",
            f"  tcp bytes  {self.carried / 1e6:.1f} MB through the proxies",
            f"  calm       {self.good} transfers that had to succeed, {self.again} of them tried again",
            f"  stopped    {self.quarantined} bytes were in quarantine while a reader stood still",
            f"  growth     {', '.join(f'{what} {by:+.3g}' for what, by in self.grown.items()) or 'not measured'}",
        ]
        if not self.broken:
            return "\n".join([*lines, "chaos: every promise held"])
        lines += ["chaos: BROKEN", *(f"  - {what}" for what in self.broken)]
        lines.append(f"  Logs of every process and its config: {folder} (NAME.LIFE.log, client-NAME.log).")
        again = f" --break {self.on_purpose}" if self.on_purpose else ""
        lines.append(f"  Again: scripts/chaos --seed {self.seed} --minutes {self.minutes:g}{again}")
        return "\n".join(lines)


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{what} {count}" for what, count in counter.most_common()) or "none"
