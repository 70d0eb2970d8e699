"""One order each, from its beginning to its end: what an `Engine` does on its event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.cache import CacheSpec, KVCache
from hawk.control.messages import AbortFetch
from hawk.errors import (
    Aborted,
    DeadlineExceeded,
    HawkError,
    PeerLost,
    PeerUnreachable,
    StillDraining,
    UnknownPeer,
    UnknownRequest,
    VerificationFailed,
)
from hawk.integrations.remote import again, claim
from hawk.layouts import load
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from hawk.cache_gpu import Mark
    from hawk.client import Client
    from hawk.handles import Cache, Fetch, Ready
    from hawk.integrations.books import FetchOrder, OfferOrder
    from hawk.integrations.engine import Engine

log = get_log("hawk.integrations.orders")

_AT_A_TIME = 16
"""Offers that are given back at a time."""

_LEAST = 0.001
"""Seconds that a fetch has at least, so that it ends by an error of its own."""

Scratch = tuple["Cache", "asyncio.Queue[int]"]


@dataclass(eq=False)
class Offering:
    """An offer from the hook's word to its end.

    layers, mark    how many layers are written, and where a GPU is when they are
    leaving         the engine wants its blocks back
    left, told      when it said so, on the system's count of seconds; whether it is known that it takes long
    over            HAWK reads the blocks no more
    """

    order: OfferOrder
    began: float
    layers: int = 0
    mark: Mark | None = None
    leaving: bool = False
    left: float = 0.0
    told: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    _changed: asyncio.Event | None = None

    def leave(self, now: float) -> None:
        """It is to end."""
        if not self.leaving:
            self.leaving, self.left = True, now

    def end(self, ending: str, why: str) -> OfferEnd:
        """What is said of its end."""
        return OfferEnd(self.order.key, self.order.attempt, ending, why)

    def wake(self) -> None:
        """On the loop: layers were written, or it is to end."""
        if self._changed is not None:
            self._changed.set()

    def changed(self) -> asyncio.Event:
        """Set by the next `wake`."""
        self._changed = asyncio.Event()
        return self._changed


@dataclass(eq=False)
class Fetching:
    """A fetch from the hook's word to its end.

    tickets    of the offers that it went for last
    ready      what came of it; None, and `why`, where nothing did
    """

    order: FetchOrder
    began: float
    tickets: tuple[str, ...] = ()
    task: asyncio.Task[None] | None = None
    started: bool = False
    aborted: bool = False
    over: bool = False
    ready: Ready | None = None
    why: str = ""

    def __post_init__(self) -> None:
        self.tickets = self.order.tickets

    def abort(self) -> None:
        """On the loop: ends it; it is over when no byte of it can land any more."""
        # One that has not started sees `aborted` when it does; one that is over is telling the other side so.
        if self.task is not None and self.started and not self.over:
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class OfferEnd:
    """How an offer ended (`consumed`, `expired`, `withdrawn`, `offer_failed`) and why; its blocks are read no more."""

    key: str
    attempt: int
    ending: str
    why: str = ""


@dataclass(slots=True)
class Ended:
    """What has ended since the last look.

    sent       requests that the engine is through with and whose blocks are its own again
    offers     every offer that ended, also of requests that go on
    arrived    requests whose fetch has ended, in either way
    ready      those of them whose tokens are there, with what the other side said of them (its note, and bytes)
    why        the others, and what kept their tokens away
    failed     those of the others that the engine still wants, and blocks that hold nothing of use for it
    """

    sent: set[str] = field(default_factory=set)
    offers: list[OfferEnd] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    ready: dict[str, Ready] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    failed: dict[str, tuple[int, ...]] = field(default_factory=dict)


async def offer(engine: Engine, entry: Offering) -> str:
    """Makes the offer, tells of its layers as they come, and returns how it ended."""
    order, client, cache = entry.order, engine.client, engine.cache
    assert client is not None
    assert cache is not None
    changed = entry.changed()
    settings, whole = engine.settings, cache.layout.shape.layers
    told, after = engine.taken(entry)
    handle = await client.offer(
        order.transfer,
        cache,
        engine.table(order.blocks),
        tokens=order.tokens,
        # What is still being computed is as good as not offered: its time is to begin when it is there.
        ttl=settings.ttl if told == whole else settings.ttl + settings.timeout,
        note=bytes.fromhex(order.digest),
        layers_ready=0
        if entry.leaving
        else told,  # it is made all the same: who waits for it is to hear of its end
        after=after,
        consumers=engine.consumers,
        claim=claim(order.transfer, engine.number, order.attempt),
    )
    end = asyncio.get_running_loop().create_task(handle.ended())
    try:
        while not end.done():
            if entry.leaving:
                await handle.withdraw()
            elif entry.layers > told:
                told, after = engine.taken(entry)
                with contextlib.suppress(UnknownRequest):  # it has ended meanwhile
                    await handle.layers_ready(told, after=after)
                continue
            woken = asyncio.ensure_future(changed.wait())
            await asyncio.wait({end, woken}, return_when=asyncio.FIRST_COMPLETED)
            woken.cancel()
            changed = entry.changed()
        return await end
    except BaseException:
        # The blocks are the engine's again when this returns, so nobody may be reading them.
        with contextlib.suppress(HawkError):
            await handle.withdraw()
        raise
    finally:
        end.cancel()


async def forgo(engine: Engine, transfer: str, attempt: int, why: str) -> None:
    """Tells the agent that this offer is not coming; where that cannot be said, who waits has its deadline."""
    try:
        assert engine.client is not None
        await engine.client.forgo(transfer, claim(transfer, engine.number, attempt), why=why)
    except HawkError as error:
        log.debug("nobody was told that an offer is not coming", transfer=transfer, reason=str(error))


async def fetch(engine: Engine, entry: Fetching) -> Ready:
    """Brings a request; being cancelled ends it, and returns when no byte of it can land any more.

    A prefill that was interrupted begins again, under another claim.  Who has the answer to it knows that one; who
    fetches early, by the transfer's name alone, finds out here and asks for it.
    """
    order, cache = entry.order, engine.cache
    assert cache is not None
    loop = asyncio.get_running_loop()
    until = loop.time() + engine.settings.timeout
    attempt = 0
    while True:
        client = engine.client
        assert client is not None
        job = client.fetch(
            list(entry.tickets),
            into=cache,
            blocks=engine.table(order.blocks),
            first=order.first,
            tokens=order.end - order.first,
            timeout=max(until - loop.time(), _LEAST),
            wait=True,
        )
        try:
            ready = await _drained(client, job)
            break
        except (Aborted, UnknownRequest) as ended:
            if not order.transfer or ended.facts.get("outcome") != "withdrawn" or loop.time() > until:
                raise
            attempt += 1
            entry.tickets = again(entry.tickets, order.transfer, attempt)
            log.info("the prefill begins again", request=order.key, attempt=attempt)
    if ready.note and order.digest and ready.note.hex() != order.digest:
        raise VerificationFailed(
            "what was prefilled is another prompt", field="note", got=ready.note.hex(), expected=order.digest
        )
    return ready


def may_be_held(error: HawkError) -> bool:
    """Whether the other side may still hold the blocks of a request whose fetch has failed, and can be told."""
    return not isinstance(
        error, UnknownRequest | VerificationFailed | PeerLost | PeerUnreachable | UnknownPeer
    )


async def _drained(client: Client, job: Fetch) -> Ready:
    """Its result; on every other way out no byte can land any more, however long that takes."""
    try:
        await job.start()
        return await job.result()
    except StillDraining:
        # The agent has not answered and may begin yet; orders are answered in turn, so this one's answer is the end.
        end = asyncio.ensure_future(client.done(AbortFetch(0, job.job), timeout=None))
        while not end.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({end})
        with contextlib.suppress(HawkError):  # the agent is gone, and its threads with it
            end.result()
        raise
    except asyncio.CancelledError:
        while True:
            try:
                await job.abort()
                break
            except StillDraining:
                continue
        raise


async def release(engine: Engine, tickets: tuple[str, ...], tokens: int) -> None:
    """Ends an offer that nobody needs, by taking its last token into a block that is nobody's."""
    client, cache = engine.client, engine.cache
    assert client is not None
    assert cache is not None
    old = engine.scratch
    if old is None or (old.done() and (old.cancelled() or old.exception() is not None)):
        engine.scratch = asyncio.ensure_future(_scratch(client, cache))
    assert engine.scratch is not None
    scratch, free = await asyncio.shield(engine.scratch)
    try:  # each may wait long, for an offer that is yet to be made
        async with asyncio.timeout(engine.settings.timeout):
            block = await free.get()
    except TimeoutError as late:
        raise DeadlineExceeded("too many are being given back", seconds=engine.settings.timeout) from late
    try:
        await client.fetch(
            list(tickets),
            into=scratch,
            blocks=[block] * tokens,
            first=tokens - 1,
            tokens=1,
            timeout=engine.settings.timeout,
            wait=True,
        )
    finally:
        free.put_nowait(block)


async def _scratch(client: Client, cache: Cache) -> Scratch:
    """A cache of single tokens, and its blocks; in the plainest layout, since not all have pages of one token."""
    free: asyncio.Queue[int] = asyncio.Queue()
    for block in range(_AT_A_TIME):
        free.put_nowait(block)
    shape, plain = cache.layout.shape, load("contiguous/bhsd")
    codec = cache.layout.codec.name
    spec = CacheSpec(
        layers=shape.layers,
        heads=shape.heads,
        dim=shape.dim,
        kvs=shape.kvs,
        block_size=1,
        blocks=_AT_A_TIME,
        layout=plain,
        codec=codec if codec in plain.codecs else None,
        part=cache.part,
    )
    return await client.register(KVCache.alloc(spec)), free
