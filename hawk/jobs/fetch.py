"""The decode side of a job: reserve the target blocks, ask for the cache, read it chunk by chunk, make it visible.

    reserving -> connecting -> requested -> receiving -> releasing -> ready | failed

*Ready* means that every byte arrived, that the memory was flushed after the last of them, and that the
prefill side confirmed at release that its lease held until then.  Every other ending is an error with a name,
and it is raised only when no byte of the job can land any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, field
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
    pack_blocks,
)
from hawk.errors import (
    DeadlineExceeded,
    HawkError,
    InternalError,
    InvalidArgument,
    LeaseExpired,
    StillDraining,
    TransportError,
    from_wire,
)
from hawk.jobs.receive import Receiver
from hawk.jobs.states import Lease, State, Stoppable, settle
from hawk.observe.log import get as get_log
from hawk.plan.check import check_blocks
from hawk.plan.target import entries
from hawk.plan.types import Selection
from hawk.transports.registry import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from hawk.control.messages import PeerMessage
    from hawk.jobs.caches import CacheBook, CacheEntry
    from hawk.jobs.planner import Planner
    from hawk.jobs.peers import Links, Peers, PeerSession
    from hawk.observe.metrics import Metrics
    from hawk.transports.base import Link, Transport

log = get_log("hawk.jobs.fetch")

T = TypeVar("T")

NUDGE = 1.0
"""Seconds without an expected answer after which the question is put again; frames can be lost, jobs must not be."""

MARGIN = 0.1
"""Part of a lease that the reader leaves unused, so that its last read ends before the lease does."""


@dataclass(frozen=True)
class FetchContext:
    """What all fetches of an agent share."""

    peers: Peers
    links: Links
    transports: Mapping[str, Transport]
    prefer: tuple[str, ...]
    on_failure: str
    caches: CacheBook
    planner: Planner
    metrics: Metrics
    chunk: int
    credit: int
    staging: int
    mode: str


@dataclass(frozen=True)
class FetchRequest:
    """What one fetch is asked to do; `blocks` counts from token 0, tokens 0 means all from `first` on."""

    job: str
    request: str
    claim: str
    source: str
    address: str
    cache: CacheEntry
    blocks: NDArray[np.int64]
    first: int
    tokens: int
    timeout: float
    wait: bool


@dataclass
class FetchResult:
    """What a ready fetch brought: counts in tokens and bytes, seconds per phase, bytes per channel."""

    first: int = 0
    tokens: int = 0
    nbytes: int = 0
    note: bytes = b""
    transport: str = ""
    mode: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    channels: list[int] = field(default_factory=list)


class FetchJob(Stoppable):
    """One job on the decode side; `on_progress(state, bytes, total)` is called at every change."""

    def __init__(
        self, context: FetchContext, request: FetchRequest, on_progress: Callable[[State, int, int], None]
    ) -> None:
        super().__init__()
        self.context = context
        self.request = request
        self.state = State.RESERVING
        self.result = FetchResult()
        self._on_progress = on_progress
        self._changed = asyncio.Event()
        self._attempt_id = ""
        self._session: PeerSession | None = None
        self._reset()

    def _reset(self) -> None:
        """Forgets what an earlier attempt heard."""
        self._accepted: Accepted | None = None
        self._prepared: dict[int, Prepared] = {}
        self._consumed: set[int] = set()
        self._released = False
        self._ended: HawkError | None = None
        self._fault: HawkError | None = None
        self._lease: Lease | None = None
        self._polls: dict[int, float] = {}
        self._answered = 0
        self._seq = 0
        self._fetch: Fetch | None = None
        self._total = 0
        self._asked = 0.0

    # -- messages from the prefill side ------------------------------------------------------------------

    def on_message(self, message: PeerMessage) -> None:
        """A frame of this job arrived; any may come twice or late."""
        match message:
            case Accepted():
                if self._accepted is None:
                    self._accepted = message
            case Prepared(chunk=chunk):
                if chunk not in self._consumed:
                    self._prepared.setdefault(chunk, message)
                else:
                    self._send(Consumed(self._attempt_id, chunk))
            case Alive(seq=seq):
                sent = self._polls.pop(seq, None)
                self._answered = max(self._answered, seq)
                if sent is not None and self._lease is not None:
                    self._lease.renew(sent)
            case Released():
                self._released = True
            case Ended(error=error):
                self._ended = from_wire(error)
            case _:
                log.debug("message out of place", job=self.request.job, message=type(message).__name__)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _send(self, message: PeerMessage) -> None:
        if self._session is not None:
            self._session.send(message)

    async def _until(self, ready: Callable[[], T | None], again: Callable[[], None]) -> T:
        """Waits for `ready()` to give something; raises what ended the job instead; asks `again` when it takes long."""
        while True:
            if self._ended is not None:
                raise self._ended
            if self._fault is not None:
                raise self._fault
            value = ready()
            if value is not None:
                return value
            changed = self._changed
            try:
                await asyncio.wait_for(changed.wait(), NUDGE)
            except TimeoutError:
                again()

    def _poll(self) -> int:
        self._seq += 1
        self._polls[self._seq] = asyncio.get_running_loop().time()
        while len(self._polls) > 64:
            self._polls.pop(next(iter(self._polls)))
        self._send(Poll(self._attempt_id, self._seq, sorted(self._consumed)))
        return self._seq

    # -- the job -----------------------------------------------------------------------------------------

    def _move_to(self, state: State) -> None:
        self.state = state
        self._on_progress(state, self.result.nbytes, self._total)

    async def run(self) -> FetchResult:
        """Runs the job to its end; returns only when ready, raises the named error of every other ending."""
        request, cache = self.request, self.request.cache
        caches = self.context.caches
        began = time.perf_counter()
        caches.use(cache)
        error: BaseException | None = None
        try:
            cache.own(self._touched_blocks(), request.job)
            async with asyncio.timeout(request.timeout):
                await self.supervise(self._attempts())
        except TimeoutError as fault:
            if isinstance(fault, HawkError):
                error = fault
                raise
            error = DeadlineExceeded(
                "the fetch did not end in time", state=self.state.value, seconds=request.timeout
            )
            raise error from None
        except HawkError as fault:
            error = fault
            raise
        except asyncio.CancelledError as fault:
            error = fault
            raise
        except Exception as fault:
            log.exception("a fetch failed on a fault of ours", job=request.job)
            error = InternalError(f"{type(fault).__name__}: {fault}", state=self.state.value)
            raise error from fault
        finally:
            cache.disown(request.job, quarantine=isinstance(error, StillDraining))
            caches.done(cache)
            self._move_to(State.READY if error is None else State.FAILED)
        self.result.phases["total"] = time.perf_counter() - began
        return self.result

    def _touched_blocks(self) -> NDArray[np.int64]:
        """The blocks that the job writes; raises `InvalidArgument` naming the entry that cannot be right."""
        request, shape = self.request, self.request.cache.layout.shape
        tokens = request.tokens or len(request.blocks) * shape.block_size - request.first
        if tokens < 1:
            raise InvalidArgument(
                "the block table ends before the first token",
                field="blocks",
                got=f"{len(request.blocks)} entries",
                expected=f"more than {request.first // shape.block_size}",
            )
        wanted = Selection(layer=0, layers=shape.layers, token=request.first, tokens=tokens)
        blocks = check_blocks(request.cache.layout, request.blocks, wanted, "blocks")
        # A prefix that is there already is not the job's, nor is a block that no token of it touches: they may
        # serve others meanwhile.
        first, last = entries(request.cache.layout, wanted)
        return blocks[first:last]

    async def _attempts(self) -> None:
        """One attempt, or as many as there are agreed transports where the config says `next`."""
        left = list(self.context.prefer)
        while True:
            try:
                await self._attempt(left)
                return
            except TransportError as fault:
                tried = self.result.transport
                if self.context.on_failure != "next" or tried not in left or len(left) == 1:
                    raise
                left.remove(tried)
                self.context.metrics.fallback(fault.code)
                log.warning("trying the next transport", job=self.request.job, after=tried, reason=str(fault))
                self.result = FetchResult()
                self._reset()

    async def _attempt(self, transports: list[str]) -> None:
        context, request = self.context, self.request
        self._move_to(State.CONNECTING)
        began = time.perf_counter()
        session = await context.peers.session(request.source, request.address, timeout=request.timeout)
        choice = choose(transports, context.transports, session.endpoints)
        self.result.transport = choice.name
        log.debug("transport chosen", job=request.job, transport=choice.name, reason=choice.reason)
        link = await context.links.get(session, choice.name, timeout=request.timeout)
        self._attempt_id = secrets.token_hex(16)
        self._session = session
        session.attach(self._attempt_id, self.on_message, self._lost)
        self.result.phases["connect"] = time.perf_counter() - began
        try:
            await self._transfer(link, choice.name)
        except BaseException as fault:
            await self._give_up(fault)
            raise
        finally:
            if self._lease is not None:
                self._lease.end()
            session.detach(self._attempt_id)
            self._session = None

    async def _transfer(self, link: Link, transport: str) -> None:
        request = self.request
        receiver = Receiver(self.context, request, self.result, self._read_failed)
        await receiver.reserve(self.context.transports[transport].capabilities)
        try:
            await self._exchange(receiver, link, transport)
        finally:
            await receiver.stop()

    async def _exchange(self, receiver: Receiver, link: Link, transport: str) -> None:
        request, loop = self.request, asyncio.get_running_loop()
        began = time.perf_counter()
        self._asked = loop.time()
        self._fetch = Fetch(
            job=self._attempt_id,
            request=request.request,
            claim=request.claim,
            target=request.cache.descr,
            blocks=pack_blocks(request.blocks),
            first=request.first,
            tokens=request.tokens,
            transport=transport,
            chunk=receiver.chunk_limit,
            credit=self.context.credit,
            deadline=request.timeout,
            wait=request.wait,
        )
        self._move_to(State.REQUESTED)
        self._send(self._fetch)
        accepted = await self._until(lambda: self._accepted, self._ask_again)
        self.result.phases["accept"] = time.perf_counter() - began
        self._start_lease(accepted)
        keep_alive = loop.create_task(self._renew(accepted.lease))
        try:
            self._move_to(State.RECEIVING)
            self.result.note = accepted.note
            receiver.begin(accepted)
            self._total = receiver.total
            for number in range(accepted.chunks):
                await receiver.room()
                prepared = await self._until(lambda n=number: self._prepared.get(n), self._poll)  # type: ignore[misc]
                receiver.start(prepared, link, self._one_consumed)
            await receiver.all_done()
            await receiver.flush()
            self._move_to(State.RELEASING)
            began = time.perf_counter()
            self._send(Release(self._attempt_id))
            await self._until(lambda: self._released or None, lambda: self._send(Release(self._attempt_id)))
            self.result.phases["release"] = time.perf_counter() - began
        finally:
            keep_alive.cancel()
            await settle(keep_alive)

    def _ask_again(self) -> None:
        if self._fetch is not None:
            self._send(self._fetch)

    def _one_consumed(self, prepared: Prepared) -> None:
        self._consumed.add(prepared.chunk)
        self._prepared.pop(prepared.chunk, None)
        self._send(Consumed(self._attempt_id, prepared.chunk))
        self._on_progress(self.state, self.result.nbytes, self._total)

    # -- lease and loss ----------------------------------------------------------------------------------

    def _start_lease(self, accepted: Accepted) -> None:
        # An early fetch is accepted long after it was sent; P's lease began when it accepted, so what D may rely
        # on has to be asked for once more, from a moment that D knows.
        self._lease = Lease(accepted.lease * (1 - MARGIN), self._lease_ran_out)
        if not self.request.wait:
            late = asyncio.get_running_loop().time() - self._asked
            if late >= self._lease.seconds:
                self._poll()
        else:
            self._poll()

    async def _renew(self, lease: float) -> None:
        while True:
            await asyncio.sleep(lease / 4)
            self._poll()

    def _lease_ran_out(self) -> None:
        self.stop(
            LeaseExpired("the prefill side did not renew the lease in time", source=self.request.source)
        )

    def _lost(self, error: HawkError) -> None:
        """The session's peer died, restarted or fell silent."""
        self._fault = self._fault or error
        self._wake()

    def _read_failed(self, error: HawkError) -> None:
        self._fault = self._fault or error
        self._wake()

    async def _give_up(self, fault: BaseException) -> None:
        """Tells P that nothing is read any more; learns the cause from P if P ended the job first."""
        told = fault if isinstance(fault, HawkError) else HawkError("the fetch was cancelled")
        self._send(Abort(self._attempt_id, (self.stopped or told).to_wire()))
        if isinstance(fault, TransportError) and self._ended is None:
            # P may have closed the range on purpose; its own word, if there is one, says more than a broken read.
            fault_seen, self._fault = self._fault, None
            with contextlib.suppress(TimeoutError, HawkError):
                await asyncio.wait_for(self._until(lambda: None, lambda: None), NUDGE)
            self._fault = fault_seen
            if self._ended is not None and self._ended.code not in ("aborted", "job"):
                raise self._ended from fault
