"""The prefill side of a job: claim the offer, retile chunk by chunk, and hold each until it was read.

    waiting -> queued -> preparing -> prepared -> released | failed

Where it waits for others of its kind (a place to work, room in the arena, a turn at the retiler) the order is
`hawk.jobs.scheduler`'s.  Ranges of the arena belong to this job until the reader's word, or a revoke that provably
shut the reader out.  A range of which neither can be had is quarantined and handed to the `Quarantine`.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from hawk.control.frames import PROTOCOL_VERSION
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
    unpack_blocks,
)
from hawk.errors import Aborted, DeadlineExceeded, HawkError, InternalError, LeaseExpired, NotViable
from hawk.jobs.ahead import Ahead
from hawk.jobs.caches import compile_descr, part_of, write_part
from hawk.jobs.chunks import agreed
from hawk.jobs.dialogue import NUDGE, SILENCE, UNNEEDED
from hawk.jobs.retilers import Portion
from hawk.jobs.room import RoomAsk
from hawk.jobs.scheduler import Ask
from hawk.jobs.shelf import Shelf
from hawk.jobs.states import Lease, State, Stoppable, forget_frames, settle
from hawk.jobs.verify import Sealer, Verifier
from hawk.observe.log import get as get_log
from hawk.plan.check import check_blocks
from hawk.plan.part import serves
from hawk.plan.repeat import SourcePlans, TargetPlans

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hawk.control.messages import PeerMessage
    from hawk.jobs.admission import Place
    from hawk.jobs.caches import CacheBook
    from hawk.jobs.offers import Claim, OfferBook, OfferEntry
    from hawk.jobs.planner import Planner
    from hawk.jobs.quarantine import Quarantine
    from hawk.jobs.retilers import Retilers, SourceRetiler
    from hawk.jobs.room import Room
    from hawk.jobs.shelf import Held
    from hawk.observe.metrics import Metrics
    from hawk.plan.types import Chunk, Step
    from hawk.transports.base import Transport

log = get_log("hawk.jobs.serve")


@dataclass(frozen=True)
class ServeContext:
    """What all serves of an agent share."""

    room: Room
    retilers: Retilers
    planner: Planner
    transports: Mapping[str, Transport]
    offers: OfferBook
    caches: CacheBook
    quarantine: Quarantine
    metrics: Metrics
    lease: float
    chunk: int
    verifier: Verifier = field(default_factory=Verifier)


@dataclass(eq=False)
class ServeJob(Stoppable):
    """One job on the prefill side.

    consumer    name of the asking agent
    place       its place among the jobs of this agent
    send        puts a message on the way to it; never waits, never raises
    version     the protocol version that the agent spoke when it asked
    reader      its own endpoint of the job's transport, by which that may know it
    phase       what it does or waits for now: offer, turn, layers, plan, reserve, retile, release
    """

    context: ServeContext
    fetch: Fetch
    consumer: str
    place: Place
    send: Callable[[PeerMessage], None]
    version: int = PROTOCOL_VERSION
    reader: Mapping[str, str] = field(default_factory=dict)
    state: State = State.WAITING
    claim: Claim | None = None
    _accepted: Accepted | None = None
    _told: bool = False
    _said: bool = False
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _lease: Lease | None = None
    _sealer: Sealer = field(init=False)
    _answer: Released | Ended | None = None
    _due: float = math.inf
    _left: int = 0
    bytes_prepared: int = 0
    phase: str = "offer"

    def __post_init__(self) -> None:
        Stoppable.__init__(self)
        context, fetch = self.context, self.fetch
        self._transport = context.transports.get(fetch.transport)
        self._shelf = Shelf(
            context.room, context.quarantine, self._transport, job=fetch.job, credit=fetch.credit
        )
        if self.fetch.ttft:
            self._due = asyncio.get_running_loop().time() + self.fetch.ttft

    @property
    def offer(self) -> OfferEntry | None:
        """The offer that the job has claimed, for as long as it holds it."""
        return None if self.claim is None else self.claim.offer

    @property
    def bytes_read(self) -> int:
        """Those that the consumer says it has read; once it has released the job, all that were prepared."""
        return self.bytes_prepared if isinstance(self._answer, Released) else self._shelf.read

    @property
    def answer(self) -> Released | Ended | None:
        """The last word to the consumer, once there is one."""
        return self._answer

    def stop(self, error: HawkError) -> None:
        """Ends the job with `error`; whoever claims its offer from now on waits until it has ended."""
        super().stop(error)
        if self.claim is not None:
            self.claim.leaving = True

    # -- messages from the consumer ----------------------------------------------------------------------

    def on_message(self, message: PeerMessage) -> None:
        """A frame of this job arrived.  Any of them may come twice, or after the end."""
        if self._answer is not None:
            self.send(self._answer)
            return
        if self._lease is not None and not self._lease.renew():
            self._lease_ran_out()
            return
        match message:
            case Fetch():
                self._repeat()
            case Consumed(chunk=chunk):
                self._shelf.consumed(chunk)
            case Poll(seq=seq, consumed=consumed):
                for chunk in consumed:
                    self._shelf.consumed(chunk)
                self.send(Alive(self.fetch.job, seq))
                self._repeat()
            case Release(hold=hold):
                self._told = True
                if hold:
                    self.send(Released(self.fetch.job, held=True))
                else:
                    self._released.set()
            case Abort(error=error):
                self._told = True
                if self.claim is not None:
                    self.claim.declined = error.get(f"fact.{UNNEEDED}") == "yes"
                self.stop(
                    Aborted("the consumer ended the job", by="consumer", cause=error.get("message", "none"))
                )
            case _:
                log.debug("message out of place", job=self.fetch.job, message=type(message).__name__)

    def _repeat(self) -> None:
        """Sends again what the consumer may have missed."""
        if self._accepted is not None:
            self._said = True
            self.send(self._accepted)
        for message in self._shelf.prepared():
            self.send(message)

    # -- the job -----------------------------------------------------------------------------------------

    async def run(self) -> HawkError | None:
        """Serves the job to its end; returns None when it was released, else the error it ended with."""
        error: HawkError | None = None
        try:
            async with asyncio.timeout(self.fetch.deadline):
                await self.supervise(self._serve())
        except HawkError as fault:
            error = fault
        except TimeoutError:
            waited = " while it waited for layers" if self.phase == "layers" else ""
            text = f"the consumer's deadline passed{waited}"
            error = DeadlineExceeded(text, state=self.state.value, seconds=self.fetch.deadline)
        except asyncio.CancelledError:
            error = Aborted("the agent is stopping", state=self.state.value)
            raise
        except Exception as fault:
            log.exception("a serve failed on a fault of ours", job=self.fetch.job)
            error = InternalError(f"{type(fault).__name__}: {fault}", state=self.state.value)
        finally:
            await self._finish(error)
            forget_frames(error)
        return error

    async def _serve(self) -> None:
        context, fetch = self.context, self.fetch
        if self._transport is None:
            raise NotViable("the peer has no such transport", field="transport", got=fetch.transport)
        # Until its turn comes the consumer asks again and again; one that does not has given up, and its word was lost.
        self._lease = Lease(max(context.lease, SILENCE), self._lease_ran_out, grace=NUDGE)
        target = compile_descr(fetch.target)
        blocks = unpack_blocks(fetch.blocks)
        wanted = part_of(fetch.target)
        self.claim = await context.offers.claim(
            fetch.request,
            fetch.claim,
            self.consumer,
            fetch.job,
            wait=fetch.wait,
            wants=lambda entry: serves(entry.part, wanted),
        )
        self.claim.stop = self.stop
        offer = self.claim.offer
        context.caches.use(offer.cache)
        source = offer.cache.layout
        most, room = min(fetch.chunk, context.chunk), context.room.arena.region.nbytes
        growing = context.retilers.writing(offer)
        selection, chunks, self._left, lossy = agreed(offer, fetch, source, target, most, room, growing)
        # Those of the offer were looked at when it came.
        check_blocks(target, blocks, selection, "fetch.blocks")
        self.place.arrived()
        self.state, self.phase = State.QUEUED, "turn"
        await self.place.work(self._ask(self._left))
        self._lease.end()
        self._lease = Lease(context.lease, self._lease_ran_out, grace=NUDGE)
        self.state = State.PREPARING
        into = TargetPlans(target, blocks, selection)
        self._sealer = Sealer(context.verifier, fetch, into.plan)
        self._accepted = Accepted(
            job=fetch.job,
            first=selection.token,
            tokens=selection.tokens,
            chunks=len(chunks),
            lease=context.lease,
            note=offer.note,
            lossy=lossy,
            verify=self._sealer.name,
            part=write_part(offer.part),
        )
        # With the first chunk, if that is there in this turn of the loop: one frame then does for two.
        asyncio.get_running_loop().call_soon(self._say_accepted)
        out = SourcePlans(source, offer.blocks, offer.cache.placement, target, blocks)

        def plan(chunk: Chunk) -> tuple[int, Sequence[Step]]:
            planned = into.plan(chunk)
            return planned.nbytes, out.plan(planned)

        retiler = context.retilers.of(offer.cache)
        arena, seen = context.room.arena.region, bool(self._sealer.name)
        async with Ahead(retiler.ahead) as ahead:
            for number, chunk in enumerate(chunks):
                self.phase = "layers"
                layers = selection.source_layer(chunk.layer + chunk.layers - 1) + 1
                await offer.until_layers(layers)
                self.phase = "plan"
                began = time.perf_counter()
                nbytes, steps = plan(chunk) if into.quick(chunk) else await context.planner.call(plan, chunk)
                context.metrics.phase("plan", time.perf_counter() - began)
                held = await self._reserve(number, nbytes)
                portion = Portion(
                    offer, layers, steps, arena, held.range.offset, nbytes, self._transport.shadow, seen
                )
                await ahead.put(self._prepare(number, chunk, portion, retiler, held, self._transport))
        self.state, self.phase = State.PREPARED, "release"
        # The source has been read for the last time, and what is left to do is the consumer's.
        self.place.leave()
        await self._released.wait()

    def _say_accepted(self, first: Prepared | None = None) -> bool:
        """Says it once; whether `first` was said with it."""
        if self._accepted is None or self._said or self._answer is not None:
            return False
        self._said = True
        together = first is not None and self.fetch.together
        self.send(msgspec.structs.replace(self._accepted, prepared=first) if together else self._accepted)
        return together

    async def _reserve(self, number: int, nbytes: int) -> Held:
        context, fetch = self.context, self.fetch
        began = time.perf_counter()
        ask = RoomAsk(
            self.consumer,
            nbytes,
            fetch.priority,
            self._due,
            self._left,
            owner=fetch.job,
            transport=fetch.transport,
        )
        self.phase = "reserve"
        held = await self._shelf.place(number, ask)
        context.metrics.phase("reserve", time.perf_counter() - began)
        return held

    async def _prepare(
        self,
        number: int,
        chunk: Chunk,
        portion: Portion,
        retiler: SourceRetiler,
        held: Held,
        transport: Transport,
    ) -> None:
        context, nbytes, offset = self.context, portion.nbytes, portion.offset
        self.phase = "retile"
        began = time.perf_counter()
        if not retiler.at_once(portion):
            async with retiler.turns.turn(self._ask(nbytes)):
                began = time.perf_counter()
                await retiler.run(portion)
        took = time.perf_counter() - began
        context.metrics.phase("retile", took)
        self._left -= nbytes
        checks = await self._sealer.seal(number, chunk, portion.view, context.metrics)
        held.grant = transport.grant(offset, nbytes)
        transport.expect(held.grant, self.reader)
        held.message = Prepared(
            job=self.fetch.job,
            chunk=number,
            layer=chunk.layer,
            layers=chunk.layers,
            block=chunk.block,
            blocks=chunk.blocks,
            offset=offset,
            nbytes=nbytes,
            key=held.grant.key,
            retile=took,
            checks=checks,
        )
        self.bytes_prepared += nbytes
        if not self._say_accepted(held.message):
            self.send(held.message)

    def _ask(self, nbytes: int) -> Ask:
        return Ask(self.consumer, nbytes, self.fetch.priority, self._due, self._left)

    def _lease_ran_out(self) -> None:
        self.stop(
            LeaseExpired(
                "the consumer fell silent and the lease ran out",
                consumer=self.consumer,
                seconds=self.context.lease if self._lease is None else self._lease.seconds,
                state=self.state.value,
            )
        )

    # -- letting go --------------------------------------------------------------------------------------

    async def _finish(self, error: HawkError | None) -> None:
        """Decides the answer, then returns or quarantines every range, then answers and gives the offer back."""
        self.state = State.DRAINING
        if self._lease is not None:
            self._lease.end()
        if self.claim is not None:
            self.claim.leaving = True
        try:
            if not self._shelf.clear_at_once():
                cleared = self._shelf.clear(on_its_word=self._told, reason=str(error))
                await settle(asyncio.get_running_loop().create_task(cleared))
        finally:
            try:
                self._end(error)
            except Exception:
                log.exception("a serve could not end cleanly", job=self.fetch.job)

    def _end(self, error: HawkError | None) -> None:
        self._answer = Released(self.fetch.job) if error is None else Ended(self.fetch.job, error.to_wire())
        self.state = State.RELEASED if error is None else State.FAILED
        try:
            self.send(self._answer)  # first of all, since it is waited for
        finally:  # nothing that comes of it is heard before this turn of the loop is over
            if self.claim is not None:
                self.context.caches.done(self.claim.offer.cache)
                self.context.offers.unclaim(self.claim, consumed=error is None)
                self.claim = None  # which refers to this job, for as long as it held the offer
