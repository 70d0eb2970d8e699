"""What `hawk bench transfer --devices` found, and how it is told."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from hawk.bench.samples import Samples, machine, of_runs
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

_CONTROL = ("connect", "accept", "release")

_FAR = ("tile", "up", "place")
"""Stages of the naive way that follow the job."""

STAGES = {"down": "down", "sockets": "read", "tile": "tile", "up": "up"}
"""Baseline of each stage of the naive way, and the phase or stage that is compared with it."""

PAPER_RATIO = 27.69
"""GN-Host by GN-HAWK at most, as the paper has it."""

GOAL_LARGE, GOAL_SMALL, GOAL_RAW, GOAL_STAGE = 0.0065, 0.165, 0.9, 0.8


@dataclass
class Way:
    """One way at one rate: samples, and medians of everything else."""

    wall: Samples
    phases: dict[str, float]
    stages: dict[str, float]
    control: float
    copies: float

    @classmethod
    def of(cls, nbytes: int, answers: Sequence[dict[str, Any]]) -> Way:
        """Of the decode side's answers."""

        def median(name: str, key: str) -> float:
            return float(statistics.median(answer[name].get(key, 0.0) for answer in answers))

        phases = {key: median("phases", key) for key in answers[0]["phases"]}
        stages = {key: median("stages", key) for key in answers[0]["stages"]}
        control = statistics.median(
            sum(a["phases"].get(name, 0.0) for name in _CONTROL)
            + (
                a["seconds"]
                - sum(a["stages"].get(n, 0.0) for n in _FAR)
                - a["phases"].get("total", a["seconds"])
            )
            for a in answers
        )
        return cls(
            Samples(nbytes, [answer["seconds"] for answer in answers]),
            phases,
            stages,
            control,
            statistics.median(answer["copies"] for answer in answers),
        )

    def to_dict(self) -> dict[str, object]:
        """As in the description of `hawk.bench.between`."""
        found = {
            **self.wall.to_dict(),
            "phases": self.phases,
            "stages": self.stages,
            "control": self.control,
        }
        if self.copies:
            found |= {"copies": self.copies, "copies_gb_per_s": self.wall.nbytes / self.copies / 1e9}
        return found


@dataclass
class SizeResult:
    """Everything of one size; ways by name and rate."""

    nbytes: int
    tokens: int
    baselines: dict[str, Samples] = field(default_factory=dict)
    ways: dict[tuple[str, str], Way] = field(default_factory=dict)

    def median(self, way: str, rate: str) -> float:
        """Seconds."""
        return self.ways[way, rate].wall.median

    @property
    def over_direct(self) -> dict[str, float]:
        """GN-HAWK beside GG-Direct, the median over runs that followed each other: microseconds, and a part."""

        def pairs(rate: str) -> list[tuple[float, float]]:
            ways = (self.ways[way, rate].wall.seconds for way in ("GN-HAWK", "GG-Direct"))
            return list(zip(*ways, strict=True))

        return {
            "full": statistics.median(a - b for a, b in pairs("full")) * 1e6,
            "paced": statistics.median(a / b - 1 for a, b in pairs("paced")),
        }

    @property
    def host_over_hawk(self) -> dict[str, float]:
        """By how much longer the ways by the host take than GN-HAWK, paced."""
        hawk = self.median("GN-HAWK", "paced")
        return {way: self.median(way, "host") / hawk for way in ("GN-Host", "GN-Host, overlapped")}

    @property
    def naive_ratio(self) -> dict[str, float]:
        """Of each stage of the naive way: its rate by that of its baseline."""
        way = self.ways["GN-Host", "host"]
        spent = way.phases | way.stages
        return {
            name: self.baselines[name].median / spent[stage] for name, stage in STAGES.items() if spent[stage]
        }

    @property
    def raw_ratio(self) -> float:
        """The rate of GN-HAWK's copies by the plain copy's."""
        copies = self.ways["GN-HAWK", "full"].copies
        return self.baselines["raw"].median / copies if copies else 0.0

    def to_dict(self) -> dict[str, object]:
        """As in the description of `hawk.bench.between`."""
        ways: dict[str, dict[str, object]] = {}
        for (name, rate), way in self.ways.items():
            ways.setdefault(name, {})[rate] = way.to_dict()
        return {
            "bytes": self.nbytes,
            "tokens": self.tokens,
            "raw": self.baselines["raw"].to_dict(),
            "baselines": {name: s.to_dict() for name, s in self.baselines.items() if name != "raw"},
            "ways": ways,
            "naive_ratio": self.naive_ratio,
            "over_direct": self.over_direct,
            "host_over_hawk": self.host_over_hawk,
            "raw_ratio": self.raw_ratio,
        }


@dataclass
class Result:
    """Outcome of `run`; every byte was compared."""

    devices: str
    names: list[str]
    runs: int
    pace: float
    sizes: list[SizeResult] = field(default_factory=list)

    @property
    def one_gpu(self) -> bool:
        """Whether both are one, so that nothing passes a link."""
        first, _, second = self.devices.partition(",")
        return "host" not in self.devices and first.strip() == second.strip()

    def to_dict(self) -> dict[str, object]:
        """As in the description of `hawk.bench.between`."""
        return {
            "machine": machine(),
            "devices": self.devices,
            "names": self.names,
            "one_gpu": self.one_gpu,
            "channels": "regions in GPU memory: no BAR, no NPU",
            "runs": self.runs,
            "pace": self.pace,
            "correct": True,
            "sizes": [size.to_dict() for size in self.sizes],
        }


# -- telling -------------------------------------------------------------------------------------------------


def render(result: Result, console: Console) -> None:
    """Prints `result` as tables."""
    first, second = result.names
    link = "one GPU, so no link between them" if result.one_gpu else f"{first} to {second}"
    if "host" in result.devices:
        link = (
            "memory of the host and its processors stand in for both GPUs: ways by the host are what they are"
        )
    console.print(
        f"{result.devices}: {link}.  The channels are regions in GPU memory: no BAR, no NPU.  "
        f"Of each {of_runs(result.runs)}; every byte compared.  Paced: {result.pace / 1e9:g} GB/s.",
        highlight=False,
    )
    console.print(_ways(result))
    console.print(_beside(result))


def _ways(result: Result) -> Table:
    table = Table(title="From asking until stored; ms", title_justify="left")
    for title in ("size", "way", "rate"):
        table.add_column(title, no_wrap=True)
    for title in ("median", "fastest", "slowest", "GB/s", "control", "GPU copies", "their GB/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for size in result.sizes:
        label = approximate_size(size.nbytes)
        raw = size.baselines["raw"]
        table.add_row(
            label,
            "a plain copy",
            "full",
            *_ms(raw.median, min(raw.seconds), max(raw.seconds)),
            f"{raw.rate / 1e9:.1f}",
        )
        for (name, rate), way in size.ways.items():
            wall = way.wall
            table.add_row(
                "",
                name,
                rate,
                *_ms(wall.median, min(wall.seconds), max(wall.seconds)),
                f"{wall.rate / 1e9:.1f}",
                *_ms(way.control),
                *(_ms(way.copies) if way.copies else ("",)),
                f"{size.nbytes / way.copies / 1e9:.1f}" if way.copies else "",
            )
        table.add_section()
    return table


def _ms(*seconds: float) -> tuple[str, ...]:
    return tuple(f"{each * 1e3:.2f}" for each in seconds)


def _beside(result: Result) -> Table:
    table = Table(
        title=f"Beside each other (the paper: GN-Host over GN-HAWK {PAPER_RATIO} at most)",
        title_justify="left",
    )
    table.add_column("size", no_wrap=True)
    titles = (
        "HAWK over direct, full",
        "paced",
        "goal",
        "GN-Host by HAWK",
        "overlapped by HAWK",
        "copies by raw",
    )
    for title in (*titles, *(f"naive {name}" for name in STAGES)):
        table.add_column(title, justify="right")
    for size in result.sizes:
        over, host = size.over_direct, size.host_over_hawk
        goal = GOAL_LARGE if size.nbytes >= 300_000_000 else GOAL_SMALL
        table.add_row(
            approximate_size(size.nbytes),
            f"{over['full']:.0f} us",
            _told(over["paced"], over["paced"] <= goal, ".2%"),
            f"{goal:.2%}",
            f"{host['GN-Host']:.1f}",
            f"{host['GN-Host, overlapped']:.1f}",
            _told(size.raw_ratio, size.raw_ratio >= GOAL_RAW, ".2f"),
            *(
                _told(size.naive_ratio.get(name, 0.0), size.naive_ratio.get(name, 0.0) >= GOAL_STAGE, ".2f")
                for name in STAGES
            ),
        )
    return table


def _told(value: float, met: bool, form: str) -> Text:
    return Text(format(value, form), "green" if met else "yellow")
