"""What the decode side of one attempt has said and heard: questions put again until answered, and the lease.

Frames can be lost, come twice or late; the dialogue keeps the latest truth and wakes whoever waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import TYPE_CHECKING, TypeVar

from hawk.control.messages import (
    Abort,
    Accepted,
    Alive,
    Consumed,
    Ended,
    Fetch,
    Poll,
    Prepared,
    Release,
    Released,
)
from hawk.errors import BadFrame, HawkError, LeaseExpired, from_wire
from hawk.jobs.chunks import MOST_CHUNKS
from hawk.jobs.farewell import Farewell
from hawk.jobs.states import Lease
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.messages import PeerMessage
    from hawk.jobs.peers import PeerSession

log = get_log("hawk.jobs.dialogue")

T = TypeVar("T")

NUDGE = 1.0
"""Seconds without an expected answer after which the question is put again; frames can be lost, jobs must not be."""

SILENCE = 4 * NUDGE
"""Seconds without a frame after which a consumer that has not been accepted yet is taken to have given up."""

MARGIN = 0.1
"""Part of a lease that the reader leaves unused, so that its last read ends before the lease does."""

UNNEEDED = "unneeded"
"""Fact of an `Abort` by which the decode side gives an offer back because other offers hold the same."""

_POLLS_KEPT = 64


def _in_vain(wait: asyncio.Future[bool]) -> None:
    if not wait.done():
        wait.set_result(False)


class Dialogue:
    """One attempt's conversation with the prefill side; `attach` it first, `detach` it at the end.

    id          the job id on the wire; every attempt has its own
    accepted    the answer to the fetch, once there is one
    ended       the error with which the prefill side ended the job, if it did
    """

    def __init__(self, session: PeerSession, on_lease_lost: Callable[[], None]) -> None:
        self.id = secrets.token_hex(16)
        self.accepted: Accepted | None = None
        self.ended: HawkError | None = None
        self._session = session
        self._on_lease_lost = on_lease_lost
        self._prepared: dict[int, Prepared] = {}
        self._consumed: set[int] = set()
        self._asked_release = False
        self._held = False
        self._released = False
        self._settled = False
        self._abort: Abort | None = None
        self._fault: HawkError | None = None
        self._parted = False
        self._lease: Lease | None = None
        self._keep_alive: asyncio.TimerHandle | None = None
        self._polls: dict[int, float] = {}
        self._answered: dict[int, float] = {}
        self._seq = 0
        self._waits: list[asyncio.Future[bool]] = []

    def attach(self) -> None:
        """Frames of this attempt come here from now on."""
        self._session.attach(self.id, self.on_message, self._lost)

    def detach(self) -> None:
        """The attempt has ended, and nothing of this is asked any more.

        Lets go of the errors that were raised here, which have this in their frames.
        """
        if self._lease is not None:
            self._lease.end()
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        if self._abort is None or self.ended is not None:
            self._session.detach(self.id)
        else:
            Farewell(self._session, self._abort, NUDGE)
        self._keep_alive = self._fault = self.ended = None

    # -- hearing -----------------------------------------------------------------------------------------

    def on_message(self, message: PeerMessage) -> None:
        """A frame of this attempt arrived."""
        match message:
            case Accepted(chunks=chunks):
                if not 1 <= chunks <= MOST_CHUNKS:
                    self._lied("the peer promised so many chunks", chunks, f"1..{MOST_CHUNKS}")
                self.accepted = self.accepted or message
                if message.prepared is not None:
                    self._take(message.prepared)
            case Prepared():
                self._take(message)
            case Alive(seq=seq):
                sent = self._polls.pop(seq, None)
                if sent is not None:
                    self._answered = {seq: sent}
                    if self._lease is not None:
                        self._lease.renew(sent)
            case Released(held=held):
                if not self._asked_release:
                    self._lied("the peer confirmed a release before it was asked for", "released", None)
                self._held = True
                self._released = self._released or not held
            case Ended(error=error):
                self.ended = self.ended or from_wire(error)
            case _:
                log.debug("message out of place", job=self.id, message=type(message).__name__)
        self._wake()

    def _take(self, message: Prepared) -> None:
        chunk = message.chunk
        most = MOST_CHUNKS if self.accepted is None else self.accepted.chunks
        if chunk >= most:
            self._lied("the peer prepared a chunk that it did not promise", chunk, f"0..{most - 1}")
        elif chunk in self._consumed:
            self._send(Consumed(self.id, chunk))
        else:
            self._prepared.setdefault(chunk, message)

    def _lied(self, what: str, got: object, expected: str | None) -> None:
        self._fault = self._fault or BadFrame(what, field="peer", got=got, expected=expected)

    def fail(self, error: HawkError) -> None:
        """Something else has ended the attempt: the peer is lost, or a chunk failed.  The first error counts.

        Once the release is confirmed nothing that happens to the peer matters any more.
        """
        if not self._released:
            self._fault = self._fault or error
        self._wake()

    def _lost(self, error: HawkError) -> None:
        """The peer died, restarted or will not talk with this agent.

        An ending that it tells of after that, even in the same turn of the loop, only follows from it.
        """
        self._parted = self._parted or (self.ended is None and self._fault is None)
        self.fail(error)

    def _wake(self) -> None:
        waits, self._waits = self._waits, []
        for wait in waits:
            if not wait.done():
                wait.set_result(True)

    async def _change(self) -> bool:
        """Waits until something has changed; False where nothing has for `NUDGE` seconds.

        A future and a timer: what a job waits for is on the way to its first byte.
        """
        loop = asyncio.get_running_loop()
        wait: asyncio.Future[bool] = loop.create_future()
        self._waits.append(wait)
        timer = loop.call_later(NUDGE, _in_vain, wait)
        try:
            return await wait
        finally:
            timer.cancel()
            if wait in self._waits:  # in vain, or cancelled
                self._waits.remove(wait)

    async def _until(self, ready: Callable[[], T | None], again: Callable[[], object]) -> T:
        """Waits for `ready()` to give something; raises what ended the attempt; calls `again` when it takes long."""
        while True:
            if not self._settled:
                self._raise()
            value = ready()
            if value is not None:
                return value
            if not await self._change():
                again()

    def _raise(self) -> None:
        """Raises what has ended the attempt, if anything has."""
        if self.ended is not None and not self._parted:
            raise self.ended
        if self._fault is not None:
            raise self._fault
        if self._lease is not None and self._lease.remaining <= 0 and not self._released:
            # Its timer is due and has not had its turn of the loop; nothing may begin before that.
            raise LeaseExpired("the prefill side did not renew the lease in time", source=self._session.name)

    # -- saying ------------------------------------------------------------------------------------------

    def _send(self, message: PeerMessage) -> None:
        self._session.send(message)

    async def ask(self, fetch: Fetch) -> Accepted:
        """Asks for the cache until it is accepted; from then on the lease is kept up."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        self._send(fetch)
        accepted = await self._until(lambda: self.accepted, lambda: self._send(fetch))
        if loop.time() - asked > accepted.lease / 4:
            # The answer took long (an early fetch waits for its offer): ask anew what the lease counts from.
            seq = self._poll()
            asked = await self._until(lambda: self._answered_at(seq), self._poll)
        # P's lease runs from when it heard us, D's from when it spoke, which was before.
        self._lease = Lease(accepted.lease * (1 - MARGIN), self._on_lease_lost, since=asked)
        self._keep_alive = loop.call_later(accepted.lease / 4, self._renew, accepted.lease / 4)
        return accepted

    def _answered_at(self, seq: int) -> float | None:
        """When the latest answered poll was sent, if that was number `seq` or a later one."""
        return next((sent for number, sent in self._answered.items() if number >= seq), None)

    async def prepared(self, number: int) -> Prepared:
        """Waits for a chunk to be prepared."""
        return await self._until(lambda: self._prepared.get(number), self._poll)

    def look(self) -> None:
        """Something outside has changed that `wait_until` waits for."""
        self._wake()

    async def wait_until(self, ready: Callable[[], bool]) -> None:
        """Returns when `ready()`, which is asked again after every `look`; raises what ends the attempt meanwhile."""
        await self._until(lambda: ready() or None, self._poll)

    async def read_until(self, ready: Callable[[], bool]) -> None:
        """The same for what this side does itself; the prefill side, which need not be asked, may end it all the same.

        Its word, or its loss, is acted upon at once: a read that it will never answer would last until the lease ends.
        """
        await self._until(lambda: ready() or None, lambda: None)

    def consumed(self, number: int, last: bool = False) -> None:
        """All of a chunk that is wanted was read; of the `last` one `release` says it, which follows at once."""
        self._consumed.add(number)
        self._prepared.pop(number, None)
        # A peer that said a chunk with Accepted is none of those that wait for every word.
        if not last or self.accepted is None or self.accepted.prepared is None:
            self._send(Consumed(self.id, number))

    async def release(self) -> None:
        """Gives all back; returns when the prefill side confirms that its lease held until now."""
        self._asked_release = True
        self._send(Release(self.id))
        await self._until(lambda: self._released or None, lambda: self._send(Release(self.id)))

    async def hold(self) -> None:
        """Reads no more; returns when the prefill side confirms that its lease held until now.

        It keeps the offer for this attempt, until that is released, aborted, or silent for a lease.
        """
        self._asked_release = True
        message = Release(self.id, hold=True)
        self._send(message)
        await self._until(lambda: self._held or None, lambda: self._send(message))

    def settle(self) -> None:
        """All parts are held: nothing that happens to this one ends its fetch any more."""
        self._settled = True
        self._wake()

    async def conclude(self) -> bool:
        """Releases what was held, once `settle` was called; whether the prefill side has confirmed it.

        It has not where it is gone, where it has ended the job, or after `SILENCE` seconds.
        """
        release = Release(self.id)
        if not self._released:
            self._send(release)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENCE):
                await self._until(
                    lambda: self._released or self.ended or self._fault, lambda: self._send(release)
                )
        return self._released

    async def abort(self, error: HawkError, *, wait: bool) -> None:
        """Says that nothing is read any more; with `wait` gives the prefill side a moment to say how it ended.

        It is said again after `detach` until it is answered, so that the offer is not kept for a lease.
        """
        self._abort = Abort(self.id, error.to_wire())
        self._send(self._abort)
        if wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NUDGE):
                    await self._end()

    async def _end(self) -> None:
        while self.ended is None:
            await self._change()

    def _poll(self) -> int:
        self._seq += 1
        self._polls[self._seq] = asyncio.get_running_loop().time()
        while len(self._polls) > _POLLS_KEPT:
            self._polls.pop(next(iter(self._polls)))
        self._send(Poll(self.id, self._seq, sorted(self._consumed)))
        return self._seq

    def _renew(self, interval: float) -> None:
        self._keep_alive = asyncio.get_running_loop().call_later(interval, self._renew, interval)
        self._poll()
