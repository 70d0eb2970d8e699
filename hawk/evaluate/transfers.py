"""Figures and tables of what was measured, here or elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hawk.evaluate import machines, paper
from hawk.evaluate.records import (
    Axis,
    Column,
    Figure,
    Origin,
    Panel,
    Point,
    Section,
    Series,
    Table,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hawk.evaluate.sources import Source

NAMES = {
    "gg-host": "GG-Host",
    "gn-host": "GN-Host",
    "gg-direct": "GG-Direct",
    "gn-hawk": "GN-HAWK",
    "ggh-direct": "GGH-Direct",
    "gn-host-overlapped": "GN-Host, overlapped",
}
FOUR = ("gg-host", "gn-host", "gg-direct", "gn-hawk")

_RATES = ("paced", "host", "full")
"""A direct way is taken at the paper's link rate where it was measured so."""

SIZE = Axis("size of the KV cache", "MB", "size_mb", log=True)
LATENCY = Axis("latency", "ms", "latency_ms", log=True)


def of(sources: Iterable[Source], benchmark: str) -> list[Source]:
    """Those of one benchmark."""
    return [s for s in sources if s.benchmark == benchmark]


def way(size: Any, key: str) -> Any:
    """The sample of one configuration of a size of `between`, or None."""
    rates = size.ways.get(NAMES[key], {})
    return next((rates[r] for r in _RATES if r in rates), None)


# -- Figure 9 ------------------------------------------------------------------------------------------------


def latency(source: Source, name: str, title: str, *, buffer: bool = False) -> Figure:
    """Figure 9 of one file of `hawk bench transfer --devices`; `buffer`: the single receive buffer's replay follows."""
    series = []
    for key in FOUR:
        points = [
            Point(size.bytes / 1e6, found.seconds * 1e3, found.fastest * 1e3, found.slowest * 1e3)
            for size in source.data.sizes
            if (found := way(size, key)) is not None
        ]
        if points:
            series.append(Series(NAMES[key], key, source.origin, source.name, tuple(points)))
    data = source.data
    link = f"the direct ways paced to {data.pace / 1e9:g} GB/s, the paper's link" if data.pace else "unpaced"
    stand_in = (
        " Memory of this host and its processors stand in for both devices: the order of the ways is their "
        "software's, and no link, GPU or NPU is in it."
        if data.devices == "host,host"
        else " The target's channels are regions in memory of the second GPU."
    )
    caption = (
        f"From asking until stored. {_runs(data.runs)}, ways that are compared by turns; {link}; every byte "
        f"compared. {source.told}.{stand_in} "
        "The single receive buffer has no line: the paper's runs out of memory"
        f"{', as its replay below shows' if buffer else ''}."
    )
    return Figure(name, title, caption, SIZE, LATENCY, (Panel("", tuple(series)),))


_RATIOS = (
    ("gn-host", "gg-host", "GN-Host by GG-Host"),
    ("gg-direct", "gg-host", "GG-Direct by GG-Host"),
    ("gn-hawk", "gg-host", "GN-HAWK by GG-Host"),
)


def ratios(sources: Sequence[Source], simulated: Sequence[Series] = ()) -> Figure:
    """Figure 9's ratios: of every file, of the paper, and simulated (`simulated`: latencies, by configuration)."""
    panels = []
    for top, bottom, title in _RATIOS:
        series = []
        for source, look in zip(sources, _looks(sources), strict=True):
            points = tuple(
                Point(size.bytes / 1e6, a.seconds / b.seconds)
                for size in source.data.sizes
                if (a := way(size, top)) is not None and (b := way(size, bottom)) is not None
            )
            if points:
                label = _short(source)
                if sum(_short(other) == label for other in sources) > 1:
                    label = f"{label}, {source.name}"  # or the legend would have one line for both
                series.append(Series(label, look, source.origin, source.name, points))
        low = {s.way: s for s in simulated}
        if top in low and bottom in low:
            pairs = zip(low[top].points, low[bottom].points, strict=True)
            points = tuple(Point(a.x, a.y / b.y) for a, b in pairs)
            series.append(Series("the paper's hardware", "", Origin.SIMULATED, low[top].source, points))
        small, large = paper.FIGURE_9[top]
        ends = (Point(paper.SMALL, small), Point(paper.LARGE, large))
        series.append(Series("the paper", "", Origin.PAPER, "section 5.2", ends))
        panels.append(Panel(title, tuple(series)))
    caption = (
        "Latency by that of GG-Host on the same hardware. The paper gives the two ends in its text; its GN-HAWK, "
        "printed as a share of GN-Host, fits its other numbers only as one of GG-Host."
    )
    axis = Axis("latency, by GG-Host's", "", "ratio", log=True)
    return Figure("figure-9-ratios", "Figure 9 as ratios", caption, SIZE, axis, tuple(panels))


def _looks(sources: Sequence[Source]) -> list[str]:
    """A look for each file: the configuration is the panel's."""
    others = iter(("another machine", "a third machine", "a fourth machine", "a fifth machine"))
    return ["this machine" if s.origin is Origin.HERE else next(others, "") for s in sources]


def _runs(runs: int) -> str:
    return "One run of each" if runs == 1 else f"Median of {runs} with the fastest and the slowest run"


def _short(source: Source) -> str:
    if source.origin is Origin.HERE:
        return "this machine"
    names = getattr(source.data, "names", None) or [source.name]
    return str(names[0])


def latency_table(sources: Sequence[Source]) -> Table:
    """Every way of every file, with its ratios."""
    columns = (
        Column("size, MB", "size_mb", ".1f"),
        Column("configuration", "configuration"),
        Column("rate", "rate"),
        Column("median, ms", "median_ms", ".2f"),
        Column("fastest, ms", "fastest_ms", ".2f"),
        Column("slowest, ms", "slowest_ms", ".2f"),
        Column("by GG-Host", "by_gg_host", ".2f"),
        Column("by GG-Direct", "by_gg_direct", ".3f"),
        Column("origin", "origin"),
        Column("file", "source"),
    )
    rows = []
    for source in sources:
        for size in source.data.sizes:
            host, direct = way(size, "gg-host"), way(size, "gg-direct")
            for name, rates in size.ways.items():
                for rate, found in rates.items():
                    beside = rates_of(size, "GG-Direct").get(rate, direct)
                    rows.append(
                        (
                            size.bytes / 1e6,
                            name,
                            rate,
                            found.seconds * 1e3,
                            found.fastest * 1e3,
                            found.slowest * 1e3,
                            found.seconds / host.seconds if host else None,
                            found.seconds / beside.seconds if beside else None,
                            source.origin.value,
                            source.name,
                        )
                    )
    caption = (
        "full: as fast as the memories have it; paced: as a link of 25 GB/s would bring the bytes; host: by way of "
        "the host, over sockets. Full ways are held against GG-Direct at full rate, others against it as paced."
    )
    return Table("figure-9-table", "Latency by size and way", caption, columns, tuple(rows))


def rates_of(size: Any, name: str) -> dict[str, Any]:
    """Samples of a way by rate."""
    found: dict[str, Any] = size.ways.get(name, {})
    return found


# -- all of it -------------------------------------------------------------------------------------------------


def section(sources: Sequence[Source], simulated: Sequence[Series] = ()) -> Section:
    """All of it, in order; `simulated`: Figure 9's latencies by the cost model."""
    found = Section("Transfers")
    between = of(sources, "between")
    here = [s for s in between if s.origin is Origin.HERE]
    elsewhere = [s for s in between if s.origin is not Origin.HERE]
    replayed = bool(of(sources, "fragmentation"))
    for number, source in enumerate(here):
        name = "figure-9-here" if not number else f"figure-9-here-{number + 1}"
        title = "Figure 9, measured here: latency by size"
        found.items.append(latency(source, name, title, buffer=replayed))
    for number, source in enumerate(elsewhere, 1):
        title = f"Figure 9, measured elsewhere ({_short(source)}): latency by size"
        found.items.append(latency(source, f"figure-9-elsewhere-{number}", title, buffer=replayed))
    if simulated:
        caption = (
            "The cost model of each configuration on the paper's hardware, in the calibration named under the inputs; "
            "the single receive buffer is left out, since it runs out of memory."
        )
        found.items.append(
            Figure(
                "figure-9-simulated",
                "Figure 9, simulated: latency by size on the paper's hardware",
                caption,
                SIZE,
                LATENCY,
                (Panel("", tuple(simulated)),),
            )
        )
    if between or simulated:
        found.items.append(ratios(between, simulated))
    if between:
        found.items.append(latency_table(between))
    for source in of(sources, "fragmentation")[:1]:
        found.items += machines.fragmentation(source)
    tables = (
        machines.stages(between),
        machines.jobs([*of(sources, "transfer"), *of(sources, "gpu")]),
        machines.retile([*of(sources, "retile"), *of(sources, "retile_cuda")]),
        machines.beside_prefill(of(sources, "overlap")),
    )
    found.items += [table for table in tables if table is not None]
    return found
