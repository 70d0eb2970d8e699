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
from hawk.serving.possible import check_blocks, check_joins, check_share, joins, most_kept
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
    reason     why it cannot, or what promise fails: TTFT, TPOT, or that queues do not grow
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
    """Every combination whose way joins its devices, in order.

    Raises `InvalidArgument` for a way that joins none of these devices.
    """
    for t in transfers:
        if not any(joins(t.configuration, p, d) for p, d in product(prefills, decodes)):
            check_joins(t.configuration, prefills[0], decodes[0])
    return [
        Option(p, d, tp[0], tp[1], ratio, t)
        for p, d, tp, ratio, t in product(prefills, decodes, tps, ratios, transfers)
        if joins(t.configuration, p, d)
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


def _fails(outcome: Outcome, attainment: float) -> str:
    """Which promise a cluster does not keep."""
    if not outcome.steady:
        where = ("prefill", "links", "decode")[outcome.load.index(max(outcome.load))]
        return f"queues grow: {where} can do less than is asked"
    failing = [
        name
        for name, kept in (("TTFT", outcome.ttft_attainment), ("TPOT", outcome.tpot_attainment))
        if kept < attainment
    ]
    return " and ".join(failing) or "TTFT and TPOT together"


def _search(base: Scenario, attainment: float, most: int, option: Option, times: int) -> Answer:
    low, best = times - 1, None
    kept = most_kept(option.scenario(base, times))
    hopeless = [name for name, part in zip(("TTFT", "TPOT"), kept, strict=True) if part < attainment]
    if hopeless:
        least = f"an idle cluster keeps it for {min(kept):.0%} at most: more instances cannot help"
        outcome = simulate(option.scenario(base, times))
        return Answer(option, 0, outcome, f"{' and '.join(hopeless)}: {least}")
    while best is None:
        outcome = simulate(option.scenario(base, times))
        if _kept(outcome, attainment):
            best = outcome
        elif times >= most:
            why = _fails(outcome, attainment)
            tried = "" if most == 1 else f", with {most} times the ratio"
            return Answer(option, 0, outcome, f"{why}{'' if ':' in why else ': too late'}{tried}")
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
    Raises `InvalidArgument` where none can be built, with the reason of the first, and for options that ask for a way
    between devices that it does not join, KV heads that are not shared out evenly, or blocks of parts of tiles.
    """
    number(attainment, "attainment", 0.0, 1.0)
    if not ways:
        raise InvalidArgument("nothing to compare", field="ways", got="none", expected="1 or more")
    widest = max(max(option.ratio) for option in ways)
    if not 1 <= most <= MOST_INSTANCES // widest:
        raise InvalidArgument(
            "too many instances", field="most", got=most, expected=f"1..{MOST_INSTANCES // widest}"
        )
    for option in ways:
        check_joins(option.transfer.configuration, option.prefill, option.decode)
    model = base.served
    for tp in dict.fromkeys(tp for option in ways for tp in (option.prefill_tp, option.decode_tp)):
        check_share(model, tp)
    for transfer, tps in dict.fromkeys((o.transfer.sides, (o.prefill_tp, o.decode_tp)) for o in ways):
        for side, tp, which in zip(transfer, tps, ("prefill", "decode"), strict=True):
            check_blocks(model, side, tp, which)
    found = spread(partial(_smallest, base, attainment, most), ways, workers=workers, progress=progress)
    if all(answer.outcome is None for answer in found):
        raise InvalidArgument(f"no such cluster can be built: {found[0].reason}", field="devices")
    return sorted(found, key=lambda a: (not a.holds, a.outcome is None, bool(a.option.caution), _price(a)))


def cheapest(found: Sequence[Answer]) -> Answer | None:
    """The cheapest that keeps the promise and has nothing against it that is not simulated, if there is one."""
    return next((one for one in found if one.holds and not one.option.caution), None)


def _price(answer: Answer) -> float:
    return answer.outcome.cost if answer.outcome is not None else 0.0
