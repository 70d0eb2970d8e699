"""What the simulator says of the rates that were measured, when it knows single requests only.

Two models, and the second once more.  *Apart*: each side is as quick as alone.  *Shared*: the sides take processors
from each other.  How much, single requests beside others that decode have told: while decode is busy, a prefill takes
`slowed("prefill")` times as long at that batch, and so on.  The simulator has no such thing, so its sides are slowed in
the mean, by how much of their busy time the other is busy as well, and it runs until what it was given agrees with what
came out:

    prefill table   * (1 + (slowed prefill(b) - 1) * part of prefill's busy time in which decode is busy)
    decode table    * (1 + (slowed step(b) - 1) * part of decode's busy time in which prefill is busy)
    fetch table     * (1 + (slowed fetch(b) - 1) * d + (slowed fetch behind - 1) * p)
    rest            + d * (later(b) - half a step) + p * later behind, for the other half the simulator has itself

with b the mean batch of decode while it is busy, d the part of prefills that end while it is, and p the part of those
that another follows at once.

*Paced* is *shared* on processors whose pace changes (`hawk.bench.load_pace`), which no single request can know of.
Single requests are taken as they would have been at full pace, and a prefill takes what the pace of its side's
processors in each tenth of a second makes of that share of it which single requests slowed by; all else takes what that
of decode's side makes of it in the mean.
The pace is that of the run itself, and has in it what the engines take from each other by caches and memory: so this is
an account of where the time goes, where the other two foretell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hawk.bench.load_result import PARTS, PERCENTILES, Compared
from hawk.bench.load_single import SIDES
from hawk.serving import Decode, Device, Outcome, Prefill, Scenario, Side, Transfer, Workload, simulate
from hawk.serving.transfer import Cost, Moved

if TYPE_CHECKING:
    from hawk.bench.load_result import Measured, Rate, Setting
    from hawk.bench.load_single import Calibration
    from hawk.serving import ServedModel
    from hawk.serving.outcome import F64

ROUNDS = 30
NEAR = 2e-3

LATE = 0.05
"""Seconds by which a request may be sent late before that is told."""

CHANGED = 1.1
"""How many times as long, or as short, processors may take as before, until that is told."""

TAKEN = 0.02
"""The part of the processors that others may take until that is told."""

LACKS = (
    "An engine asks for a cache at the end of a decode step, and sees at the end of a later one that it has come.",
    "The sides slow each other in the mean over a run, not while both happen to be busy.",
    "Decode steps are of the workload's mean context, whatever the requests in them have.",
    "Prefill steps of the whole budget are as long as others before them, for which the engine has then prepared.",
)
"""What the simulator leaves out of such a pair."""


@dataclass(frozen=True)
class Timed(Transfer):
    """A transfer that takes what was measured, by tokens; what is beyond the shortest is bytes, one after another."""

    points: tuple[tuple[float, float], ...] = ()
    token_bytes: int = 0

    def cost(self, model: ServedModel, tokens: int, source_tp: int, target_tp: int) -> Cost:
        """Seconds of a request of so many tokens: linear between the points, and as at the nearest outside."""
        seconds = _at(dict(self.points), tokens, 0.0)
        moved = Moved(self.token_bytes * tokens, 1, 1, 1)
        held = max(0.0, seconds - min(of for _, of in self.points))
        return Cost(moved, seconds, held, held, held, 0.0, 0.0)


@dataclass(frozen=True)
class Busy:
    """What the sides see of each other.

    prefill  part of decode's busy time in which prefill is busy;  decode: the other way round
    ends     part of prefills that end while decode is busy;  goes_on: that another follows at once
    batch    mean batch of decode while it is busy
    """

    prefill: float
    decode: float
    ends: float
    goes_on: float
    batch: float

    @classmethod
    def of(cls, outcome: Outcome) -> Busy:
        """As a simulation had it."""
        before = _union(outcome.prefill_start, outcome.prefill_end)
        after = _union(outcome.decode_start, outcome.end)
        both = _common(before, after)
        return cls(
            both / max(1e-9, _length(after)),
            both / max(1e-9, _length(before)),
            _inside(outcome.prefill_end, after),
            _inside(outcome.prefill_end, before),
            max(1.0, outcome.mean_batch),
        )

    def between(self, other: Busy) -> Busy:
        """Half of the way."""
        mine, its = astuple(self), astuple(other)
        return Busy(*(0.5 * (a + b) for a, b in zip(mine, its, strict=True)))

    def far(self, other: Busy) -> float:
        """The largest difference of a part."""
        mine, its = astuple(self)[:-1], astuple(other)[:-1]
        return float(max(abs(a - b) for a, b in zip(mine, its, strict=True)))


def _union(begin: F64, end: F64) -> F64:
    """Intervals joined where they touch, `float64[n, 2]` in their order."""
    order = np.argsort(begin, kind="stable")
    begin, latest = begin[order], np.maximum.accumulate(end[order])
    first = np.concatenate([[True], begin[1:] > latest[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([begin[first], latest[last]], axis=1)


def _inside(when: F64, intervals: F64) -> float:
    """Part of the times that lie in an interval of a union, and are not its end."""
    found = np.maximum(np.searchsorted(intervals[:, 0], when, side="right") - 1, 0)
    inside = (intervals[found, 0] <= when) & (when < intervals[found, 1] - 1e-9)
    return float(inside.mean())


def _length(intervals: F64) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def _common(a: F64, b: F64) -> float:
    """Seconds in both of two unions."""
    both = np.concatenate([a, b])
    joined = _union(both[:, 0], both[:, 1])
    return _length(a) + _length(b) - _length(joined)


def foretell(measured: Measured) -> None:
    """Fills `compared` of every rate, and `lacks` where something is missed.

    Raises `MissingDependency` without the simulator's library.
    """
    measured.lacks = []
    for rate in measured.rates:
        rate.compared = []
        rate.parts = {name: of for name, of in rate.parts.items() if name == "measured"}
        if rate.late > LATE:
            measured.lacks.append(
                f"{rate.fraction:.0%}: a request was sent {rate.late:.2f} s late: the machine had more to do than this"
            )
        if rate.others > TAKEN:
            measured.lacks.append(
                f"{rate.fraction:.0%}: other programs took {rate.others:.0%} of the processors meanwhile"
            )
        changed = slower(measured, rate)
        if max(changed, 1 / changed) > CHANGED:
            measured.lacks.append(
                f"{rate.fraction:.0%}: the prefill engine's processors took {changed:.2f} times as long with the same "
                "work as while single requests were measured: others have a part of the machine"
            )
        if rate.failed:
            measured.lacks.append(
                f"{rate.fraction:.0%}: {len(rate.failed)} of {len(rate.requests)} requests failed: never answered"
            )
        for name, outcome in outcomes(measured, rate).items():
            rate.parts[name] = dict(zip(PARTS, parts(outcome), strict=True))
            rate.compared += [
                Compared(
                    model=name,
                    percentile=percentile,
                    measured=rate.ttft(percentile),
                    predicted=outcome.percentile("ttft", percentile),
                )
                for percentile in PERCENTILES
                if math.isfinite(rate.ttft(percentile))
            ]
    if not all(measured.holds.values()):
        measured.lacks += LACKS


def parts(outcome: Outcome) -> list[float]:
    """Mean seconds of each of `PARTS`, of all requests."""
    edges = (outcome.prefill_start, outcome.prefill_end, outcome.transfer_end, outcome.first_token)
    found = [float((b - a).mean()) for a, b in pairwise(edges)]
    return [*found, float((outcome.first_token - outcome.arrival).mean()) - sum(found)]


def outcomes(measured: Measured, rate: Rate) -> dict[str, Outcome]:
    """By model; `paced` only where the processors' pace was taken."""
    plain = Rates(measured.setting, measured.calibration)
    found = {"apart": apart(plain, rate), "shared": shared(plain, rate)}
    if all(measured.pace.get(side) for side in SIDES):
        found["paced"] = shared(paced(measured, rate), rate)
    return found


@dataclass(frozen=True)
class Rates:
    """What the simulator is told.

    takes  see `hawk.serving.Prefill`;  slow: how many times as long all but prefill takes
    """

    setting: Setting
    calibration: Calibration
    takes: Callable[[float, float], float] | None = None
    slow: float = 1.0


def paced(measured: Measured, rate: Rate) -> Rates:
    """As at full pace, and the pace that the processors had while the requests of this rate came."""
    share = measured.calibration.share(measured.pace["prefill"])
    pace = {side: of.part(share) for side, of in measured.pace.items()}
    zero = rate.at + min(
        r.due for r in rate.requests
    )  # the simulator's: a trace begins with its first request
    return Rates(
        measured.setting,
        measured.calibration.at_full_pace(pace),
        pace["prefill"].from_(zero).takes,
        pace["decode"].mean(zero, rate.at + rate.lasted),
    )


def slower(measured: Measured, rate: Rate) -> float:
    """How many times as long the prefill side's processors took as while single requests were measured; 1: unknown."""
    pace, singles = measured.pace.get("prefill"), measured.calibration.singles
    if pace is None:
        return 1.0
    before = statistics.fmean(pace.mean(one.at, one.at + one.first) for one in singles)
    return pace.mean(rate.at, rate.at + rate.lasted) / before


def apart(told: Rates, rate: Rate) -> Outcome:
    """With each side as quick as alone."""
    return simulate(scenario(told, rate, None))


def shared(told: Rates, rate: Rate) -> Outcome:
    """With sides that slow each other; see the module."""
    outcome = apart(told, rate)
    given = Busy(0.0, 0.0, 0.0, 0.0, 1.0)
    for _ in range(ROUNDS):
        found = Busy.of(outcome)
        if found.far(given) < NEAR:
            break
        # Half of the way: a side that is slowed is busier, and a step too far swings.
        given = given.between(found)
        outcome = simulate(scenario(told, rate, given))
    return outcome


def scenario(told: Rates, rate: Rate, busy: Busy | None) -> Scenario:
    """One prefill and one decode instance of what single requests took, and the requests of a rate as a trace."""
    setting, found = told.setting, told.calibration
    prefill, steps, fetch, rest = (
        found.table("prefill"),
        found.step_table(),
        found.table("fetch"),
        found.table("rest"),
    )
    overhead = min(rest.values())
    if busy is not None:
        prefill = _times(prefill, 1 + (_at(found.slowed("prefill"), busy.batch, 1.0) - 1) * busy.decode)
        beside, behind = _at(found.slowed("fetch"), busy.batch, 1.0), found.slowed_behind("fetch")
        fetch = _times(fetch, 1 + (beside - 1) * busy.ends + (behind - 1) * busy.goes_on)
        late = _at(found.later(), busy.batch, 0.0) - _at(steps, busy.batch, 0.0) / 2
        overhead += busy.ends * max(0.0, late) + busy.goes_on * found.later_behind()
        steps = _times(steps, 1 + (_at(found.steps_slowed(), busy.batch, 1.0) - 1) * busy.prefill)
    fetch, steps, rest = (_times(table, told.slow) for table in (fetch, steps, rest))
    overhead *= told.slow
    # HTTP of a longer prompt takes longer; where in the request's way that is makes no difference to its end.
    least = min(rest.values())
    moves = {length: seconds + rest[length] - least for length, seconds in fetch.items()}
    rows = [(r.due, r.input, r.output) for r in rate.requests]
    return Scenario(
        prefill=Prefill(
            Device.measured("prefill engine", prefill=_rising(prefill)),
            chunk=setting.budget,
            takes=told.takes,
        ),
        decode=Decode(Device.measured("decode engine", decode=_rising(steps)), max_batch=setting.batch),
        transfer=Timed(
            "gn-hawk",
            target=Side("vllm/nhd", block=setting.block),
            points=tuple(moves.items()),
            token_bytes=setting.token_bytes,
        ),
        workload=Workload.of(rows),
        rate=None,
        requests=None,
        warm_up=min(0.95, (rate.warm_up + 0.5) / len(rows)),
        first_token="step",
        overhead=overhead,
    )


def _at(table: Mapping[float, float] | Mapping[int, float], where: float, otherwise: float) -> float:
    """Linear between the points, as at the nearest outside."""
    return float(np.interp(where, list(table), list(table.values()))) if table else otherwise


def _times(table: Mapping[int, float], factor: float) -> dict[int, float]:
    return {key: value * factor for key, value in table.items()}


def _rising(table: Mapping[int, float]) -> dict[int, float]:
    """The table without dips, which are noise: more work is not done sooner."""
    keys = sorted(table)
    return dict(zip(keys, np.maximum.accumulate([table[key] for key in keys]).tolist(), strict=True))
