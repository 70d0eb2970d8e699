"""Transfers beside plain sockets and a memcpy of the same bytes, in the same run, on the same buffers.

For each size, from buffers that are touched and warm, the median of a number of runs:

- a plain socket copy between two processes, and `np.copyto`;
- the bytes alone over each transport between two processes, as one segment, as 2 KB segments dealt over eight
  channels, and as 2 KB segments in random order (which no plan makes);
- the whole job through two agents (offer, retile, transfer, finish), beside its parts one at a time.

Every way's bytes are compared in the same run.  Sizes are rounded to whole blocks of the device, 8 MiB each.

JSON, seconds and bytes throughout; `gb_per_s` is 10**9 bytes a second; a *sample* is `{seconds, fastest, slowest,
gb_per_s, gb_per_s_most, gb_per_s_least}` with the median run as `seconds` and `gb_per_s`:

    machine      cpus, python, numpy, retile_core
    runs         measured runs of everything; one more came first
    sizes        list of
      asked, bytes, tokens
      sockets, memcpy    samples
      transports         by name:
        beside, goal       "sockets" or "memcpy", and the part of its rate that is the goal
        one, pieces, random    samples
        one_ratio, pieces_ratio, random_ratio    rate by the baseline's, the median over runs
        job                a sample, and mode, bytes, phases, control, parts, parts_sum, over_sum, over_largest;
                           see `hawk.bench.whole_job.WholeJob`
    left_out     list of {asked, reason}
    correct      true: every way's bytes were compared and right (a wrong byte is an error instead)
"""

from __future__ import annotations

import asyncio
import os
import platform
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hawk.bench import bytes_alone, whole_job
from hawk.bench.samples import Samples, machine, of_runs, ratio
from hawk.demo import scenario
from hawk.errors import InvalidArgument
from hawk.memory.available import available_memory
from hawk.retile.native import core_name
from hawk.transports import registry
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = (10_000_000, 80_000_000, 320_000_000, 1_280_000_000)
RUNS = 5

_WORDS = {"one": "one segment", "pieces": "2 KB segments", "random": "2 KB at random"}

GOALS = {bytes_alone.SOCKETS: 0.95, bytes_alone.MEMCPY: 0.9}

_TOKEN_BYTES = 128 << 10
"""Bytes of one token of the model."""


@dataclass
class SizeResult:
    """Everything that was measured of one size.

    beside    by transport: the baseline that it is compared with
    """

    asked: int
    nbytes: int
    tokens: int
    baselines: dict[str, Samples]
    alone: dict[tuple[str, str], Samples]
    jobs: dict[str, whole_job.WholeJob]
    beside: dict[str, str]

    def ratio(self, transport: str, what: str) -> float:
        """The transport's rate (`what`: "one", "pieces" or "random") by its baseline's."""
        return ratio(self.alone[transport, what], self.baselines[self.beside[transport]])

    def to_dict(self) -> dict[str, object]:
        """As in the module's description."""
        return {
            "asked": self.asked,
            "bytes": self.nbytes,
            "tokens": self.tokens,
            **{name: samples.to_dict() for name, samples in self.baselines.items()},
            "transports": {
                name: {
                    "beside": beside,
                    "goal": GOALS[beside],
                    "one": self.alone[name, "one"].to_dict(),
                    "pieces": self.alone[name, "pieces"].to_dict(),
                    "random": self.alone[name, "random"].to_dict(),
                    "one_ratio": self.ratio(name, "one"),
                    "pieces_ratio": self.ratio(name, "pieces"),
                    "random_ratio": self.ratio(name, "random"),
                    "job": self.jobs[name].to_dict(),
                }
                for name, beside in self.beside.items()
            },
        }


@dataclass
class TransferResult:
    """Outcome of `run`; `left_out` are the sizes that memory was too short for, with the reason."""

    runs: int
    sizes: list[SizeResult] = field(default_factory=list)
    left_out: list[tuple[int, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """As in the module's description."""
        return {
            "machine": machine(),
            "runs": self.runs,
            "sizes": [size.to_dict() for size in self.sizes],
            "left_out": [{"asked": asked, "reason": reason} for asked, reason in self.left_out],
            "correct": True,
        }


def run(
    sizes: Sequence[int] = SIZES,
    transports: Sequence[str] = ("tcp", "shm"),
    runs: int = RUNS,
    quick: bool = False,
) -> TransferResult:
    """Measures `sizes` (bytes) over `transports`, `runs` times each; `quick` is one run of the first size.

    Raises `InvalidArgument` or `NotViable` for a transport that cannot be measured here.
    """
    if runs < 1:
        raise InvalidArgument("nothing to measure", field="runs", got=runs, expected="1 or more")
    for asked in sizes:
        if asked < 1:
            raise InvalidArgument("nothing to move", field="sizes", got=asked, expected="1 byte or more")
    beside = {name: _baseline(name) for name in dict.fromkeys(transports)}
    if quick:
        sizes, runs = sizes[:1], 1
    result = TransferResult(runs)
    told = Console(stderr=True, highlight=False)
    for asked in sizes:
        tokens = tokens_of(asked)
        need, there = _needed(tokens), available_memory()
        if need > there:
            reason = f"needs {approximate_size(need)} of memory, {approximate_size(there)} are available"
            result.left_out.append((asked, reason))
            continue
        if told.is_terminal:
            told.print(f"measuring {asked / 1e6:.0f} MB ...")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result.sizes.append(runner.run(_size(asked, tokens, beside, runs)))
    return result


def _baseline(transport: str) -> str:
    """What a transport is compared with: what copies inside one host with a copy, the others with sockets."""
    capabilities = registry.make(transport).capabilities
    return bytes_alone.MEMCPY if capabilities.same_host else bytes_alone.SOCKETS


def tokens_of(asked: int) -> int:
    """Tokens of a cache of about that many bytes, whole blocks of the device."""
    block = scenario.load(1).target.block_size
    return max(1, round(asked / (block * _TOKEN_BYTES))) * block


def _needed(tokens: int) -> int:
    scene = scenario.load(tokens)
    arenas = whole_job.settings(scene, "tcp").arenas
    return scenario.needed(scene, arenas + whole_job.SPARE)


async def _size(asked: int, tokens: int, beside: dict[str, str], runs: int) -> SizeResult:
    scene = scenario.load(tokens)
    names = tuple(beside)
    alone = await bytes_alone.measure(scene.payload, names, runs)
    jobs = await whole_job.measure(scene, names, runs)
    return SizeResult(
        asked=asked,
        nbytes=scene.payload,
        tokens=tokens,
        baselines=alone.baselines,
        alone=alone.transports,
        jobs=jobs,
        beside=beside,
    )


# -- telling -------------------------------------------------------------------------------------------------


def render(result: TransferResult, console: Console) -> None:
    """Prints the bytes alone, then the whole jobs and their parts, then what was left out."""
    cpus = len(os.sched_getaffinity(0))
    console.print(
        f"Python {platform.python_version()} on {cpus} CPUs, retile core {core_name()}; "
        f"{of_runs(result.runs, ', with the slowest and the fastest')}.  1 GB is 10^9 bytes.",
        highlight=False,
    )
    console.print(_alone(result))
    console.print(_jobs(result))
    console.print(_parts(result))
    for asked, reason in result.left_out:
        console.print(Text(f"{asked / 1e6:.0f} MB left out: {reason}", "yellow"))


def _table(title: str, texts: int, *headings: str) -> Table:
    """A table whose first column and those after the next `texts` are numbers."""
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if 0 < i <= texts else "right", no_wrap=True)
    return table


def _alone(result: TransferResult) -> Table:
    names = ("MB", "way", "GB/s", "slowest", "fastest", "ratio", "goal")
    table = _table("The bytes alone; ratio: to memcpy within one host, to sockets otherwise", 1, *names)
    for size in result.sizes:
        label = f"{size.nbytes / 1e6:.1f}"
        for name, samples in size.baselines.items():
            table.add_row(label, name, *samples.told())
            label = ""
        for name, beside in size.beside.items():
            for what, words in _WORDS.items():
                met = size.ratio(name, what)
                table.add_row(
                    "",
                    f"{name}, {words}",
                    *size.alone[name, what].told(),
                    Text(f"{met:.2f}", "green" if met >= GOALS[beside] else "yellow"),
                    f"{GOALS[beside]:.2f}",
                )
        table.add_section()
    return table


def _jobs(result: TransferResult) -> Table:
    table = _table(
        "The whole job", 2, "MB", "over", "mode", "ms", "slowest", "fastest", "GB/s", "control, ms"
    )
    for size in result.sizes:
        label = f"{size.nbytes / 1e6:.1f}"
        for name, job in size.jobs.items():
            seconds = job.wall.seconds
            times = (job.wall.median, max(seconds), min(seconds))
            table.add_row(
                label,
                name,
                job.mode,
                *(f"{t * 1e3:.1f}" for t in times),
                job.wall.told()[0],
                f"{job.control * 1e3:.1f}",
            )
            label = ""
        table.add_section()
    return table


def _parts(result: TransferResult) -> Table:
    names = ("MB", "over", "retile", "bytes", "finish", "sum", "job/sum", "job/largest", "plan")
    table = _table(
        "Its parts alone, milliseconds; goal: job/sum at most 1 (plan, of both sides, is not in the sum)",
        1,
        *names,
    )
    for size in result.sizes:
        label = f"{size.nbytes / 1e6:.1f}"
        for name, job in size.jobs.items():
            table.add_row(
                label,
                name,
                *(f"{job.parts[part] * 1e3:.1f}" for part in whole_job.PARTS),
                f"{job.parts_sum * 1e3:.1f}",
                Text(f"{job.over_sum:.2f}", "green" if job.over_sum <= 1 else "yellow"),
                f"{job.over_largest:.2f}",
                f"{job.parts['plan'] * 1e3:.1f}",
            )
            label = ""
        table.add_section()
    return table
