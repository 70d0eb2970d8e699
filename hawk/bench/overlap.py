"""What a transfer costs the prefill that it runs beside, and what of it is left when that is over.

The prefill is `hawk.bench.prefill`'s: launched kernel by kernel from a thread of its own, as engines do, or a layer at
a time as CUDA graphs, which takes Python's share in it away.  Beside it, each in turn, round after round, with the same
pause before each, for a GPU that has just worked is slower than one that has not:

    nothing     the prefill alone
    kernels     all chunks retiled behind their layers' events, prepared and launched by the thread of the prefill
    copies      as many bytes copied into locked memory, likewise
    told        an agent is told of each layer, and nobody fetches
    job         a whole job: an agent is told of each layer, and another process fetches

The agent is embedded in this process, or in one of its own that maps the cache (`hawk.bench.apart`).  Requests go into
the emulated device over `shm`; or, `into` a GPU, into channels in its memory over `cuda`, as fast as a link of 25 GB/s
(regions in GPU memory: no BAR, no NPU).  What the prefill takes longer is told to the one alone of the same round.
The target is marked before one more job at the end, of which every byte is compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from hawk.bench.apart import Apart
from hawk.bench.between import PACE, Group, Pair
from hawk.bench.between_far import CHANNELS
from hawk.bench.between_process import Process
from hawk.bench.overlap_result import Result, Row, Size
from hawk.bench.overlap_result import render as render
from hawk.bench.prefill import Chunks, Prefill
from hawk.bench.whole_job import SPARE
from hawk.cache import KVCache
from hawk.demo import agents, engine, scenario
from hawk.demo.scenario import ALIGNMENT
from hawk.errors import HawkError, InternalError, InvalidArgument
from hawk.memory.cuda import device as gpu_of
from hawk.retile.cuda.launch import CudaRetiler

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from hawk.bench.between_process import Decode
    from hawk.client import Client
    from hawk.demo.scenario import Scenario
    from hawk.handles import Cache, OfferHandle

TOKENS = (2048, 8192)
RUNS = 7
CHUNK = 64 << 20
PAUSE = 0.12
"""Seconds before each measurement."""

_TIMEOUT = 120.0


def run(
    device: str = "cuda:0",
    tokens: Sequence[int] = TOKENS,
    runs: int = RUNS,
    chunk: int = CHUNK,
    agent: Sequence[str] = ("embedded", "apart"),
    into: str | None = None,
    quick: bool = False,
    start: Callable[[Path, int], Decode] = Process,
) -> Result:
    """Measure on `device`; `quick` is one round of 64 tokens with an embedded agent.

    into     a GPU, best another one: requests go there over a link of 25 GB/s, from an embedded agent
    start    makes the decode side for that, for tests

    Raises `MissingDependency` without torch, CuPy or a GPU, `InternalError` where a byte is wrong.
    """
    gpu = CudaRetiler(_number(device, "device")).device  # says what is missing
    target = None if into is None else gpu_of(_number(into, "into"), field="into").number
    if quick:
        tokens, runs, agent = (64,), 1, ("embedded",)
    return uvloop.run(_all(gpu, tokens, runs, chunk, agent, target, start))


def _number(device: str, field: str) -> int:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise InvalidArgument("no such device", field=field, got=device, expected="cuda, cuda:0, cuda:1, ...")
    return int(number or "0")


async def _all(
    gpu: int,
    tokens: Sequence[int],
    runs: int,
    chunk: int,
    kinds: Sequence[str],
    target: int | None,
    start: Callable[[Path, int], Decode],
) -> Result:
    sizes = []
    for count in tokens:
        size = _Size(gpu, scenario.load(count), runs, chunk)
        sizes.append(await size.measure(kinds) if target is None else await size.paced(target, start))
    mps = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    return Result(gpu_of(gpu).name, runs, chunk, mps, sizes)


@dataclass
class _Seen:
    """One measurement: the prefill's seconds, the launching thread's, and what was left after it."""

    took: float
    launching: float
    after: float = 0.0


@dataclass(frozen=True)
class _Side:
    """What measuring asks of agents: to fetch an offer, to make it, to tell it of layers, to await or make its end.

    `marked` overwrites what was fetched; `fetched` says when it was there for whoever asked for it, by the clock of
    `time.perf_counter`, which all processes of a machine share.
    """

    marked: Callable[[], Any]
    fetched: Callable[[Any], Any]
    offered: Callable[[str], Any]
    teller: Callable[[Any], Callable[[int], None]]
    ended: Callable[[Any], Any]
    withdrawn: Callable[[Any], Any] | None


class _Size:
    """All measurements of one size."""

    def __init__(self, gpu: int, scene: Scenario, runs: int, chunk: int) -> None:
        self._gpu, self._scene, self._runs, self._chunk = gpu, scene, runs, chunk
        self._cupy: Any = import_module("cupy")
        self._prefill = Prefill(gpu, scene.tokens, scene.source.layers)
        self._pending: list[Future[None]] = []

    @contextlib.asynccontextmanager
    async def _filled(self) -> AsyncIterator[tuple[KVCache, Any]]:
        """The cache on the GPU, and the one allocation that it lies in, so that another process can open all of it."""
        scene, cp = self._scene, self._cupy
        with contextlib.closing(KVCache.alloc(scene.source)) as host, cp.cuda.Device(self._gpu):
            await engine.fill_in_threads(host, scene)
            memory = cp.asarray(np.concatenate(host.buffers))
            arrays = list(memory.reshape(len(host.buffers), -1))
            cp.cuda.Device(self._gpu).synchronize()
            with contextlib.closing(KVCache.from_cuda(arrays, scene.source)) as there:
                yield there, memory

    async def measure(self, kinds: Sequence[str]) -> Size:
        """Without an agent, and with each kind of it."""
        result = Size(self._scene.tokens, self._scene.payload)
        async with self._filled() as (there, memory):
            await self._without_agent(there, result)
            if "embedded" in kinds:
                await self._embedded(there, result)
            if "apart" in kinds:
                await self._apart(memory, result)
        return result

    async def paced(self, target: int, start: Callable[[Path, int], Decode]) -> Size:
        """With an embedded agent, into channels in the memory of a GPU, over a link of a given rate."""
        scene = self._scene
        result = Size(scene.tokens, scene.payload)
        group = Group("paced", "cuda", {"GN-HAWK": CHANNELS})
        async with (
            self._filled() as (there, _),
            Pair(group, scene, self._gpu, target, PACE, start) as pair,
        ):
            await pair.far.ask("prepare", scene.tokens, [CHANNELS])
            source = await pair.client.register(there)

            async def fetched(offer: OfferHandle) -> float:
                answer = await pair.far.ask("fetch", CHANNELS, str(offer))
                if answer["transport"] != "cuda":
                    raise InternalError("another transport than asked for", got=answer["transport"])
                return float(answer["ready"])

            async def ended(offer: OfferHandle) -> None:
                with contextlib.suppress(HawkError):  # it may be over before we ask
                    await offer.ended()

            side = _Side(
                partial(pair.far.ask, "mark", CHANNELS),
                fetched,
                partial(self._offered, pair.client, source),
                self._teller(),
                ended,
                lambda o: o.withdraw(),
            )
            await self._with_agent("embedded, 25 GB/s", result, side)
            await pair.far.ask("check", CHANNELS, "")
            await source.release()
        return result

    async def _rounds(self, ways: dict[tuple[str, str], Callable[[], Any]]) -> dict[Any, list[_Seen]]:
        """Each way's measurements, way after way in every round, the first of which warms up."""
        seen: dict[Any, list[_Seen]] = {key: [] for key in ways}
        for number in range(self._runs + 1):
            for key, way in ways.items():
                await asyncio.sleep(PAUSE)
                one = await way()
                if number:
                    seen[key].append(one)
        return seen

    def _rows(self, agent: str, seen: dict[Any, list[_Seen]], result: Size) -> None:
        for (launch, beside), found in seen.items():
            alone = seen[launch, "nothing"]
            slows = [a.took / b.took - 1 for a, b in zip(found, alone, strict=True)]
            after = statistics.median(s.after for s in found)
            job = result.alone.get(agent, 0.0) if beside == "job" else 0.0
            result.rows.append(
                Row(
                    agent,
                    launch,
                    beside,
                    seconds=statistics.median(s.took for s in found),
                    slows=statistics.median(slows),
                    least=min(slows),
                    most=max(slows),
                    launching=statistics.median(s.launching for s in found),
                    after=after,
                    part=after / job if job else 0.0,
                )
            )

    async def _run(self, graph: bool, told: Callable[[int], None] | None = None) -> _Seen:
        launching = await asyncio.to_thread(self._prefill.launch, graph=graph, told=told)
        waiting = asyncio.ensure_future(asyncio.to_thread(self._prefill.wait))
        pending, self._pending = self._pending, []
        # While it computes: once it has ended this loop is the agent's, which the last layer waits for.
        await asyncio.gather(*map(asyncio.wrap_future, pending))
        return _Seen(await waiting, launching)

    # -- without an agent ----------------------------------------------------------------------------------

    async def _without_agent(self, there: KVCache, result: Size) -> None:
        with Chunks(self._cupy, self._gpu, self._scene, self._chunk, there, self._prefill) as chunks:

            def way(kernels: bool, copies: bool) -> Callable[[], Any]:
                async def measured() -> _Seen:
                    put = (lambda layers: chunks.put(layers, kernels, copies)) if kernels or copies else None
                    seen = await self._run(True, put)
                    seen.after = await asyncio.to_thread(self._prefill.settle)
                    return seen

                return measured

            names = ("nothing", "kernels", "copies", "kernels and copies")
            ways = {("graphs", name): way("kernels" in name, "copies" in name) for name in names}
            self._rows("none", await self._rounds(ways), result)

    # -- with one ------------------------------------------------------------------------------------------

    def _settings(self, *, embedded: bool) -> agents.Settings:
        scene = self._scene
        return agents.Settings(
            capacity=scene.target_bytes + SPARE,
            channels=scene.channels,
            alignment=ALIGNMENT,
            transports=("shm",),
            arena=max(256 << 20, 4 * self._chunk),
            chunk=self._chunk,
            tables=f"[transport.shm]\nthreads = {min(8, os.cpu_count() or 1)}\n",
            embedded=embedded,
            outside=not embedded,
        )

    async def _offered(self, client: Client, source: Cache, name: str) -> OfferHandle:
        blocks = self._scene.source_blocks()
        return await client.offer(
            name, source, blocks, tokens=self._scene.tokens, ttl=_TIMEOUT, layers_ready=0
        )

    def _teller(self) -> Callable[[OfferHandle], Callable[[int], None]]:
        loop = asyncio.get_running_loop()

        def teller(offer: OfferHandle) -> Callable[[int], None]:
            def told(layers: int) -> None:
                mark = offer.mark(self._prefill.stream)
                call = offer.layers_ready(layers, after=mark)
                self._pending.append(asyncio.run_coroutine_threadsafe(call, loop))

            return told

        return teller

    async def _embedded(self, there: KVCache, result: Size) -> None:
        async with agents.Pair(self._settings(embedded=True)) as pair, self._target(pair) as target:
            source = await pair.prefill.register(there)
            side = _Side(
                *target,
                partial(self._offered, pair.prefill, source),
                self._teller(),
                lambda o: o.ended(),
                lambda o: o.withdraw(),
            )
            await self._with_agent("embedded", result, side)
            await source.release()

    async def _apart(self, memory: Any, result: Size) -> None:
        async with agents.Pair(self._settings(embedded=False)) as pair, self._target(pair) as target:
            apart = Apart(pair.config, self._gpu, self._scene, memory, self._prefill.events)
            try:
                await apart.ready()
                side = _Side(
                    *target, apart.offer, lambda _: apart.layers_ready, lambda _: apart.ended(), None
                )
                await self._with_agent("apart", result, side)
            finally:
                apart.close()

    @contextlib.asynccontextmanager
    async def _target(
        self, pair: agents.Pair
    ) -> AsyncIterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        """Marks the emulated device, and fetches an offer into it; all its bytes are compared in the end."""
        scene, blocks = self._scene, self._scene.target_blocks()
        target = await pair.decode.allocate(scene.target, memory=agents.MEMORY)

        async def marked() -> None:
            await asyncio.to_thread(engine.mark, target)

        async def fetched(offer: Any) -> float:
            async with pair.decode.fetch(offer, into=target, blocks=blocks, timeout=_TIMEOUT) as fetch:
                await fetch
                return time.perf_counter()

        yield marked, fetched
        verdict = await engine.verify(engine.job(target, scene))
        if verdict.mismatch:
            raise InternalError("a byte is wrong after the jobs", got=verdict.mismatch)
        await target.release()

    async def _with_agent(self, agent: str, result: Size, side: _Side) -> None:
        names = iter(range(1 << 30))

        async def job(graph: bool) -> _Seen:
            offer = await side.offered(f"job-{next(names)}")
            fetch = asyncio.ensure_future(side.fetched(offer))
            seen = await self._run(graph, side.teller(offer))
            seen.after = await fetch - self._prefill.ended
            await side.ended(offer)
            return seen

        async def told(graph: bool) -> _Seen:
            offer = await side.offered(f"told-{next(names)}")
            seen = await self._run(graph, side.teller(offer))
            assert side.withdrawn is not None
            await side.withdrawn(offer)
            return seen

        async def alone() -> float:
            offer = await side.offered(f"alone-{next(names)}")
            await self._run(True)
            began = time.perf_counter()
            side.teller(offer)(self._scene.source.layers)
            took = float(await side.fetched(offer)) - began
            await side.ended(offer)
            return took

        result.alone[agent] = statistics.median([await alone() for _ in range(self._runs + 1)][1:])
        ways: dict[tuple[str, str], Callable[[], Any]] = {}
        for launch, graph in (("kernels", False), ("graphs", True)):
            ways[launch, "nothing"] = partial(self._run, graph)
            if side.withdrawn is not None:
                ways[launch, "told"] = partial(told, graph)
            ways[launch, "job"] = partial(job, graph)
        self._rows(agent, await self._rounds(ways), result)
        await side.marked()  # what a job has brought is no proof of the next one's bytes
        await job(True)


__all__ = ["render", "run"]
