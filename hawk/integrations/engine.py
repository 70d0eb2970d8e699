"""The worker's half of a connector, free of any engine: offers and fetches on a thread of its own.

An engine's hooks run between its kernels, so nothing here makes them wait: they append to a bounded queue that the
agent's event loop empties, and ask what has ended.  Only `start`, `register` and `close` wait, and `withdraw` does for
a moment, where the engine is about to write into blocks that are being read.

    engine = Engine(settings, name="p0", role="prefill", number=0, size=1)
    engine.start(); engine.register(kv)
    engine.offer(order, written=0); engine.written({"r1"}, 3)      # while a step computes
    ended = engine.ended({"r1"})                                     # after each step
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import uvloop

from hawk.agent import Agent
from hawk.cache_gpu import drop, set_mark
from hawk.client import connect
from hawk.errors import Aborted, DeadlineExceeded, HawkError, InvalidArgument
from hawk.integrations import processors, remote, stats
from hawk.integrations.keeping import keep, known, maker
from hawk.integrations.orders import Ended, Fetching, Offering, fetch, offer, release
from hawk.integrations.settings import agent_config, beside, reachable
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from hawk.cache import KVCache
    from hawk.cache_gpu import Mark
    from hawk.client import Client
    from hawk.handles import Cache
    from hawk.integrations.books import DropOrder, FetchOrder, OfferOrder
    from hawk.integrations.keeping import Maker
    from hawk.integrations.orders import Scratch
    from hawk.integrations.settings import Settings

log = get_log("hawk.integrations.engine")

START = 120.0
"""Seconds that an agent may take to fill its memory and answer."""

WITHDRAW = 5.0
"""Seconds that blocks may be read after the engine asked for them back: one retile of one chunk takes far less."""

CLOSE = 10.0


class Engine:
    """One worker's agent, cache, offers and fetches.

    number, size    which worker of how many
    split           how many of the agent's blocks one of the engine's is (kernels may use smaller ones)
    """

    def __init__(self, settings: Settings, *, name: str, role: str, number: int = 0, size: int = 1) -> None:
        self.settings = settings
        self.number = number
        self.worker = remote.Worker("", "")
        self.split = 1
        self._start = (name, role, size)
        self._queue: deque[Callable[[], object]] = deque()
        self._awake = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._up = threading.Event()
        self._fault: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.client: Client | None = None
        self.make: Maker | None = None
        self.cache: Cache | None = None
        self.scratch: asyncio.Future[Scratch] | None = None
        self.consumers = 1
        self._offers: dict[str, Offering] = {}
        self._fetches: dict[str, Fetching] = {}
        self._held: set[str] = set()
        self._stats = stats.empty()

    # -- life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread and the agent, or finds the agent beside it; raises what keeps it from that."""
        self._thread = threading.Thread(target=self._run, name="hawk-engine", daemon=True)
        self._thread.start()
        if not self._up.wait(START):
            raise DeadlineExceeded("the agent did not come up in time", seconds=START)
        if self._fault is not None:
            self._thread.join()
            raise self._fault

    def _run(self) -> None:
        try:
            processors.take(self.settings.cpus)  # first: the threads that this one starts have what it has
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        except BaseException as error:  # noqa: BLE001 - it is told where the engine can hear it
            if self._up.is_set():
                log.error("the connector's thread has ended", reason=repr(error))
            self._fault = error
            self._up.set()
        finally:
            self._none_left()

    def _none_left(self) -> None:
        """The loop has ended: what stood in line never began, and touches no block."""
        with self._lock:
            offers = [entry for entry in self._offers.values() if not entry.over.is_set()]
            fetches = [entry for entry in self._fetches.values() if not entry.over]
        for entry in offers:
            self._offer_over(entry, "offer_failed")
        for loading in fetches:
            self._fetch_over(loading, "fetch_failed", "the connector was closed")

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        name, role, size = self._start
        async with contextlib.AsyncExitStack() as stack:
            if self.settings.agent:
                client = connect(beside(self.settings, self.number))
            else:
                config = agent_config(self.settings, engine=name, role=role, number=self.number, size=size)
                agent = await stack.enter_async_context(Agent(config))
                client = connect(agent)
            await client.open()
            self.client = client
            stack.push_async_callback(self._part)
            status = await self.client.status()
            self.worker = remote.Worker(status.name, reachable(status.control, self.settings.host))
            if self.settings.agent:
                self._spawn(keep(self))
            self._up.set()
            await self._stop.wait()
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(set(self._tasks), timeout=CLOSE)

    async def _part(self) -> None:
        assert self.client is not None
        await self.client.close()

    def register(self, cache: KVCache | Maker, *, split: int = 1, consumers: int = 1) -> None:
        """Makes the engine's cache known to the agent; waits for it, and raises what is wrong with it.

        cache        arrays of this process, or what makes it with a client of the agent's (`integrations.provided`)
        consumers    how many workers of the other side read each offer of this one; 0: none, others have the same
        """
        self.make, self.split, self.consumers = maker(cache), split, consumers
        assert self._loop is not None
        known(self, self._loop, START)

    def close(self) -> None:
        """Ends what is under way, the agent and the thread.  Safe to call twice."""
        if self._thread is None or self._loop is None or self._stop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(2 * CLOSE)

    # -- what hooks call ---------------------------------------------------------------------------------

    def offer(self, order: OfferOrder, *, written: int) -> None:
        """Offers a request of which `written` layers are there; the rest is told by `written`."""
        entry = Offering(order, began=time.monotonic())
        with self._lock:
            self._offers[order.key] = entry
        if self.consumers == 0:
            self._offer_over(entry, "consumed")
            return
        try:
            self._say_written(entry, written)
            posted = self._post(lambda: self._spawn(self._offered(entry)))
        except Exception:  # whatever it is, the blocks are the engine's again and the next order has its turn
            log.exception("no offer was made", request=order.key)
            self.fault()
            posted = False
        if not posted:
            self._offer_over(entry, "offer_failed")

    def written(self, keys: Iterable[str], layers: int) -> None:
        """Layers `[0, layers)` of these offers are written, on the current stream where they are on a GPU."""
        for key in keys:
            entry = self._offers.get(key)
            if entry is not None and layers > entry.layers:
                self._say_written(entry, layers)
                self._post(entry.wake, bounded=False)

    def _say_written(self, entry: Offering, layers: int) -> None:
        mark = set_mark(None if self.cache is None else self.cache.local, None) if layers else None
        with self._lock:
            over = entry.over.is_set()
            old, entry.mark = (mark, None) if over else (entry.mark, mark)
            entry.layers = layers
        if old is not None:
            drop(old)

    def taken(self, entry: Offering) -> tuple[int, Mark | None]:
        """How many layers are written, and the mark for it, which is the caller's from now on."""
        with self._lock:
            mark, entry.mark = entry.mark, None
            return entry.layers, mark

    def fetch(self, order: FetchOrder) -> None:
        """Begins to bring a request."""
        entry = Fetching(order, began=time.monotonic())
        with self._lock:
            self._fetches[order.key] = entry
        why = "too many orders stand in line, or the connector was closed"
        try:
            posted = self._post(lambda: self._begin(entry))
        except Exception as error:  # as above
            log.exception("no fetch was begun", request=order.key)
            self.fault()
            posted, why = False, str(error)
        if not posted:
            self._fetch_over(entry, "fetch_failed", why)

    def drop(self, order: DropOrder) -> None:
        """Tells the other side that a request will not be fetched."""
        self._post(lambda: self._spawn(self._released(order.tickets, order.tokens)))

    def withdraw(self, keys: Iterable[str]) -> None:
        """Ends offers whose blocks the engine will write at once; returns when they are read no more."""
        with self._lock:
            entries = [entry for key in keys if (entry := self._offers.pop(key, None)) is not None]
        for entry in entries:
            entry.leaving = True
            self._post(entry.wake, bounded=False)
        until = time.monotonic() + WITHDRAW
        for entry in entries:
            if not entry.over.wait(max(until - time.monotonic(), 0.0)):
                log.error(
                    "blocks are still being read that the engine has taken back", request=entry.order.key
                )

    def abandon(self, keys: Iterable[str]) -> None:
        """Ends offers of requests that ended badly; `ended` says when their blocks are free."""
        for key in keys:
            entry = self._offers.get(key)
            if entry is not None:
                entry.leaving = True
                self._post(entry.wake, bounded=False)

    def ended(self, finished: Iterable[str]) -> Ended:
        """What has ended; `finished` are requests that the engine is through with, whose blocks it may be holding."""
        found = Ended()
        with self._lock:
            for key in finished:
                if key in self._offers:
                    self._held.add(key)
                loading = self._fetches.get(key)
                if loading is not None and not loading.over and not loading.aborted:
                    loading.aborted = True
                    self._post(loading.abort, bounded=False)
            for key in [key for key in self._held if self._offers[key].over.is_set()]:
                self._held.discard(key)
                entry = self._offers.pop(key)
                found.sent.add(key)
                stats.observe(self._stats, "held_seconds", time.monotonic() - entry.began)
            for key in [key for key, loading in self._fetches.items() if loading.over]:
                loading = self._fetches.pop(key)
                found.arrived.add(key)
                if loading.failed and not loading.aborted:
                    found.failed[key] = self._useless(loading.order)
        return found

    def _useless(self, order: FetchOrder) -> tuple[int, ...]:
        """Blocks, as the engine counts them, that were to hold tokens from elsewhere."""
        assert self.cache is not None
        size = self.cache.layout.shape.block_size * self.split
        return order.blocks[order.first // size : -(-order.end // size)]

    def take_stats(self) -> dict[str, Any]:
        """What was counted since the last time."""
        with self._lock:
            taken, self._stats = self._stats, stats.empty()
        return taken

    def fault(self) -> None:
        """Counts an error inside a hook."""
        with self._lock:
            self._stats["faults"] += 1

    # -- the queue ---------------------------------------------------------------------------------------

    def _post(self, call: Callable[[], object], *, bounded: bool = True) -> bool:
        """Puts a call in line for the loop; False if there is no room, or no loop any more.

        What only wakes an order that is there already always has room: there are no more of those than orders.
        """
        if bounded and len(self._queue) >= self.settings.queue:
            return False
        self._queue.append(call)
        if not self._awake:
            self._awake = True
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # the loop has ended
                self._awake = False
                self._queue.clear()
                return False
        return True

    def _empty(self) -> None:
        self._awake = False
        while self._queue:
            self._queue.popleft()()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- on the loop -------------------------------------------------------------------------------------

    def table(self, blocks: tuple[int, ...]) -> list[int]:
        """The engine's block table in the agent's blocks."""
        if self.split == 1:
            return list(blocks)
        return [block * self.split + i for block in blocks for i in range(self.split)]

    async def _offered(self, entry: Offering) -> None:
        ending = "offer_failed"
        try:
            with self._lock:
                self._stats["offered"] += 1
            ending = await offer(self, entry)
        except HawkError as error:
            log.warning("offer failed", request=entry.order.key, reason=str(error))
        finally:
            self._offer_over(entry, ending)

    def _offer_over(self, entry: Offering, ending: str) -> None:
        with self._lock:
            self._stats[ending] += 1
            mark, entry.mark = entry.mark, None
            entry.over.set()
        if mark is not None:
            drop(mark)

    def _begin(self, entry: Fetching) -> None:
        entry.task = self._spawn(self._fetched(entry))

    async def _fetched(self, entry: Fetching) -> None:
        order, ending, why = entry.order, "fetch_failed", "the connector was closed"
        entry.started = True
        try:
            if entry.aborted:
                raise Aborted("the engine ended the request")
            ready = await fetch(self, order)
            ending = "fetched"
            with self._lock:
                stats.observe(self._stats, "fetch_seconds", time.monotonic() - entry.began)
                stats.observe(self._stats, "fetch_bytes", ready.nbytes)
        except asyncio.CancelledError:
            if not entry.aborted:  # the connector is being closed
                raise
            why = "the engine ended the request"
        except HawkError as error:
            why = str(error)
        finally:
            self._fetch_over(entry, "fetch_aborted" if entry.aborted and ending != "fetched" else ending, why)
        if ending != "fetched" and entry.aborted:
            await self._released(order.tickets, order.end)

    def _fetch_over(self, entry: Fetching, ending: str, why: str) -> None:
        if ending == "fetch_failed":
            log.warning("fetch failed", request=entry.order.key, reason=why)
        with self._lock:
            self._stats[ending] += 1
            entry.failed = ending != "fetched"
            entry.over = True

    async def _released(self, tickets: tuple[str, ...], tokens: int) -> None:
        try:
            with self._lock:
                self._stats["dropped"] += 1
            await release(self, tickets, tokens)
        except (HawkError, InvalidArgument) as error:
            # It runs out by itself: all that is lost is room on the other side, for a while.
            log.info("an offer that nobody needs was not released", reason=str(error))
