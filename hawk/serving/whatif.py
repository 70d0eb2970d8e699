"""What a cluster has to be: the fewest instances of each kind that keep a promise, and the cheapest of these."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import InvalidArgument
from hawk.serving.engine import simulate
from hawk.serving.figures import number
from hawk.serving.scenario import MOST_INSTANCES
from hawk.serving.sweep import spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.serving.device import Device
    from hawk.serving.outcome import Outcome
    from hawk.serving.scenario import Scenario
    from hawk.serving.transfer import Transfer
    from hawk.serving.workload import Workload

MOST = 256
"""Most times that a ratio is multiplied before it is said not to hold."""

LEAST_REQUESTS, MOST_REQUESTS = 2000, 200_000
SECONDS = 120.0
"""Seconds of arrivals that are simulated unless said otherwise, within the bounds above: several answers' time."""


@dataclass(frozen=True)
class Option:
    """One way of building a cluster: what its instances are, how many of each there are at least, what moves KV.

    ratio    prefill and decode instances of the smallest such cluster
    """

    prefill: Device
    decode: Device
    prefill_tp: int
    decode_tp: int
    ratio: tuple[int, int]
    transfer: Transfer

    @property
    def caution(self) -> str:
        """What a simulation of it does not show, and would decide; empty where there is nothing."""
        if self.transfer.configuration != "single-buffer":
            return ""
        return "only its time is simulated: one contiguous buffer uses a device's memory up (hawk bench fragmentation)"

    def scenario(self, base: Scenario, times: int) -> Scenario:
        """The cluster of `times` such, asked what `base` is asked."""
        p, d = self.ratio
        return replace(
            base,
            prefill=replace(base.prefill, device=self.prefill, tp=self.prefill_tp, instances=p * times),
            decode=replace(base.decode, device=self.decode, tp=self.decode_tp, instances=d * times),
            transfer=self.transfer,
        )


@dataclass(frozen=True)
class Answer:
    """What came of an option.

    times      how many times its ratio it takes; 0 where none keeps the promise for as long as requests come
    outcome    of that cluster, or of the largest that was tried; None where the option cannot be built
    reason     why it cannot
    """

    option: Option
    times: int
    outcome: Outcome | None
    reason: str = ""

    @property
    def holds(self) -> bool:
        """Whether the promise is kept."""
        return self.times > 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON: seconds, tokens a second, watts, dollars."""
        o, t = self.option, self.option.transfer
        target = t.sides[1]
        found: dict[str, Any] = {
            "prefill": o.prefill.name,
            "decode": o.decode.name,
            "prefill_tp": o.prefill_tp,
            "decode_tp": o.decode_tp,
            "ratio": list(o.ratio),
            "configuration": t.configuration,
            "overlap": t.overlap,
            "link": t.link,
            "layout": target.layout,
            "codec": target.codec,
            "calibration": t.calibration.name,
            "holds": self.holds,
            "prefill_instances": o.ratio[0] * self.times,
            "decode_instances": o.ratio[1] * self.times,
            "reason": self.reason,
            "caution": o.caution,
        }
        told = {} if self.outcome is None else {"load": max(self.outcome.load)} | self.outcome.summary()
        # JSON has no NaN, which is the time a token of answers that have one token.
        return found | {key: None if math.isnan(value) else value for key, value in told.items()}


def options(
    prefills: Sequence[Device],
    decodes: Sequence[Device],
    tps: Sequence[tuple[int, int]],
    ratios: Sequence[tuple[int, int]],
    transfers: Sequence[Transfer],
) -> list[Option]:
    """Every combination, in order."""
    return [
        Option(p, d, tp[0], tp[1], ratio, t)
        for p, d, tp, ratio, t in product(prefills, decodes, tps, ratios, transfers)
    ]


def asked(workload: Workload, rate: float | None, requests: int | None = None) -> int | None:
    """How many requests are simulated where `requests` does not say: enough for several answers' time."""
    if requests is not None or workload.recorded or rate is None:
        return requests
    return int(min(max(LEAST_REQUESTS, rate * SECONDS), MOST_REQUESTS))


def _least(base: Scenario, option: Option, most: int) -> int:
    """Times the ratio below which prompts alone are more than the prefill instances can compute.

    Simulating what drowns takes as long as simulating what does not.  Only where arrivals go on for far longer than a
    first token may take: a short burst can be answered late and still in time.
    """
    before, _ = option.scenario(base, 1).rates()
    drawn = base.workload.draw(base.rate, base.requests, base.seed)
    span = float(drawn.arrival[-1] - drawn.arrival[0])
    if span < 20 * base.slo.ttft:
        return 1
    lengths, counts = np.unique(drawn.input, return_counts=True)
    # Without the fixed part of a step, which prompts may share.
    work = sum(before.work(0, int(n)) * int(count) for n, count in zip(lengths, counts, strict=True))
    return min(most, max(1, int(0.8 * work / span / option.ratio[0])))


def _smallest(base: Scenario, attainment: float, most: int, option: Option) -> Answer:
    """Doubles and halves: one more of each instance never makes the promise worse, but for chance."""
    try:
        return _search(base, attainment, most, option, _least(base, option, most))
    except InvalidArgument as error:  # the weights, or a request, are larger than its memory
        return Answer(option, 0, None, str(error))


def _kept(outcome: Outcome, attainment: float) -> bool:
    """Whether the promise is kept, and not only because what was simulated ends before queues have grown too long."""
    return outcome.steady and outcome.attainment >= attainment


def _search(base: Scenario, attainment: float, most: int, option: Option, times: int) -> Answer:
    low, best = times - 1, None
    while best is None:
        outcome = simulate(option.scenario(base, times))
        if _kept(outcome, attainment):
            best = outcome
        elif times >= most:
            why = ", where queues grow for as long as requests come" if max(outcome.load) >= 1 else ""
            return Answer(option, 0, outcome, f"does not hold with {most} times as many either{why}")
        else:
            low, times = times, min(2 * times, most)
    while times - low > 1:
        middle = (low + times) // 2
        outcome = simulate(option.scenario(base, middle))
        if _kept(outcome, attainment):
            times, best = middle, outcome
        else:
            low = middle
    return Answer(option, times, best)


def what_if(
    base: Scenario,
    ways: Sequence[Option],
    *,
    attainment: float = 0.9,
    most: int = MOST,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Answer]:
    """The smallest cluster of each option that keeps `base.slo` for that part of `base`'s requests.

    Those that do come first, the cheapest first; then those that do not, and those that cannot be built.
    Raises `InvalidArgument` where none can be built, with the reason of the first.
    """
    number(attainment, "attainment", 0.0, 1.0)
    if not ways:
        raise InvalidArgument("nothing to compare", field="ways", got="none", expected="1 or more")
    widest = max(max(option.ratio) for option in ways)
    if not 1 <= most <= MOST_INSTANCES // widest:
        raise InvalidArgument(
            "too many instances", field="most", got=most, expected=f"1..{MOST_INSTANCES // widest}"
        )
    found = spread(partial(_smallest, base, attainment, most), ways, workers=workers, progress=progress)
    if all(answer.outcome is None for answer in found):
        raise InvalidArgument(
            "no such cluster can be built",
            field="devices",
            got=found[0].reason,
            expected="room for the model",
        )
    return sorted(found, key=lambda a: (not a.holds, a.outcome is None, _price(a)))


def _price(answer: Answer) -> float:
    return answer.outcome.cost if answer.outcome is not None else 0.0
