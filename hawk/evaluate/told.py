"""The summary: what a reader who reads nothing else should know, in plain sentences made from the numbers."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from hawk.bench.between_result import GOAL_STAGE
from hawk.evaluate import beside, paper
from hawk.evaluate.records import Origin
from hawk.evaluate.transfers import FOUR, NAMES, of, way

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.evaluate.simulated import Simulated
    from hawk.evaluate.sources import Source


def summary(
    measured: Sequence[Source],
    elsewhere: Sequence[Source],
    found: Simulated,
    *,
    quick: bool,
    load: float = 0.0,
) -> list[str]:
    """Sentences, the most important first; `load`: the load average of this machine when measuring began."""
    told = []
    if quick:
        told.append(
            "A quick run: small sizes, few runs and few requests show that it works, not how fast it is."
        )
    cpus = len(os.sched_getaffinity(0))
    if measured and load > cpus:
        told.append(
            f"This machine was busy when measuring began: a load average of {load:.1f} on {cpus} processors. What was "
            "measured here is slower and wavers more than on an idle one."
        )
    for source in [*of(measured, "between"), *of(elsewhere, "between")]:
        told += [_transfer(source), *_straw_man(source)]
    told += _buffer([*measured, *elsewhere])
    told += _knees(found)
    told += _efficiency(found)
    sentence, far = beside.verdict(found)
    told.append(f"{sentence} What does not fit is named below." if far else sentence)
    told += _reality([*measured, *elsewhere])
    told.append(
        "What is simulated is no measurement: it follows from the inputs at the end, some of which are assumed and "
        "some of which were chosen so that some of the paper's own results come out."
    )
    return told


def _transfer(source: Source) -> str:
    largest = max(source.data.sizes, key=lambda size: size.bytes)
    times = {key: found for key in FOUR if (found := way(largest, key)) is not None}
    where = "Measured here" if source.origin is Origin.HERE else f"Measured elsewhere ({source.machine})"
    begin = f"{where}, {largest.bytes / 1e6:.0f} MB"
    stand_in = (
        ", with memory of this host in place of both devices, so no GPU, NPU or link is in it"
        if source.data.devices == "host,host"
        else ""
    )
    runs = source.data.runs
    begin += ", one run" if runs == 1 else f", median of {runs} runs (fastest to slowest)"
    parts = [f"{NAMES[key]} {_with_spread(found)}" for key, found in times.items()]
    text = f"{begin}{stand_in}: {', '.join(parts)}"
    if "gn-host" in times and "gn-hawk" in times:
        host, hawk = times["gn-host"], times["gn-hawk"]
        if apart(host, hawk):
            factor = _digits(host.seconds / hawk.seconds, 2)
            text += (
                f"; the naive way takes {factor} times as long as HAWK (the paper: up to {paper.MOST_FASTER})"
            )
            if runs == 1:
                text += ", by one run of each, which has no spread"
    close = [
        f"{NAMES[one]} and {NAMES[other]}"
        for one, other in itertools.combinations(times, 2)
        if not apart(times[one], times[other])
    ]
    if close:
        text += f"; within the spread of their runs, so that neither is the faster: {', '.join(close)}"
    return text + "."


def apart(one: Any, other: Any) -> bool:
    """Whether every run of one sample was quicker than every run of the other."""
    return bool(one.slowest < other.fastest or other.slowest < one.fastest)


def _with_spread(found: Any) -> str:
    median, fastest, slowest = (
        _digits(seconds * 1e3, 4) for seconds in (found.seconds, found.fastest, found.slowest)
    )
    return f"{median} ms" if fastest == slowest else f"{median} ms ({fastest} to {slowest})"


def _straw_man(source: Source) -> list[str]:
    """What of the naive way is slower than it need be at the size that the sentence before this is about."""
    largest = max(source.data.sizes, key=lambda size: size.bytes)
    slow = {stage: found for stage, found in largest.naive_ratio.items() if found < GOAL_STAGE}
    if not slow:
        return []
    stages = ", ".join(f"{stage} at {found:.2f}" for stage, found in slow.items())
    text = (
        f"The naive way is slower there than it need be: of what its stages reach by themselves, {stages}, below "
        f"{GOAL_STAGE:g}. What is said of it is too kind to HAWK."
    )
    return [text]


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
    few = f", coarse with {found.requests} requests a run" if found.quick else ""
    for workload in ("chatbot", "summarization"):
        parts = []
        for key in FOUR:
            run = found.knees.get((workload, key))
            printed = paper.KNEES[workload, key]
            ours = "never" if run is None else f"{run.rate:.2f}"
            parts.append(f"{NAMES[key]} {ours} (paper: {'never' if printed is None else f'{printed:.2f}'})")
        sentences.append(
            f"Simulated, {workload}{few}: the rate up to which 90 % of requests meet the service level, in requests a "
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
