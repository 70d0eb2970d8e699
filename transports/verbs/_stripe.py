"""The reading side of one queue pair: what is under way on it, and what becomes of that when it breaks."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hawk.errors import AccessDenied, HawkError, TransferFailed
from hawk.transports.verbs._device import (
    FLUSHED,
    REM_ACCESS,
    RETRY_EXCEEDED,
    RNR_EXCEEDED,
    STATUS,
    SUCCESS,
    VerbsError,
)
from hawk.transports.verbs._numa import UNKNOWN, Distances
from hawk.transports.verbs._work import MOST_TRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.transports.verbs._device import Completion
    from hawk.transports.verbs._end import End
    from hawk.transports.verbs._work import Flight, Work

AHEAD = 4
"""Batches under way on a queue pair: one arrives, the others keep it busy meanwhile."""

_OF_THE_PATH = (FLUSHED, RETRY_EXCEEDED, RNR_EXCEEDED)
"""Ends of a request for which it is not to blame: it may be tried on another queue pair."""


class Stripe:
    """One of a link's queue pairs; `end` is the present one, None while there is none.

    index      its number in the link, and that of its keys
    device     index of the device that it is on
    node       NUMA node of that device
    peer       number of the queue pair at the other end
    since      when the last one was destroyed
    on_free    called when it can take more
    on_broken  called once for each queue pair that broke; what was under way stays so until `bury`
    """

    def __init__(self, index: int, device: int, node: int = UNKNOWN) -> None:
        self.index = index
        self.device = device
        self.node = node
        self.peer = 0
        self.end: End | None = None
        self.broken = False
        self.failures = 0
        self.since = 0.0
        self.forget()
        self._flights: deque[Flight] = deque()
        self._used = 0
        self._fault: tuple[int, int] | None = None

    @property
    def flying(self) -> int:
        """Batches under way."""
        return len(self._flights)

    @property
    def fault(self) -> str:
        """What the completion said that broke it."""
        return "given up" if self._fault is None else _said(self._fault[1])

    def carries(self, work: Work) -> bool:
        """Whether something of this read is under way."""
        return any(flight.work is work for flight in self._flights)

    def adopt(self, end: End, peer: int) -> None:
        """Takes a connected queue pair into use."""
        self.peer = peer
        self.end, self.broken, self._fault, self._used = end, False, None, 0
        end.on_done = self._done
        end.on_lost = self.break_

    def forget(self) -> None:
        """Tells nobody any more: whoever was told refers to this in turn."""
        self.on_free: Callable[[], None] = lambda: None
        self.on_broken: Callable[[Stripe], None] = lambda stripe: None

    def fits(self, flight: Flight) -> bool:
        """Whether this batch can be posted now."""
        return (
            self.end is not None
            and not self.broken
            and len(self._flights) < AHEAD
            and self._used + len(flight.batch) <= self.end.depth
        )

    def post(self, flight: Flight, work: Work) -> None:
        """Posts a batch that fits; on a queue pair that will not take it, it is as if it broke under it."""
        end, batch = self.end, flight.batch
        keys = work.keys[self.index]
        assert end is not None
        assert keys is not None
        flight.first = end.take_ids(len(batch))
        flight.last = flight.first + len(batch) - 1
        flight.tries += 1
        batch.address(work.local_keys(self.device), keys, flight.first)
        self._flights.append(flight)
        self._used += len(batch)
        try:
            end.post(batch)
        except VerbsError:
            self.break_()

    def _done(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            if completion.status != SUCCESS:
                # The first that failed is to blame; what came after it was flushed.
                self._fault = self._fault or (completion.wr_id, completion.status)
                self.break_()
                continue
            while self._flights and self._flights[0].last <= completion.wr_id:
                flight = self._flights.popleft()
                self._used -= len(flight.batch)
                self.failures = 0
                flight.work.landed(flight)
        if not self.broken:
            self.on_free()

    def break_(self) -> None:
        """The queue pair is of no more use."""
        if not self.broken:
            self.broken = True
            self.failures += 1
            self.on_broken(self)

    def bury(self, error: HawkError | None) -> None:
        """The queue pair is destroyed and nothing can land: settles what was under way on it.

        With an error all of it fails; without, the batch at fault fails as its completion said, and the others, like
        any that lost their way, are to be posted again.
        """
        self.end = None
        flights, self._flights = self._flights, deque()
        self._used = 0
        fault, self._fault = self._fault, None
        for flight in flights:
            flight.avoid = self.index
            why = error
            if why is None and fault is not None and flight.first <= fault[0] <= flight.last:
                why = _verdict(flight, fault[1])
            if why is None and flight.tries >= MOST_TRIES:
                why = TransferFailed("queue pairs broke under it again and again", tries=flight.tries)
            flight.work.lost(flight, why)


def best(stripes: Sequence[Stripe], flight: Flight, near: str, distances: Distances) -> Stripe | None:
    """Which of these, all in order, a batch goes to: of those that have room the nearest, and of these the idlest.

    With `near` "only" none that is farther than another, with "any" the idlest wherever it is.
    """

    def far(stripe: Stripe) -> int:
        return 0 if near == "any" else distances.of(stripe.node, flight.node)

    if near == "only" and stripes:
        nearest = min(map(far, stripes))
        stripes = [s for s in stripes if far(s) == nearest]
    return min((s for s in stripes if s.fits(flight)), key=lambda s: (far(s), s.flying), default=None)


def _verdict(flight: Flight, status: int) -> HawkError | None:
    """What a failed completion means for the read that it belongs to; None where the path is to blame."""
    said = _said(status)
    if status == REM_ACCESS:
        return AccessDenied("the key was revoked during the read, or does not cover the range", got=said)
    if status in _OF_THE_PATH:
        return (
            TransferFailed("the peer did not answer", got=said, tries=flight.tries)
            if flight.tries >= MOST_TRIES
            else None
        )
    return TransferFailed("the RDMA device refused the read", got=said)


def _said(status: int) -> str:
    return STATUS.get(status, f"status {status}")
