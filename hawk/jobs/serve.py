"""The prefill side of a job: claim the offer, retile chunk by chunk, and hold each until it was read.

    waiting -> preparing -> prepared -> released | failed

Ranges of the arena belong to this job until the reader's word, or a revoke that provably shut the reader
out.  A range of which neither can be had is quarantined and handed to the `Quarantine`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from hawk.errors import (
    Aborted,
    DeadlineExceeded,
    HawkError,
    InternalError,
    InvalidArgument,
    LeaseExpired,
    NotViable,
)
from hawk.jobs.caches import compile_descr
from hawk.jobs.chunks import cut
from hawk.jobs.dialogue import MOST_CHUNKS
from hawk.jobs.states import Lease, State, Stoppable, forget_frames, settle
from hawk.jobs.verify import Sealer, Verifier
from hawk.observe.log import get as get_log
from hawk.plan.check import check, check_blocks
from hawk.plan.repeat import SourcePlans, TargetPlans
from hawk.plan.types import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hawk.control.messages import PeerMessage
    from hawk.jobs.caches import CacheBook
    from hawk.jobs.credit import Credit
    from hawk.jobs.offers import Claim, OfferBook, OfferEntry
    from hawk.jobs.planner import Planner
    from hawk.jobs.quarantine import Quarantine
    from hawk.layouts import CompiledLayout
    from hawk.memory.arena import Arena, Range
    from hawk.observe.metrics import Metrics
    from hawk.plan.types import Chunk, Step
    from hawk.retile.cpu import Retiler
    from hawk.transports.base import Grant, Transport

log = get_log("hawk.jobs.serve")


@dataclass(frozen=True)
class ServeContext:
    """What all serves of an agent share."""

    arena: Arena
    retiler: Retiler
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
class _Held:
    """A chunk that lies in the arena; its bytes count against the peer's credit until it goes."""

    range: Range
    grant: Grant | None = None
    message: Prepared | None = None


@dataclass(eq=False)
class ServeJob(Stoppable):
    """One job on the prefill side.

    consumer    name of the asking agent
    credit      what all jobs of that agent may have prepared together
    send        puts a message on the way to it; never waits, never raises
    version     the protocol version that the agent spoke when it asked
    """

    context: ServeContext
    fetch: Fetch
    consumer: str
    credit: Credit
    send: Callable[[PeerMessage], None]
    version: int = PROTOCOL_VERSION
    state: State = State.WAITING
    claim: Claim | None = None
    _accepted: Accepted | None = None
    _held: dict[int, _Held] = field(default_factory=dict)
    _consumed: set[int] = field(default_factory=set)
    _told: bool = False
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _freeing: set[asyncio.Task[None]] = field(default_factory=set)
    _lease: Lease | None = None
    _sealer: Sealer = field(init=False)
    _outstanding: int = 0
    _answer: Released | Ended | None = None
    bytes_prepared: int = 0

    def __post_init__(self) -> None:
        Stoppable.__init__(self)

    @property
    def offer(self) -> OfferEntry | None:
        """The offer that the job has claimed, for as long as it holds it."""
        return None if self.claim is None else self.claim.offer

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
                self._consume(chunk)
            case Poll(seq=seq, consumed=consumed):
                for chunk in consumed:
                    self._consume(chunk)
                self.send(Alive(self.fetch.job, seq))
                self._repeat()
            case Release():
                self._told = True
                self._released.set()
            case Abort(error=error):
                self._told = True
                self.stop(
                    Aborted("the consumer ended the job", by="consumer", cause=error.get("message", "none"))
                )
            case _:
                log.debug("message out of place", job=self.fetch.job, message=type(message).__name__)

    def _repeat(self) -> None:
        """Sends again what the consumer may have missed."""
        if self._accepted is not None:
            self.send(self._accepted)
        for held in self._held.values():
            if held.message is not None:
                self.send(held.message)

    def _consume(self, chunk: int) -> None:
        held = self._held.get(chunk)
        if held is None or held.message is None or chunk in self._consumed:
            return
        self._consumed.add(chunk)
        task = asyncio.get_running_loop().create_task(self._let_go(chunk))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

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
            error = DeadlineExceeded(
                "the consumer's deadline passed", state=self.state.value, seconds=self.fetch.deadline
            )
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
        transport = context.transports.get(fetch.transport)
        if transport is None:
            raise NotViable("this agent has no such transport", field="transport", got=fetch.transport)
        target = compile_descr(fetch.target)
        blocks = unpack_blocks(fetch.blocks)
        self.claim = await context.offers.claim(
            fetch.request, fetch.claim, self.consumer, fetch.job, wait=fetch.wait
        )
        self.claim.stop = self.stop
        offer = self.claim.offer
        context.caches.use(offer.cache)
        source = offer.cache.layout
        selection = self._selection(target)
        check(source, target)
        check_blocks(source, offer.blocks, selection, "offer.blocks")
        check_blocks(target, blocks, selection, "fetch.blocks")
        limit = min(fetch.chunk, context.chunk, max(context.arena.region.nbytes // 2, 1))
        half = limit < min(fetch.chunk, context.chunk)
        chunks = cut(target, selection, limit, "arena.size (half of it)" if half else "jobs.chunk")
        if len(chunks) > MOST_CHUNKS:
            raise InvalidArgument(
                "the request falls into too many chunks",
                field="jobs.chunk",
                got=f"{len(chunks)} chunks of at most {limit} bytes",
                expected=f"{MOST_CHUNKS} chunks or fewer",
            )
        self._lease = Lease(context.lease, self._lease_ran_out)
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
            lossy=target.codec.lossy and target.codec != source.codec,
            verify=self._sealer.name,
        )
        self.send(self._accepted)
        out = SourcePlans(source, offer.blocks, offer.cache.placement, target, blocks)

        def plan(chunk: Chunk) -> tuple[int, list[Step]]:
            planned = into.plan(chunk)
            return planned.nbytes, out.plan(planned)

        for number, chunk in enumerate(chunks):
            await offer.until_layers(chunk.layer + chunk.layers)
            began = time.perf_counter()
            nbytes, steps = plan(chunk) if into.quick(chunk) else await context.planner.call(plan, chunk)
            context.metrics.phase("plan", time.perf_counter() - began)
            await self._prepare(number, chunk, nbytes, steps, offer, transport)
        self.state = State.PREPARED
        # The source has been read for the last time.
        await self._released.wait()

    def _selection(self, target: CompiledLayout) -> Selection:
        assert self.offer is not None
        first, tokens = self.fetch.first, self.fetch.tokens
        last = first + tokens if tokens else self.offer.tokens
        if first >= self.offer.tokens or last > self.offer.tokens:
            raise InvalidArgument(
                "the offer does not hold these tokens",
                field="tokens",
                got=f"[{first}, {last})",
                expected=f"within [0, {self.offer.tokens})",
            )
        return Selection(layer=0, layers=target.shape.layers, token=first, tokens=last - first)

    async def _prepare(
        self,
        number: int,
        chunk: Chunk,
        nbytes: int,
        steps: list[Step],
        offer: OfferEntry,
        transport: Transport,
    ) -> None:
        context, fetch = self.context, self.fetch
        while self._outstanding and self._outstanding + nbytes > fetch.credit:
            self._room.clear()
            await self._room.wait()
        began = time.perf_counter()
        await self.credit.take(nbytes)
        try:
            reserved = await context.arena.reserve(nbytes, owner=fetch.job, timeout=fetch.deadline)
        except BaseException:
            self.credit.give(nbytes)
            raise
        self._held[number] = held = _Held(reserved)
        self._outstanding += nbytes
        context.metrics.phase("reserve", time.perf_counter() - began)
        began = time.perf_counter()
        view = context.arena.region.array[reserved.offset : reserved.offset + nbytes]
        await context.retiler.run_steps(steps, [r.array for r in offer.cache.regions], view)
        took = time.perf_counter() - began
        context.metrics.phase("retile", took)
        checks = await self._sealer.seal(number, chunk, view, context.metrics)
        held.grant = transport.grant(reserved.offset, nbytes)
        held.message = Prepared(
            job=fetch.job,
            chunk=number,
            layer=chunk.layer,
            layers=chunk.layers,
            block=chunk.block,
            blocks=chunk.blocks,
            offset=reserved.offset,
            nbytes=nbytes,
            key=held.grant.key,
            retile=took,
            checks=checks,
        )
        self.bytes_prepared += nbytes
        self.send(held.message)

    def _lease_ran_out(self) -> None:
        self.stop(
            LeaseExpired(
                "the consumer fell silent and the lease ran out",
                consumer=self.consumer,
                seconds=self.context.lease,
                state=self.state.value,
            )
        )

    # -- letting go --------------------------------------------------------------------------------------

    async def _let_go(self, number: int) -> None:
        """Closes one chunk's range on the consumer's word and returns it to the arena."""
        held = self._held.pop(number)
        # The consumer said it has read all it wants; whether the transport can prove it does not matter here.
        await self._return(held, on_its_word=True)
        self._outstanding -= held.range.nbytes
        self._room.set()

    async def _return(self, held: _Held, *, on_its_word: bool, reason: str = "") -> None:
        """Closes a range to the reader, then frees it; quarantines it where the reader may still be inside."""
        context = self.context
        transport = context.transports.get(self.fetch.transport)
        closed = held.grant is None
        try:
            if held.grant is not None and transport is not None:
                closed = await transport.revoke(held.grant)
        except Exception:
            log.exception("a range could not be closed to its reader", job=self.fetch.job)
            on_its_word = False
        self.credit.give(held.range.nbytes)
        if closed or on_its_word:
            context.arena.free(held.range)
        else:
            context.quarantine.keep(held.range, held.grant, transport, job=self.fetch.job, reason=reason)

    async def _finish(self, error: HawkError | None) -> None:
        """Decides the answer, then returns or quarantines every range, then gives the offer back."""
        self.state = State.DRAINING
        if self._lease is not None:
            self._lease.end()
        if self.claim is not None:
            self.claim.leaving = True
        cleanup = asyncio.get_running_loop().create_task(self._clean_up(error))
        await settle(cleanup)
        if (fault := cleanup.exception()) is not None:
            log.error("a serve could not end cleanly", job=self.fetch.job, exc_info=fault)

    async def _clean_up(self, error: HawkError | None) -> None:
        context, fetch = self.context, self.fetch
        # All at once: where a reader has to be waited for, one wait serves for all ranges.
        left = [self._return(held, on_its_word=self._told, reason=str(error)) for held in self._held.values()]
        self._held.clear()
        await asyncio.gather(*self._freeing, *left, return_exceptions=True)
        if self.claim is not None:
            context.caches.done(self.claim.offer.cache)
            context.offers.unclaim(self.claim, consumed=error is None)
            self.claim = None  # which refers to this job, for as long as it held the offer
        self._answer = Released(fetch.job) if error is None else Ended(fetch.job, error.to_wire())
        self.state = State.RELEASED if error is None else State.FAILED
        self.send(self._answer)
