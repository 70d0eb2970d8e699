"""Bytes on their way from memory of the host to a GPU's: chunks of the arena, and what comes for a target there.

A transport that brings bytes to memory of the host alone brings those for a GPU's into locked buffers, a few MiB at a
time; while one is filled the one before goes up, in one copy, and is dealt out to its places by a kernel.  One that may
bring them to memory of the GPU brings long rows to their places, and short ones into the buffers' like on the GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from typing import TYPE_CHECKING

import numpy as np

from hawk.endings import Threads
from hawk.errors import DeadlineExceeded, HawkError, RegistrationFailed
from hawk.jobs.states import settle
from hawk.memory.cuda import DeviceRegion, device, needs_flush
from hawk.memory.cuda_held import Held
from hawk.memory.cuda_rows import Rows, most_rows
from hawk.memory.cuda_wait import none_left
from hawk.memory.region import Region, Segments
from hawk.transports._pieces import cut
from hawk.transports.base import Link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.cuda import CudaDevice
    from hawk.memory.cuda_driver import Call
    from hawk.memory.region import I64
    from hawk.transports._pieces import Piece
    from hawk.transports.base import Capabilities

SLOTS = 4
SLOT = 8 << 20
"""Bytes that go to a GPU at a time."""

_ROWS = 1 << 14
_LONG = 256 << 10
"""Mean length of rows, bytes, from which each goes to its place by a copy of its own."""


async def lift(arena: Region, shadow: Region, offset: int, nbytes: int) -> None:
    """Copies a range of the arena to where it is on the GPU; raises `DeviceLost` or `HawkMemoryError`."""
    work = asyncio.get_running_loop().run_in_executor(None, _lift, arena, shadow, offset, nbytes)
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await settle(work)
        raise


def _lift(arena: Region, shadow: Region, offset: int, nbytes: int) -> None:
    there = device(shadow.gpu)
    with there.current() as driver, Held(there) as held:
        stream, event = held.stream(), held.event()
        with none_left(driver, stream, event):
            up = "to_device", shadow.address + offset, arena.address + offset, nbytes, stream
            driver.run([up, ("record", event, stream), ("outwait", event)])


class _Slot:
    """A locked buffer, as large a one on the GPU, and a stream between them."""

    def __init__(self, there: CudaDevice) -> None:
        self._there = there
        self._host = self._room = self._stream = self._event = 0
        self.flushes: bool | None = None
        self._rows: Rows | None = None
        try:
            with there.current() as driver:
                self._host = driver.allocate_host(SLOT)
                self._room = driver.allocate(SLOT)
                self._stream = driver.stream(low=False)
                self._event = driver.event()
                self._rows = Rows(there, driver, self._stream, most_rows(SLOT, _ROWS))
                self.flushes = needs_flush(driver, there.number)
        except BaseException:
            self.close()
            raise
        bytes_there = (ctypes.c_uint8 * SLOT).from_address(self._host)
        self.region = Region(f"gpu{there.number}/landing", np.ctypeslib.as_array(bytes_there))
        self.room = DeviceRegion(f"gpu{there.number}/landing-there", self._room, SLOT, there.number)

    def up(self, piece: Piece, at: I64, bases: I64, arrived: bool) -> None:
        """Brings the piece, whose rows begin `at` these bytes of the buffer, to its places, and waits for that.

        arrived    it is in the GPU's buffer already
        """
        assert self._rows is not None
        target = bases[piece.region] + piece.local
        stream = self._stream
        with self._there.current() as driver, none_left(driver, stream, self._event):
            if arrived:
                if self.flushes:
                    driver.flush_writes()
                calls: list[Call] = list(self._rows.calls(self._room + at, target, piece.nbytes))
            elif piece.total >= _LONG * len(at):
                columns = zip(target.tolist(), at.tolist(), piece.nbytes.tolist(), strict=True)
                calls = [("to_device", to, self._host + begin, n, stream) for to, begin, n in columns]
            else:
                calls = [("to_device", self._room, self._host, piece.total, stream)]
                calls += self._rows.calls(self._room + at, target, piece.nbytes)
            driver.run([*calls, ("record", self._event, stream), ("outwait", self._event)])

    def close(self) -> None:
        with contextlib.suppress(HawkError), self._there.current() as driver:
            if self._rows is not None:
                self._rows.close(driver)
            if self._event:
                driver.drop_event(self._event)
            if self._stream:
                driver.drop_stream(self._stream)
            if self._room:
                driver.free(self._room)
            if self._host:
                driver.free_host(self._host)


class Landings:
    """The slots of an agent, made for each GPU when something first goes there by way of the host."""

    def __init__(self) -> None:
        self._slots: dict[int, asyncio.Queue[_Slot]] = {}
        self._flushes: dict[int, bool | None] = {}
        self._all: list[_Slot] = []
        self._pool = Threads(2, thread_name_prefix="hawk-landing")
        self._opening = asyncio.Lock()

    async def through(self, link: Link, capabilities: Capabilities, gpu: int) -> Link:
        """The link as a reader into memory of that GPU has it; -1 is memory of the host.

        Raises `DeviceLost`, `OutOfMemory`, or another `HawkMemoryError`.
        """
        if gpu < 0 or capabilities.into_gpus:
            return link
        async with self._opening:
            if gpu not in self._slots:
                work = asyncio.get_running_loop().run_in_executor(self._pool, self._make, gpu)
                try:
                    made = await asyncio.shield(work)
                except asyncio.CancelledError:
                    await settle(work)
                    if work.exception() is None:
                        self._keep(gpu, work.result())
                    raise
                self._keep(gpu, made)
        return _Lifting(link, self._slots[gpu], self._pool, gpu, self._flushes[gpu])

    def _keep(self, gpu: int, made: list[_Slot]) -> None:
        self._all += made
        self._flushes[gpu] = made[0].flushes
        queue = self._slots[gpu] = asyncio.Queue()
        for slot in made:
            queue.put_nowait(slot)

    @staticmethod
    def _make(gpu: int) -> list[_Slot]:
        there = device(gpu, field="into")
        made: list[_Slot] = []
        try:
            made.extend(_Slot(there) for _ in range(SLOTS))
        except BaseException:
            for slot in made:  # they would be room that the engine misses, and nobody uses
                slot.close()
            raise
        return made

    def close(self) -> None:
        """Gives all back; no read is under way any more."""
        self._pool.shutdown(wait=True)
        for slot in self._all:
            slot.close()
        self._all.clear()
        self._slots.clear()


def _flush(gpu: int) -> None:
    with device(gpu).current() as driver:
        driver.flush_writes()


class _Lifting(Link):
    """Reads through another link into memory of a GPU.  The other link is not its own to close.

    flushes    see `needs_flush`; a GPU that could not be made to see what came gets everything by way of the host
    """

    def __init__(
        self,
        link: Link,
        slots: asyncio.Queue[_Slot],
        pool: Threads,
        gpu: int,
        flushes: bool | None,
    ) -> None:
        self._link, self._slots, self._pool, self._gpu, self._flushes = link, slots, pool, gpu, flushes

    async def read(
        self, key: bytes, segments: Segments, regions: Sequence[Region], *, timeout: float
    ) -> None:
        """See `Link.read`."""
        segments.check(regions)
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        if self._flushes is not None and self._link.into(self._gpu):
            try:
                if segments.total < _LONG * len(segments):
                    await self._dealt(key, segments, regions, until, timeout, by_host=False)
                else:
                    await self._link.read(key, segments, regions, timeout=timeout)
                    await self._see()
            except RegistrationFailed:
                if self._link.into(self._gpu):
                    raise
            else:
                return
        await self._dealt(key, segments, regions, until, timeout, by_host=True)

    async def _see(self) -> None:
        """Returns when the GPU sees what was written into its memory by others."""
        if self._flushes:
            work = asyncio.get_running_loop().run_in_executor(self._pool, _flush, self._gpu)
            try:
                await asyncio.shield(work)
            except asyncio.CancelledError:
                await settle(work)
                raise

    async def _dealt(
        self,
        key: bytes,
        segments: Segments,
        regions: Sequence[Region],
        until: float,
        timeout: float,
        *,
        by_host: bool,
    ) -> None:
        """By way of buffers: locked ones, or the GPU's own."""
        loop = asyncio.get_running_loop()
        bases = np.asarray([region.address for region in regions], np.int64)
        rising: list[asyncio.Future[None]] = []
        try:
            for piece in cut(segments, SLOT, _ROWS):
                slot = await self._slot(until, timeout)
                at = np.cumsum(piece.nbytes) - piece.nbytes
                rows = Segments(np.zeros(len(at), np.int32), at, piece.remote, piece.nbytes)
                try:
                    left = max(until - loop.time(), 0.001)
                    into = slot.region if by_host else slot.room
                    await self._link.read(key, rows, [into], timeout=left)
                    up = loop.run_in_executor(self._pool, slot.up, piece, at, bases, not by_host)
                except BaseException:
                    self._slots.put_nowait(slot)
                    raise
                up.add_done_callback(lambda _, slot=slot: self._slots.put_nowait(slot))  # type: ignore[misc]
                rising.append(up)
                for done in [each for each in rising if each.done()]:
                    done.result()
        finally:
            again: tuple[object, ...] | None = None
            for up in rising:
                try:
                    await settle(up)
                except asyncio.CancelledError as error:
                    again = error.args
            if again is not None:
                raise asyncio.CancelledError(*again)
        for up in rising:
            up.result()

    async def _slot(self, until: float, timeout: float) -> _Slot:
        try:
            async with asyncio.timeout_at(until):
                return await self._slots.get()
        except TimeoutError:
            raise DeadlineExceeded("the read did not end in time", timeout=timeout) from None

    @property
    def broken(self) -> bool:
        """See `Link.broken`."""
        return self._link.broken

    async def close(self) -> None:
        """Nothing of its own."""
