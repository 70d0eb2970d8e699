"""The worker's half of a connector, free of any engine: offers and fetches on a thread of its own.

An engine's hooks run between its kernels, so nothing here makes them wait: they append to a bounded queue that the
agent's event loop empties, and ask what has ended.  Only `start`, `register` and `close` wait.

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
from typing import TYPE_CHECKING, Any

from hawk.agent import Agent
from hawk.cache_gpu import drop, set_mark
from hawk.client import connect
from hawk.errors import Aborted, HawkError, InvalidArgument
from hawk.integrations import remote, stats
from hawk.integrations.books import ForgoOrder
from hawk.integrations.keeping import keep, known, maker
from hawk.integrations.orders import Ended, Fetching, Offering, fetch, forgo, may_be_held, offer, release
from hawk.integrations.settings import agent_config, beside, reachable
from hawk.integrations.thread import LoopThread
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hawk.cache import KVCache
    from hawk.cache_gpu import Mark
    from hawk.client import Client
    from hawk.handles import Cache, Ready
    from hawk.integrations.books import DropOrder, FetchOrder, OfferOrder
    from hawk.integrations.keeping import Maker
    from hawk.integrations.orders import Scratch
    from hawk.integrations.settings import Settings

log = get_log("hawk.integrations.engine")

START = 120.0
"""Seconds that an agent may take to fill its memory and answer."""

LATE = 5.0
"""Seconds after which blocks that the engine has taken back, and that are still read, are told of by name."""

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
        self.role = role
        self._start = (name, size)
        self.gone = False
        """Whether there is no agent now: nothing can be handed over."""
        self._line = LoopThread(self._main, cpus=settings.cpus, room=settings.queue, ended=self._none_left)
        self._lock = threading.Lock()
        self.client: Client | None = None
        self.make: Maker | None = None
        self.cache: Cache | None = None
        self.scratch: asyncio.Future[Scratch] | None = None
        self.consumers = 1
        self._offers: dict[str, Offering] = {}
        self._fetches: dict[str, Fetching] = {}
        self._held: set[str] = set()
        self._leaving: list[Offering] = []
        self._offering: dict[str, asyncio.Task[None]] = {}
        self._over = Ended()
        self._stats = stats.empty()

    # -- life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread and the agent, or finds the agent beside it; raises what keeps it from that."""
        self._line.start(START)

    def _none_left(self) -> None:
        """The loop has ended: what stood in line never began, and touches no block."""
        self.gone = True
        with self._lock:
            standing = [*self._offers.values(), *self._leaving]
            offers = [entry for entry in standing if not entry.over.is_set()]
            fetches = [entry for entry in self._fetches.values() if not entry.over]
        for entry in offers:
            self._offer_over(entry, "offer_failed", "the connector was closed")
        for loading in fetches:
            self._fetch_over(loading, "fetch_failed", "the connector was closed")

    async def _main(self, up: Callable[[], None]) -> None:
        name, size = self._start
        async with contextlib.AsyncExitStack() as stack:
            if self.settings.agent:
                client = connect(beside(self.settings, self.number))
            else:
                config = agent_config(
                    self.settings, engine=name, role=self.role, number=self.number, size=size
                )
                agent = await stack.enter_async_context(Agent(config))
                client = connect(agent)
            await client.open()
            self.client = client
            stack.push_async_callback(self._part)
            status = await self.client.status()
            self.worker = remote.Worker(status.name, reachable(status.control, self.settings.host))
            if self.settings.agent:
                self._line.spawn(keep(self))
            up()
            await self._line.until_stopped(CLOSE)

    async def _part(self) -> None:
        assert self.client is not None
        await self.client.close()

    def register(self, cache: KVCache | Maker, *, split: int = 1, consumers: int = 1) -> None:
        """Makes the engine's cache known to the agent; waits for it, and raises what is wrong with it.

        cache        arrays of this process, or what makes it with a client of the agent's (`integrations.provided`)
        consumers    how many workers of the other side read each offer of this one; 0: none, others have the same
        """
        self.make, self.split, self.consumers = maker(cache), split, consumers
        assert self._line.loop is not None
        known(self, self._line.loop, START)

    def close(self) -> None:
        """Ends what is under way, the agent and the thread.  Safe to call twice."""
        self._line.close(2 * CLOSE)

    # -- what hooks call ---------------------------------------------------------------------------------

    def offer(self, order: OfferOrder, *, written: int) -> None:
        """Offers a request of which `written` layers are there; the rest is told by `written`."""
        entry = Offering(order, began=time.monotonic())
        with self._lock:
            self._offers[order.key] = entry
        if self.consumers == 0:
            self._offer_over(entry, "consumed")
            return
        why = "too many orders stand in line, or the connector was closed"
        try:
            self._say_written(entry, written)
            posted = self._post(lambda: self._begin_offer(entry))
        except (
            Exception
        ) as error:  # whatever it is, the blocks are the engine's again and the next order has its turn
            log.exception("no offer was made", request=order.key)
            self.fault()
            posted, why = False, str(error)
        if not posted:
            self._offer_over(entry, "offer_failed", why)

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
        self._post(lambda: self._line.spawn(self._released(order.tickets, order.tokens)))

    def forgo(self, order: ForgoOrder) -> None:
        """Tells who waits for a transfer that no offer of it is coming."""
        self._post(
            lambda: self._line.spawn(forgo(self, order.transfer, order.attempt, order.why)), bounded=False
        )

    def withdraw(self, keys: Iterable[str]) -> None:
        """Ends offers whose blocks the engine wants back, to offer the requests anew later.

        The blocks are the engine's only when `ended` names the offer, request and attempt, in `offers`.
        """
        with self._lock:
            entries = [entry for key in keys if (entry := self._offers.pop(key, None)) is not None]
            self._leaving += entries
        for entry in entries:
            entry.leave(time.monotonic())
            self._post(entry.wake, bounded=False)

    def abandon(self, keys: Iterable[str]) -> None:
        """Ends offers of requests that ended badly; `ended` says when their blocks are free."""
        for key in keys:
            entry = self._offers.get(key)
            if entry is not None:
                entry.leave(time.monotonic())
                self._post(entry.wake, bounded=False)
                # Who waits for it is told that it was withdrawn, and waits for the next one.
                order = entry.order
                self.forgo(
                    ForgoOrder(order.transfer, order.attempt + 1, "the prefill engine has given it up")
                )

    def ended(self, finished: Iterable[str]) -> Ended:
        """What has ended; `finished` are requests that the engine is through with, whose blocks it may be holding."""
        now = time.monotonic()
        with self._lock:
            found, self._over = self._over, Ended()
            self._look_after(now)
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
                stats.observe(self._stats, "held_seconds", now - entry.began)
            for key in [key for key, loading in self._fetches.items() if loading.over]:
                loading = self._fetches.pop(key)
                found.arrived.add(key)
                if loading.ready is not None:
                    found.ready[key] = loading.ready
                else:
                    found.why[key] = loading.why
                    if not loading.aborted:
                        found.failed[key] = self._useless(loading.order)
        return found

    def _look_after(self, now: float) -> None:
        """Names blocks that were taken back long ago and are still read; they stay held, however long that takes."""
        self._leaving = [entry for entry in self._leaving if not entry.over.is_set()]
        for entry in self._leaving:
            if entry.left and now - entry.left > LATE and not entry.told:
                entry.told = True
                self._stats["late"] += 1
                log.error(
                    "blocks that the engine has taken back are still being read; they stay held",
                    request=entry.order.key,
                    blocks=len(entry.order.blocks),
                    seconds=LATE,
                )

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

    def _post(self, call: Callable[[], object], *, bounded: bool = True) -> bool:
        return self._line.post(call, bounded=bounded)

    # -- on the loop -------------------------------------------------------------------------------------

    def table(self, blocks: tuple[int, ...]) -> list[int]:
        """The engine's block table in the agent's blocks."""
        if self.split == 1:
            return list(blocks)
        return [block * self.split + i for block in blocks for i in range(self.split)]

    def _begin_offer(self, entry: Offering) -> None:
        key = entry.order.key
        task = self._line.spawn(self._offered(entry, self._offering.get(key)))
        self._offering[key] = task

        def forget(task: asyncio.Task[None]) -> None:
            if self._offering.get(key) is task:
                del self._offering[key]

        task.add_done_callback(forget)

    async def _offered(self, entry: Offering, before: asyncio.Task[None] | None) -> None:
        ending, why = "offer_failed", "the connector was closed"
        try:
            if (
                before is not None
            ):  # of the same request, which was preempted; it stands until it is read no more
                await asyncio.wait({before})
            with self._lock:
                self._stats["offered"] += 1
            ending, why = await offer(self, entry), ""
        except HawkError as error:
            why = str(error)
        finally:
            self._offer_over(entry, ending, why)

    def _offer_over(self, entry: Offering, ending: str, why: str = "") -> None:
        with self._lock:
            if entry.over.is_set():  # the thread's end and the hook that found it ended both come here
                return
            self._stats[ending] += 1
            mark, entry.mark = entry.mark, None
            self._over.offers.append(entry.end(ending, why))
            entry.over.set()
        if mark is not None:
            drop(mark)
        if ending == "offer_failed":
            # Who fetches it is told now, and not by its own deadline.
            log.warning("offer failed", request=entry.order.key, reason=why)
            order = entry.order
            self._post(
                lambda: self._line.spawn(forgo(self, order.transfer, order.attempt, why)), bounded=False
            )

    def _begin(self, entry: Fetching) -> None:
        entry.task = self._line.spawn(self._fetched(entry))

    async def _fetched(self, entry: Fetching) -> None:
        order, ready, why, held = entry.order, None, "the connector was closed", True
        entry.started = True
        try:
            if entry.aborted:
                raise Aborted("the engine ended the request")
            ready = await fetch(self, entry)
            with self._lock:
                stats.observe(self._stats, "fetch_seconds", time.monotonic() - entry.began)
                stats.observe(self._stats, "fetch_bytes", ready.nbytes)
        except asyncio.CancelledError:
            if not entry.aborted:  # the connector is being closed
                raise
            why = "the engine ended the request"
        except HawkError as error:
            why, held = str(error), entry.aborted or may_be_held(error)
        finally:
            ending = "fetched" if ready is not None else "fetch_aborted" if entry.aborted else "fetch_failed"
            self._fetch_over(entry, ending, why, ready)
        if ready is None and held:
            await self._released(entry.tickets, order.end)

    def _fetch_over(self, entry: Fetching, ending: str, why: str, ready: Ready | None = None) -> None:
        with self._lock:
            if entry.over:  # as above
                return
            self._stats[ending] += 1
            entry.ready, entry.why = ready, why
            entry.over = True
        if ending == "fetch_failed":
            log.warning("fetch failed", request=entry.order.key, reason=why)

    async def _released(self, tickets: tuple[str, ...], tokens: int) -> None:
        try:
            with self._lock:
                self._stats["dropped"] += 1
            await release(self, tickets, tokens)
        except (HawkError, InvalidArgument) as error:
            # It runs out by itself: all that is lost is room on the other side, for a while.
            log.info("an offer that nobody needs was not released", reason=str(error))
