"""How a peer gets at memory of ours, and how that ends: memory windows, or registrations for lack of them.

A window of type 2 is bound on one queue pair and opens one range to that queue pair's other end: a range of a grant to
its reader, or a stretch of the memory that a read is to fill, to whom writes it.  Binding and
invalidating are work requests: what their completion says is so.  Where the queue pair is broken, giving the window
back to the device ends it as well; that has to come before the queue pair is destroyed, which some drivers will not do,
or only after a minute, while windows are bound on it.  Without windows the range is registered once more,
for remote access; its key would open it to every admitted peer that knows the number, until it is deregistered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.endings import all_ended
from hawk.observe.log import get as get_log
from hawk.transports.verbs import _register
from hawk.transports.verbs._device import (
    FLUSHED,
    LOCAL_WRITE,
    RECEIVED,
    REMOTE_READ,
    REMOTE_WRITE,
    STATUS,
    SUCCESS,
    VerbsError,
)
from hawk.transports.verbs._end import End

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.transports._grants import Held
    from hawk.transports.verbs._device import Completion, Device, Queue, Registration, Window
    from hawk.transports.verbs._register import Registered
    from hawk.transports.verbs._worker import Worker

log = get_log("hawk.transports.verbs")

_READY = 16
"""Windows that are kept ready for each device, so that binding waits for no system call."""


Bound = list[tuple["Window", int]]
"""Windows and their keys."""


class Broken(Exception):
    """The queue pair is broken: nothing can be bound or invalidated on it."""


class WindowEnd:
    """The end of one queue pair whose memory the other end reaches: binds and invalidates, each awaited.

    number       the queue pair's, once it is made
    on_received  called with immediate data that came; each takes a receive, which is posted anew
    on_broken    called once, when the queue pair is of no more use
    """

    def __init__(self, end: End) -> None:
        self.end = end
        self.broken = False
        self.number = 0
        self.on_received: Callable[[int], None] = lambda immediate: None
        self.on_broken: Callable[[], None] = lambda: None
        end.on_done = self._done
        end.on_lost = self._lost
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._room = asyncio.Semaphore(end.depth)

    async def run(self, post: Callable[[Queue, int], int]) -> int:
        """Posts one signalled request, and returns what `post` gave once it succeeded; raises `Broken`."""
        await self._room.acquire()
        if self.broken:
            self._room.release()
            raise Broken
        wr_id = self.end.take_ids(1)
        done = self._waiting[wr_id] = asyncio.get_running_loop().create_future()
        try:
            given = post(self.end.queue, wr_id)
        except VerbsError as error:
            del self._waiting[wr_id]
            self._room.release()
            self.break_()
            raise Broken from error
        self.end.posted()
        if (status := await done) != SUCCESS:
            self.break_()
            raise Broken(STATUS.get(status, str(status)))
        return given

    def receive(self, count: int) -> None:
        """Posts receives."""
        try:
            self.end.queue.receive(count)
        except VerbsError:
            self.break_()

    def break_(self) -> None:
        if not self.broken:
            self.broken = True
            self.on_broken()

    def _done(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            if completion.wr_id == RECEIVED:
                self._received(completion)
                continue
            waiting = self._waiting.pop(completion.wr_id, None)
            if waiting is not None:
                self._room.release()
                if not waiting.done():
                    waiting.set_result(completion.status)

    def _received(self, completion: Completion) -> None:
        if completion.status != SUCCESS:
            self.break_()
        elif not self.broken:
            self.receive(1)
            self.on_received(completion.immediate)

    def _lost(self) -> None:
        self.break_()
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            self._room.release()
            if not each.done():
                each.set_result(FLUSHED)

    async def fail(self) -> None:
        """Breaks it: its other end reads and writes nothing more."""
        self._lost()
        await self.end.fail()

    async def close(self) -> None:
        """Destroys it; windows that were bound on it are given back by then.  Raises `VerbsError`."""
        self._lost()
        await self.end.close()


class WindowPool:
    """Fresh windows of one device.  A window is bound once; then it is given back to the device.

    A window is never bound on a queue pair that is younger than it.  When a process is killed the kernel ends what it
    had, the youngest first, and so windows before the queue pairs that they are bound on; some drivers need that
    (Soft-RoCE waits for 50 s, and then frees a queue pair that the window still refers to).
    """

    def __init__(self, device: Device, worker: Worker) -> None:
        self._device = device
        self._worker = worker
        self._ready: deque[tuple[int, Window]] = deque()
        self._era = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._filling = False

    async def take(self) -> Window:
        """A fresh window.  Raises `VerbsError`."""
        if len(self._ready) <= _READY // 2:
            self._fill()
        while self._ready:
            era, window = self._ready.popleft()
            if era == self._era:
                return window
            self.give([(window, 0)])
        return await self._worker.call(self._device.window)

    def outdate(self) -> None:
        """A queue pair was made: windows that are there already are of no more use."""
        self._era += 1
        old: Bound = []
        while self._ready:  # emptied and not replaced: the worker may be adding to it
            old.append((self._ready.popleft()[1], 0))
        self.give(old)

    def _fill(self) -> None:
        if not self._filling:
            self._filling = True
            self._start(self._worker.call(self._make))

    def _make(self) -> None:
        try:
            with contextlib.suppress(VerbsError):  # said to whoever takes one
                while len(self._ready) < _READY:
                    era = self._era  # as it was before the window was made
                    self._ready.append((era, self._device.window()))
        finally:
            self._filling = False

    def give(self, bound: Bound) -> None:
        """Gives windows back that open nothing any more."""
        if bound:
            self._start(self._quietly(bound))

    async def _quietly(self, bound: Bound) -> None:
        try:
            await self.end(bound)
        except VerbsError as error:
            log.error("a memory window could not be given back", reason=str(error))

    async def end(self, bound: Bound) -> None:
        """Gives windows back, after which they open nothing; those that are back leave the list.

        Raises `VerbsError`.
        """
        await self._worker.call(self._close, bound)

    @staticmethod
    def _close(bound: Bound) -> None:
        while bound:
            bound[-1][0].close()
            bound.pop()

    def _start(self, doing: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(doing)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Gives all back."""
        await all_ended(*self._tasks)
        ready, self._ready = self._ready, deque()
        await self._quietly([(window, 0) for _, window in ready])


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of memory that lies in one registration: offset in the region, bytes, which slice."""

    offset: int
    nbytes: int
    slice: int


def parts(registered: Registered, offset: int, nbytes: int) -> list[Part]:
    """The stretches of `[offset, offset + nbytes)`, each with a registration of its own."""
    stop = offset + nbytes
    first = int(registered.start.searchsorted(offset, "right")) - 1
    last = int(registered.start.searchsorted(stop, "left")) - 1
    bounds = [offset, *registered.start[first + 1 : last + 1].tolist(), stop]
    return [Part(begin, end - begin, first + i) for i, (begin, end) in enumerate(itertools.pairwise(bounds))]


@dataclass(eq=False)
class Visit:
    """One peer's way into memory of ours: a reader's into a grant, a writer's into the targets of a read.

    access    what it may do there
    parts     stretches of the memory, one window each
    bound     windows and their keys by queue pair, one for each part
    shared    registrations by device, where there are no windows
    over      whether it has ended: no key is given out any more
    """

    held: Held | None = None
    access: int = REMOTE_READ
    parts: list[Part] = field(default_factory=list)
    bound: dict[WindowEnd, Bound] = field(default_factory=dict)
    shared: dict[int, list[Registration]] = field(default_factory=dict)
    over: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    evict: Callable[[], None] = lambda: None

    @property
    def rights(self) -> int:
        """Of registrations for this access; the device asks for the right to write here of who lets others write."""
        return self.access | LOCAL_WRITE if self.access & REMOTE_WRITE else self.access

    async def bind(self, end: WindowEnd, pool: WindowPool, registered: Registered, device: int) -> list[int]:
        """Keys of the parts for this queue pair's other end; raises `Broken` or `VerbsError`."""
        if end in self.bound:
            return [key for _, key in self.bound[end]]
        bound: Bound = []
        self.bound[end] = bound  # from the first window on: an invalidation must not miss one
        try:
            for part in self.parts:
                memory = registered.slices[device][part.slice]
                address = memory.address + part.offset - int(registered.start[part.slice])
                window = await pool.take()
                try:
                    key = await end.run(
                        functools.partial(_bind, window, memory, address, part.nbytes, self.access)
                    )
                except BaseException:
                    bound.append((window, -1))
                    raise
                bound.append((window, key))
        except BaseException:
            # What is half bound opens nothing that anybody was told of, but the queue pair must go before it does.
            end.break_()
            raise
        return [key for _, key in bound]

    async def share(self, device: Device, registered: Registered, number: int, worker: Worker) -> list[int]:
        """Keys of the parts for all peers on this device; raises `VerbsError`."""
        if number not in self.shared:
            made: list[Registration] = []
            self.shared[number] = made

            def register() -> None:
                for part in self.parts:
                    memory = registered.slices[number][part.slice]
                    address = memory.address + part.offset - int(registered.start[part.slice])
                    made.append(device.register(address, part.nbytes, self.rights))

            try:
                await worker.call(register)
            except VerbsError:
                del self.shared[number]
                await worker.call(_register.close, made)
                raise
        return [r.rkey for r in self.shared[number]]

    async def unbind(self, worker: Worker, pools: Callable[[WindowEnd], WindowPool]) -> None:
        """Takes every key away; when this returns nobody reads or writes by one any more.  Raises `VerbsError`."""
        for end, bound in list(self.bound.items()):
            try:
                if end.broken:
                    raise Broken
                for _, key in bound:
                    await end.run(functools.partial(_invalidate, key))
            except Broken:
                await pools(end).end(bound)
            del self.bound[end]
            pools(end).give(bound)
        for number, made in list(self.shared.items()):
            await worker.call(_close_shared, made)
            del self.shared[number]


async def retire(end: WindowEnd, visits: Sequence[Visit], pool: WindowPool | None) -> None:
    """Ends a queue pair and what is bound on it.  Raises `VerbsError`, and may be called again then."""
    await end.fail()
    if pool is not None:
        for visit in visits:
            async with visit.lock:
                await pool.end(visit.bound.get(end, []))
                visit.bound.pop(end, None)
    await end.close()


def _bind(
    window: Window, memory: Registration, address: int, nbytes: int, access: int, queue: Queue, wr_id: int
) -> int:
    return queue.bind(wr_id, window, memory, address, nbytes, access)


def _invalidate(key: int, queue: Queue, wr_id: int) -> int:
    queue.invalidate(wr_id, key)
    return key


def _close_shared(made: list[Registration]) -> None:
    while made:
        made[-1].close()
        made.pop()
