"""Offers: requests whose blocks a prefill engine has put up, and who may take them."""

from __future__ import annotations

import asyncio
import secrets
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
from hawk.jobs.past import Outcome, Past, PastOffer, gone
from hawk.plan.part import meets

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from hawk.jobs.caches import CacheEntry
    from hawk.plan.part import Part

_REMEMBERED = 4096
"""Endings kept at least, so that a late consumer learns why, instead of "unknown"."""

_TOLD = 8
"""Holders and takers that an error names."""


@dataclass(eq=False)
class Claim:
    """One consumer's hold on an offer, for as long as its job lasts.

    leaving    the job was told to end and has not yet: who comes now waits for that
    declined   the consumer has what the offer holds from elsewhere
    stop       ends the job
    """

    offer: OfferEntry
    job: str
    consumer: str
    leaving: bool = False
    declined: bool = False
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
    declined     consumers that gave it back for having the same from elsewhere, and when, on the book's own count
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
    declined: dict[str, int] = field(default_factory=dict)
    outcome: Outcome | None = None
    overdue: bool = False
    timer: asyncio.TimerHandle | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        if self.consumers:
            self.count = len(self.consumers)

    @property
    def part(self) -> Part:
        """What of the request's cache it holds."""
        return self.cache.part

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


def _foreign(request: str, consumer: str = "") -> HawkError:
    """What to tell who has another offer's ticket, or, where `consumer` asks by name, needs this one's."""
    what, hint = "the ticket is of no offer that is open", "Fetch with the ticket that offer() returned"
    if consumer:
        what, hint = "offered without consumer=", f'{hint}, or offer with consumer="{consumer}"'
    return UnknownRequest(what, field="request" if consumer else "ticket", got=request, hint=hint)


class OfferBook:
    """All open offers of an agent, by request id, and how the latest ones ended.

    A request may be offered in parts, each from a cache of its own; no two of them share a head of a layer, unless
    they say that they are copies.  An offer's source blocks may be read by HAWK until `OfferEntry.ended` is set: that
    is when its engine may reuse them.
    """

    def __init__(self, limit: int, on_ended: Callable[[OfferEntry], None]) -> None:
        self._open: dict[str, list[OfferEntry]] = {}
        # Enough that all that were open at once can be asked for.
        self._past = Past(max(_REMEMBERED, limit))
        self._limit = limit
        self._count = 0
        self._turn = 0
        self._on_ended = on_ended
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, entry: OfferEntry, ttl: float) -> None:
        """Opens an offer for `ttl` seconds; raises `AlreadyOffered` or `Busy`."""
        for other in self._open.get(entry.request, ()):
            if meets(other.part, entry.part) and (other.part.copy, other.part.copies) == (
                entry.part.copy,
                entry.part.copies,
            ):
                whole = other.part.whole and entry.part.whole
                raise AlreadyOffered(
                    "an offer for this request is open",
                    field="request",
                    got=entry.request,
                    offered=None if whole else other.part,
                )
        if self._count >= self._limit:
            raise Busy(f"this agent keeps at most {self._limit} offers open", retry_after=0.5)
        self._open.setdefault(entry.request, []).append(entry)
        self._count += 1
        self._past.anew(entry.request)
        entry.timer = asyncio.get_running_loop().call_later(ttl, self._expire, entry)
        self._wake(entry.request)

    def entries(self) -> list[OfferEntry]:
        """Every open offer."""
        return [entry for entries in self._open.values() for entry in entries]

    def find(self, request: str, claim: str | None = None) -> OfferEntry | None:
        """The open offer with that claim, or any of that request where none is given; None if there is none."""
        if claim is None:
            return next(iter(self._open.get(request, ())), None)
        # Compared without telling by the time it takes how much of a guess was right.
        raw = claim.encode()
        entries = self._open.get(request, ())
        return next((e for e in entries if secrets.compare_digest(raw, e.claim.encode())), None)

    def of_cache(self, cache: CacheEntry) -> list[OfferEntry]:
        """The open offers that are read from that cache."""
        return [entry for entry in self.entries() if entry.cache is cache]

    def past(self, claim: str) -> PastOffer | None:
        """How the offer with that claim ended, if it did and is remembered."""
        return self._past.of(claim)

    async def claim(
        self,
        request: str,
        claim: str,
        consumer: str,
        job: str,
        *,
        wait: bool,
        wants: Callable[[OfferEntry], bool] = lambda entry: True,
    ) -> Claim:
        """Gives an offer to `job`; with `wait` first waits (bounded by the caller) until there is one.

        With the `claim` of a ticket it is the offer of that ticket.  An empty one (fetch by name) takes the first of
        those offers of the request that name `consumer`, that hold what it `wants`, and that it has not claimed yet.
        One that the consumer declined while this waited is passed over: the consumer waits here for something else.

        Raises `AlreadyClaimed` where `consumer` has claimed all that it may, `UnknownRequest` where there is nothing
        to claim, `LeaseExpired` where the offer's time ran out.
        """
        since = self._turn

        def fits(entry: OfferEntry) -> bool:
            return wants(entry) and entry.declined.get(consumer, 0) <= since

        while True:
            entry = self._by_ticket(request, claim) if claim else self._by_name(request, consumer, fits, wait)
            if entry is None:
                if not wait:
                    raise UnknownRequest(
                        "nothing to fetch: no offer has that id, or none with what the target lacks",
                        field="request",
                        got=request,
                    )
                await self._arrival(request)
                continue
            if entry.outcome is not None:
                raise gone(entry.outcome, request)
            if entry.consumers and consumer not in entry.consumers:
                raise AlreadyClaimed(
                    "the offer is for another consumer",
                    field="request",
                    got=consumer,
                    expected=" or ".join(sorted(set(entry.consumers))[:_TOLD]),
                )
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
            raise gone(Outcome.EXPIRED, request)
        made = entry.claims[job] = Claim(entry, job, consumer)
        return made

    def _by_ticket(self, request: str, claim: str) -> OfferEntry | None:
        """The offer with that claim; None while none of the request was made."""
        entry = self.find(request, claim)
        if entry is None and (past := self._past.of(claim)) is not None:
            raise gone(past.outcome, request, past.why)
        # Those that were withdrawn, and are still read, make room for another.
        if entry is None and any(other.outcome is None for other in self._open.get(request, ())):
            raise _foreign(request)
        return entry

    def _by_name(
        self, request: str, consumer: str, wants: Callable[[OfferEntry], bool], wait: bool
    ) -> OfferEntry | None:
        """The offer that a consumer without a ticket gets; None where it may yet be made."""
        entries = self._open.get(request, ())
        if not entries:
            if (outcome := self._past.latest(request)) is not None:
                raise gone(outcome, request)
            return None
        named = [entry for entry in entries if consumer in entry.consumers]
        if not named:
            if not entries[0].consumers:
                raise _foreign(request, consumer)
            return entries[0]  # which is refused with the names that it is for
        fitting = [entry for entry in named if wants(entry)]
        for fits in (
            lambda entry: entry.outcome is None and entry.free(consumer),
            lambda entry: entry.outcome is None and any(c.leaving for c in entry.rivals(consumer)),
            lambda entry: entry.part.whole or not wait,  # nothing better will come
        ):
            found = next(filter(fits, fitting), None)
            if found is not None:
                return found
        return None

    def _wake(self, request: str) -> None:
        """Those who wait for an offer look again."""
        for waiter in self._waiting.pop(request, ()):
            if not waiter.done():
                waiter.set_result(None)

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

    def layers_ready(self, entry: OfferEntry, layers: int) -> None:
        """Layers `[0, layers)` of the offer's cache are written.  Never goes back."""
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
        elif claim.declined:
            self._turn += 1
            entry.declined[claim.consumer] = self._turn
        if len(entry.taken) == entry.count:
            # Also where it was withdrawn at the last moment: the consumers were told that it is ready.
            entry.outcome = Outcome.CONSUMED
        elif entry.outcome is None and entry.overdue and not entry.claims:
            entry.outcome = Outcome.EXPIRED
        if entry.outcome is not None and not entry.claims:
            self._end(entry)
        entry.touch()
        self._wake(entry.request)

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
        entries = self._open.get(entry.request, [])
        if entry not in entries:
            return
        entries.remove(entry)
        self._count -= 1
        if not entries:
            del self._open[entry.request]
        if entry.timer is not None:
            entry.timer.cancel()
        if entry.outcome is not None:
            past = PastOffer(entry.outcome, tuple(entry.taken), entry.cache.session)
            self._past.keep(entry.claim, past, entry.request)
        entry.ended.set()
        self._on_ended(entry)

    def forgo(self, request: str, claim: str, session: bytes, why: str) -> None:
        """No offer will be made with that claim; who waits for it is told why.  One that was made stays as it is."""
        if self._past.of(claim) is None and self.find(request, claim) is None:
            self._past.keep(claim, PastOffer(Outcome.FORGONE, (), session, why))
            self._wake(request)
