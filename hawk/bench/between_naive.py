"""The naive way by the host, as far as it goes on the decode side, and the plain copies that it is held against."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from hawk.bench.bytes_alone import scramble
from hawk.bench.serving import Served
from hawk.errors import InternalError
from hawk.memory import shared
from hawk.memory.cuda import device
from hawk.memory.cuda_held import Held
from hawk.memory.cuda_rows import most_rows
from hawk.plan.segments import direct
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from hawk.retile.cpu import Retiler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.cache import KVCache
    from hawk.demo.scenario import Scenario
    from hawk.handles import DeviceCache
    from hawk.memory.cuda import CudaDevice
    from hawk.memory.region import Region

SOCKETS = (1, 2, 4)
"""Plain sockets side by side that are tried."""

TUNING = 3
"""Times that each number of threads is tried."""


class Naive:
    """What the naive way does when the whole tensor has come: tile it, and copy it to the device from ordinary memory.

    The device's own engines put the pages in their places then, which costs next to nothing and is not left out.
    """

    def __init__(
        self,
        scene: Scenario,
        whole: KVCache,
        cache: DeviceCache,
        regions: Sequence[Region],
        there: CudaDevice,
    ) -> None:
        src, dst = whole.spec.compile(), cache.layout
        shape = src.shape
        selection = Selection(0, shape.layers, 0, scene.tokens)
        blocks = scene.target_blocks()
        self._whole, self._there = whole, there
        count = -(-scene.tokens // dst.shape.block_size)
        planned = target_chunk(dst, blocks, selection, Chunk(0, shape.layers, 0, count))
        buffers = len(whole.buffers)
        here = Placement(np.arange(buffers, dtype=np.int32)[:, None], np.zeros((buffers, 1), np.int64))
        self._steps = retile_steps(src, np.arange(shape.blocks, dtype=np.int64), here, planned, blocks)
        bases = np.asarray(cache.offsets, np.int64)
        into = Placement(
            np.tile(np.arange(dst.channels, dtype=np.int32), (len(bases), 1)),
            np.repeat(bases[:, None], dst.channels, axis=1),
        )
        rows = direct(planned, into, 0)
        address = np.asarray([region.address for region in regions], np.int64)
        self._remote, self._nbytes = rows.remote, rows.nbytes
        self._target = address[rows.region] + rows.local
        self.tiled = np.zeros(planned.nbytes, np.uint8)
        self._held = Held(there)
        try:
            with there.current():
                self._room = self._held.allocate(planned.nbytes)
                self._stream, self._event = self._held.stream(), self._held.event()
                self._rows = self._held.rows(self._stream, most_rows(planned.nbytes, len(self._nbytes)))
        except BaseException:
            self._held.close()
            raise
        self.threads = 1
        self._retiler = Retiler(1)

    async def tune(self) -> None:
        """Takes as many threads as tile the whole the fastest."""
        most, took = len(os.sched_getaffinity(0)), {}
        for threads in sorted({max(1, most // part) for part in (1, 2, 4, 8)}):
            self._retiler.close()
            self._retiler = Retiler(threads)
            took[threads] = min([await self.tile() for _ in range(TUNING)])
        self.threads = min(took, key=lambda threads: took[threads])
        self._retiler.close()
        self._retiler = Retiler(self.threads)

    async def tile(self) -> float:
        """Seconds that tiling takes."""
        began = time.perf_counter()
        await self._retiler.run_steps(self._steps, self._whole.buffers, self.tiled)
        return time.perf_counter() - began

    async def tile_anew(self) -> float:
        """The same, the tensor's bytes having been written just now, as they have when it was received."""
        for buffer in self._whole.buffers:
            await asyncio.to_thread(np.copyto, buffer, buffer.copy())
        return await self.tile()

    async def place(self) -> dict[str, float]:
        """Everything after the last byte has come; seconds of each stage."""
        tile = await self.tile()
        up, place = await asyncio.to_thread(self.up)
        return {"tile": tile, "up": up, "place": place}

    def up(self) -> tuple[float, float]:
        """Seconds of the copy from ordinary memory, and of putting pages into their places."""
        began = time.perf_counter()
        with self._there.current() as driver:
            driver.to_device(self._room, self.tiled.ctypes.data, self.tiled.nbytes, self._stream)
            driver.record(self._event, self._stream)
            driver.outwait(self._event)
            up = time.perf_counter()
            self._rows.put(driver, self._room + self._remote, self._target, self._nbytes)
            driver.record(self._event, self._stream)
            driver.outwait(self._event)
        return up - began, time.perf_counter() - up

    def close(self) -> None:
        """Gives the device's memory back; the whole tensor is its owner's."""
        self._held.close()
        self._retiler.close()


class Sockets:
    """Plain sockets from other processes, one, two or four side by side: `async with Sockets(nbytes) as sockets`.

    Raises `InternalError` where a byte is wrong.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._stack = contextlib.AsyncExitStack()
        self._ways: list[tuple[list[Served], NDArray[np.uint8], NDArray[np.uint8]]] = []
        self._took: list[list[float]] = [[] for _ in SOCKETS]

    async def __aenter__(self) -> Sockets:
        try:
            for count in SOCKETS:
                each = -(-self._nbytes // count)
                source = self._stack.enter_context(shared.alloc(each, name="bench-source"))
                scramble(source.array)
                served = [await self._stack.enter_async_context(Served(source, ())) for _ in range(count)]
                self._ways.append((served, source.array, np.zeros((count, each), np.uint8)))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ways.clear()
        await self._stack.aclose()

    async def measure(self) -> None:
        """One round of all."""
        for (served, source, target), took in zip(self._ways, self._took, strict=True):
            began = time.perf_counter()
            await asyncio.gather(
                *(asyncio.to_thread(s.receive, t) for s, t in zip(served, target, strict=True))
            )
            took.append(time.perf_counter() - began)
            if len(took) == 1 and not all(np.array_equal(part, source) for part in target):
                raise InternalError("the bytes that arrived are not those that were sent", way="sockets")

    @property
    def seconds(self) -> list[float]:
        """Of every round but the first, by the best number of sockets."""
        return min((took[1:] for took in self._took), key=statistics.median)


def ordinary(number: int, nbytes: int, runs: int) -> tuple[list[float], list[float]]:
    """Seconds of copies from a GPU to ordinary memory, and back."""
    plain = np.ones(nbytes, np.uint8)
    found: tuple[list[float], list[float]] = [], []
    there = device(number)
    with there.current() as driver, Held(there) as held:
        room, stream, event = held.allocate(nbytes), held.stream(), held.event()
        for _ in range(runs + 1):
            for up in (False, True):
                began = time.perf_counter()
                if up:
                    driver.to_device(room, plain.ctypes.data, nbytes, stream)
                else:
                    driver.to_host(plain.ctypes.data, room, nbytes, stream)
                driver.record(event, stream)
                driver.outwait(event)
                found[up].append(time.perf_counter() - began)
    return found[0][1:], found[1][1:]
