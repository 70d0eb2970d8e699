"""A pair of engines under load, measured, beside what the simulator foretold of it: `hawk bench serving`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hawk.evaluate.records import Axis, Column, Figure, Origin, Panel, Point, Section, Series, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.evaluate.sources import Source

_RATE = Axis("request rate", "requests/s", "rate_per_s")
_TTFT = Axis("TTFT", "ms", "ttft_ms", log=True)


def sections(sources: Sequence[Source]) -> list[Section]:
    """One section of all such files, or none."""
    found = [s for s in sources if s.benchmark == "load"]
    if not found:
        return []
    words = (
        "A prefill and a decode engine of vLLM on processors, HAWK between them, requests that arrive at random, "
        "whether or not earlier ones are done. The simulator was told the same arrivals and lengths, and rates of "
        "single requests only; paced: also how quick the processors were meanwhile."
    )
    section = Section("Against reality", [words])
    for number, source in enumerate(found, 1):
        suffix = "" if number == 1 else f"-{number}"
        section.items += [_figure(source, f"reality{suffix}"), _table(source, f"reality-table{suffix}")]
        section.words += [f"{source.name}: {line}" for line in source.data.lacks]
    return [section]


def _figure(source: Source, name: str) -> Figure:
    rates = sorted(source.data.rates, key=lambda r: r.per_second)
    percentiles = sorted({c.percentile for rate in rates for c in rate.compared})
    panels = []
    for percentile in percentiles:
        measured: dict[float, float] = {}
        predicted: dict[str, list[Point]] = {}
        for rate in rates:
            for one in rate.compared:
                if one.percentile == percentile:
                    measured[rate.per_second] = one.measured * 1e3
                    predicted.setdefault(one.model, []).append(Point(rate.per_second, one.predicted * 1e3))
        points = tuple(Point(x, y) for x, y in measured.items())
        series = [Series("the engines", "gn-hawk", source.origin, source.name, points)]
        looks = ("gg-host", "gn-host", "gg-direct", "ggh-direct")  # colours and markers only
        for (model, foretold), look in zip(predicted.items(), looks, strict=False):
            series.append(
                Series(model, look, Origin.SIMULATED, f"hawk.serving, fed by {source.name}", tuple(foretold))
            )
        panels.append(Panel(f"P{percentile} TTFT", tuple(series)))
    if not panels:
        panels = [Panel("no rate at which enough requests were answered", ())]
    caption = f"From when a request was due to its first token at the client. {source.told}."
    title = "Time to the first token of two engines under load"
    return Figure(name, title, caption, _RATE, _TTFT, tuple(panels))


def _table(source: Source, name: str) -> Table:
    rows: list[tuple[Any, ...]] = []
    goal = source.data.goal
    for rate in sorted(source.data.rates, key=lambda r: r.per_second):
        about = (100 * rate.fraction, rate.per_second, len(rate.requests), rate.failed, rate.fetched)
        if not rate.compared:  # too many failed: the rate is missed, and stays in the table
            rows.append((*about, "none", None, "", None, None, "no"))
        for one in rate.compared:
            difference = one.predicted / one.measured - 1
            rows.append(
                (
                    *about,
                    f"P{one.percentile}",
                    one.measured * 1e3,
                    one.model,
                    one.predicted * 1e3,
                    100 * difference,
                    "yes" if abs(difference) <= goal else "no",
                )
            )
    columns = (
        Column("load, %", "load_percent", ".0f"),
        Column("requests/s", "rate_per_s", ".2f"),
        Column("requests", "requests", "d"),
        Column("failed", "failed", "d"),
        Column("fetched", "fetched", "d"),
        Column("TTFT", "percentile"),
        Column("measured, ms", "measured_ms", ".1f", source.origin),
        Column("model", "model"),
        Column("simulated, ms", "simulated_ms", ".1f", Origin.SIMULATED),
        Column("difference, %", "difference_percent", "+.1f"),
        Column(f"within {goal:.0%}", "within"),
    )
    caption = (
        "Load: part of what the prefill engine can do. A request that failed counts as never answered; of one whose "
        "cache was not fetched the decode engine has computed the prompt itself. Requests with those of the warm-up. "
        f"{source.told}."
    )
    return Table(name, "Measured beside simulated", caption, columns, tuple(rows))
