"""The decode side of `hawk bench transfer --devices`: an agent, its client, pools on a GPU, and what checks them.

    python -m hawk.bench.between_far CONFIG DEVICE [stand-in]

It is asked by lines of JSON on its standard input, `[name, arguments]` for the methods of `Far`, answers each by one
line, and ends with its input.

A pool is either pages as the source has them, in one region, or a device's pages in the channels of a memory of kind
`cuda`: regions in GPU memory: no BAR, no NPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from hawk.agent import Agent
from hawk.bench.between_naive import Naive, ordinary
from hawk.bench.stand_in import standing_in
from hawk.cache import KVCache
from hawk.client import Client, connect
from hawk.config import load_config
from hawk.demo import check, engine, scenario
from hawk.errors import HawkError, InternalError
from hawk.memory import shared
from hawk.memory.cuda import device
from hawk.memory.cuda_held import Held
from hawk.memory.cuda_share import Imported, export
from hawk.memory.cuda_shared import SharedDeviceMemory
from hawk.transports.cuda import CudaTransport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.demo.scenario import Scenario
    from hawk.handles import Cache, DeviceCache, Ready
    from hawk.memory.region import U8, Region

PAGES, CHANNELS, NAIVE = "pages", "channels", "naive"
"""Where a request goes: pages as the source has them, a device's channels, or the latter the naive way."""

_TIMEOUT = 120.0


class Far:
    """One decode side; everything is made by `open`, and given back by `close`.

    number    of the GPU that its pools are on
    """

    def __init__(self, config: str, number: int) -> None:
        self._config, self._number = config, number
        self._stack = contextlib.AsyncExitStack()
        self._scene: Scenario | None = None
        self._pools: dict[str, _Pool] = {}
        self._naive: Naive | None = None
        self._landing: Cache | None = None
        self._whole: KVCache | None = None

    async def open(self) -> None:
        """Starts the agent."""
        config, _ = load_config(Path(self._config), env={})
        self._agent = await self._stack.enter_async_context(Agent(config))
        self._client: Client = await self._stack.enter_async_context(connect(self._agent))

    async def close(self) -> None:
        """Ends it."""
        await self.drop()
        await self._stack.aclose()

    async def prepare(self, tokens: int, kinds: Sequence[str]) -> None:
        """Pools for one request of that many tokens."""
        await self.drop()
        scene = self._scene = scenario.load(tokens)
        # The memory's alignment is that of the scenario's device.
        if PAGES in kinds:
            target = scene.source.replace(channels=1)
            self._pools[PAGES] = _Pool(
                await self._client.allocate(target, memory="gpu"), self._regions("gpu")
            )
        if CHANNELS in kinds or NAIVE in kinds:
            made = await self._client.allocate(scene.target, memory="npu")
            self._pools[CHANNELS] = self._pools[NAIVE] = _Pool(made, self._regions("npu"))
        if NAIVE in kinds:
            whole = KVCache.alloc(scene.source.replace(blocks=-(-tokens // scene.source.block_size)))
            self._whole = whole
            self._landing = await self._client.register(whole)
            pool = self._pools[NAIVE]
            self._naive = await asyncio.to_thread(
                Naive, scene, whole, pool.cache, pool.regions, device(self._number)
            )
            await self._naive.tune()

    async def mark(self, kind: str) -> None:
        """Marks every byte of a pool, so that what an earlier run has brought is not there any more."""
        await asyncio.to_thread(self._pools[kind].mark)

    async def drop(self) -> None:
        """Gives the pools back."""
        if self._landing is not None:
            await self._landing.release()
        if self._naive is not None:
            self._naive.close()
        if self._whole is not None:
            self._whole.close()
        for pool in {id(p): p for p in self._pools.values()}.values():
            await pool.cache.release()
        self._pools, self._landing, self._naive, self._whole = {}, None, None, None

    def _regions(self, memory: str) -> Sequence[Region]:
        return self._agent.memory(memory).regions

    async def fetch(self, kind: str, ticket: str) -> dict[str, Any]:
        """From asking until the request is in its pool: seconds, in all and by phase, and what GPUs copied of it."""
        assert self._scene is not None
        transport = self._agent.transports.get("cuda")
        if isinstance(transport, CudaTransport):
            transport.busy()
        stages: dict[str, float] = {}
        began = time.perf_counter()
        if kind == NAIVE:
            assert self._landing is not None
            assert self._naive is not None
            blocks = np.arange(-(-self._scene.tokens // self._scene.source.block_size))
            ready = await self._get(ticket, self._landing, blocks)
            stages = await self._naive.place()
        else:
            table = self._scene.source_blocks() if kind == PAGES else self._scene.target_blocks()
            ready = await self._get(ticket, self._pools[kind].cache, table)
        took = (there := time.perf_counter()) - began
        copies = transport.busy() if isinstance(transport, CudaTransport) else 0.0
        return {
            "seconds": took,
            "ready": there,
            "bytes": ready.nbytes,
            "transport": ready.transport,
            "phases": ready.phases,
            "copies": copies,
            "stages": stages,
        }

    async def _get(self, ticket: str, into: Cache, blocks: Any) -> Ready:
        async with self._client.fetch(ticket, into=into, blocks=blocks, timeout=_TIMEOUT) as fetch:
            return await fetch

    async def check(self, kind: str, known: str) -> str:
        """Compares every byte of a pool with what has to be there; the digest of the bytes.

        known    digest of a pool of this size and kind that was compared before, or empty
        """
        assert self._scene is not None
        pool = self._pools[kind]
        with contextlib.ExitStack() as stack:
            seen = await asyncio.to_thread(pool.seen, stack)
            digest = await asyncio.to_thread(seen.digest)
            if digest == known:
                return digest
            if kind == PAGES:
                await asyncio.to_thread(_check_pages, seen, self._scene)
            else:
                verdict = await engine.verify(engine.job(seen, self._scene))  # type: ignore[arg-type]
                if verdict.mismatch:
                    raise InternalError("a byte is wrong after the job", got=verdict.mismatch)
            if known:
                raise InternalError("a pool differs from one of the same request", got=digest, expected=known)
        return digest

    async def baselines(self, runs: int) -> dict[str, list[float]]:
        """Seconds of tiling alone, and of plain copies from and to ordinary memory."""
        assert self._naive is not None
        tile = [await self._naive.tile_anew() for _ in range(runs + 1)][1:]
        down, up = await asyncio.to_thread(ordinary, self._number, self._naive.tiled.nbytes, runs)
        return {"tile": tile, "down": down, "up": up}

    async def raw(self, source: int, nbytes: int, runs: int) -> list[float]:
        """Seconds, by the GPU's events, of a plain copy of so many bytes from a GPU, mapped as transfers have it."""
        return await asyncio.to_thread(_raw, source, self._number, nbytes, runs)


def _raw(source: int, target: int, nbytes: int, runs: int) -> list[float]:
    there = device(target)
    with contextlib.ExitStack() as stack:
        made = SharedDeviceMemory(device(source), nbytes, "raw")
        stack.callback(made.close)
        exported = export(device(source), made.region.address, nbytes)
        stack.callback(exported.close)
        opened = Imported(there, exported)
        stack.callback(opened.close)
        with there.current() as driver, Held(there) as held:
            room, stream, begin, end = held.allocate(nbytes), held.stream(), held.timer(), held.timer()
            found = []
            for _ in range(runs + 1):
                driver.run(
                    [
                        ("record", begin, stream),
                        ("across", room, opened.address, nbytes, stream),
                        ("record", end, stream),
                        ("synchronise", end),
                    ]
                )
                found.append(driver.elapsed(begin, end))
    return found[1:]


class _Seen:
    """Channels of a pool as they were, in memory of the host, where checkers look at them."""

    def __init__(self, pool: _Pool, buffers: list[shared.SharedBuffer]) -> None:
        self.offsets, self.layout = pool.cache.offsets, pool.cache.layout
        self.channels = [buffer.array for buffer in buffers]
        self.descriptors = [buffer.fd for buffer in buffers]

    def digest(self) -> str:
        """Of the cache's bytes in all channels."""

        def of(channel: U8) -> bytes:
            found = hashlib.blake2b(digest_size=16)
            for base in self.offsets:
                found.update(channel[base : base + self.layout.channel_bytes].data)
            return found.digest()

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return hashlib.blake2b(b"".join(pool.map(of, self.channels)), digest_size=16).hexdigest()


class _Pool:
    """A cache in a memory of kind `cuda`, and the regions of that."""

    def __init__(self, cache: DeviceCache, regions: Sequence[Region]) -> None:
        self.cache, self.regions = cache, regions

    def mark(self) -> None:
        """Every byte of the memory becomes one that no request brings."""
        for region in self.regions:
            there = device(region.gpu)
            with there.current() as driver, Held(there) as held:
                stream, event = held.stream(), held.event()
                driver.fill(region.address, engine.UNTOUCHED, region.nbytes, stream)
                driver.record(event, stream)
                driver.synchronise(event)

    def seen(self, stack: contextlib.ExitStack) -> _Seen:
        """What is in it now."""
        last = max(self.cache.offsets) + self.cache.layout.channel_bytes
        buffers = []
        for region in self.regions:
            buffer = stack.enter_context(shared.alloc(last, name="seen"))
            there = device(region.gpu)
            with there.current() as driver, Held(there) as held:
                stream, event = held.stream(), held.event()
                driver.to_host(buffer.array.ctypes.data, region.address, last, stream)
                driver.record(event, stream)
                driver.synchronise(event)
            buffers.append(buffer)
        return _Seen(self, buffers)


def _check_pages(seen: _Seen, scene: Scenario) -> None:
    """Raises `InternalError` unless pages as the source has them hold the request, and the mark everywhere else."""
    spec, table = scene.source, scene.source_blocks()
    others = np.setdiff1d(np.arange(spec.blocks), table)
    shape = (spec.kvs, spec.blocks, spec.block_size, spec.heads, spec.dim)

    def layer(number: int) -> str:
        base = seen.offsets[number]
        nbytes = 2 * int(np.prod(shape))
        pages = seen.channels[0][base : base + nbytes].view(np.uint16).reshape(shape)
        for kv in range(spec.kvs):
            got = pages[kv][table].reshape(-1, spec.heads, spec.dim)[: scene.tokens]
            wanted = check.elements(number, kv, 0, scene.tokens, spec.heads, spec.dim)
            if not np.array_equal(got, wanted):
                return f"layer {number}, kv {kv}"
        marked = bool((pages[:, others].view(np.uint8) == engine.UNTOUCHED).all())
        return "" if marked else f"layer {number}, a block of others"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        wrong = next((where for where in pool.map(layer, range(spec.layers)) if where), "")
    if wrong:
        raise InternalError("a byte is wrong after the job", got=wrong)


async def _answer(far: Far) -> None:
    await far.open()
    try:
        print(json.dumps({"value": None}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, arguments = json.loads(line)
            try:
                answer = {"value": await getattr(far, name)(*arguments)}
            except HawkError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    finally:
        await far.close()


def main() -> None:
    """The process."""
    config, number, *instead = sys.argv[1:]
    with standing_in() if instead else contextlib.nullcontext():
        uvloop.run(_answer(Far(config, int(number))))


if __name__ == "__main__":
    main()
