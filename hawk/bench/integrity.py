"""What end-to-end checks, scrubbing and TLS cost, beside the same without them, in one run.

- the check alone, in one thread, of one chunk: where the sender has it (in one piece) and where the receiver has it (in
  pages dealt over channels), beside `np.copyto` of as many bytes;
- the bytes alone over `tcp`, plain and with TLS, between two processes, as in `hawk bench transfer`;
- the whole job through two agents: over `shm` without anything, with a sample checked, with everything checked, and
  scrubbed; over `tcp` plain and with TLS.  All agents are there at once, and the ways take turns.

The bytes of every way are compared afterwards, and a flipped bit has to change a check.

JSON, seconds and bytes throughout; a *sample* is as in `hawk bench transfer`:

    machine      cpus, python, numpy, retile_core
    runs, bytes, tokens
    check        copy, sent, landed (samples); sent_ratio, landed_ratio: rate by the copy's
    alone        by way ("tcp", "tcp+tls"): one, pieces (samples); ratio of each to plain tcp's
    jobs         by way: a sample, mode, phases, and over: its time by that of the way it is compared with (beside)
    left_out     by way: the reason
    correct      true: every way's bytes were compared and right (a wrong byte is an error instead)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hawk.bench import bytes_alone, check_alone, transfer, whole_job
from hawk.bench.samples import Samples, machine, of_runs, ratio
from hawk.cache import KVCache
from hawk.control.certificates import new_certificates
from hawk.demo import agents, engine, scenario
from hawk.errors import InternalError, InvalidArgument, MissingDependency, OutOfMemory, UnknownRequest
from hawk.folders import TemporaryFolder
from hawk.memory.available import available_memory
from hawk.retile.native import core_name
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hawk.bench.serving import Ways
    from hawk.client import Client
    from hawk.demo.scenario import Scenario
    from hawk.handles import Cache, DeviceCache

SIZE = 80_000_000
QUICK = 8_000_000
RUNS = 5

_TIMEOUT = 120.0
_TLS = "tcp+tls"


@dataclass(frozen=True)
class _Way:
    """A way to do the whole job: what the agents' configuration says, and which way it is compared with."""

    name: str
    transport: str
    beside: str
    tables: str = ""


WAYS = (
    _Way("shm", "shm", "shm"),
    _Way("shm, sample", "shm", "shm", '[integrity]\nverify = "sample"'),
    _Way("shm, full", "shm", "shm", '[integrity]\nverify = "full"'),
    _Way("shm, scrub", "shm", "shm", "[integrity]\nscrub = true"),
    _Way("tcp", "tcp", "tcp"),
    _Way(_TLS, "tcp", "tcp"),
)


@dataclass
class JobResult:
    """The whole job one way; `over` is its time by that of the way `beside`, the median over runs."""

    beside: str
    mode: str
    wall: Samples
    phases: dict[str, float]
    over: float = 1.0


@dataclass
class IntegrityResult:
    """Outcome of `run`, as in the module's description."""

    runs: int
    nbytes: int
    tokens: int
    check: dict[str, Samples] = field(default_factory=dict)
    alone: dict[tuple[str, str], Samples] = field(default_factory=dict)
    jobs: dict[str, JobResult] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def check_ratio(self, what: str) -> float:
        """The check's rate ("sent" or "landed") by the copy's."""
        return ratio(self.check[what], self.check["copy"])

    def alone_ratio(self, way: str, what: str) -> float:
        """The way's rate by plain tcp's."""
        return ratio(self.alone[way, what], self.alone["tcp", what])

    def to_dict(self) -> dict[str, object]:
        """As in the module's description."""
        ways = dict.fromkeys(way for way, _ in self.alone)
        return {
            "machine": machine(),
            "runs": self.runs,
            "bytes": self.nbytes,
            "tokens": self.tokens,
            "check": {
                **{name: samples.to_dict() for name, samples in self.check.items()},
                "sent_ratio": self.check_ratio("sent"),
                "landed_ratio": self.check_ratio("landed"),
            },
            "alone": {
                way: {
                    what: {**self.alone[way, what].to_dict(), "ratio": self.alone_ratio(way, what)}
                    for what in ("one", "pieces")
                }
                for way in ways
            },
            "jobs": {
                name: {
                    **job.wall.to_dict(),
                    "beside": job.beside,
                    "over": job.over,
                    "mode": job.mode,
                    "phases": job.phases,
                }
                for name, job in self.jobs.items()
            },
            "left_out": self.left_out,
            "correct": True,
        }


def run(size: int = SIZE, ways: Sequence[str] = (), runs: int = RUNS, quick: bool = False) -> IntegrityResult:
    """Measures a cache of about `size` bytes, `runs` times each way; `quick` is one run of `QUICK` bytes.

    ways    names of the whole jobs to measure, beside those they are compared with; none: all

    Raises `InvalidArgument` for a way that is none or nothing to measure, `OutOfMemory` where the caches of all ways do
    not fit.
    """
    known = {way.name: way for way in WAYS}
    for name in ways:
        if name not in known:
            raise InvalidArgument(
                "no such way", field="way", got=name, expected=" or ".join(map(repr, known))
            )
    wanted = {name for way in ways or known for name in (way, known[way].beside)}
    chosen = [way for way in WAYS if way.name in wanted]
    if runs < 1:
        raise InvalidArgument("nothing to measure", field="runs", got=runs, expected="1 or more")
    if size < 1:
        raise InvalidArgument("nothing to move", field="size", got=size, expected="1 byte or more")
    if quick:
        size, runs = QUICK, 1
    tokens = transfer.tokens_of(size)
    scene = scenario.load(tokens)
    need, there = _needed(scene, len(chosen)), available_memory()
    if need > there:
        raise OutOfMemory(
            "the caches of all ways do not fit at once",
            field="size",
            got=f"{approximate_size(need)} needed",
            expected=f"{approximate_size(there)} or less",
        )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(scene, chosen, runs))


def _needed(scene: Scenario, ways: int) -> int:
    each = scene.target_bytes + whole_job.SPARE + whole_job.settings(scene, "tcp").arenas + scenario.PROCESSES
    return scene.source_bytes + ways * each


async def _measure(scene: Scenario, ways: list[_Way], runs: int) -> IntegrityResult:
    result = IntegrityResult(runs, scene.payload, scene.tokens)
    result.check = await asyncio.to_thread(check_alone.measure, scene, runs)
    with contextlib.ExitStack() as stack:
        over: Ways = {way.name: {} for way in ways if way.transport == "tcp"}
        try:
            if _TLS in over:
                folder = stack.enter_context(TemporaryFolder("hawk-bench-")).path
                new_certificates(folder, ["bench"])
                over[_TLS] = _tls(folder)
        except MissingDependency as error:
            result.left_out[_TLS] = str(error)
            del over[_TLS]
        if over:
            alone = await bytes_alone.measure(scene.payload, over, runs)
            result.alone = alone.transports
        await _jobs(scene, [way for way in ways if way.name not in result.left_out], runs, over, result)
    return result


def _tls(folder: Path) -> dict[str, str]:
    return {
        "tls_cert": f"{folder}/bench.pem",
        "tls_key": f"{folder}/bench-tls.key",
        "tls_ca": f"{folder}/ca.pem",
    }


# -- the whole job -------------------------------------------------------------------------------------------


@dataclass
class _Running:
    """A way's agents with their caches, and what was measured."""

    way: _Way
    prefill: Client
    decode: Client
    source: Cache
    device: DeviceCache
    walls: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    mode: str = ""


async def _jobs(scene: Scenario, ways: list[_Way], runs: int, over: Ways, result: IntegrityResult) -> None:
    async with contextlib.AsyncExitStack() as stack:
        cache = stack.enter_context(contextlib.closing(KVCache.alloc(scene.source)))
        await engine.fill_in_threads(cache, scene)
        running = []
        for way in ways:
            tables = way.tables
            if way.name == _TLS:
                lines = [f'{key} = "{value}"' for key, value in over[_TLS].items()]
                tables = "\n".join(["[transport.tcp]", *lines])
            chosen = replace(whole_job.settings(scene, way.transport), tables=tables)
            pair = await stack.enter_async_context(agents.Pair(chosen))
            source = await pair.prefill.register(cache)
            device = await pair.decode.allocate(scene.target, memory=agents.MEMORY)
            engine.mark(device)
            running.append(_Running(way, pair.prefill, pair.decode, source, device))
        for number in range(runs + 1):
            for each in running:
                await _once(scene, each, number)
        for each in running:
            verdict = await engine.verify(engine.job(each.device, scene))
            if verdict.mismatch:
                raise InternalError("a byte is wrong after the job", way=each.way.name, got=verdict.mismatch)
    for each in running:
        names = each.phases[0]
        result.jobs[each.way.name] = JobResult(
            beside=each.way.beside,
            mode=each.mode,
            wall=Samples(scene.payload, each.walls),
            phases={name: statistics.median(p.get(name, 0.0) for p in each.phases) for name in names},
        )
    for job in result.jobs.values():
        job.over = 1 / ratio(job.wall, result.jobs[job.beside].wall)


async def _once(scene: Scenario, each: _Running, number: int) -> None:
    blocks = scene.target_blocks()
    began = time.perf_counter()
    offer = await each.prefill.offer(
        f"bench-{number}", each.source, scene.source_blocks(), tokens=scene.tokens, ttl=_TIMEOUT
    )
    async with each.decode.fetch(offer, into=each.device, blocks=blocks, timeout=_TIMEOUT) as fetch:
        ready = await fetch
    took = time.perf_counter() - began
    with contextlib.suppress(UnknownRequest):  # it may be over before we ask
        await offer.ended()
    if number:  # the first makes the connection and warms up
        each.walls.append(took)
        each.phases.append(dict(ready.phases))
        each.mode = ready.mode


# -- telling -------------------------------------------------------------------------------------------------


def render(result: IntegrityResult, console: Console) -> None:
    """Prints the check alone, the bytes alone, the whole jobs, then what was left out."""
    cpus = len(os.sched_getaffinity(0))
    console.print(
        f"Python {platform.python_version()} on {cpus} CPUs, retile core {core_name()}; "
        f"{of_runs(result.runs, ', with the slowest and the fastest')}.  1 GB is 10^9 bytes.",
        highlight=False,
    )
    checks = _table(
        "The check of a chunk alone, one thread", "way", "GB/s", "slowest", "fastest", "by the copy"
    )
    words = {"copy": "np.copyto", "sent": "where it was retiled", "landed": "where it arrived"}
    for name, samples in result.check.items():
        by = "" if name == "copy" else f"{result.check_ratio(name):.2f}"
        checks.add_row(words[name], *samples.told(), by)
    console.print(checks)
    alone = _table(f"{result.nbytes / 1e6:.1f} MB alone", "way", "GB/s", "slowest", "fastest", "by tcp")
    for (way, what), samples in result.alone.items():
        if what in ("one", "pieces"):
            label = f"{way}, {'one segment' if what == 'one' else '2 KB segments'}"
            alone.add_row(label, *samples.told(), f"{result.alone_ratio(way, what):.2f}")
    console.print(alone)
    jobs = _table(
        f"The whole job of {result.nbytes / 1e6:.1f} MB",
        "way",
        "ms",
        "slowest",
        "fastest",
        "times",
        "verify, ms",
    )
    for name, job in result.jobs.items():
        seconds = job.wall.seconds
        times = [f"{t * 1e3:.1f}" for t in (job.wall.median, max(seconds), min(seconds))]
        took = job.phases.get("verify")
        over = "" if name == job.beside else f"{job.over:.2f} x {job.beside}"
        jobs.add_row(name, *times, over, "" if took is None else f"{took * 1e3:.1f}")
    console.print(jobs)
    for name, reason in result.left_out.items():
        console.print(Text(f"{name} left out: {reason}", "yellow"))


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    return table
