"""What is simulated beside what the paper prints: its tables 8 and 9, and one table of all its numbers in the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hawk.evaluate import paper
from hawk.evaluate.records import Column, Input, Origin, Section, Table
from hawk.evaluate.transfers import FOUR, NAMES
from hawk.serving import scenario
from hawk.serving.calibration import load_calibration
from hawk.serving.scenario import SLOS
from hawk.serving.workload import ASSUMED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hawk.evaluate.simulated import Run, Simulated
    from hawk.serving.figures import Figure as Value

SLO = {name: (slo.ttft, slo.tpot) for name, slo in SLOS.items()}

_MARKS = {"paper": Origin.PAPER, "assumed": Origin.ASSUMED, "measured": Origin.ELSEWHERE}
_DEVICES = ("a100", "h100", "p150a")
_GGH = "ggh-direct"

NEAR = 0.1
"""A difference of this part of the paper's number is near."""


@dataclass(frozen=True)
class Comparison:
    """One number of the paper; `simulated` is None where the simulation has none (no knee).

    used      whether the calibration was solved from it, or chosen by it
    coarse    whether it stands on so few requests that a difference says little
    """

    what: str
    workload: str
    unit: str
    paper: float | None
    simulated: float | None
    where: str
    form: str = ".2f"
    used: bool = False
    coarse: bool = False

    @property
    def near(self) -> bool:
        """Whether the two differ by `NEAR` at most, or neither is a number."""
        if self.difference is None:
            return self.paper is None and self.simulated is None
        return abs(self.difference) <= NEAR

    @property
    def judged(self) -> str:
        """What may be made of the difference."""
        if self.used:
            return "solved from it"
        if self.coarse:
            return "too few requests"
        return "fits" if self.near else "does not fit"

    @property
    def difference(self) -> float | None:
        """By what part of the paper's number the simulated one differs."""
        if self.paper is None or self.simulated is None or not self.paper:
            return None
        return self.simulated / self.paper - 1

    @property
    def agrees(self) -> str:
        """In words: how far the two lie apart, or that only one of them is a number."""
        if self.paper is None and self.simulated is None:
            return "agrees: never in both"
        if self.paper is None or self.simulated is None:
            return "differs: never in one of them"
        difference = self.difference
        if difference is None:
            return ""
        return f"{round(difference, 3) + 0.0:+.1%}"

    def to_dict(self) -> dict[str, Any]:
        """For the summary as JSON."""
        return {
            "what": self.what,
            "workload": self.workload,
            "unit": self.unit,
            "paper": self.paper,
            "simulated": self.simulated,
            "difference": self.difference,
            "where": self.where,
            "used_for_calibration": self.used,
            "judged": self.judged,
        }


def compared(found: Simulated) -> list[Comparison]:
    """Every number of the paper's text that the simulation has a counterpart of, in the paper's order."""
    return [*_figure_9(found), *_knees(found), *_ratios(found)]


def _figure_9(found: Simulated) -> list[Comparison]:
    low = {s.way: {round(p.x): p.y for p in s.points} for s in found.latencies}
    rows = []
    for way, ends in paper.FIGURE_9.items():
        for size, printed in zip((paper.SMALL, paper.LARGE), ends, strict=True):
            ratio = low[way][round(size)] / low["gg-host"][round(size)]
            what = f"latency of {NAMES[way]} by GG-Host's, {size:g} MB"
            used = ("figure 9", way, size) in paper.SOLVED_FROM
            rows.append(Comparison(what, "", "", printed, ratio, "section 5.2", ".4f", used))
    sizes = low["gn-hawk"]
    faster = max(low["gn-host"][size] / sizes[size] for size in sizes)
    rows.append(Comparison("GN-Host by GN-HAWK, at most", "", "", paper.MOST_FASTER, faster, "abstract"))
    longer = sizes[round(paper.LARGE)] / low["gg-direct"][round(paper.LARGE)] - 1
    what = f"latency of GN-HAWK beyond GG-Direct's, {paper.LARGE:g} MB"
    rows.append(Comparison(what, "", "%", 100 * paper.FROM_DIRECT, 100 * longer, "abstract"))
    return rows


def _knees(found: Simulated) -> list[Comparison]:
    rows = []
    for (workload, way), printed in paper.KNEES.items():
        run = found.knees.get((workload, way))
        what = f"rate of {NAMES[way]} at 90 % attainment"
        rows.append(
            Comparison(
                what,
                workload,
                "requests/s",
                printed,
                None if run is None else run.rate,
                "section 5.3.3",
                ".3f",
                ("knee", workload, way) in paper.SOLVED_FROM,
                found.quick,
            )
        )
    return rows


def _ratios(found: Simulated) -> list[Comparison]:
    rows = []
    for workload, change in paper.THROUGHPUT.items():
        rows.append(
            Comparison(
                "output throughput of GN-HAWK by GG-Direct's",
                workload,
                "",
                1 + change,
                _ratio(found, workload, "gg-direct", "throughput"),
                "section 5.3.4",
                ".4f",
                coarse=found.quick,
            )
        )
    for against, table, number in (("gg-direct", paper.TABLE_8, 8), (_GGH, paper.TABLE_9, 9)):
        for (workload, measure), printed in table.items():
            what = f"{_MEASURES[measure][0]} of GN-HAWK by {NAMES[against]}'s"
            value = _ratio(found, workload, against, measure)
            where = f"table {number}, section 5.4"
            used = (f"table {number}", workload, measure) in paper.SOLVED_FROM
            rows.append(Comparison(what, workload, "", printed, value, where, used=used, coarse=found.quick))
    return rows


_MEASURES: dict[str, tuple[str, str, Callable[[Run], float]]] = {
    "throughput": ("output throughput", "tokens/s", lambda run: run.throughput),
    "power": ("power efficiency", "tokens/J", lambda run: run.per_watt),
    "cost": ("cost efficiency", "tokens/s for 1000 USD", lambda run: 1000 * run.per_dollar),
}


def _ratio(found: Simulated, workload: str, against: str, measure: str) -> float | None:
    ours, theirs = (found.knees.get((workload, way)) for way in ("gn-hawk", against))
    if ours is None or theirs is None:
        return None
    value = _MEASURES[measure][2]
    below = float(value(theirs))
    return float(value(ours)) / below if below else None


# -- tables ----------------------------------------------------------------------------------------------------


def efficiency(found: Simulated, number: int) -> Table:
    """Table 8 (against GG-Direct) or 9 (against GGH-Direct)."""
    against, printed = ("gg-direct", paper.TABLE_8) if number == 8 else (_GGH, paper.TABLE_9)
    rows: list[tuple[Any, ...]] = []
    for workload in ("chatbot", "summarization"):
        ours, theirs = (found.knees.get((workload, way)) for way in ("gn-hawk", against))
        for measure, (words, unit, value) in _MEASURES.items():
            pair = tuple(None if run is None else float(value(run)) for run in (theirs, ours))
            ratio = _ratio(found, workload, against, measure)
            said = printed.get((workload, measure))
            if said is None and measure == "throughput":
                said = 1 + paper.THROUGHPUT[workload]
            difference = None if ratio is None or said is None else 100 * (ratio / said - 1)
            rows.append((workload, words, unit, *pair, ratio, said, difference))
        rows += _of_devices(workload, theirs, ours)
    name = NAMES[against]
    columns = (
        Column("workload", "workload"),
        Column("at 90 % attainment", "measure"),
        Column("unit", "unit"),
        Column(name, "against", "digits", Origin.SIMULATED),
        Column("GN-HAWK", "gn_hawk", "digits", Origin.SIMULATED),
        Column(f"GN-HAWK by {name}", "ratio", ".3f", Origin.SIMULATED),
        Column(f"GN-HAWK by {name}", "ratio_paper", ".3f", Origin.PAPER),
        Column("difference, %", "difference_percent", "+.1f"),
    )
    caption = (
        "Output tokens a second by the power of all devices' ASICs, averaged over the run, and by the price of all "
        f"devices. The paper's table bodies are not in its text, its ratios are. {found.told}."
        + (f" {coarse(found)}" if found.quick else "")
    )
    title = f"Table {number}, simulated: efficiency of GN-HAWK beside {name}"
    return Table(f"table-{number}", title, caption, columns, tuple(rows))


def _of_devices(workload: str, theirs: Run | None, ours: Run | None) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    for words, unit, name in (
        ("request rate", "requests/s", "rate"),
        ("power of all ASICs", "W", "power"),
        ("price of all devices", "USD", "cost"),
    ):
        pair = tuple(None if run is None else float(getattr(run, name)) for run in (theirs, ours))
        rows.append((workload, words, unit, *pair, None, None, None))
    return rows


def against_paper(found: Simulated) -> Table:
    """Every number of the paper's text beside the simulated one."""
    columns = (
        Column("what", "what"),
        Column("workload", "workload"),
        Column("unit", "unit"),
        Column("paper", "paper", "digits", Origin.PAPER),
        Column("simulated", "simulated", "digits", Origin.SIMULATED),
        Column("difference, %", "difference_percent", "+.1f"),
        Column("verdict", "verdict"),
        Column("calibration", "calibration"),
        Column("in the paper", "where"),
    )
    rows = tuple(
        (
            c.what,
            c.workload,
            c.unit,
            "never" if c.paper is None else c.paper,
            "never" if c.simulated is None else c.simulated,
            c.agrees if c.difference is None else 100 * c.difference,
            c.judged,
            found.calibration,
            c.where,
        )
        for c in compared(found)
    )
    caption = (
        f"Every result of the paper that its text gives as a number. {found.told}. Fits: within {NEAR:.0%}. Solved "
        "from it: the calibration was solved from this number or chosen by it, so that it comes out is no finding."
        + (f" {coarse(found)}" if found.quick else "")
    )
    return Table("against-paper", "The paper, simulated, and the difference", caption, columns, rows)


def order(found: Simulated) -> Table:
    """Which configuration has the shorter P90 TTFT, at each rate."""
    rows = []
    for workload in ("chatbot", "summarization"):
        by_rate: dict[float, list[tuple[float, str]]] = {}
        for way in FOUR:
            for run in found.of(workload, way):
                by_rate.setdefault(run.rate, []).append((run.ttft_p90, way))
        for rate, runs in sorted(by_rate.items()):
            direct = {way: ttft for ttft, way in runs}
            holds = max(direct["gg-direct"], direct["gn-hawk"]) < direct["gg-host"] < direct["gn-host"]
            told = " < ".join(NAMES[way] for _, way in sorted(runs))
            rows.append((workload, rate, told, "yes" if holds else "no"))
    columns = (
        Column("workload", "workload"),
        Column("requests/s", "rate_per_s", ".2f"),
        Column("P90 TTFT, shortest first", "order", "", Origin.SIMULATED),
        Column("as in the paper", "holds"),
    )
    caption = (
        "The paper: GG-Direct and GN-HAWK close together, then GG-Host, then GN-Host, at every rate. Far beyond its "
        "knee a configuration's TTFT is that of a line which grows for as long as the run lasts."
    )
    return Table("order", "The order of the four configurations", caption, columns, tuple(rows))


def verdict(found: Simulated) -> tuple[str, list[str]]:
    """How many of the paper's numbers come out within `NEAR`, as sentences, and those that do not.

    Only numbers count that the calibration was not solved from, and of these only such as stand on enough requests.
    """
    rows = compared(found)
    free = [c for c in rows if not c.used]
    judged = [c for c in free if not c.coarse]
    fit = sum(c.near for c in judged)
    which = "not used for the calibration"
    if len(free) > len(judged):
        which = f"neither used for the calibration nor had from {found.requests} requests alone"
    sentence = (
        f"{fit} of {len(judged)} numbers of the paper that were {which} come out within {NEAR:.0%}; "
        f"{len(rows) - len(free)} more were used for it and are no test of it."
    )
    if len(free) > len(judged):
        sentence += f" {len(free) - len(judged)} others are not judged. {coarse(found)}"
    return sentence, [
        _told(c) for c in rows if c.judged == "does not fit" or (c.used and not c.near and not c.coarse)
    ]


def coarse(found: Simulated) -> str:
    """What a run with few requests says of its knees."""
    return (
        f"With {found.requests} requests a run knees are coarse, and so is all that follows from them; without --quick "
        "there are more."
    )


def _told(one: Comparison) -> str:
    where = f", {one.workload}" if one.workload else ""
    paper_says, ours = ("never" if v is None else format(v, one.form) for v in (one.paper, one.simulated))
    return f"{one.what}{where}: {ours} (paper: {paper_says})"


def sections(found: Simulated, _: object = None) -> list[Section]:
    """Efficiency, then the paper beside all of it."""
    sentence, far = verdict(found)
    words = [
        f"Calibration {found.calibration!r}: {load_calibration(found.calibration).summary}. {sentence}",
        f"What does not fit: {'; '.join(far)}." if far else "Nothing lies further off.",
    ]
    return [
        Section("Efficiency", [], [efficiency(found, 8), efficiency(found, 9)]),
        Section("Beside the paper", words, [against_paper(found), order(found)]),
    ]


# -- inputs ------------------------------------------------------------------------------------------------------


def inputs(found: Simulated) -> list[Input]:
    """Settings of the paper, figures of devices, of transfers and of workloads, and the run's own."""
    rows = [
        Input("the paper's system", s.name, s.value, Origin.PAPER, s.where, "stated") for s in paper.SETTINGS
    ]
    calibration = load_calibration(found.calibration)
    for device in _DEVICES:
        rows += _figures(f"device {device}", calibration.device(device).figures.items())
    of_transfers = ((key, one) for key, one in calibration.transfer.items())
    rows += _figures(f"transfers, calibration {found.calibration!r}", of_transfers)
    rows += _figures("workloads", ASSUMED.items())
    rows += _figures("the paper's system, where its text is silent", scenario.ASSUMED.items())
    why = "chosen for this run; --quick takes fewer" if not found.quick else "chosen for --quick"
    rows.append(
        Input("the simulation", "requests of each run", str(found.requests), Origin.ASSUMED, why, "set")
    )
    rows.append(Input("the simulation", "seed", str(found.seed), Origin.ASSUMED, "--seed", "set"))
    return rows


def _figures(group: str, named: Iterable[tuple[str, Value]]) -> list[Input]:
    return [
        Input(
            group,
            name,
            f"{one.value:.6g}" if one.unit in ("", "1") else f"{one.value:.6g} {one.unit}",
            _MARKS[one.mark],
            one.source if one.low is None else f"{one.source}; chosen between {one.low:g} and {one.high:g}",
            _how(one),
        )
        for name, one in named
    ]


def _how(one: Value) -> str:
    """The devices' and calibrations' figures that bear the paper's mark are all solved: what it states are settings."""
    if one.mark == "assumed":
        return "chosen by the paper's results" if one.source.startswith("chosen") else "assumed"
    return "solved from the paper" if one.mark == "paper" else "measured"
