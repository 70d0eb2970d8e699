"""What a transfer costs the prefill that it runs beside, and what of it is left when that is over.

The prefill is `hawk.bench.prefill`'s: launched kernel by kernel from a thread of its own, as engines do, or a layer at
a time as CUDA graphs, which takes Python's share in it away.  Beside it, each in turn, round after round, with the same
pause before each, for a GPU that has just worked is slower than one that has not:

    nothing     the prefill alone
    kernels     all chunks retiled behind their layers' events, prepared and launched by the thread of the prefill
    copies      as many bytes copied into locked memory, likewise
    told        an agent is told of each layer, and nobody fetches
    job         a whole job: an agent is told of each layer, and another process fetches

The agent is embedded in this process, or in one of its own that maps the cache (`hawk.bench.apart`).  What the prefill
takes longer is told to the one alone of the same round.  Every byte that a job moved is compared at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop
from rich.table import Table

from hawk.bench.apart import Apart
from hawk.bench.prefill import Chunks, Prefill
from hawk.bench.samples import machine
from hawk.bench.whole_job import SPARE
from hawk.cache import KVCache
from hawk.demo import agents, engine, scenario
from hawk.demo.scenario import ALIGNMENT
from hawk.errors import InternalError, InvalidArgument
from hawk.memory.cuda import device as gpu_of
from hawk.retile.cuda.launch import CudaRetiler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from rich.console import Console

    from hawk.demo.scenario import Scenario
    from hawk.handles import DeviceCache, OfferHandle, Ready

TOKENS = (2048, 8192)
RUNS = 7
CHUNK = 64 << 20
PAUSE = 0.12
"""Seconds before each measurement."""

_TIMEOUT = 120.0


@dataclass(frozen=True)
class Row:
    """Something beside the prefill; seconds of the runs, one a round.

    agent     "none", "embedded" or "apart"
    launch    "kernels" or "graphs"
    slows     by what part of itself the prefill takes longer than alone in the same round, the median of the rounds
    least, most    of the rounds
    after     from the prefill's end until the job is ready, or all that was put onto the GPU is done
    part      that as part of the job alone
    """

    agent: str
    launch: str
    beside: str
    seconds: float
    slows: float
    least: float
    most: float
    launching: float
    after: float = 0.0
    part: float = 0.0


@dataclass
class Size:
    """All of one number of tokens: bytes of the request, seconds of the job alone by agent, and rows."""

    tokens: int
    nbytes: int
    alone: dict[str, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)


@dataclass
class Result:
    """Outcome of `run`; every byte that a job moved was compared."""

    device: str
    runs: int
    chunk: int
    mps: bool
    sizes: list[Size]

    def to_dict(self) -> dict[str, object]:
        """Seconds and bytes throughout."""
        return {"machine": machine(), "correct": True, **asdict(self)}


def run(
    device: str = "cuda:0",
    tokens: Sequence[int] = TOKENS,
    runs: int = RUNS,
    chunk: int = CHUNK,
    agent: Sequence[str] = ("embedded", "apart"),
    quick: bool = False,
) -> Result:
    """Measure on `device`; `quick` is one round of 64 tokens with an embedded agent.

    Raises `MissingDependency` without torch, CuPy or a GPU, `InternalError` where a byte is wrong.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise InvalidArgument(
            "no such device", field="device", got=device, expected="cuda, cuda:0, cuda:1, ..."
        )
    gpu = CudaRetiler(int(number or "0")).device  # says what is missing
    if quick:
        tokens, runs, agent = (64,), 1, ("embedded",)
    return uvloop.run(_all(gpu, tokens, runs, chunk, agent))


async def _all(gpu: int, tokens: Sequence[int], runs: int, chunk: int, kinds: Sequence[str]) -> Result:
    sizes = [await _Size(gpu, scenario.load(count), runs, chunk).measure(kinds) for count in tokens]
    mps = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    return Result(gpu_of(gpu).name, runs, chunk, mps, sizes)


@dataclass
class _Seen:
    """One measurement: the prefill's seconds, the launching thread's, and what was left after it."""

    took: float
    launching: float
    after: float = 0.0


class _Size:
    """All measurements of one size."""

    def __init__(self, gpu: int, scene: Scenario, runs: int, chunk: int) -> None:
        self._gpu, self._scene, self._runs, self._chunk = gpu, scene, runs, chunk
        self._cupy: Any = import_module("cupy")
        self._prefill = Prefill(gpu, scene.tokens, scene.source.layers)
        self._pending: list[Future[None]] = []

    async def measure(self, kinds: Sequence[str]) -> Size:
        scene, cp = self._scene, self._cupy
        result = Size(scene.tokens, scene.payload)
        with contextlib.closing(KVCache.alloc(scene.source)) as host, cp.cuda.Device(self._gpu):
            await engine.fill_in_threads(host, scene)
            # One allocation, so that another process can open all of it.
            memory = cp.asarray(np.concatenate(host.buffers))
            arrays = list(memory.reshape(len(host.buffers), -1))
            cp.cuda.Device(self._gpu).synchronize()
            with contextlib.closing(KVCache.from_cuda(arrays, scene.source)) as there:
                await self._without_agent(there, result)
                if "embedded" in kinds:
                    await self._embedded(there, result)
                if "apart" in kinds:
                    await self._apart(memory, result)
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
        seen = _Seen(await asyncio.to_thread(self._prefill.wait), launching)
        pending, self._pending = self._pending, []
        await asyncio.gather(*map(asyncio.wrap_future, pending))
        return seen

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

    async def _embedded(self, there: KVCache, result: Size) -> None:
        async with agents.Pair(self._settings(embedded=True)) as pair:
            source = await pair.prefill.register(there)
            loop = asyncio.get_running_loop()

            async def offered(name: str) -> OfferHandle:
                return await pair.prefill.offer(
                    name,
                    source,
                    self._scene.source_blocks(),
                    tokens=self._scene.tokens,
                    ttl=_TIMEOUT,
                    layers_ready=0,
                )

            def teller(offer: OfferHandle) -> Callable[[int], None]:
                def told(layers: int) -> None:
                    mark = offer.mark(self._prefill.events[layers - 1])
                    call = offer.layers_ready(layers, after=mark)
                    self._pending.append(asyncio.run_coroutine_threadsafe(call, loop))

                return told

            await self._with_agent(
                "embedded", pair, result, offered, teller, lambda o: o.ended(), lambda o: o.withdraw()
            )
            await source.release()

    async def _apart(self, memory: Any, result: Size) -> None:
        async with agents.Pair(self._settings(embedded=False)) as pair:
            apart = Apart(pair.config, self._gpu, self._scene, memory, self._prefill.events)
            try:
                await apart.ready()

                async def ended(_: object) -> None:
                    await apart.ended()

                await self._with_agent(
                    "apart", pair, result, apart.offer, lambda _: apart.layers_ready, ended, None
                )
            finally:
                apart.close()

    async def _with_agent(
        self,
        agent: str,
        pair: agents.Pair,
        result: Size,
        offered: Callable[[str], Any],
        teller: Callable[[Any], Callable[[int], None]],
        ended: Callable[[Any], Any],
        withdrawn: Callable[[Any], Any] | None,
    ) -> None:
        scene, names = self._scene, iter(range(1 << 30))
        target = await pair.decode.allocate(scene.target, memory=agents.MEMORY)
        engine.mark(target)

        async def fetched(offer: Any) -> float:
            await self._fetch(pair, offer, target)
            return time.perf_counter()

        async def job(graph: bool) -> _Seen:
            offer = await offered(f"job-{next(names)}")
            fetch = asyncio.ensure_future(fetched(offer))
            seen = await self._run(graph, teller(offer))
            seen.after = await fetch - self._prefill.ended
            await ended(offer)
            return seen

        async def told(graph: bool) -> _Seen:
            offer = await offered(f"told-{next(names)}")
            seen = await self._run(graph, teller(offer))
            assert withdrawn is not None
            await withdrawn(offer)
            return seen

        async def alone() -> float:
            offer = await offered(f"alone-{next(names)}")
            await self._run(True)
            began = time.perf_counter()
            teller(offer)(scene.source.layers)
            took = await fetched(offer) - began
            await ended(offer)
            return took

        result.alone[agent] = statistics.median([await alone() for _ in range(self._runs + 1)][1:])
        ways: dict[tuple[str, str], Callable[[], Any]] = {}
        for launch, graph in (("kernels", False), ("graphs", True)):
            ways[launch, "nothing"] = partial(self._run, graph)
            if withdrawn is not None:
                ways[launch, "told"] = partial(told, graph)
            ways[launch, "job"] = partial(job, graph)
        self._rows(agent, await self._rounds(ways), result)
        verdict = await engine.verify(engine.job(target, scene))
        if verdict.mismatch:
            raise InternalError("a byte is wrong after the jobs", got=verdict.mismatch)
        await target.release()

    async def _fetch(self, pair: agents.Pair, offer: Any, target: DeviceCache) -> Ready:
        blocks = self._scene.target_blocks()
        async with pair.decode.fetch(offer, into=target, blocks=blocks, timeout=_TIMEOUT) as fetch:
            return await fetch


def render(result: Result, console: Console) -> None:
    """Print `result` as tables."""
    mps = ", under MPS" if result.mps else ""
    console.print(
        f"Beside a prefill on {result.device}{mps}, {result.runs} rounds, chunks of at most {result.chunk >> 20} MiB; "
        "every byte compared"
    )
    for size in result.sizes:
        told = ", ".join(f"{agent} {seconds * 1e3:.1f} ms" for agent, seconds in size.alone.items())
        table = Table(
            title=f"{size.tokens} tokens, {size.nbytes / 1e6:.0f} MB; a job alone: {told or 'none'}"
        )
        for title in ("agent", "launched as", "beside"):
            table.add_column(title)
        for title in ("prefill, ms", "launching", "slows", "least", "most", "after, ms", "of the job"):
            table.add_column(title, justify="right")
        for row in size.rows:
            table.add_row(
                row.agent,
                row.launch,
                row.beside,
                f"{row.seconds * 1e3:.2f}",
                f"{row.launching * 1e3:.2f}",
                *(f"{x:+.1%}" for x in (row.slows, row.least, row.most)),
                f"{row.after * 1e3:.2f}" if row.after else "",
                f"{row.part:.2f}" if row.part else "",
            )
        console.print(table)
