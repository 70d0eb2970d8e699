"""The paper's serving runs, simulated: rates, knees and efficiencies, from `hawk.serving`, beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hawk.errors import MissingDependency
from hawk.evaluate import beside, reality
from hawk.evaluate.records import Axis, Figure, Input, Line, Origin, Panel, Point, Section, Series
from hawk.evaluate.transfers import FOUR, NAMES
from hawk.extras import install
from hawk.serving.calibration import load_calibration
from hawk.serving.scenario import paper_scenario
from hawk.serving.sweep import Knee, knee, spread, sweep
from hawk.serving.transfer import Transfer

if TYPE_CHECKING:
    from hawk.evaluate.sources import Source
    from hawk.serving.scenario import Scenario

WORKLOADS = {"chatbot": "Chatbot", "summarization": "Summarization"}
RATES = (0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8)
QUICK_RATES = (0.2, 0.4, 0.6, 0.8)
REQUESTS, QUICK_REQUESTS = 4000, 400
ATTAINMENT = 0.9
LOWEST_RATE = 0.05
"""At which a configuration that does not hold is said never to."""
CALIBRATION = "paper"
GGH = "ggh-direct"

_SIZES = tuple(10e6 * 2**n for n in range(8))

RATE = Axis("request rate", "requests/s", "rate_per_s")


@dataclass(frozen=True)
class Run:
    """What one simulation has seen at one rate; seconds, tokens a second, watts, dollars."""

    workload: str
    way: str
    rate: float
    ttft_p90: float
    tpot_p90: float
    attainment: float
    throughput: float
    power: float
    cost: float

    @property
    def per_watt(self) -> float:
        """Output tokens a second for each watt of all devices: tokens a joule."""
        return self.throughput / self.power

    @property
    def per_dollar(self) -> float:
        """Output tokens a second for each dollar of all devices."""
        return self.throughput / self.cost


@dataclass
class Simulated:
    """Runs at every rate, and at the knees: the highest rates with 90 % attainment, None where there is none."""

    quick: bool
    seed: int
    requests: int
    calibration: str
    runs: list[Run] = field(default_factory=list)
    knees: dict[tuple[str, str], Run | None] = field(default_factory=dict)
    latencies: list[Series] = field(default_factory=list)

    @property
    def told(self) -> str:
        """Where simulated points are from."""
        return f"hawk.serving, calibration {self.calibration!r}, {self.requests} requests, seed {self.seed}"

    def of(self, workload: str, way: str) -> list[Run]:
        """Of one configuration, by rate."""
        return sorted((r for r in self.runs if (r.workload, r.way) == (workload, way)), key=lambda r: r.rate)

    def inputs(self) -> list[Input]:
        """Everything that the simulated numbers follow from."""
        return beside.inputs(self)

    def sections(self, sources: Sequence[Source]) -> list[Section]:
        """Serving, efficiency, the paper beside it, and reality beside the simulator."""
        return [*serving_sections(self), *beside.sections(self, sources), *reality.sections(sources)]

    def facts(self) -> dict[str, Any]:
        """For the summary as JSON."""
        return {
            "calibration": self.calibration,
            "requests": self.requests,
            "knees": {
                workload: {
                    way: None if run is None else run.rate
                    for (w, way), run in self.knees.items()
                    if w == workload
                }
                for workload in WORKLOADS
            },
            "against_paper": [c.to_dict() for c in beside.compared(self)],
        }


def library() -> None:
    """Raises `MissingDependency` without the library that `hawk.serving` stands on."""
    try:
        import simpy  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "the simulated part needs SimPy", field="simpy", got=error, hint=install("evaluate")
        ) from error


def simulate(
    *, quick: bool, seed: int, workers: int | None, told: Callable[[str], None] = lambda _: None
) -> Simulated:
    """Every configuration of both workloads at every rate, then each one's knee.

    Raises `MissingDependency` without the extra `evaluate`.
    """
    requests, rates = (QUICK_REQUESTS, QUICK_RATES) if quick else (REQUESTS, RATES)
    found = Simulated(quick, seed, requests, CALIBRATION)
    found.latencies = _latencies(found)
    every = [(workload, way) for workload in WORKLOADS for way in (*FOUR, GGH)]
    # GGH-Direct has a place in Table 9 alone.
    wanted = {
        (workload, way, rate): scenario(workload, way, rate, requests=requests, seed=seed)
        for workload, way in every
        for rate in rates
        if way != GGH
    }

    def so_far(done: int, total: int) -> None:
        told(f"simulating serving, {done} of {total}")

    outcomes = sweep(list(wanted.values()), workers=workers, progress=so_far)
    for (workload, way, rate), outcome in zip(wanted, outcomes, strict=True):
        found.runs.append(run_of(workload, way, rate, outcome))
    first = [scenario(workload, way, rates[0], requests=requests, seed=seed) for workload, way in every]

    def looked(done: int, total: int) -> None:
        told(f"looking for 90 % attainment, {done} of {total}")

    knees = spread(knee_of, first, workers=workers, progress=looked)
    for (workload, way), one in zip(every, knees, strict=True):
        reached = one.rate > 0
        found.knees[workload, way] = run_of(workload, way, one.rate, one.outcome) if reached else None
    return found


def knee_of(scenario: Scenario) -> Knee:
    """The highest rate at which 90 % of requests meet the paper's service level."""
    return knee(scenario, ATTAINMENT, low=LOWEST_RATE, high=8.0)


def scenario(workload: str, way: str, rate: float, *, requests: int, seed: int) -> Scenario:
    """The paper's system in one configuration; `GGH` is GG-Direct with H100 that decode."""
    configuration: Any = "gg-direct" if way == GGH else way
    return paper_scenario(
        configuration, workload, rate, decoder="h100" if way == GGH else None, requests=requests, seed=seed
    )


def run_of(workload: str, way: str, rate: float, outcome: Any) -> Run:
    """An outcome's numbers."""
    return Run(
        workload,
        way,
        rate,
        ttft_p90=outcome.percentile("ttft", 90),
        tpot_p90=outcome.percentile("tpot", 90),
        attainment=outcome.attainment,
        throughput=outcome.output_throughput,
        power=outcome.power,
        cost=outcome.cost,
    )


def _latencies(found: Simulated) -> list[Series]:
    """Figure 9 by the cost model."""
    calibration = load_calibration(found.calibration)
    series = []
    for way in FOUR:
        transfer = Transfer(way, calibration)  # type: ignore[arg-type]
        points = tuple(Point(n / 1e6, transfer.seconds(n) * 1e3) for n in _SIZES)
        source = f"hawk.serving.Transfer, calibration {found.calibration!r}"
        series.append(Series(NAMES[way], way, Origin.SIMULATED, source, points))
    return series


# -- figures 10 to 13 ----------------------------------------------------------------------------------------


def serving_sections(found: Simulated) -> list[Section]:
    """Figures 10 to 13."""
    words = (
        "One prefill instance of four A100 and one decode instance of four A100 (GG) or four p150a (GN), 200 Gb/s "
        "between them, Llama 3.1 70B, Poisson arrivals, as in the paper's section 5.1. All of it is simulated: no GPU "
        "and no NPU had a part in it. What the simulator is made from stands under the inputs."
    )
    figures = [
        _by_rate(
            found, "figure-10", "Figure 10, simulated: P90 time to the first token", "ttft_p90", "P90 TTFT", 0
        ),
        _by_rate(
            found, "figure-11", "Figure 11, simulated: P90 time per output token", "tpot_p90", "P90 TPOT", 1
        ),
        _attainment(found),
    ]
    return [Section("Serving", [words], [*figures, _throughput(found)])]


def _by_rate(found: Simulated, name: str, title: str, value: str, label: str, which: int) -> Figure:
    panels = []
    for workload, words in WORKLOADS.items():
        slo = beside.SLO[workload][which]
        panels.append(
            Panel(
                words,
                _series(found, workload, lambda run: getattr(run, value) * 1e3),
                (Line(f"SLO {slo * 1e3:,g} ms", slo * 1e3),),
            )
        )
    caption = f"90th percentile over requests behind the warm-up; {found.told}. The line: the paper's service level."
    return Figure(
        name,
        title,
        caption,
        RATE,
        Axis(label, "ms", value.replace("_p90", "_p90_ms"), log=True),
        tuple(panels),
    )


def _attainment(found: Simulated) -> Figure:
    panels = [
        Panel(
            words,
            _series(found, workload, lambda run: 100 * run.attainment),
            (Line("90 %", 90.0),),
        )
        for workload, words in WORKLOADS.items()
    ]
    caption = f"The part of requests with both TTFT and TPOT within the paper's service level; {found.told}."
    axis = Axis("SLO attainment", "% of requests", "attainment_percent")
    return Figure("figure-12", "Figure 12, simulated: SLO attainment", caption, RATE, axis, tuple(panels))


def _series(found: Simulated, workload: str, value: Callable[[Run], float]) -> tuple[Series, ...]:
    return tuple(
        Series(
            NAMES[way],
            way,
            Origin.SIMULATED,
            found.told,
            tuple(Point(run.rate, y) for run in found.of(workload, way) if math.isfinite(y := value(run))),
        )
        for way in FOUR
    )


def _throughput(found: Simulated) -> Figure:
    panels = []
    for workload, words in WORKLOADS.items():
        series = []
        for at, way in enumerate(FOUR):
            run = found.knees.get((workload, way))
            if run is not None:
                series.append(
                    Series(NAMES[way], way, Origin.SIMULATED, found.told, (Point(float(at), run.throughput),))
                )
        panels.append(Panel(words, tuple(series)))
    caption = (
        "Output tokens a second at the highest rate with 90 % attainment; a configuration without a bar does not reach "
        f"90 % at {LOWEST_RATE:g} requests a second, the lowest that is tried. {found.told}."
    )
    names = tuple(NAMES[way] for way in FOUR)
    return Figure(
        "figure-13",
        "Figure 13, simulated: output throughput at 90 % attainment",
        caption,
        Axis("configuration", "", "configuration_number", names=names),
        Axis("output throughput", "tokens/s", "tokens_per_s"),
        tuple(panels),
        form="bars",
    )
