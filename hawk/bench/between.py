"""Requests between two GPUs in the paper's four configurations, through the same agents and control path in all.

    GG-Host     GPU to GPU by way of the host: pinned, overlapped buffers on both sides, over a socket
    GN-Host     GPU to channels by way of the host: ordinary memory, the whole tensor sent, tiled when it has come
    GG-Direct   GPU to GPU over the cuda transport, pages as the source has them, gathered in the sender's arena first
    GN-HAWK     GPU to channels over the cuda transport, retiled on the sender's GPU

and `GN-Host, overlapped`: GN-HAWK's request over GG-Host's way.  Channels are regions in GPU memory: no BAR, no NPU.
Agents are two processes; a time runs from when the decode side's client asks until the request is in its pool, the
offer being there already.  Direct ways are measured at the rate that the GPUs have between them and at a *pace*: bytes
are held back as a link of so many bytes a second would (`transport.cuda.pace`).  Runs of ways that are compared go by
turns.  A pool is marked before every run, and every byte of it compared after its last one.

Beside them, in the same run: a plain copy between the GPUs of as many bytes, copies from and to ordinary memory,
plain sockets (one, two or four, whichever were the fastest), and tiling alone, which show that the naive way is no
straw man.

JSON, seconds and bytes throughout:

    machine, devices, one_gpu, runs, pace, correct
    sizes     list of
      bytes, tokens
      raw             sample: a plain copy from the first GPU to the second, by its events
      baselines       samples: down, up (a GPU and ordinary memory), sockets, tile
      ways            by name and rate ("full", "paced"; "host" for those by way of it): a sample, and
        phases, stages      medians, as the agents count them
        control             connect, accept, release, and what passed outside the job
        copies              what the GPUs were busy copying, by their events, and `copies_gb_per_s`
      naive_ratio     of each stage of GN-Host: its rate by that of its baseline
      over_direct     GN-HAWK beside GG-Direct: microseconds at full rate, the part of it when paced
      host_over_hawk  GN-Host by GN-HAWK, paced; and its overlapped kind
      raw_ratio       the rate of GN-HAWK's copies by the plain copy's, at full rate
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from hawk.agent import Agent
from hawk.bench.between_far import CHANNELS, NAIVE, PAGES
from hawk.bench.between_naive import SOCKETS, Sockets
from hawk.bench.between_process import Decode, Process
from hawk.bench.between_result import Result, SizeResult, Way
from hawk.bench.between_result import render as render
from hawk.bench.samples import Samples
from hawk.bench.stand_in import standing_in
from hawk.cache import KVCache
from hawk.client import Client, connect
from hawk.config import load_config
from hawk.demo import engine, scenario
from hawk.errors import HawkError, InternalError, InvalidArgument
from hawk.folders import TemporaryFolder
from hawk.memory import cuda_driver
from hawk.memory.cuda import CudaMemory, device
from hawk.memory.cuda_held import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hawk.demo.scenario import Scenario
    from hawk.handles import Cache
    from hawk.memory.cuda_driver import Call, Driver

SIZES = (10_000_000, 80_000_000, 320_000_000, 1_280_000_000)
RUNS = 5
HOST = "host,host"
PACE = 25e9
"""Bytes a second of the paper's link, 200 Gb/s."""

_CHUNK = 64 << 20
_TIMEOUT = 120.0
_BLOCK_BYTES = 64 * (128 << 10)
"""Bytes of 64 tokens of the model."""


@dataclass(frozen=True)
class Group:
    """Ways that one pair of agents measures by turns; `ways` gives where each goes."""

    rate: str
    transport: str
    ways: dict[str, str]
    naive: bool = False


GROUPS = (
    Group("full", "cuda", {"GG-Direct": PAGES, "GN-HAWK": CHANNELS}),
    Group("paced", "cuda", {"GG-Direct": PAGES, "GN-HAWK": CHANNELS}),
    Group("host", "tcp", {"GG-Host": PAGES, "GN-Host, overlapped": CHANNELS}),
    Group("host", "tcp", {"GN-Host": NAIVE}, naive=True),
)


@dataclass
class _Array:
    """Memory of a GPU as other libraries' arrays look."""

    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes // 2,),
            "typestr": "<u2",
            "data": (self.address, False),
            "strides": None,
        }


def numbers(devices: str) -> tuple[int, int]:
    """Two GPUs of text like `"cuda:0,cuda:1"`, or what stands in for them; raises `InvalidArgument`."""
    if devices == HOST:
        return 0, 1
    found = []
    for name in devices.split(","):
        kind, _, number = name.strip().partition(":")
        if kind != "cuda" or not number.isdecimal():
            break
        found.append(int(number))
    if len(found) != 2 or devices.count(",") != 1:
        raise InvalidArgument("not two GPUs", field="devices", got=devices, expected='like "cuda:0,cuda:1"')
    return found[0], found[1]


def run(
    devices: str = "cuda:0,cuda:1",
    sizes: Sequence[int] = SIZES,
    runs: int = RUNS,
    pace: float = PACE,
    quick: bool = False,
    start: Callable[[Path, int], Decode] | None = None,
) -> Result:
    """Measures between two GPUs, which may be one; `quick` is one run of the first size.

    devices  `HOST`: memory of the host stands in for both, which shows what ways by the host take of processors
    pace     bytes a second of the paced link
    start    makes the decode side of a config and a GPU's number, for tests; by default a process

    Raises `MissingDependency` or `InvalidArgument` without the GPUs, `InternalError` where a byte is wrong.
    """
    if devices == HOST:
        with standing_in():
            return _run(devices, sizes, runs, pace, quick, start or partial(Process, stand_in=True))
    return _run(devices, sizes, runs, pace, quick, start or Process)


def _run(
    devices: str,
    sizes: Sequence[int],
    runs: int,
    pace: float,
    quick: bool,
    start: Callable[[Path, int], Decode],
) -> Result:
    source, target = numbers(devices)
    names = [device(number, field="devices").name for number in (source, target)]
    if quick:
        sizes, runs = sizes[:1], 1
    result = Result(devices, names, runs, pace)
    return uvloop.run(_all(result, source, target, sizes, start))


async def _all(
    result: Result, source: int, target: int, sizes: Sequence[int], start: Callable[[Path, int], Decode]
) -> Result:
    scenes = [scenario.load(max(1, round(asked / _BLOCK_BYTES)) * 64) for asked in sizes]
    largest = max(scenes, key=lambda scene: scene.payload)
    result.sizes = [SizeResult(scene.payload, scene.tokens) for scene in scenes]
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(_Source(scene, source)) for scene in scenes]
        for one in sources:
            await one.fill()
        digests: dict[tuple[int, str], str] = {}
        for group in GROUPS:
            watched = stack.enter_context(_watched()) if group.naive else []
            async with Pair(group, largest, source, target, result.pace, start, watched) as pair:
                for one, size in zip(sources, result.sizes, strict=True):
                    await pair.measure(one, size, result.runs, digests)
                    if group is GROUPS[0]:
                        raw = await pair.far.ask("raw", source, size.nbytes, result.runs)
                        size.baselines["raw"] = Samples(size.nbytes, raw)
    return result


class _Watched:
    """A driver whose copies to ordinary memory are timed; they have ended when the call has."""

    def __init__(self, driver: Driver, took: list[float]) -> None:
        self._driver, self._took = driver, took

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def run(self, calls: Sequence[Call]) -> None:
        for call in calls:
            began = time.perf_counter()
            self._driver.run((call,))
            if call[0] == "to_host":
                self._took.append(time.perf_counter() - began)


@contextlib.contextmanager
def _watched() -> Iterator[list[float]]:
    """Seconds of each copy from a GPU to memory of the host, for as long as the block lasts."""
    took: list[float] = []
    watched: Any = _Watched(cuda_driver.load(), took)
    with cuda_driver.using(watched):
        yield took


class _Source:
    """The request in pages of the first GPU."""

    def __init__(self, scene: Scenario, number: int) -> None:
        self.scene, self.number = scene, number
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def fill(self) -> None:
        """Fills it, by way of memory of the host."""
        scene = self.scene
        with contextlib.closing(KVCache.alloc(scene.source)) as host:
            await engine.fill_in_threads(host, scene)
            whole = sum(buffer.nbytes for buffer in host.buffers)
            memory = CudaMemory("source", capacity=whole, gpu=self.number)
            self._stack.callback(memory.close)
            at, arrays = memory.regions[0].address, []
            for buffer in host.buffers:
                arrays.append(_Array(at, buffer.nbytes))
                _up(self.number, at, buffer)
                at += buffer.nbytes
        self.cache = KVCache.from_cuda(arrays, scene.source)
        self._stack.callback(self.cache.close)


def _up(number: int, address: int, host: Any) -> None:
    there = device(number)
    with there.current() as driver, Held(there) as held:
        stream, event = held.stream(), held.event()
        driver.to_device(address, host.ctypes.data, host.nbytes, stream)
        driver.record(event, stream)
        driver.synchronise(event)


class Pair:
    """The agents of one group: the prefill side in this process, the decode side where `start` puts it."""

    def __init__(
        self,
        group: Group,
        largest: Scenario,
        source: int,
        target: int,
        pace: float,
        start: Callable[[Path, int], Decode],
        down: list[float] | None = None,
    ) -> None:
        self._down = [] if down is None else down
        self._group, self._largest, self._pace = group, largest, pace
        self._source, self._target, self._start = source, target, start
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Pair:
        folder = self._stack.enter_context(TemporaryFolder("hawk-bench-")).path
        try:
            near, far = folder / "prefill.toml", folder / "decode.toml"
            near.write_text(self._config("prefill", folder, self._source))
            far.write_text(self._config("decode", folder, self._target) + self._memories())
            config, _ = load_config(near, env={})
            agent = await self._stack.enter_async_context(Agent(config))
            self.client: Client = await self._stack.enter_async_context(connect(agent))
            self.far = self._start(far, self._target)
            await self.far.open()
            self._stack.push_async_callback(self.far.close)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _config(self, name: str, folder: Path, gpu: int) -> str:
        naive = self._group.naive
        # The naive way sends whole tensors: one chunk, in an arena that has room for it.
        chunk = self._largest.payload + (1 << 20) if naive else _CHUNK
        arena = chunk if naive else 8 * _CHUNK
        pace = self._pace if self._group.rate == "paced" else 0.0
        return f"""\
[agent]
name = "{name}"
role = "{name}"
control = "tcp://127.0.0.1:0"
local = "ipc://{folder}/{name}.sock"
insecure = true
log_level = "error"
[transport]
prefer = ["{self._group.transport}"]
[transport.cuda]
gpu = {gpu}
pace = {pace}
[transport.tcp]
streams = {max(SOCKETS)}
[arena]
size = {arena}
pinned = {"false" if naive else "true"}
[jobs]
chunk = {chunk}
in_flight_per_peer = {arena}
pipeline = {1 if naive else 4}
"""

    def _memories(self) -> str:
        spare = 64 << 20
        pages = self._largest.source_bytes + spare
        channels = self._largest.target_bytes + spare
        table = '[memory.{}]\nkind = "cuda"\ngpu = {}\ncapacity = {}\nchannels = {}\nalignment = 64\n'
        return table.format("gpu", self._target, pages, 1) + table.format(
            "npu", self._target, channels, self._largest.channels
        )

    async def measure(
        self, source: _Source, size: SizeResult, runs: int, digests: dict[tuple[int, str], str]
    ) -> None:
        """Every way of the group for one size, by turns; then every byte is compared."""
        ways, scene = self._group.ways, source.scene
        await self.far.ask("prepare", scene.tokens, list(ways.values()))
        registered = await self.client.register(source.cache)
        answers: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        async with contextlib.AsyncExitStack() as stack:
            plain = await stack.enter_async_context(Sockets(size.nbytes)) if self._group.naive else None
            await self._runs(registered, scene, size, runs, answers, plain)
            if plain is not None:
                size.baselines["sockets"] = Samples(size.nbytes, plain.seconds)
        for way, kind in ways.items():
            where = (size.nbytes, PAGES if kind == PAGES else CHANNELS)
            digests[where] = await self.far.ask("check", kind, digests.get(where, ""))
            size.ways[way, self._group.rate] = Way.of(size.nbytes, answers[way])
        if self._group.naive:
            for name, seconds in (await self.far.ask("baselines", runs)).items():
                size.baselines[name] = Samples(size.nbytes, seconds)
        await registered.release()

    async def _runs(
        self,
        registered: Cache,
        scene: Scenario,
        size: SizeResult,
        runs: int,
        answers: dict[str, list[dict[str, Any]]],
        plain: Sockets | None,
    ) -> None:
        ways = self._group.ways
        for number in range(runs + 1):
            # Whoever comes second meets caches, clocks and pools as the first has left them: they take turns in that.
            for way, kind in list(ways.items())[:: -1 if number % 2 else 1]:
                await self.far.ask("mark", kind)
                offer = await self.client.offer(
                    f"{way}-{size.nbytes}-{number}",
                    registered,
                    scene.source_blocks(),
                    tokens=scene.tokens,
                    ttl=_TIMEOUT,
                )
                self._down.clear()
                answer = await self.far.ask("fetch", kind, str(offer))
                if kind == NAIVE:
                    answer["stages"]["down"] = sum(self._down)
                if answer["transport"] != self._group.transport:
                    raise InternalError("another transport than asked for", got=answer["transport"])
                with contextlib.suppress(HawkError):  # it may be over before we ask
                    await offer.ended()
                if number:  # the first connects, compiles and warms up
                    answers[way].append(answer)
            if plain is not None:
                await plain.measure()


__all__ = ["Decode", "Process", "render", "run"]
