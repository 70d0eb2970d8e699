"""What single requests took, and what the simulator is told of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from hawk.bench.load_pace import Pace

Some = Annotated[float, msgspec.Meta(gt=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


SIDES = ("prefill", "decode")

LEAST = 0.002
"""A variance of the pace of requests of a length, from which something is learned of it: a twentieth up or down."""

MOST_SHARE = 3.0


class Single(msgspec.Struct, frozen=True, kw_only=True):
    """One request with nothing beside it, in seconds.

    input    tokens, nearly: no two prompts are of the same length
    first    at the client, from the sending to the first token
    prefill  in the prefill engine; fetch: in the decode engine, from its order to the last byte
    step     the decode engine's step that says the first token
    at       when it was sent, on the system's count of seconds
    """

    input: Count
    first: Some
    prefill: Some
    fetch: Some
    step: Some
    at: float = 0.0

    @property
    def rest(self) -> float:
        """HTTP, the proxy, and the engines' own lines."""
        return max(0.0, self.first - self.prefill - self.fetch - self.step)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Mean seconds of a decode step of `batch` requests behind prompts of `context` tokens, over `gaps` tokens.

    at, until  when that was, on the system's count of seconds
    """

    batch: Count
    context: Count
    seconds: Some
    gaps: Count
    at: float = 0.0
    until: float = 0.0


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """One request while `batch` others decode; `others` is the mean of their steps during such prefills, in seconds."""

    batch: Count
    others: Some | None
    one: Single


class Calibration(msgspec.Struct, kw_only=True):
    """All that the simulator is told of the pair; `behind` are single requests before another's prefill."""

    singles: list[Single] = []
    steps: list[Step] = []
    beside: list[Beside] = []
    behind: list[Single] = []

    def lengths(self) -> list[int]:
        """Of single prompts."""
        return sorted({single.input for single in self.singles})

    def table(self, what: str) -> dict[int, float]:
        """Median seconds of a part (`prefill`, `fetch`, `step`, `rest`, `first`) of single requests, by length."""
        return {
            length: statistics.median(getattr(s, what) for s in self.singles if s.input == length)
            for length in self.lengths()
        }

    def step_table(self) -> dict[int, float]:
        """Seconds of a decode step by batch."""
        return {step.batch: step.seconds for step in self.steps}

    def slowed(self, what: str) -> dict[int, float]:
        """How many times as long a part of a single request takes beside a batch that decodes: the median, by batch."""
        return {batch: self._times(what, ones) for batch, ones in self._beside().items()}

    def later(self) -> dict[int, float]:
        """By how many seconds `rest` is longer beside a batch that decodes: the median, by batch."""
        return {batch: self._more("rest", ones) for batch, ones in self._beside().items()}

    def slowed_behind(self, what: str) -> float:
        """How many times as long a part of a single request takes before another's prefill: the median."""
        return self._times(what, self.behind)

    def later_behind(self) -> float:
        """By how many seconds `rest` is longer before another's prefill: the median."""
        return self._more("rest", self.behind)

    def _beside(self) -> dict[int, list[Single]]:
        found: dict[int, list[Single]] = {}
        for entry in sorted(self.beside, key=lambda entry: entry.batch):
            found.setdefault(entry.batch, []).append(entry.one)
        return found

    def _times(self, what: str, ones: Sequence[Single]) -> float:
        alone = self.table(what)
        return max(1.0, statistics.median([float(getattr(o, what)) / alone[o.input] for o in ones] or [1.0]))

    def _more(self, what: str, ones: Sequence[Single]) -> float:
        alone = self.table(what)
        return max(0.0, statistics.median([float(getattr(o, what)) - alone[o.input] for o in ones] or [0.0]))

    def steps_slowed(self) -> dict[int, float]:
        """How many times as long a decode step takes beside a prefill, by batch."""
        alone = self.step_table()
        return {
            entry.batch: max(1.0, entry.others / alone[entry.batch])
            for entry in self.beside
            if entry.others is not None and entry.batch in alone
        }

    def share(self, pace: Pace) -> float:
        """How much of a prefill slows as `pace` says, of 1: by which it differs least among those of a length.

        1 where the pace hardly changed, and between 0 and `MOST_SHARE`.
        """
        those: dict[int, list[tuple[float, float]]] = {}
        for one in self.singles:
            those.setdefault(one.input, []).append((pace.mean(one.at, one.at + one.prefill), one.prefill))
        if sum(statistics.pvariance([slow for slow, _ in of]) for of in those.values()) < LEAST * len(those):
            return 1.0

        def differ(share: float) -> float:
            return sum(
                statistics.pvariance([math.log(took / (1 + share * (slow - 1))) for slow, took in of])
                for of in those.values()
            )

        return min((step * MOST_SHARE / 60 for step in range(61)), key=differ)

    def at_full_pace(self, pace: Mapping[str, Pace]) -> Calibration:
        """What it would be with the processors of `prefill` and `decode` at full pace all the while."""

        def one(single: Single) -> Single:
            there = single.at + single.prefill
            first = pace["prefill"].mean(single.at, there)
            second = pace["decode"].mean(there, single.at + single.first)
            return msgspec.structs.replace(
                single,
                first=single.prefill / first
                + (single.fetch + single.step) / second
                + single.rest / math.sqrt(first * second),
                prefill=single.prefill / first,
                fetch=single.fetch / second,
                step=single.step / second,
            )

        def of(entry: Beside) -> Beside:
            found = entry.others
            if found is not None:
                found /= pace["decode"].mean(entry.one.at, entry.one.at + entry.one.prefill)
            return msgspec.structs.replace(entry, one=one(entry.one), others=found)

        return Calibration(
            singles=[one(single) for single in self.singles],
            steps=[
                msgspec.structs.replace(step, seconds=step.seconds / pace["decode"].mean(step.at, step.until))
                for step in self.steps
            ],
            beside=[of(entry) for entry in self.beside],
            behind=[one(single) for single in self.behind],
        )
