"""Offers: requests whose blocks a prefill engine has put up, and who may take them."""

from __future__ import annotations

import asyncio
import enum
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.errors import (
    AlreadyClaimed,
    AlreadyOffered,
    Busy,
    HawkError,
    InvalidArgument,
    LeaseExpired,
    UnknownRequest,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from hawk.jobs.caches import CacheEntry

_REMEMBERED = 4096
"""Endings kept so that a late consumer learns why, instead of "unknown"."""

_TOLD = 8
"""Holders and takers that an error names."""


class Outcome(enum.StrEnum):
    """How an offer ended."""

    CONSUMED = "consumed"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"


@dataclass(eq=False)
class Claim:
    """One consumer's hold on an offer, for as long as its job lasts.

    leaving    the job was told to end and has not yet: who comes now waits for that
    stop       ends the job
    """

    offer: OfferEntry
    job: str
    consumer: str
    leaving: bool = False
    stop: Callable[[HawkError], None] | None = None


@dataclass(eq=False)
class OfferEntry:
    """One open offer.

    tokens       tokens `[0, tokens)` lie in `blocks`
    layers       layers `[0, layers)` of the cache are written; grows while prefill runs
    consumers    names of the agents that may claim it, each as often as it is named; empty: whoever has the ticket
    count        how many claims are to be released before the offer is consumed; of named consumers, all of theirs
    claims       those that hold it now, by job
    taken        consumers whose jobs have released it
    overdue      its time ran out while a job held it: no new claim
    """

    request: str
    cache: CacheEntry
    blocks: NDArray[np.int64]
    tokens: int
    note: bytes
    layers: int
    consumers: tuple[str, ...] = ()
    count: int = 1
    claim: str = field(default_factory=lambda: secrets.token_hex(16))
    claims: dict[str, Claim] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    overdue: bool = False
    timer: asyncio.TimerHandle | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if self.consumers:
            self.count = len(self.consumers)

    def touch(self) -> None:
        """Wakes everyone who waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def until_layers(self, layers: int) -> None:
        """Returns when layers `[0, layers)` are written."""
        while self.layers < layers:
            await self.changed.wait()

    def rivals(self, consumer: str) -> list[Claim]:
        """The claims that take one of those that `consumer` could have."""
        return [c for c in self.claims.values() if not self.consumers or c.consumer == consumer]

    def free(self, consumer: str) -> bool:
        """Whether `consumer` may claim it now."""
        if not self.consumers:
            return len(self.taken) + len(self.claims) < self.count
        return self.taken.count(consumer) + len(self.rivals(consumer)) < self.consumers.count(consumer)


@dataclass(frozen=True, slots=True)
class PastOffer:
    """What became of an offer: how it ended, who took it, and whose it was; `claim` is that of its ticket."""

    outcome: Outcome
    taken: tuple[str, ...]
    session: bytes
    claim: str


class OfferBook:
    """All open offers of an agent, by request id, and how the latest ones ended.

    An offer's source blocks may be read by HAWK until `OfferEntry.ended` is set: that is when its engine may
    reuse them.
    """

    def __init__(self, limit: int, on_ended: Callable[[OfferEntry], None]) -> None:
        self._open: dict[str, OfferEntry] = {}
        self._past: OrderedDict[str, PastOffer] = OrderedDict()
        self._limit = limit
        self._on_ended = on_ended
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, entry: OfferEntry, ttl: float) -> None:
        """Opens an offer for `ttl` seconds; raises `AlreadyOffered` or `Busy`."""
        if entry.request in self._open:
            raise AlreadyOffered("an offer for this request is open", field="request", got=entry.request)
        if len(self._open) >= self._limit:
            raise Busy(f"this agent keeps at most {self._limit} offers open", retry_after=0.5)
        self._past.pop(entry.request, None)
        self._open[entry.request] = entry
        entry.timer = asyncio.get_running_loop().call_later(ttl, self._expire, entry)
        for waiter in self._waiting.pop(entry.request, ()):
            if not waiter.done():
                waiter.set_result(None)

    def find(self, request: str) -> OfferEntry | None:
        """The open offer of that request, if there is one."""
        return self._open.get(request)

    def of_cache(self, cache: CacheEntry) -> list[OfferEntry]:
        """The open offers that are read from that cache."""
        return [entry for entry in self._open.values() if entry.cache is cache]

    def past(self, request: str) -> PastOffer | None:
        """How the latest offer of that request ended, if it is remembered and none is open."""
        return self._past.get(request)

    def get(self, request: str) -> OfferEntry:
        """The open offer; raises `UnknownRequest`, or what became of a past one."""
        entry = self._open.get(request)
        if entry is not None and entry.outcome is None:
            return entry
        past = self._past.get(request)
        outcome = entry.outcome if entry is not None else past and past.outcome
        if outcome is Outcome.CONSUMED:
            raise AlreadyClaimed("the offer was consumed", field="request", got=request)
        if outcome is Outcome.EXPIRED:
            raise LeaseExpired("the offer's time ran out before it was fetched", field="request", got=request)
        why = "it was withdrawn" if outcome is Outcome.WITHDRAWN else "no offer has that id"
        raise UnknownRequest(f"nothing to fetch: {why}", field="request", got=request)

    async def claim(self, request: str, claim: str, consumer: str, job: str, *, wait: bool) -> Claim:
        """Gives the offer to `job`; with `wait` first waits (bounded by the caller) until it is made.

        An empty `claim` (fetch by name) is accepted only where the offer names `consumer`; otherwise the claim
        must be the ticket's.  Raises `AlreadyClaimed` where `consumer` has claimed all that it may.
        """
        if wait and request not in self._open and request not in self._past:
            await self._arrival(request)
        while True:
            entry = self.get(request)
            self._check_claim(entry, claim, consumer)
            if job in entry.claims:
                raise AlreadyClaimed("the job has claimed the offer before", field="job", got=job)
            if entry.free(consumer):
                break
            rivals = entry.rivals(consumer)
            if not any(rival.leaving for rival in rivals):
                raise AlreadyClaimed(
                    "no claim of the offer is left" if len(entry.taken) else "others have claimed the offer",
                    field="request",
                    got=request,
                    holder=", ".join(rival.job for rival in rivals[:_TOLD]) or None,
                    taken=", ".join(entry.taken[:_TOLD]) or None,
                )
            # A job that was told to end still holds it for a moment.  What it leaves may be claimed anew.
            await entry.changed.wait()
        if entry.overdue:
            raise LeaseExpired("the offer's time ran out before it was fetched", field="request", got=request)
        made = entry.claims[job] = Claim(entry, job, consumer)
        return made

    @staticmethod
    def _check_claim(entry: OfferEntry, claim: str, consumer: str) -> None:
        if entry.consumers and consumer not in entry.consumers:
            raise AlreadyClaimed(
                "the offer is for another consumer",
                field="request",
                got=consumer,
                expected=" or ".join(sorted(set(entry.consumers))[:_TOLD]),
            )
        # Compared without telling by the time it takes how much of a guess was right.
        right = secrets.compare_digest(claim.encode(), entry.claim.encode())
        if not right and (claim or not entry.consumers):
            raise UnknownRequest(
                "the claim is not this offer's",
                field="claim",
                hint="Fetch with the ticket that offer() returned",
            )

    async def _arrival(self, request: str) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(request, []).append(waiter)
        try:
            await waiter
        finally:
            waiting = self._waiting.get(request)
            if waiting is not None and waiter in waiting:
                waiting.remove(waiter)
                if not waiting:
                    del self._waiting[request]

    def layers_ready(self, request: str, layers: int) -> None:
        """Layers `[0, layers)` are written.  Never goes back."""
        entry = self._open.get(request)
        if entry is None:
            raise UnknownRequest("no open offer has that id", field="request", got=request)
        top = entry.cache.layout.shape.layers
        if not entry.layers <= layers <= top:
            raise InvalidArgument(
                "layers become ready in order", field="layers", got=layers, expected=f"{entry.layers}..{top}"
            )
        entry.layers = layers
        entry.touch()

    def unclaim(self, claim: Claim, *, consumed: bool) -> None:
        """The claim's job has ended and no longer reads the source.  Unless consumed, another may take its place."""
        entry = claim.offer
        del entry.claims[claim.job]
        if consumed:
            entry.taken.append(claim.consumer)
        if len(entry.taken) == entry.count:
            # Also where it was withdrawn at the last moment: the consumers were told that it is ready.
            entry.outcome = Outcome.CONSUMED
        elif entry.outcome is None and entry.overdue and not entry.claims:
            entry.outcome = Outcome.EXPIRED
        if entry.outcome is not None and not entry.claims:
            self._end(entry)
        entry.touch()

    def end(self, entry: OfferEntry, outcome: Outcome, error: HawkError) -> None:
        """Ends the offer: no new claim from now on; jobs that hold it are stopped with `error` first."""
        if entry.outcome is not None:
            return
        entry.outcome = outcome
        if not entry.claims:
            self._end(entry)
            return
        for claim in list(entry.claims.values()):
            if claim.stop is not None:
                claim.stop(error)

    def _expire(self, entry: OfferEntry) -> None:
        if entry.claims:
            # A claimed offer lives by its jobs' leases and deadlines; its own time only bounds how long it waits.
            entry.overdue = True
            return
        self.end(entry, Outcome.EXPIRED, LeaseExpired("the offer's time ran out", got=entry.request))

    def _end(self, entry: OfferEntry) -> None:
        if self._open.get(entry.request) is not entry:
            return
        del self._open[entry.request]
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.outcome is not None:
            self._past[entry.request] = PastOffer(
                entry.outcome, tuple(entry.taken), entry.cache.session, entry.claim
            )
            while len(self._past) > _REMEMBERED:
                self._past.popitem(last=False)
        entry.ended.set()
        self._on_ended(entry)
