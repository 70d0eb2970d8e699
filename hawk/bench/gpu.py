"""The main job from a GPU: from an engine's pages into the emulated device, beside what copies alone take.

For each size, in one run: one copy of as many bytes from the GPU into locked memory and one into ordinary memory; the
whole job over each transport from a cache on the GPU, and from the same cache in memory of the host, by the same
agents; every byte of both compared.  Then the same while a *prefill* computes on the GPU: products of matrices on a
stream of a higher priority, a layer's worth for each layer of the cache, each layer said to be ready (`after=` the
stream) before the GPU has begun with it.  That tells how much the prefill slows down, and how long the job takes on
after the last layer was written.

The agent of the prefill side lives in this process, as an engine's does; the decode side is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop
from rich.table import Table

from hawk.bench.samples import Samples, machine
from hawk.bench.whole_job import SPARE
from hawk.cache import KVCache
from hawk.demo import agents, engine, scenario
from hawk.demo.scenario import ALIGNMENT
from hawk.errors import InternalError, InvalidArgument, MissingDependency
from hawk.retile.cuda.launch import CudaRetiler
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hawk.demo.scenario import Scenario
    from hawk.handles import Cache, DeviceCache, OfferHandle, Ready

SIZES = (10_000_000, 80_000_000, 320_000_000)
RUNS = 5

_BLOCK_BYTES = 64 * (128 << 10)
"""Bytes of 64 tokens of the model."""

_TIMEOUT = 120.0

_SIDE = 4096
"""Rows and columns of a prefill's products."""

_WEIGHTS = 8_000_000_000
"""Weights of the model that is made believe: a token takes two operations for each."""


@dataclass
class Job:
    """The whole job from one source (`"gpu"` or `"host"`) over one transport; phases in seconds, chunks added up."""

    source: str
    transport: str
    wall: Samples
    phases: dict[str, float]


@dataclass
class Overlap:
    """Medians in seconds: the prefill alone and beside a transfer, and from its end until the fetch is ready.

    sequential    the job alone, once all layers are written
    """

    transport: str
    alone: float
    beside: float
    slowest_alone: float
    fastest_alone: float
    tail: float
    sequential: float

    @property
    def slows(self) -> float:
        """By what part of itself the prefill takes longer."""
        return self.beside / self.alone - 1


@dataclass
class SizeResult:
    """Everything of one size: seconds of plain copies by kind of memory, jobs, and overlap."""

    nbytes: int
    tokens: int
    copies: dict[str, float]
    jobs: list[Job] = field(default_factory=list)
    overlap: list[Overlap] = field(default_factory=list)


@dataclass
class Result:
    """Outcome of `run`; every byte was compared."""

    device: str
    runs: int
    sizes: list[SizeResult]

    def to_dict(self) -> dict[str, object]:
        """Seconds and bytes throughout."""
        return {
            "machine": machine(),
            "device": self.device,
            "runs": self.runs,
            "correct": True,
            "sizes": [
                {
                    "bytes": size.nbytes,
                    "tokens": size.tokens,
                    "copies": size.copies,
                    "jobs": [
                        {"source": j.source, "transport": j.transport, "phases": j.phases, **j.wall.to_dict()}
                        for j in size.jobs
                    ],
                    "overlap": [asdict(o) | {"slows": o.slows} for o in size.overlap],
                }
                for size in self.sizes
            ],
        }


def run(
    device: str = "cuda:0",
    sizes: Sequence[int] = SIZES,
    transports: Sequence[str] = ("shm", "tcp"),
    runs: int = RUNS,
    quick: bool = False,
) -> Result:
    """Measure on `device`; `quick` is one run of the first size over the first transport.

    Raises `MissingDependency` without CuPy or a GPU, `InternalError` where a byte is wrong.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise InvalidArgument(
            "no such device", field="device", got=device, expected="cuda, cuda:0, cuda:1, ..."
        )
    gpu = CudaRetiler(int(number or "0")).device  # says what is missing
    if quick:
        sizes, transports, runs = sizes[:1], transports[:1], 1
    return uvloop.run(_all(gpu, sizes, transports, runs))


async def _all(gpu: int, sizes: Sequence[int], transports: Sequence[str], runs: int) -> Result:
    cupy: Any = import_module("cupy")
    with cupy.cuda.Device(gpu):
        name = cupy.cuda.runtime.getDeviceProperties(gpu)["name"].decode()
        found = []
        for asked in sizes:
            scene = scenario.load(max(1, round(asked / _BLOCK_BYTES)) * 64)
            found.append(await _Size(cupy, scene, runs).measure(transports))
    return Result(name, runs, found)


class _Size:
    """All measurements of one size."""

    def __init__(self, cupy: Any, scene: Scenario, runs: int) -> None:
        self._cupy, self._scene, self._runs = cupy, scene, runs

    async def measure(self, transports: Sequence[str]) -> SizeResult:
        scene = self._scene
        result = SizeResult(scene.payload, scene.tokens, self._copies(scene.payload))
        with contextlib.closing(KVCache.alloc(scene.source)) as host:
            await engine.fill_in_threads(host, scene)
            arrays = [self._cupy.asarray(buffer) for buffer in host.buffers]
            self._cupy.cuda.Device().synchronize()
            there = KVCache.from_cuda(arrays, scene.source)
            for transport in transports:
                await self._over(transport, {"gpu": there, "host": host}, result)
            there.close()
        return result

    def _copies(self, nbytes: int) -> dict[str, float]:
        """Median seconds of a copy from the GPU, by kind of memory that it goes to."""
        cp = self._cupy
        source = cp.zeros(nbytes, cp.uint8)
        locked = cp.cuda.alloc_pinned_memory(nbytes)
        plain = np.ones(nbytes, np.uint8)
        targets = {"locked": int(locked.ptr), "ordinary": plain.ctypes.data}
        stream = cp.cuda.Stream(non_blocking=True)
        found = {}
        for kind, address in targets.items():
            seconds = []
            for _ in range(self._runs + 1):
                began = time.perf_counter()
                cp.cuda.runtime.memcpyAsync(address, source.data.ptr, nbytes, 2, stream.ptr)
                stream.synchronize()
                seconds.append(time.perf_counter() - began)
            found[kind] = statistics.median(seconds[1:])
        return found

    async def _over(self, transport: str, caches: dict[str, KVCache], result: SizeResult) -> None:
        scene = self._scene
        chosen = agents.Settings(
            capacity=scene.target_bytes + SPARE,
            channels=scene.channels,
            alignment=ALIGNMENT,
            transports=(transport,),
            arena=256 << 20,
            embedded=True,
        )
        async with agents.Pair(chosen) as pair:
            device = await pair.decode.allocate(scene.target, memory=agents.MEMORY)
            sequential = 0.0
            for name, cache in caches.items():
                registered = await pair.prefill.register(cache)
                job = await self._jobs(pair, name, transport, registered, device)
                result.jobs.append(job)
                if name == "gpu":
                    sequential = job.wall.median
                    gpu = registered
                else:
                    await registered.release()
            result.overlap.append(await self._overlap(pair, transport, gpu, device, sequential))
            await gpu.release()
            await device.release()

    async def _jobs(
        self, pair: agents.Pair, name: str, transport: str, source: Cache, device: DeviceCache
    ) -> Job:
        engine.mark(device)
        walls: list[float] = []
        readies: list[Ready] = []
        for number in range(self._runs + 1):
            began = time.perf_counter()
            offer = await self._offer(pair, f"{name}-{number}", source)
            ready = await self._fetch(pair, offer, device)
            took = time.perf_counter() - began
            await offer.ended()
            if number:  # the first compiles kernels, makes the connection and warms up
                walls.append(took)
                readies.append(ready)
        await self._check(device)
        phases = {
            key: statistics.median(ready.phases.get(key, 0.0) for ready in readies)
            for key in readies[0].phases
        }
        return Job(name, transport, Samples(readies[0].nbytes, walls), phases)

    async def _offer(
        self, pair: agents.Pair, name: str, source: Cache, layers_ready: int | None = None
    ) -> OfferHandle:
        return await pair.prefill.offer(
            name,
            source,
            self._scene.source_blocks(),
            tokens=self._scene.tokens,
            ttl=_TIMEOUT,
            layers_ready=layers_ready,
        )

    async def _fetch(self, pair: agents.Pair, offer: OfferHandle, device: DeviceCache) -> Ready:
        blocks = self._scene.target_blocks()
        async with pair.decode.fetch(offer, into=device, blocks=blocks, timeout=_TIMEOUT) as fetch:
            return await fetch

    async def _check(self, device: DeviceCache) -> None:
        verdict = await engine.verify(engine.job(device, self._scene))
        if verdict.mismatch:
            raise InternalError("a byte is wrong after the job", got=verdict.mismatch)

    # -- while the GPU computes ----------------------------------------------------------------------------

    async def _overlap(
        self, pair: agents.Pair, transport: str, source: Cache, device: DeviceCache, sequential: float
    ) -> Overlap:
        engine.mark(device)
        prefill = _Prefill(self._cupy, self._scene.tokens, self._scene.source.layers)
        alone, beside, tails = [], [], []
        for number in range(self._runs + 1):
            took = await prefill.run()
            offer = await self._offer(pair, f"prefill-{number}", source, layers_ready=0)
            fetch = asyncio.ensure_future(self._fetch(pair, offer, device))
            with_it = await prefill.run(offer)
            await fetch
            tail = time.perf_counter() - prefill.ended
            await offer.ended()
            if number:
                alone.append(took)
                beside.append(with_it)
                tails.append(tail)
        await self._check(device)
        return Overlap(
            transport,
            alone=statistics.median(alone),
            beside=statistics.median(beside),
            slowest_alone=max(alone),
            fastest_alone=min(alone),
            tail=statistics.median(tails),
            sequential=sequential,
        )


class _Prefill:
    """Products of matrices, as many operations as so many tokens take, on a stream of a higher priority.

    ended    when the GPU was seen to have come to the end, by `time.perf_counter`
    """

    def __init__(self, cupy: Any, tokens: int, layers: int) -> None:
        self._cupy, self._layers = cupy, layers
        self._each = max(1, round(2 * _WEIGHTS * tokens / (layers * 2 * _SIDE**3)))
        self._a = cupy.random.standard_normal((_SIDE, _SIDE), cupy.float32).astype(cupy.float16)
        self._b = self._a * cupy.float16(0.01)
        self._c = cupy.empty((_SIDE, _SIDE), cupy.float16)
        try:
            self._stream = cupy.cuda.Stream(non_blocking=True, priority=-1)
        except TypeError as error:
            raise MissingDependency(
                "streams with priorities need CuPy 13", field="cupy", got=error
            ) from error
        self.ended = 0.0

    async def run(self, offer: OfferHandle | None = None) -> float:
        """Seconds on the GPU; tells `offer` of each layer once its work is on the stream."""
        cp = self._cupy
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        with self._stream:
            begin.record()
        for layer in range(self._layers):
            with self._stream:
                for _ in range(self._each):
                    cp.matmul(self._a, self._b, out=self._c)
            if offer is not None:
                await offer.layers_ready(layer + 1, after=self._stream)
        with self._stream:
            end.record()
        self.ended = await asyncio.to_thread(_reached, end)
        return float(cp.cuda.get_elapsed_time(begin, end)) * 1e-3


def _reached(event: Any) -> float:
    event.synchronize()
    return time.perf_counter()


def render(result: Result, console: Console) -> None:
    """Print `result` as tables."""
    console.print(f"From {result.device}, median of {result.runs}; every byte compared")
    table = Table(title="Whole jobs and plain copies")
    for title in ("size", "source", "over"):
        table.add_column(title)
    for title in ("ms", "fastest", "slowest", "GB/s", "plan", "retile", "read"):
        table.add_column(title, justify="right")
    for size in result.sizes:
        told = approximate_size(size.nbytes)
        for kind, seconds in size.copies.items():
            table.add_row(
                told,
                "gpu",
                f"a copy, {kind}",
                f"{seconds * 1e3:.2f}",
                "",
                "",
                f"{size.nbytes / seconds / 1e9:.2f}",
            )
        for job in size.jobs:
            wall = job.wall
            times = (wall.median, min(wall.seconds), max(wall.seconds))
            phases = (job.phases.get(name, 0.0) * 1e3 for name in ("plan", "retile", "read"))
            table.add_row(
                told,
                job.source,
                job.transport,
                *(f"{t * 1e3:.2f}" for t in times),
                f"{wall.rate / 1e9:.2f}",
                *(f"{p:.2f}" for p in phases),
            )
    console.print(table)
    table = Table(title="While the GPU computes; ms")
    for title in ("size", "over"):
        table.add_column(title)
    for title in ("prefill alone", "beside a job", "slows by", "until ready after it", "the job alone"):
        table.add_column(title, justify="right")
    for size in result.sizes:
        for o in size.overlap:
            table.add_row(
                approximate_size(size.nbytes),
                o.transport,
                f"{o.alone * 1e3:.2f} ({o.fastest_alone * 1e3:.2f} to {o.slowest_alone * 1e3:.2f})",
                f"{o.beside * 1e3:.2f}",
                f"{o.slows:.1%}",
                f"{o.tail * 1e3:.2f}",
                f"{o.sequential * 1e3:.2f}",
            )
    console.print(table)
