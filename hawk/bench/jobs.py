"""Many small jobs: how soon the first byte is there, how many in a second, and what one more in line costs.

A prefill and a decode agent as processes with CURVE between them, a second decode agent in this process, and small
requests from pages of 16 tokens into tiles.  Every byte is checked afterwards by `hawk/demo/check.py`.

*First byte* is what a client sees: from calling `fetch` until it hears that bytes have arrived.  Beside it, in turn
with it, stands the control plane's own round trip: PING and PONG on the very connection between the two agents.
*At a distance* the same goes through a relay that hands every byte on after `DELAY`: what agents compute hardly
counts then, and the ratio is how many round trips the protocol takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop
from rich.table import Table
from rich.text import Text

from hawk.bench.distance import Distance
from hawk.bench.jobs_result import GOALS, Crowd, JobsResult, Light
from hawk.cache import KVCache
from hawk.demo import agents, engine, scenario
from hawk.demo.scenario import ALIGNMENT
from hawk.errors import Busy, InternalError, InvalidArgument
from hawk.memory.available import available_memory
from hawk.retile.native import core_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from rich.console import Console

    from hawk.client import Client
    from hawk.demo.scenario import Scenario
    from hawk.handles import Cache, DeviceCache, Fetch, OfferHandle

TOKENS = 64
"""Tokens of one job: a block of the device, 32 KiB."""

RUNS, AT_ONCE, QUEUED = 200, 1000, (100, 1000, 10_000)
DELAY = 0.01
"""Seconds each way."""


_LAYERS, _HEADS, _DIM = 2, 1, 64
_TIMEOUT = 300.0
_OFFERING = 64
"""Offers that are made, and fetches that are handed in, at a time."""

_WORKING = 64
"""Jobs at work at a time where the line behind them is measured."""


def run(
    transports: Sequence[str] = ("shm", "tcp"),
    runs: int = RUNS,
    at_once: int = AT_ONCE,
    queued: Sequence[int] = QUEUED,
    quick: bool = False,
) -> JobsResult:
    """Measures `runs` single jobs, `at_once` concurrent ones, and lines of `queued` jobs, over each transport.

    `quick` does a little of each.  Raises `InvalidArgument` for counts below 1, `InternalError` for a wrong byte.
    """
    for name, value in (("runs", runs), ("at_once", at_once), *(("queued", n) for n in queued)):
        if value < 1:
            raise InvalidArgument("nothing to measure", field=name, got=value, expected="1 or more")
    if quick:
        transports, runs, at_once, queued = transports[:1], 3, 20, (10, 20)
    result = JobsResult(runs, 0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for name in transports:
            runner.run(_transport(name, result, at_once, queued))
    return result


async def _transport(name: str, result: JobsResult, at_once: int, queued: Sequence[int]) -> None:
    fitting = [n for n in queued if _needed(n) <= available_memory()]
    result.left_out += [n for n in queued if n not in fitting and n not in result.left_out]
    scene = _scene(max(result.runs + 20, at_once))
    result.nbytes = scene.payload // (scene.tokens // TOKENS)
    async with _bench(scene, name, inside=True) as bench:
        result.light[name] = await bench.light(result.runs)
        result.at_once[name] = await bench.crowd(at_once)
    few = max(result.runs // 4, 1)
    async with Distance(DELAY) as far, _bench(_scene(few + 20), name, inside=True, far=far) as bench:
        result.far[name] = await bench.light(few)
    crowds = result.queued[name] = []
    if fitting:
        async with _bench(_scene(max(fitting)), name, max_jobs=_WORKING) as bench:
            await bench.crowd(min(fitting))  # warms up
            crowds.extend([await bench.crowd(count) for count in sorted(fitting)])


def _needed(jobs: int) -> int:
    scene = _scene(jobs)
    return scenario.needed(scene, 2 * _settings(scene, "tcp").arenas)


def _scene(jobs: int) -> Scenario:
    """One request of as many blocks as there are jobs, each of which brings one of them."""
    made = scenario.load(jobs * TOKENS)
    model = {"layers": _LAYERS, "heads": _HEADS, "dim": _DIM}
    return replace(made, source=made.source.replace(**model), target=made.target.replace(**model))


def _settings(scene: Scenario, transport: str, inside: bool = False, max_jobs: int = 256) -> agents.Settings:
    return agents.Settings(
        capacity=scene.target_bytes + (64 << 20),
        channels=scene.channels,
        alignment=ALIGNMENT,
        transports=(transport,),
        jobs={"max_offers": 1 << 20, "max_jobs": max_jobs},
        inside=inside,
    )


@contextlib.asynccontextmanager
async def _bench(
    scene: Scenario, transport: str, *, inside: bool = False, max_jobs: int = 256, far: Distance | None = None
) -> AsyncIterator[_Bench]:
    with contextlib.closing(KVCache.alloc(scene.source)) as cache:
        await engine.fill_in_threads(cache, scene)
        chosen = replace(
            _settings(scene, transport, inside, max_jobs), prefill="" if far is None else far.address
        )
        async with agents.Pair(chosen) as pair:
            if far is not None:
                far.target = (await pair.prefill.status()).control
            source = await pair.prefill.register(cache)
            yield _Bench(scene, pair, source)
            await source.release()


class _Bench:
    """Two or three agents with a source, and what is measured between them."""

    def __init__(self, scene: Scenario, pair: agents.Pair, source: Cache) -> None:
        self._scene = scene
        self._pair = pair
        self._source = source
        self._sources, self._targets = scene.source_blocks(), scene.target_blocks()
        self._per_job = TOKENS // scene.source.block_size
        self._count = 0

    async def _offer(self, number: int) -> OfferHandle:
        self._count += 1
        first = number * self._per_job
        blocks = self._sources[first : first + self._per_job]
        return await self._pair.prefill.offer(
            f"bench-{self._count}", self._source, blocks, tokens=TOKENS, ttl="1h"
        )

    async def _offers(self, count: int) -> list[OfferHandle]:
        made: list[OfferHandle] = []
        for first in range(0, count, _OFFERING):
            made += await asyncio.gather(
                *(self._offer(number) for number in range(first, min(first + _OFFERING, count)))
            )
        return made

    async def _device(self, client: Client) -> DeviceCache:
        device = await client.allocate(self._scene.target, memory=agents.MEMORY)
        engine.mark(device)
        return device

    async def _check(self, device: DeviceCache, count: int) -> None:
        """Every byte of the first `count` jobs, and that nothing else was touched."""
        part = replace(self._scene, tokens=count * TOKENS)
        verdict = await engine.verify(engine.job(device, part, self._targets[:count].tolist()))
        if verdict.mismatch:
            raise InternalError("a byte is wrong after the jobs", got=verdict.mismatch)

    async def light(self, runs: int) -> Light:
        """One job at a time, by either agent in turn, with a round trip before each pair."""
        pair = self._pair
        clients = {"embedded": pair.inside, "separate": pair.decode}
        devices = {name: await self._device(client) for name, client in clients.items()}
        first: dict[str, list[float]] = {name: [] for name in clients}
        whole: dict[str, list[float]] = {name: [] for name in clients}
        pings, locals_, phases = [], [], []
        warm = 20
        address = (await pair.prefill.status()).control
        async with contextlib.AsyncExitStack() as stack:
            session = await stack.enter_async_context(
                pair.agent.peers.session(agents.PREFILL, address, timeout=_TIMEOUT)
            )
            for number in range(runs + warm):
                ping = statistics.median([await session.channel.round_trip(_TIMEOUT) for _ in range(5)])
                local = statistics.median([await pair.decode.round_trip() for _ in range(5)])
                for name, client in clients.items():
                    offer = await self._offer(number)
                    began = time.perf_counter()
                    arrived = 0.0
                    async with client.fetch(
                        offer, into=devices[name], blocks=[self._targets[number]], timeout=_TIMEOUT
                    ) as job:
                        async for progress in job.progress():
                            if progress.nbytes:
                                arrived = time.perf_counter() - began
                                break
                        ready = await job
                    took = time.perf_counter() - began
                    if number >= warm:
                        first[name].append(arrived or took)
                        whole[name].append(took)
                        if name == "embedded":
                            phases.append(ready.phases)
                if number >= warm:
                    pings.append(ping)
                    locals_.append(local)
        for device in devices.values():
            await self._check(device, runs + warm)
            await device.release()
        return Light(
            ping=statistics.median(pings),
            local=statistics.median(locals_),
            first={name: statistics.median(times) for name, times in first.items()},
            whole={name: statistics.median(times) for name, times in whole.items()},
            ratio={
                name: statistics.median(a / b for a, b in zip(times, pings, strict=True))
                for name, times in first.items()
            },
            phases={key: statistics.median(p.get(key, 0.0) for p in phases) for key in phases[0]},
        )

    async def crowd(self, count: int) -> Crowd:
        """`count` jobs submitted at once to the agent of its own process; refusals are tried again as told."""
        device = await self._device(self._pair.decode)
        offers = await self._offers(count)
        crowd = Crowd(count, 0.0)
        submitting = asyncio.Semaphore(_OFFERING)

        async def submitted(number: int) -> Fetch:
            while True:
                job = self._pair.decode.fetch(
                    offers[number], into=device, blocks=[self._targets[number]], timeout=_TIMEOUT
                )
                try:
                    async with submitting:
                        await job.start()
                except Busy as busy:
                    crowd.busy += 1
                    await asyncio.sleep(busy.retry_after)
                else:
                    return job

        async def one(number: int) -> None:
            began = time.perf_counter()
            await (await submitted(number)).result()
            crowd.waits.append(time.perf_counter() - began)

        before = sum(map(_cpu, self._pair.pids))
        began = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(count)))
        crowd.seconds = time.perf_counter() - began
        crowd.cpu = sum(map(_cpu, self._pair.pids)) - before
        await self._check(device, count)
        await device.release()
        return crowd


def _cpu(pid: int) -> float:
    """Seconds of processor time that a process has taken, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- telling -------------------------------------------------------------------------------------------------


def render(result: JobsResult, console: Console) -> None:
    """Prints the three tables."""
    console.print(
        f"{result.nbytes >> 10} KiB a job; Python {platform.python_version()}, retile core {core_name()}; "
        f"medians of {result.runs} runs",
        highlight=False,
    )
    light = _table("One job at a time; ratio: first byte to the agents' round trip", "over", "decode agent")
    for heading in ("round trip, ms", "first byte, ms", "ratio", "goal", "ready, ms"):
        light.add_column(heading, justify="right")
    measured = [
        *((name, one) for name, one in result.light.items()),
        *((f"{name}, at a distance", one) for name, one in result.far.items()),
    ]
    for name, one in measured:
        for where, goal in GOALS.items():
            met = one.ratio[where]
            light.add_row(
                name,
                where,
                f"{one.ping * 1e3:.2f}",
                f"{one.first[where] * 1e3:.2f}",
                Text(f"{met:.1f}", "green" if met <= goal else "yellow"),
                f"{goal:.1f}",
                f"{one.whole[where] * 1e3:.2f}",
            )
    console.print(light)
    crowds = _table("Jobs submitted at once", "over", "line")
    for heading in ("jobs", "jobs/s", "each, ms", "CPU, ms", "p50, ms", "p99, ms", "told to come again"):
        crowds.add_column(heading, justify="right")
    for name, crowd in result.at_once.items():
        crowds.add_row(name, "no", *_told(crowd))
        for other in result.queued[name]:
            crowds.add_row(name, f"{_WORKING} at work", *_told(other))
    console.print(crowds)
    for count in result.left_out:
        console.print(Text(f"{count} jobs left out: memory is too short", "yellow"))


def _table(title: str, *texts: str) -> Table:
    table = Table(title=title, title_justify="left")
    for text in texts:
        table.add_column(text)
    return table


def _told(crowd: Crowd) -> tuple[str, ...]:
    return (
        f"{crowd.jobs}",
        f"{1 / crowd.each:.0f}",
        f"{crowd.each * 1e3:.2f}",
        f"{crowd.cpu / crowd.jobs * 1e3:.2f}",
        f"{crowd.quantile(0.5) * 1e3:.0f}",
        f"{crowd.quantile(0.99) * 1e3:.0f}",
        f"{crowd.busy}",
    )
