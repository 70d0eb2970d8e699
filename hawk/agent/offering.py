"""What a client says of its offers."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from hawk.control.messages import Offer, Offered, OfferEnded, Ticket, encode_ticket, unpack_blocks
from hawk.errors import Aborted, AlreadyOffered, Draining, HawkError, InvalidArgument, UnknownRequest
from hawk.jobs.offers import OfferEntry
from hawk.jobs.past import Outcome
from hawk.observe.log import get as get_log
from hawk.plan.check import check_blocks, entries
from hawk.plan.types import Selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hawk.agent.core import Agent
    from hawk.agent.sessions import Session
    from hawk.control.messages import LayersReady
    from hawk.jobs.caches import CacheEntry
    from hawk.jobs.past import PastOffer

log = get_log("hawk.agent.offering")


def offer(agent: Agent, session: Session, message: Offer) -> Offered:
    """Opens an offer; its blocks are lent until `ended` below."""
    refused = agent.wrong_role("prefill")
    if refused is not None:
        raise refused
    if agent.draining:
        raise Draining.refused(agent.config.agent.name, "offers")
    cache = agent.caches.get(message.cache, session.token)
    _check(message, cache)
    selection = Selection(layer=0, layers=cache.layout.shape.layers, token=0, tokens=message.tokens)
    blocks = check_blocks(cache.layout, unpack_blocks(message.blocks), selection, "blocks")
    claim = _claim(agent, message)
    entry = OfferEntry(
        request=message.request,
        cache=cache,
        blocks=blocks,
        tokens=message.tokens,
        note=message.note,
        layers=message.layers,
        consumers=_consumers(message),
        count=message.claims,
        claim=claim,
    )
    cache.lend(_read(entry))
    try:
        agent.offers.add(entry, message.ttl)
    except HawkError:
        cache.take_back(_read(entry))
        raise
    agent.caches.use(cache)
    session.offers.add(entry)
    if message.mark:
        _behind(agent, entry, message.layers, message.mark)
    ticket = Ticket(
        agent=agent.config.agent.name,
        address=agent.advertised_address,
        generation=f"{agent.generation:016x}",
        request=message.request,
        claim=entry.claim,
        tokens=message.tokens,
        part=cache.descr.part,
    )
    return Offered(message.id, encode_ticket(ticket))


def _claim(agent: Agent, message: Offer) -> str:
    """The offer's claim: the client's, or a fresh one.  One that was used is refused, as its ticket tells of that."""
    claim = message.claim
    if not claim:
        return secrets.token_hex(16)
    if agent.offers.past(claim) is not None or agent.offers.find(message.request, claim) is not None:
        raise AlreadyOffered("an offer was made with this claim", field="claim", got=message.request)
    return claim


def _behind(agent: Agent, entry: OfferEntry, layers: int, mark: int) -> None:
    """The layers are written when a mark is reached.  An offer of which that cannot be told ends."""
    try:
        agent.gpus.behind(entry, layers, mark)
    except HawkError as error:
        agent.offers.end(entry, Outcome.WITHDRAWN, error)
        raise


def layers_ready(agent: Agent, session: Session, message: LayersReady) -> None:
    """More layers of an offer are written, or will be when a GPU has come to the mark."""
    entry = own(agent, session, message.request, message.claim)
    agent.offers.layers_ready(entry, message.layers)
    if message.mark:  # in the same turn of the loop: nobody has begun with these layers
        _behind(agent, entry, message.layers, message.mark)


def _read(entry: OfferEntry) -> NDArray[np.int64]:
    """The blocks that tokens of the offer lie in."""
    layout = entry.cache.layout
    _, last = entries(layout, Selection(layer=0, layers=layout.shape.layers, token=0, tokens=entry.tokens))
    return entry.blocks[:last]


def _check(message: Offer, cache: CacheEntry) -> None:
    layers = cache.layout.shape.layers
    if message.tokens < 1:
        raise InvalidArgument("an offer holds at least one token", field="tokens", got=message.tokens)
    if message.ttl <= 0:
        raise InvalidArgument(
            "an offer lives for some time", field="ttl", got=message.ttl, expected="more than 0"
        )
    if message.layers > layers:
        raise InvalidArgument(
            "the cache has fewer layers", field="layers", got=message.layers, expected=f"0..{layers}"
        )


def _consumers(message: Offer) -> tuple[str, ...]:
    if message.consumer and (message.consumers or message.claims != 1):
        raise InvalidArgument(
            "an offer names its consumers once",
            field="consumer",
            got=message.consumer,
            expected="none beside consumers",
        )
    return (message.consumer,) if message.consumer else tuple(message.consumers)


def own(agent: Agent, session: Session, request: str, claim: str) -> OfferEntry:
    """The client's open offer with that claim; raises `UnknownRequest`.

    The request alone would not do: the offer of a handle may have ended, and its request been offered anew.
    """
    entry = agent.offers.find(request, claim)
    if entry is None or entry.cache.session != session.token:
        raise UnknownRequest("this offer is not open any more", field="request", got=request)
    return entry


def _past(agent: Agent, session: Session, claim: str) -> PastOffer | None:
    past = agent.offers.past(claim)
    return past if past is not None and past.session == session.token else None


async def withdraw(agent: Agent, session: Session, request: str, claim: str) -> None:
    """Ends an offer; returns when its blocks are read no more.  One that has ended already stays as it ended."""
    if _past(agent, session, claim) is not None:
        return
    entry = own(agent, session, request, claim)
    why = Aborted(
        "the prefill side withdrew the offer",
        by="the prefill side",
        request=request,
        outcome=Outcome.WITHDRAWN,
    )
    agent.offers.end(entry, Outcome.WITHDRAWN, why)
    await entry.ended.wait()


async def ending(agent: Agent, session: Session, call: int, request: str, claim: str) -> OfferEnded:
    """Waits for the end of an offer, or tells how it ended if the agent remembers."""
    past = _past(agent, session, claim)
    if past is not None:
        return _ended(call, past.outcome, past.taken)
    entry = own(agent, session, request, claim)
    await entry.ended.wait()
    return _ended(call, entry.outcome, entry.taken)


def _ended(call: int, outcome: Outcome | None, taken: Sequence[str]) -> OfferEnded:
    return OfferEnded(call, str(outcome), taken[-1] if taken else "", list(taken))


def withdraw_all(agent: Agent, cache: CacheEntry, error: HawkError) -> None:
    """Ends every open offer of a cache that its client gives back."""
    for entry in agent.offers.of_cache(cache):
        agent.offers.end(entry, Outcome.WITHDRAWN, error)


def ended(agent: Agent, session: Session | None, entry: OfferEntry) -> None:
    """An offer is over and its source blocks are free: forget it."""
    agent.gpus.forget(entry)
    entry.cache.take_back(_read(entry))
    agent.caches.done(entry.cache)
    if session is not None:
        session.offers.discard(entry)
    taken = ", ".join(entry.taken)
    log.info("offer ended", request=entry.request, outcome=str(entry.outcome), consumer=taken)
