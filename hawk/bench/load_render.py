"""The tables of `hawk bench serving`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.bench.load_result import GOAL, PARTS, PERCENTILES, medians

if TYPE_CHECKING:
    from rich.console import Console

    from hawk.bench.load_result import Measured


def render(result: Measured, console: Console) -> None:
    """Single requests, what the sides take from each other, and every rate beside what was foretold."""
    from rich.table import Table

    found = result.calibration
    table = Table(title="single requests, ms: median (least to most)")
    for word in ("tokens", "prefill", "fetch", "decode's first step", "HTTP and lines", "first token"):
        table.add_column(word, justify="right")
    for length in found.lengths():
        those = [single for single in found.singles if single.input == length]
        parts = ("prefill", "fetch", "step", "rest", "first")
        table.add_row(str(length), *(medians([getattr(s, part) for s in those]) for part in parts))
    console.print(table)

    table = Table(title="side by side: ms, and how many times as long")
    for word in (
        "requests that decode",
        "decode step",
        "beside a prefill",
        "prefill",
        "fetch",
        "HTTP and lines",
    ):
        table.add_column(word, justify="right")
    prefill, fetch, later = found.slowed("prefill"), found.slowed("fetch"), found.later()
    steps = found.steps_slowed()
    for step in found.steps:
        batch = step.batch
        table.add_row(
            str(batch),
            f"{1e3 * step.seconds:.1f}",
            *(f"x {of[batch]:.2f}" if batch in of else "" for of in (steps, prefill, fetch)),
            f"+ {1e3 * later[batch]:.1f}" if batch in later else "",
        )
    if found.behind:
        table.add_row(
            "the next prefill",
            "",
            "",
            "",
            f"x {found.slowed_behind('fetch'):.2f}",
            f"+ {1e3 * found.later_behind():.1f}",
        )
    console.print(table)

    table = Table(title="time to the first token, ms")
    for word in ("load", "requests a second", "model", *(f"P{p}" for p in PERCENTILES)):
        table.add_column(word, justify="right")
    for rate in result.rates:
        load = f"{rate.fraction:.0%}", f"{rate.per_second:.2f}"
        seen = [f"{1e3 * rate.ttft(p):.0f}" for p in PERCENTILES]
        table.add_row(*load, "measured", *seen)
        models = dict.fromkeys(entry.model for entry in rate.compared)
        for model in models:
            cells = {
                entry.percentile: f"{1e3 * entry.predicted:.0f} ({entry.difference:+.0%})"
                for entry in rate.compared
                if entry.model == model
            }
            table.add_row("", "", model, *(cells.get(p, "") for p in PERCENTILES))
    console.print(table)

    table = Table(title="parts of it, mean ms of all requests")
    for word in ("load", "model", "prefill", "fetch", "decode's first step", "line, HTTP and the rest"):
        table.add_column(word, justify="right")
    for rate in result.rates:
        for model, means in rate.parts.items():
            table.add_row(
                f"{rate.fraction:.0%}", model, *(f"{1e3 * means[p]:.0f}" for p in PARTS if p in means)
            )
    console.print(table)
    for side, pace in result.pace.items():
        if pace.slow:
            slow = [(rate.fraction, pace.mean(rate.at, rate.at + rate.lasted)) for rate in result.rates]
            means_said = ", ".join(f"{mean:.2f} at {fraction:.0%}" for fraction, mean in slow)
            console.print(
                f"processors of {side}: the same work took {min(pace.slow):.2f} to {max(pace.slow):.2f} times "
                f"as long as at full pace; in the mean {means_said}"
            )
    for model, holds in result.holds.items():
        console.print(f"{model}: {'every' if holds else 'not every'} percentile within {GOAL:.0%}")
    for rate in result.rates:
        if rate.failed:
            console.print(f"{rate.fraction:.0%}: {len(rate.failed)} failed, first: {rate.failed[0].error}")
        if rate.fetched < len(rate.requests):
            console.print(f"{rate.fraction:.0%}: only {rate.fetched} caches were fetched")
    for line in result.lacks:
        console.print(line)
    for side, log in result.logs.items():
        console.print(f"log of {side}:", log, sep="\n", markup=False)
