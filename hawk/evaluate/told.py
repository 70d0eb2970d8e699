"""The summary: what a reader who reads nothing else should know, in plain sentences made from the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.evaluate import beside, paper
from hawk.evaluate.records import Origin
from hawk.evaluate.transfers import FOUR, NAMES, of, way

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.evaluate.simulated import Simulated
    from hawk.evaluate.sources import Source


def summary(
    measured: Sequence[Source], elsewhere: Sequence[Source], found: Simulated, *, quick: bool
) -> list[str]:
    """Sentences, the most important first."""
    told = []
    if quick:
        told.append(
            "A quick run: small sizes, few runs and few requests show that it works, not how fast it is."
        )
    told += [_transfer(source) for source in of(measured, "between")]
    told += [_transfer(source) for source in of(elsewhere, "between")]
    told += _buffer([*measured, *elsewhere])
    told += _knees(found)
    told += _efficiency(found)
    told.append(f"{beside.verdict(found)[0]} What does not fit is named below.")
    told += _reality([*measured, *elsewhere])
    told.append(
        "What is simulated is no measurement: it follows from the inputs at the end, some of which are assumed and "
        "some of which were chosen so that some of the paper's own results come out."
    )
    return told


def _transfer(source: Source) -> str:
    largest = max(source.data.sizes, key=lambda size: size.bytes)
    times = {key: found.seconds for key in FOUR if (found := way(largest, key)) is not None}
    where = "Measured here" if source.origin is Origin.HERE else f"Measured elsewhere ({source.machine})"
    begin = f"{where}, {largest.bytes / 1e6:.0f} MB"
    stand_in = (
        ", with memory of this host in place of both devices, so no GPU, NPU or link is in it"
        if source.data.devices == "host,host"
        else ""
    )
    parts = [f"{NAMES[key]} {_digits(seconds * 1e3, 4)} ms" for key, seconds in times.items()]
    text = f"{begin}{stand_in}: {', '.join(parts)}"
    if "gn-host" in times and "gn-hawk" in times:
        factor = times["gn-host"] / times["gn-hawk"]
        text += (
            f"; the naive way takes {_digits(factor, 2)} times as long as HAWK "
            f"(the paper: up to {paper.MOST_FASTER})"
        )
    return text + "."


def _digits(value: float, count: int) -> str:
    """So many significant ones, all of them where more stand before the point, and no exponent."""
    return f"{float(f'{value:.{count}g}'):,.15g}" if value < 10**count else f"{value:,.0f}"


def _buffer(sources: Sequence[Source]) -> list[str]:
    for source in of(sources, "fragmentation"):
        single = [s for s in source.data.schemes if s.name != "per-channel"]
        failed = [s.failure for s in single if s.failure is not None]
        whole = [s for s in source.data.schemes if s.name == "per-channel" and s.failure is None]
        if failed and whole:
            first = min(failed, key=lambda f: f.step)
            text = (
                f"A single receive buffer runs out of memory, as in the paper: at step {first.step} of "
                f"{source.data.steps} {first.asked >> 20:,} MiB do not fit while {first.free >> 20:,} MiB are free. "
                "One region in every channel lasts to the end (a replay on HAWK's own allocator)."
            )
            return [text]
        return ["The paper's single receive buffer did not run out of memory in this replay."]
    return []


def _knees(found: Simulated) -> list[str]:
    sentences = []
    for workload in ("chatbot", "summarization"):
        parts = []
        for key in FOUR:
            run = found.knees.get((workload, key))
            printed = paper.KNEES[workload, key]
            ours = "never" if run is None else f"{run.rate:.2f}"
            parts.append(f"{NAMES[key]} {ours} (paper: {'never' if printed is None else f'{printed:.2f}'})")
        sentences.append(
            f"Simulated, {workload}: the rate up to which 90 % of requests meet the service level, in requests a "
            f"second: {', '.join(parts)}."
        )
    return sentences


def _efficiency(found: Simulated) -> list[str]:
    by_key = {(c.what, c.workload): c for c in beside.compared(found)}
    sentences = []
    for against in ("GG-Direct", "GGH-Direct"):
        parts = []
        for measure, words in (
            ("power", "tokens for each joule"),
            ("cost", "tokens for each dollar of hardware"),
        ):
            each = []
            for workload in ("chatbot", "summarization"):
                one = by_key[f"{measure} efficiency of GN-HAWK by {against}'s", workload]
                if one.simulated is not None:
                    each.append(f"{one.simulated:.2f} times, {workload} (paper: {one.paper:.2f})")
            if each:
                parts.append(f"{words} {' and '.join(each)}")
        if parts:
            sentences.append(f"Simulated, GN-HAWK beside {against} at 90 % attainment: {'; '.join(parts)}.")
    return sentences


def _reality(sources: Sequence[Source]) -> list[str]:
    sentences = []
    for source in of(sources, "load"):
        sentences += [
            f"Against two engines under load ({source.name}) the simulator's {model!r} foretold "
            f"{'every' if source.data.held(model) else 'not every'} percentile within {source.data.goal:.0%}."
            for model in source.data.models
        ]
        if not source.data.models:
            sentences.append(
                f"Two engines under load ({source.name}) answered too few requests to compare the simulator with."
            )
    return sentences
