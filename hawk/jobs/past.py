"""How the latest offers ended, and which were never made: what is said to those who come too late."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass

from hawk.errors import AlreadyClaimed, HawkError, LeaseExpired, UnknownRequest


class Outcome(enum.StrEnum):
    """How an offer ended."""

    CONSUMED = "consumed"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    FORGONE = "forgone"
    """It was never made, and will not be."""


@dataclass(frozen=True, slots=True)
class PastOffer:
    """What became of an offer: how it ended, who took it, whose it was, and why it was not made."""

    outcome: Outcome
    taken: tuple[str, ...]
    session: bytes
    why: str = ""


def gone(outcome: Outcome, request: str, why: str = "") -> HawkError:
    """What to tell who comes for an offer that has ended."""
    if outcome is Outcome.CONSUMED:
        return AlreadyClaimed("the offer was consumed", field="request", got=request)
    if outcome is Outcome.EXPIRED:
        return LeaseExpired("the offer's time ran out before it was fetched", field="request", got=request)
    what = "it was withdrawn" if outcome is Outcome.WITHDRAWN else "it will not be offered"
    return UnknownRequest(
        f"nothing to fetch: {what}", field="request", got=request, outcome=outcome, reason=why or None
    )


class Past:
    """The latest endings, by claim and by request; of more than `most` the oldest are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._claims: OrderedDict[str, PastOffer] = OrderedDict()
        self._requests: OrderedDict[str, Outcome] = OrderedDict()

    def of(self, claim: str) -> PastOffer | None:
        """How the offer with that claim ended, if it did and is remembered."""
        return self._claims.get(claim)

    def latest(self, request: str) -> Outcome | None:
        """How the request's latest offer ended, unless it was offered anew."""
        return self._requests.get(request)

    def anew(self, request: str) -> None:
        """The request is offered again."""
        self._requests.pop(request, None)

    def keep(self, claim: str, past: PastOffer, request: str = "") -> None:
        """An offer has ended, the latest of `request`; without one it was not made."""
        self._claims[claim] = past
        if request:
            self._requests[request] = past.outcome
        for known in (self._claims, self._requests):
            while len(known) > self._most:
                known.popitem(last=False)
