"""Retiling from the memory of a GPU: by its kernels into memory of its own, then by its copy engine into the arena.

For each chunk a *lane*: a stream of the least priority, so that an engine's kernels on streams of higher ones go first,
and room for one chunk on the GPU, allocated once.  On that stream, behind the events by which the engine said that the
layers are written: the kernels, the copy into the arena (whose pages are locked, so that the copy engine writes them
itself), an event.  Where its pages cannot be locked each lane has room in locked memory, too, and a thread copies on
from there.  While a chunk is copied the one before is on the wire: chunks are in ranges of the arena of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from hawk.endings import Threads
from hawk.errors import HawkError, HawkMemoryError, InvalidArgument, OutOfMemory
from hawk.jobs.lifting import lift
from hawk.jobs.states import settle
from hawk.jobs.turns import Slots
from hawk.jobs.ways import Way
from hawk.memory import cuda_marks
from hawk.memory.cuda import CudaMemory, Pinned, device
from hawk.memory.cuda_driver import STICKY, CudaFault
from hawk.observe.log import get as get_log
from hawk.retile.cuda.bases import Span, Spans
from hawk.retile.cuda.launch import CudaRetiler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.errors import DeviceLost
    from hawk.jobs.offers import OfferEntry
    from hawk.jobs.retilers import Portion
    from hawk.memory.cuda import CudaDevice
    from hawk.memory.cuda_driver import Driver
    from hawk.memory.cuda_marks import Mark
    from hawk.memory.region import Region
    from hawk.retile.cpu import Step
    from hawk.retile.cuda.lanes import Calls
    from hawk.retile.rows import RowsStep

log = get_log("hawk.jobs.gpus")

AHEAD = 2
"""Chunks of one job at a time on its GPU: one is made ready while the other is copied."""

LANES = AHEAD + 1
"""Chunks at a time on each GPU: one more, so that another job finds one where a job's layers are awaited on the GPU."""


class Kernels(Protocol):
    """What makes kernels of steps; `hawk.retile.cuda.launch.CudaRetiler` does."""

    def calls(
        self,
        steps: Sequence[Step | RowsStep],
        regions: Sequence[Span],
        arena: Span,
        stream: int,
        driver: Driver,
    ) -> Calls:
        """What carries out these steps on a stream of which nothing is under way."""

    def close(self, driver: Driver) -> None:
        """Gives back what it has on the GPU."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream, its event, and room for a chunk on the GPU; `between` is room for one in locked memory, or 0."""

    stream: int
    event: int
    room: Span
    between: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A chunk as a lane is told of it: `before` are events that come first, `stop` says that nobody wants it."""

    steps: Sequence[Step | RowsStep]
    spans: Spans
    way: Way
    nbytes: int
    before: Sequence[int]
    stop: threading.Event = field(default_factory=threading.Event)


class OnGpu:
    """Retiles from one GPU; made in a thread, for it starts the driver and locks memory.

    Raises `MissingDependency` without CuPy, `OutOfMemory` or `HawkMemoryError` where the GPU has no room.
    """

    ahead = AHEAD

    def __init__(
        self, there: CudaDevice, chunk: int, *, locked: bool, scrub: bool, make: Callable[[int], Kernels]
    ) -> None:
        self.turns = Slots(LANES)
        self._there, self._scrub = there, scrub
        self._marks: WeakKeyDictionary[OfferEntry, list[tuple[int, Mark]]] = WeakKeyDictionary()
        self._spans: WeakKeyDictionary[OfferEntry, Spans] = WeakKeyDictionary()
        self._kernels = make(there.number)
        name = f"gpu{there.number}/chunks"
        self._memory = CudaMemory(name, capacity=LANES * chunk, gpu=there.number)
        self._lanes: list[Lane] = []
        self._pool = Threads(LANES, thread_name_prefix=f"hawk-gpu{there.number}")
        try:
            with there.current() as driver:
                for number in range(LANES):
                    room = Span(self._memory.regions[0].address + number * chunk, chunk)
                    self._lanes.append(_lane(driver, room, locked))
        except BaseException:
            self.close()
            raise

    def behind(self, offer: OfferEntry, layers: int, mark: Mark) -> None:
        """Layers `[0, layers)` of the offer are written when the mark is reached, which is owned from here on.

        What was said before of as many layers holds: the same said again adds nothing.
        """
        known = self._marks.setdefault(offer, [])
        if known and layers <= known[-1][0]:
            mark.close()
        else:
            known.append((layers, mark))

    def written(self, offer: OfferEntry) -> bool:
        """Whether the GPU has come to all that was said to be written; raises `DeviceLost`."""
        with self._there.current() as driver:
            return all(driver.reached(mark.event) for _, mark in self._marks.get(offer, ()))

    def forget(self, offer: OfferEntry) -> None:
        """The offer has ended, and nothing of it is retiled any more."""
        cuda_marks.close_all([mark for _, mark in self._marks.pop(offer, ())])

    def _before(self, offer: OfferEntry, layers: int) -> list[int]:
        """Events that come before layers `[0, layers)` are written: of every word until the first that covers them."""
        found = []
        for reached, mark in self._marks.get(offer, ()):
            found.append(mark.event)
            if reached >= layers:
                break
        return found

    def _where(self, offer: OfferEntry) -> Spans:
        """Where its cache is."""
        found = self._spans.get(offer)
        if found is None:
            regions = offer.cache.regions
            found = self._spans[offer] = Spans(Span(region.address, region.nbytes) for region in regions)
        return found

    def at_once(self, portion: Portion) -> bool:
        """See `SourceRetiler`: marks are waited for, and kernels."""
        del portion
        return False

    async def run(self, portion: Portion) -> None:
        """See `hawk.jobs.retilers.SourceRetiler`.  A cancelled one waits until the GPU has come to its end.

        Raises `OutOfMemory` where there is no room for the chunk on the GPU, `DeviceLost`, `HawkMemoryError`.
        """
        self._there.check()
        lane = self._lanes.pop()
        if portion.nbytes > lane.room.nbytes:
            self._lanes.append(lane)
            raise OutOfMemory(
                "the chunk is larger than its room on the GPU",
                field="jobs.chunk",
                got=portion.nbytes,
                expected=f"{lane.room.nbytes} bytes or fewer",
            )
        wanted = _Wanted(
            portion.steps,
            self._where(portion.offer),
            Way.of(portion, self._there.number),
            portion.nbytes,
            self._before(portion.offer, portion.layers),
        )
        try:
            work = asyncio.get_running_loop().run_in_executor(self._pool, self._work, lane, wanted)
            await asyncio.shield(work)
        except asyncio.CancelledError:
            wanted.stop.set()
            await settle(work)
            raise
        finally:
            self._lanes.append(lane)
        if portion.shadow is not None and not (wanted.way.room or wanted.way.there):
            await lift(portion.arena, portion.shadow, portion.offset, portion.nbytes)

    def _work(self, lane: Lane, wanted: _Wanted) -> None:
        with self._there.current() as driver:
            try:
                self._carry_out(driver, lane, wanted)
            except Exception as error:
                fault = self._typed(error)
                if self._there.lost is None:
                    # What came onto the lane before must not go on in memory that others get.
                    driver.record(lane.event, lane.stream)
                    driver.synchronise(lane.event)
                if fault is error:
                    raise
                raise fault from error

    def _typed(self, error: Exception) -> Exception:
        """The error as it is told: the driver's faults by number, those of the kernels' library by theirs."""
        if isinstance(error, CudaFault):
            return self._there.typed(error)
        if isinstance(error, MemoryError) and not isinstance(error, HawkError):
            return OutOfMemory(
                "the GPU has too little free memory for rows and tables",
                field=f"cuda:{self._there.number}",
                got=error,
            )
        code = getattr(error, "status", None)
        if isinstance(error, HawkError) or code is None:
            return error
        if code in STICKY:
            return self._there.lose(error)
        return HawkMemoryError("kernels cannot be started", field=f"cuda:{self._there.number}", got=error)

    def _carry_out(self, driver: Driver, lane: Lane, wanted: _Wanted) -> None:
        way, nbytes, stream = wanted.way, wanted.nbytes, lane.stream
        room = way.room or lane.room.address
        kernels = self._kernels.calls(wanted.steps, wanted.spans, Span(room, nbytes), stream, driver)
        if wanted.stop.is_set():
            return
        calls = [*kernels.first, *(("wait", stream, event) for event in wanted.before)]
        if self._scrub:
            # What lies between the pages of a chunk is copied too, and must be nobody's.
            calls.append(("fill", room, 0, nbytes, stream))
        calls += kernels.then
        if way.host:
            calls.append(("to_host", lane.between or way.host, room, nbytes, stream))
        if way.there:
            calls.append(("across", way.there, room, nbytes, stream))
        # A GPU that is lost answers at the last of these, and its copy engine has stopped then.
        driver.run([*calls, ("record", lane.event, stream), ("outwait", lane.event)])
        kernels.done()
        if lane.between and way.host:
            ctypes.memmove(way.host, lane.between, nbytes)

    def close(self) -> None:
        """Waits for what is under way, then gives everything on the GPU back."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for offer in list(self._marks):
            self.forget(offer)
        lanes, self._lanes = self._lanes, []
        if self._there.lost is None:
            with contextlib.suppress(HawkMemoryError), self._there.current() as driver:
                self._kernels.close(driver)
                for lane in lanes:
                    driver.drop_stream(lane.stream)
                    driver.drop_event(lane.event)
                    if lane.between:
                        driver.free_host(lane.between)
        self._memory.close()


def _lane(driver: Driver, room: Span, locked: bool) -> Lane:
    event = driver.event()
    between = 0
    try:
        between = 0 if locked else driver.allocate_host(room.nbytes)
        return Lane(driver.stream(low=True), event, room, between)
    except BaseException:
        driver.drop_event(event)
        if between:
            driver.free_host(between)
        raise


class Gpus:
    """The GPUs that sources are on; each is opened when the first cache of it is registered.

    arena      where chunks go to; its pages are locked from then on
    chunk      bytes of a chunk at most
    scrub      whether room is zeroed before it is used
    pinned     whether pages of the arena are locked; else copies go to ordinary memory, and wait for the processor
    on_lost    called on the event loop with a GPU's number and the error, once, when it is lost
    """

    make: Callable[[int], Kernels] = CudaRetiler

    def __init__(
        self,
        arena: Region,
        chunk: int,
        *,
        scrub: bool,
        on_lost: Callable[[int, DeviceLost], None],
        pinned: bool = True,
    ) -> None:
        self._pins = pinned
        self._arena, self._chunk, self._scrub, self._on_lost = arena, chunk, scrub, on_lost
        self._loop = asyncio.get_running_loop()
        self._open: dict[int, OnGpu] = {}
        self._told: list[tuple[CudaDevice, Callable[[DeviceLost], None]]] = []
        self._pinned: Pinned | None = None
        self._opening = asyncio.Lock()

    async def open(self, number: int) -> None:
        """Makes that GPU ready, once.  Raises `DeviceLost`, and what `OnGpu` raises."""
        async with self._opening:
            found = self._open.get(number)
            if found is None:
                work = self._loop.run_in_executor(None, self._make, number)
                try:
                    found = await asyncio.shield(work)
                except asyncio.CancelledError:
                    await settle(work)
                    if work.exception() is None:
                        self._keep(number, work.result())
                    raise
                self._keep(number, found)
            device(number).check()

    def _make(self, number: int) -> OnGpu:
        there = device(number, field="cache")
        there.check()
        first = self._pinned is None
        pinned = self._pinned
        if pinned is None and self._pins:
            pinned = Pinned(there, self._arena.address, self._arena.nbytes)
        locked = pinned is None or not pinned.why
        try:
            made = OnGpu(there, self._chunk, locked=locked, scrub=self._scrub, make=type(self).make)
        except BaseException:
            if first and pinned is not None:
                pinned.close()
            raise
        self._pinned = pinned
        return made

    def _keep(self, number: int, made: OnGpu) -> None:
        self._open[number] = made
        there = device(number)

        def told(error: DeviceLost) -> None:
            with contextlib.suppress(
                RuntimeError
            ):  # the loop has ended, and with it whoever would want to know
                self._loop.call_soon_threadsafe(self._on_lost, number, error)

        there.on_lost.append(told)
        self._told.append((there, told))
        slow = self._pinned.why if self._pinned is not None else "arena.pinned is false"
        log.info("GPU opened", gpu=number, name=there.name, pinned=not slow, reason=slow or None)

    def of(self, number: int) -> OnGpu:
        """That GPU, which was opened; raises `DeviceLost` where it is lost."""
        found = self._open[number]
        device(number).check()
        return found

    def behind(self, offer: OfferEntry, layers: int, number: int) -> None:
        """Layers `[0, layers)` of the offer are written when the mark of that number is reached.

        Raises `InvalidArgument` for a mark that is not there, or of another GPU than the offer's cache.
        """
        mark = cuda_marks.claim(number)
        if mark.device.number != offer.cache.gpu:
            mark.close()
            raise InvalidArgument(
                "the mark is on another device than the cache",
                field="after",
                got=f"cuda:{mark.device.number}",
                expected=f"cuda:{offer.cache.gpu}"
                if offer.cache.gpu >= 0
                else "none: the cache is on no GPU",
            )
        self._open[offer.cache.gpu].behind(offer, layers, mark)

    def forget(self, offer: OfferEntry) -> None:
        """The offer has ended."""
        found = self._open.get(offer.cache.gpu)
        if found is not None:
            found.forget(offer)

    def close(self) -> None:
        """Gives everything back.  Safe to call twice."""
        for there, told in self._told:
            if told in there.on_lost:
                there.on_lost.remove(told)
        opened, self._open, self._told = list(self._open.values()), {}, []
        for one in opened:
            one.close()
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.close()
