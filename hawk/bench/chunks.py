"""What a chunk of a GPU costs the processors: whole jobs over a driver that does nothing, so that nothing else counts.

Two agents of this process, each on a loop and a thread of its own, from pages on one GPU into tiles in channels on
another over the `cuda` transport; every call of the driver returns at once, so no byte is moved, and none compared.
What each thread took of a processor is told for each chunk, by what the thread is for:

    prefill    the prefill agent's loop, and the client that offers
    kernels    the threads that make chunks: tables and launches
    decode     the decode agent's loop, and the client that fetches
    reads      the threads that read chunks
    planning   those that plan
    others     whatever threads are not Python's: messages

JSON: machine, runs, `correct` is absent, for nothing is moved; `sizes`, a list of
    tokens, chunk, chunks    chunks of a job
    job                      seconds, a sample: from asking until ready
    parts                    by name: microseconds of a processor for each chunk, `least` and `median` over the runs
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop
from rich.table import Table

from hawk.agent import Agent
from hawk.bench.samples import Samples, machine, of_runs
from hawk.bench.stand_in import Compiler, StandIn
from hawk.cache import KVCache
from hawk.client import connect
from hawk.config import load_config
from hawk.demo import scenario
from hawk.errors import HawkError, InvalidArgument
from hawk.folders import TemporaryFolder
from hawk.jobs.gpus import Gpus
from hawk.memory import cuda_driver
from hawk.memory.cuda import CudaMemory
from hawk.retile.cuda.launch import CudaRetiler
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from pathlib import Path

    from rich.console import Console

    from hawk.client import Client
    from hawk.demo.scenario import Scenario

TOKENS = (64, 2048, 8192)
RUNS, CHUNK = 15, 64 << 20
_WARM, _TIMEOUT = 2, 60.0

_PARTS = {
    "prefill": "MainThread",
    "kernels": "hawk-gpu",
    "decode": "hawk-bench-decode",
    "reads": "hawk-cuda-read",
    "planning": "hawk-plan",
}


@dataclass
class Size:
    """One size: chunks of a job, its seconds, and microseconds of each part in each run, for one chunk."""

    tokens: int
    chunk: int
    chunks: int
    job: Samples
    parts: dict[str, list[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """As in the module's description."""
        parts = {name: {"least": min(v), "median": statistics.median(v)} for name, v in self.parts.items()}
        told = {"tokens": self.tokens, "chunk": self.chunk, "chunks": self.chunks}
        return told | {"job": self.job.to_dict(), "parts": parts}


@dataclass
class Result:
    """Outcome of `run`."""

    runs: int
    sizes: list[Size] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """As in the module's description."""
        return {"machine": machine(), "runs": self.runs, "sizes": [size.to_dict() for size in self.sizes]}


def run(tokens: Sequence[int] = TOKENS, runs: int = RUNS, chunk: int = CHUNK, quick: bool = False) -> Result:
    """Measures requests of so many tokens; `quick` is one run of the first.

    Raises `InvalidArgument` where there is nothing to measure.
    """
    if runs < 1 or min(tokens, default=0) < 1:
        raise InvalidArgument(
            "nothing to measure", field="runs, tokens", got=(runs, *tokens), expected="1 or more"
        )
    if quick:
        tokens, runs = tokens[:1], 1
    made, before = Compiler(), Gpus.make
    # As the driver, CuPy is somebody else's while this lasts.
    Gpus.make = staticmethod(lambda number: CudaRetiler(number, made))
    try:
        with cuda_driver.using(StandIn(copies=False)):
            return Result(runs, [_size(count, chunk, runs) for count in tokens])
    finally:
        Gpus.make = before


@dataclass
class _Array:
    address: int
    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape = (self.nbytes // 2,)
        return {
            "version": 3,
            "shape": shape,
            "typestr": "<u2",
            "data": (self.address, False),
            "strides": None,
        }


def _config(folder: Path, name: str, gpu: int, chunk: int, more: str = "") -> Path:
    file = folder / f"{name}.toml"
    file.write_text(f"""\
[agent]
name = "{name}"
role = "{name}"
control = "tcp://127.0.0.1:0"
local = "ipc://{folder}/{name}.sock"
insecure = true
log_level = "error"
[transport]
prefer = ["cuda"]
[transport.cuda]
gpu = {gpu}
[arena]
size = {8 * chunk}
[jobs]
chunk = {chunk}
in_flight_per_peer = {8 * chunk}
{more}""")
    return file


def _size(tokens: int, chunk: int, runs: int) -> Size:
    scene = scenario.load(tokens)
    with TemporaryFolder("hawk-bench-") as folder, _thread() as decode:
        return uvloop.run(_measured(scene, folder.path, decode, chunk, runs))


@contextlib.contextmanager
def _thread() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """A loop on a thread of its own, and what runs something there and waits for it."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name=_PARTS["decode"])
    thread.start()

    async def there(work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    try:
        yield there
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _measured(
    scene: Scenario, folder: Path, decode: Callable[[Coroutine[Any, Any, Any]], Any], chunk: int, runs: int
) -> Size:
    room = scene.target_bytes + (64 << 20)
    memory = f'[memory.npu]\nkind = "cuda"\ngpu = 1\ncapacity = {room}\nchannels = {scene.channels}\nalignment = 64\n'
    layout = scene.source.compile()
    stack, far = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
    async with stack:
        source = CudaMemory("source", capacity=layout.buffer_count * layout.channel_bytes)
        stack.callback(source.close)
        at = source.regions[0].address + np.arange(layout.buffer_count) * layout.channel_bytes
        cache = KVCache.from_cuda([_Array(a, layout.channel_bytes) for a in at.tolist()], scene.source)
        near, _ = load_config(_config(folder, "prefill", 0, chunk), env={})
        client: Client = await stack.enter_async_context(
            connect(await stack.enter_async_context(Agent(near)))
        )
        registered = await client.register(cache)
        stack.push_async_callback(registered.release)

        async def opened() -> Callable[[str], Coroutine[Any, Any, Any]]:
            config, _ = load_config(_config(folder, "decode", 1, chunk, memory), env={})
            other = await far.enter_async_context(connect(await far.enter_async_context(Agent(config))))
            target = await other.allocate(scene.target, memory="npu")
            far.push_async_callback(target.release)
            blocks = scene.target_blocks()

            async def fetched(ticket: str) -> tuple[float, int]:
                began = time.perf_counter()
                async with other.fetch(ticket, into=target, blocks=blocks, timeout=_TIMEOUT) as fetch:
                    ready = await fetch
                return time.perf_counter() - began, ready.nbytes

            return fetched

        stack.push_async_callback(lambda: decode(far.aclose()))
        fetched = await decode(opened())
        size = Size(scene.tokens, chunk, 0, Samples(scene.payload))
        blocks = scene.source_blocks()
        for number in range(-_WARM, runs):
            offer = await client.offer(f"{number}", registered, blocks, tokens=scene.tokens, ttl=_TIMEOUT)
            before, launched = _spent(), _launched()
            took, _ = await decode(fetched(str(offer)))
            with contextlib.suppress(HawkError):  # it may be over before we ask
                await offer.ended()
            chunks = _launched() - launched
            if number < 0:
                continue
            size.chunks = chunks
            size.job.seconds.append(took)
            for name, seconds in _spent().items():
                each = (seconds - before.get(name, 0.0)) / max(chunks, 1) * 1e6
                size.parts.setdefault(name, []).append(each)
        return size


def _launched() -> int:
    driver = cuda_driver.load()
    assert isinstance(driver, StandIn)
    return driver.launched


def _spent() -> dict[str, float]:
    """Seconds of processors that each part has taken so far."""
    found = dict.fromkeys((*_PARTS, "others"), 0.0)
    rest = time.process_time()
    for thread in threading.enumerate():
        if thread.ident is None:
            continue
        seconds = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        name = next((n for n, prefix in _PARTS.items() if thread.name.startswith(prefix)), "others")
        found[name] += seconds
        rest -= seconds
    found["others"] += rest
    return found


def render(result: Result, console: Console) -> None:
    """Prints `result` as a table."""
    table = Table(
        title=f"Microseconds of a processor for each chunk, {of_runs(result.runs, ' (the least)')}",
        title_justify="left",
    )
    table.add_column("request", no_wrap=True)
    for name in ("chunks", *_PARTS, "others", "job, ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for size in result.sizes:
        table.add_row(
            approximate_size(size.job.nbytes),
            str(size.chunks),
            *(f"{statistics.median(v):.0f} ({min(v):.0f})" for v in size.parts.values()),
            f"{size.job.median * 1e3:.2f}",
        )
    console.print(
        "A driver that does nothing: nothing is moved, and nothing compared.  What is left is what Python does.",
        highlight=False,
    )
    console.print(table)
