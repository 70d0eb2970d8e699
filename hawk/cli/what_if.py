"""`hawk evaluate what-if`: the smallest cluster of each kind that keeps a promise, and the cheapest of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from hawk.cli.layout import _pair
from hawk.cli.operate import print_json

if TYPE_CHECKING:
    from rich.console import Console

    from hawk.serving.transfer import Side, Transfer
    from hawk.serving.whatif import Answer, Option

WIDTH = 110


def _pairs(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> Any:
    """A click callback: `1:2`, any number of them."""
    return tuple(_pair(context, option, text) for text in value)


def _link(_context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> Any:
    """A click callback: bytes a second, any number of them."""
    from hawk.errors import InvalidArgument
    from hawk.units import parse_rate

    try:
        return tuple(parse_rate(text) for text in value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error), param=option) from None


def _duration(_context: click.Context, option: click.Parameter, value: str | None) -> Any:
    """A click callback: seconds."""
    from hawk.errors import InvalidArgument
    from hawk.units import parse_duration

    try:
        return None if value is None else parse_duration(value)
    except InvalidArgument as error:
        raise click.BadParameter(str(error), param=option) from None


@click.command("what-if")
@click.option("--rate", type=float, help="Requests a second.  [default: a trace's own times]")
@click.option(
    "--workload",
    default="chatbot",
    show_default=True,
    help="chatbot, summarization, or a trace: FILE.jsonl with arrival, input and output.",
)
@click.option("--model", default="llama-3.1-70b", show_default=True)
@click.option("--prefill", "prefills", multiple=True, default=("a100",), show_default=True, metavar="DEVICE")
@click.option("--decode", "decodes", multiple=True, default=("p150a",), show_default=True, metavar="DEVICE")
@click.option(
    "--tp",
    "tps",
    multiple=True,
    default=("4",),
    show_default=True,
    callback=_pairs,
    metavar="N[:N]",
    help="Devices of a prefill and of a decode instance; may be given again.",
)
@click.option(
    "--ratio",
    "ratios",
    multiple=True,
    default=("1:1",),
    show_default=True,
    callback=_pairs,
    metavar="P:D",
    help="Prefill to decode instances; may be given again.",
)
@click.option(
    "--way",
    "ways",
    multiple=True,
    default=("gn-hawk",),
    show_default=True,
    help="gg-host, gn-host, gg-direct, gn-hawk or single-buffer; may be given again.",
)
@click.option(
    "--link",
    "links",
    multiple=True,
    default=("25GB/s",),
    show_default=True,
    callback=_link,
    help="Between nodes; may be given again.",
)
@click.option("--overlap", is_flag=True, help="Layers go while later ones are computed.")
@click.option("--layout", help="Layout of the decode side.  [default: of the way]")
@click.option("--codec", help="Codec of the decode side.")
@click.option("--channels", type=click.IntRange(1, 65536), help="Channels of the decode side.")
@click.option("--source-layout", help="Layout of the prefill side.  [default: of the way]")
@click.option("--source-codec", help="Codec of the prefill side.")
@click.option("--block-size", callback=_pair, metavar="N[:N]", help="Tokens of a block of both sides.")
@click.option(
    "--ttft",
    callback=_duration,
    help="Promise on the first token.  [default: the workload's; chatbot's for a trace]",
)
@click.option("--tpot", callback=_duration, help="Promise on each token after it.  [default: as --ttft]")
@click.option(
    "--attainment",
    type=click.FloatRange(0, 1),
    default=0.9,
    show_default=True,
    help="Part of the requests that both promises are kept for.",
)
@click.option("--calibration", default="paper", show_default=True, help="paper, measured, or a .toml file.")
@click.option("--max-batch", type=click.IntRange(1), default=256, show_default=True)
@click.option("--most", type=click.IntRange(1), default=256, show_default=True, help="Most times the ratio.")
@click.option(
    "--requests",
    type=click.IntRange(1),
    help="Requests of one simulation.  [default: two minutes' worth, 2000 to 200000]",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--workers", type=click.IntRange(1, 1024), help="Processes.  [default: one for each core]")
@click.option("--json", "as_json", is_flag=True, help="Prints one JSON object instead of a table.")
def what_if(as_json: bool, workers: int | None, most: int, attainment: float, **said: Any) -> None:
    """The fewest instances of each kind of cluster that keep a promise, and the cheapest of those that do.

    Every combination of the options that may be given again is simulated.  Devices are names (a100, h100, h200,
    p150a) or paths of .toml files.
    """
    from rich.console import Console
    from rich.progress import Progress

    from hawk.serving.whatif import what_if as answer

    base, ways = _asked(said)
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("simulating", total=len(ways))
        found = answer(
            base,
            ways,
            attainment=attainment,
            most=most,
            workers=workers,
            progress=lambda done, of: bar.update(task, completed=done, total=of),
        )
    if as_json:
        cheapest = found[0].to_dict() if found[0].holds else None
        asks = {
            "workload": base.workload.name,
            "rate": base.rate,
            "model": base.model,
            "ttft": base.slo.ttft,
            "tpot": base.slo.tpot,
            "attainment": attainment,
            "requests": base.requests,
            "seed": base.seed,
        }
        print_json({"asked": asks, "cheapest": cheapest, "options": [one.to_dict() for one in found]})
        return
    # Cells are never cut: a narrow terminal folds lines.
    _render(found, attainment, Console(width=max(Console().width, WIDTH)))


def _asked(said: dict[str, Any]) -> tuple[Any, list[Option]]:
    """The question, and the ways of building a cluster that are compared."""
    from hawk.serving import SLOS, Decode, Prefill, Scenario, Transfer, Workload, load_calibration
    from hawk.serving.whatif import asked, options

    workload = Workload.named(said["workload"])
    slo = SLOS.get(workload.name, SLOS["chatbot"])
    slo = replace(slo, **{key: said[key] for key in ("ttft", "tpot") if said[key] is not None})
    calibration = load_calibration(said["calibration"])
    transfers = [
        _with_sides(Transfer(way, calibration, link, "layers" if said["overlap"] else "none"), said)
        for way in said["ways"]
        for link in said["links"]
    ]
    prefills, decodes = (
        [calibration.device(name) for name in said[side]] for side in ("prefills", "decodes")
    )
    rate = said["rate"]
    base = Scenario(
        Prefill(prefills[0]),
        Decode(decodes[0], max_batch=said["max_batch"]),
        workload,
        transfers[0],
        model=said["model"],
        rate=rate,
        requests=asked(workload, rate, said["requests"]),
        seed=said["seed"],
        slo=slo,
    )
    base.served  # noqa: B018  # an unknown model is told before anything runs
    return base, options(prefills, decodes, said["tps"], said["ratios"], transfers)


def _with_sides(transfer: Transfer, said: dict[str, Any]) -> Transfer:
    blocks = said["block_size"] or (None, None)
    names = (("source_layout", "source_codec", None), ("layout", "codec", "channels"))
    found = [
        _side(side, block, *(said[name] if name else None for name in keys))
        for side, block, keys in zip(transfer.sides, blocks, names, strict=True)
    ]
    return replace(transfer, source=found[0], target=found[1])


def _side(side: Side, block: int | None, layout: str | None, codec: str | None, channels: int | None) -> Side:
    if layout is not None and layout != side.layout:
        # Another layout has codecs and channels of its own.
        side = replace(side, layout=layout, codec=None, channels=None)
    return replace(
        side,
        codec=side.codec if codec is None else codec,
        channels=side.channels if channels is None else channels,
        block=side.block if block is None else block,
    )


def _render(found: list[Answer], attainment: float, console: Console) -> None:
    from rich import box
    from rich.table import Table

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
    if found[0].holds:
        option, times = found[0].option, found[0].times
        console.print(
            f"Cheapest that keeps its promises for {attainment:.0%}: {option.ratio[0] * times} x "
            f"{option.prefill_tp} {option.prefill.name} and {option.ratio[1] * times} x {option.decode_tp} "
            f"{option.decode.name}, {option.transfer.configuration}.",
            highlight=False,
        )
    else:
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
        "yes" if one.holds else "no",
    ]
