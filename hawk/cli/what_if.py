"""`hawk evaluate what-if`: the smallest cluster of each kind that keeps a promise, and the cheapest of them."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import click

from hawk.cli.layout import _pair
from hawk.cli.operate import print_json
from hawk.cli.what_if_table import WIDTH, assumed, head, render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.errors import HawkError
    from hawk.serving.device import Device
    from hawk.serving.scenario import Scenario, Slo
    from hawk.serving.transfer import Configuration, Side, Transfer
    from hawk.serving.whatif import Option
    from hawk.serving.workload import Workload

DEFAULT_WAYS: tuple[Configuration, ...] = ("gn-hawk", "gg-direct")

_OPTIONS = {
    "way": "way",
    "configuration": "way",
    "tp": "tp",
    "block-size": "block-size",
    "overlap": "overlap",
    "rate": "rate",
    "requests": "requests",
    "most": "most",
    "slo.ttft": "ttft",
    "slo.tpot": "tpot",
    "link": "link",
    "codec": "codec",
    "layout": "layout",
}
"""Fields of errors that are options, where no single option is being read."""


_NUMBER = re.compile(r"\d{1,6}(\.\d{1,6})?", re.ASCII)


def _pairs(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> Any:
    """A click callback: `1:2`, any number of them."""
    return tuple(_pair(context, option, text) for text in value)


def _ratios(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> Any:
    """A click callback: `1:2`, any number of them.  One number alone is refused: it may be meant as P:1 or as P:P."""
    return tuple(_ratio(context, option, text) for text in value)


def _ratio(_context: click.Context, option: click.Parameter, text: str) -> Any:
    parts = text.split(":")
    numbers = [Fraction(part) for part in parts if _NUMBER.fullmatch(part) and Fraction(part)]
    if len(numbers) == len(parts) == 2 and all(number.denominator == 1 for number in numbers):
        return tuple(map(int, numbers))
    meant = "such as 3:1"
    if len(numbers) == len(parts) == 1:
        meant = f"{_told(numbers[0])}, if {text} is prefill by decode"
    elif len(numbers) == len(parts) == 2:
        meant = _told(numbers[0] / numbers[1])
    raise click.BadParameter(
        f"not a ratio; got {text!r}; expected P:D, whole numbers of prefill and of decode instances: {meant}",
        param=option,
    )


def _told(ratio: Fraction) -> str:
    return f"{ratio.numerator}:{ratio.denominator}"


def _rate(_context: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """A click callback: requests a second; how many there may be is looked at where they are asked for."""
    if value is not None and not value > 0:
        raise click.BadParameter(
            f"not a rate; got {value:g}; expected above 0, in requests a second", param=option
        )
    return value


def _part(_context: click.Context, option: click.Parameter, value: float) -> float:
    """A click callback: above 0, and 1 at most."""
    if not 0 < value <= 1:
        meant = f": {value / 100:g} for {value:g}%" if 1 < value <= 100 else ", such as 0.9 for 90%"
        raise click.BadParameter(
            f"not a part of the requests; got {value:g}; expected above 0, and 1 at most{meant}", param=option
        )
    return value


def _link(_context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> Any:
    """A click callback: bytes a second, any number of them."""
    from hawk.errors import InvalidArgument
    from hawk.units import parse_rate

    try:
        rates = [(text, parse_rate(text)) for text in value]
        for text, rate in rates:
            if rate < 1.0:
                raise InvalidArgument(
                    "too slow for a link", got=repr(text), expected='above 0, such as "25GB/s" or "200Gb/s"'
                )
        return tuple(rate for _, rate in rates)
    except InvalidArgument as error:
        raise click.BadParameter(_plainly(error), param=option) from None


def _duration(_context: click.Context, option: click.Parameter, value: str | None) -> Any:
    """A click callback: seconds."""
    from hawk.errors import InvalidArgument
    from hawk.units import parse_duration

    try:
        seconds = None if value is None else parse_duration(value)
        if seconds == 0:
            raise InvalidArgument("nothing keeps it", got=repr(value), expected='above 0, such as "500ms"')
        return seconds
    except InvalidArgument as error:
        raise click.BadParameter(_plainly(error), param=option) from None


def _plainly(error: HawkError, whole: bool = False) -> str:
    """What was wrong, what came and what would have been right; with the field where it says more than the option."""
    got = "" if error.got is None else f"; got {error.got}"
    expected = "" if error.expected is None else f"; expected {error.expected}"
    field = f"{error.field}: " if whole and error.field else ""
    hint = f". {error.hint}" if error.hint else ""
    return f"{field}{error.message}{got}{expected}{hint}"


@contextlib.contextmanager
def _naming(option: str = "") -> Iterator[None]:
    """Refusals within are told as those of this option, or of the one that their field is."""
    from hawk.errors import HawkError

    try:
        yield
    except HawkError as error:
        if not error.field:
            raise
        field = error.field
        name = option or _OPTIONS.get(field) or _OPTIONS.get(field.rpartition(": ")[2], "")
        if not name:
            raise click.UsageError(_plainly(error, field != "devices")) from None
        name = _side_of(name, error)
        # A file's own place, its line or key, is kept.
        whole = any(mark in field for mark in (".", ": ", "/")) and not field.startswith("slo.")
        raise click.BadParameter(_plainly(error, whole), param_hint=f"'--{name}'") from None


def _side_of(name: str, error: HawkError) -> str:
    """`source-layout` and `source-codec`, where what came is what was said there."""
    given = click.get_current_context().params
    theirs = given.get(f"source_{name}") if name in ("layout", "codec") else None
    return f"source-{name}" if theirs and theirs != given.get(name) and theirs in str(error.got) else name


@click.command("what-if")
@click.option("--rate", type=float, callback=_rate, help="Requests a second.  [default: a trace's own times]")
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
    callback=_ratios,
    metavar="P:D",
    help="Prefill to decode instances, such as 3:1; may be given again.",
)
@click.option(
    "--way",
    "ways",
    multiple=True,
    help="gg-host or gg-direct (GPU to GPU), gn-host, gn-hawk or single-buffer (GPU to NPU); may be given again.  "
    "[default: gn-hawk or gg-direct]",
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
    type=float,
    default=0.9,
    show_default=True,
    callback=_part,
    help="Part of the requests that both promises are kept for: 0.9 for 90%.",
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

    from hawk.serving.whatif import cheapest
    from hawk.serving.whatif import what_if as answer

    base, ways = _asked(said)
    screen = Console(stderr=True)
    with _naming(), Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
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
        best = cheapest(found)
        asks = {
            "workload": base.workload.name,
            "rate": base.rate,
            "model": base.model,
            "ttft": base.slo.ttft,
            "tpot": base.slo.tpot,
            "attainment": attainment,
            "requests": base.requests,
            "seed": base.seed,
            "calibration": ways[0].transfer.calibration.name,
            "assumed": assumed(base, ways),
        }
        print_json(
            {"asked": asks, "cheapest": best and best.to_dict(), "options": [one.to_dict() for one in found]}
        )
        return
    # Cells are never cut: a narrow terminal folds lines.
    console = Console(width=max(Console().width, WIDTH))
    for line in head(base, ways, attainment):
        console.print(line, highlight=False)
    render(found, attainment, console)


def _asked(said: dict[str, Any]) -> tuple[Any, list[Option]]:
    """The question, and the ways of building a cluster that are compared."""
    from hawk.serving import SLOS, Transfer, Workload, load_calibration
    from hawk.serving.model import load_served
    from hawk.serving.possible import joins
    from hawk.serving.whatif import options

    with _naming("workload"):
        workload = Workload.named(said["workload"])
    with _naming():
        slo = SLOS.get(workload.name, SLOS["chatbot"])
        slo = replace(slo, **{key: said[key] for key in ("ttft", "tpot") if said[key] is not None})
    with _naming("calibration"):
        calibration = load_calibration(said["calibration"])
    with _naming("prefill"):
        prefills = [calibration.device(name) for name in said["prefills"]]
    with _naming("decode"):
        decodes = [calibration.device(name) for name in said["decodes"]]
    overlap: Literal["none", "layers"] = "layers" if said["overlap"] else "none"
    with _naming("model"):
        load_served(said["model"])  # an unknown one is told before anything runs
    with _naming():
        ways: list[Configuration] = list(said["ways"])
        if not ways:
            ways = [w for w in DEFAULT_WAYS if any(joins(w, p, d) for p in prefills for d in decodes)]
            if not ways:  # whatever decodes, one of them ends there: it is where they begin
                raise click.BadParameter(
                    f"every way begins at a GPU; got {', '.join(one.name for one in prefills)}, an NPU; "
                    "expected a GPU that prefills, such as a100",
                    param_hint="'--prefill'",
                )
        transfers = [
            _with_sides(Transfer(way, calibration, link, overlap), said)
            for way in ways
            for link in said["links"]
        ]
        base = _base(said, workload, slo, transfers[0], prefills[0], decodes[0])
        return base, options(prefills, decodes, said["tps"], said["ratios"], transfers)


def _base(
    said: dict[str, Any], workload: Workload, slo: Slo, transfer: Transfer, prefill: Device, decode: Device
) -> Scenario:
    """What every cluster is asked."""
    from hawk.serving import Decode, Prefill, Scenario
    from hawk.serving.whatif import asked

    rate = said["rate"]
    return Scenario(
        Prefill(prefill),
        Decode(decode, max_batch=said["max_batch"]),
        workload,
        transfer,
        model=said["model"],
        rate=rate,
        requests=asked(workload, rate, said["requests"]),
        seed=said["seed"],
        slo=slo,
    )


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
