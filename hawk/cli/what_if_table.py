"""The table of `hawk evaluate what-if`: what was asked, what holds, and why others do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from hawk.serving.figures import Figure
    from hawk.serving.scenario import Scenario
    from hawk.serving.whatif import Answer, Option

WIDTH = 110


def assumed(base: Scenario, ways: list[Option]) -> list[str]:
    """What of the inputs nobody measured, in words."""
    from hawk.serving.workload import ASSUMED

    calibration = ways[0].transfer.calibration
    devices = {device.name: device for way in ways for device in (way.prefill, way.decode)}
    counted = [(f"of {name}", list(device.figures.values())) for name, device in devices.items()]
    counted.append((f"of calibration {calibration.name}", list(calibration.transfer.values())))
    found = [f"{_many(figures)} figures {what}" for what, figures in counted if _many(figures)]
    if any(key.startswith(base.workload.name) for key in ASSUMED):
        found.append(f"how long {base.workload.name}'s prompts and answers are")
    return found


def _many(figures: list[Figure]) -> str:
    count = sum(one.mark == "assumed" for one in figures)
    return f"{count} of {len(figures)}" if count else ""


def head(base: Scenario, ways: list[Option], attainment: float) -> list[str]:
    """What is promised to whom, and what of the answer stands on assumptions."""
    from hawk.units import format_duration

    rate = "at its own times" if base.rate is None else f"at {base.rate:g} requests a second"
    promise = (
        f"Promise: TTFT {format_duration(base.slo.ttft)} and TPOT {format_duration(base.slo.tpot)}, both for "
        f"{attainment:.0%} of requests.  Asked: {base.workload.name} {rate}, {base.model}, calibration "
        f"{ways[0].transfer.calibration.name}."
    )
    return [promise, f"Assumed: {', '.join(assumed(base, ways))}."]


def render(found: list[Answer], attainment: float, console: Console) -> None:
    """Prints the options that were tried, why some were not or do not hold, and the cheapest that does."""
    from rich import box
    from rich.table import Table

    from hawk.serving.whatif import cheapest

    table = Table(
        title="Simulated; 90th percentiles; the cheapest that keeps its promises first",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for heading in ("prefill", "decode", "way"):
        table.add_column(heading, no_wrap=True)
    for heading in ("GB/s", "kept", "TTFT, s", "TPOT, ms", "tokens/s", "kW", "kUSD"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("holds")
    tried = [one for one in found if one.outcome is not None]
    for one in tried:
        table.add_row(*_row(one))
    console.print(table)
    for reason, ways in _left_out(found).items():
        console.print(f"Left out: {', '.join(ways)}: {reason}.", highlight=False, style="yellow")
    for caution, way in {(o.caution, o.transfer.configuration) for one in tried if (o := one.option).caution}:
        console.print(f"{way}: {caution}.", highlight=False, style="yellow")
    for one in tried:
        if not one.holds:
            o = one.option
            pair = f"{o.prefill_tp} {o.prefill.name} and {o.decode_tp} {o.decode.name}"
            where = f"{o.transfer.configuration} at {o.transfer.link / 1e9:g} GB/s"
            console.print(f"{pair}, {where}: no, {one.reason}.", highlight=False)
    best = cheapest(found)
    if best is not None:
        option, times = best.option, best.times
        console.print(
            f"Cheapest that keeps its promises for {attainment:.0%}: {option.ratio[0] * times} x "
            f"{option.prefill_tp} {option.prefill.name} and {option.ratio[1] * times} x {option.decode_tp} "
            f"{option.decode.name}, {option.transfer.configuration}.",
            highlight=False,
        )
    elif not found[0].holds:
        console.print(f"None keeps its promises for {attainment:.0%}.", highlight=False)


def _left_out(found: list[Answer]) -> dict[str, list[str]]:
    """Why some options cannot be built, and which."""
    reasons: dict[str, list[str]] = {}
    for one in found:
        if one.outcome is None:
            o = one.option
            name = f"{o.prefill_tp} {o.prefill.name} and {o.decode_tp} {o.decode.name}"
            reasons.setdefault(one.reason, [])
            if name not in reasons[one.reason]:
                reasons[one.reason].append(name)
    return reasons


def _row(one: Answer) -> list[str]:
    option, outcome = one.option, one.outcome
    assert outcome is not None
    prefill, decode = outcome.scenario.prefill, outcome.scenario.decode
    return [
        f"{prefill.instances} x {option.prefill_tp} {option.prefill.name}",
        f"{decode.instances} x {option.decode_tp} {option.decode.name}",
        option.transfer.configuration,
        f"{option.transfer.link / 1e9:g}",
        f"{outcome.attainment:.1%}",
        f"{outcome.percentile('ttft', 90):.2f}",
        f"{outcome.percentile('tpot', 90) * 1e3:.0f}",
        f"{outcome.output_throughput:,.0f}",
        f"{outcome.power / 1e3:,.1f}",
        f"{outcome.cost / 1e3:,.0f}",
        "yes" if one.holds else f"no: {one.reason.partition(':')[0]}",
    ]
