"""The decode side of a job: reserve the target blocks, ask for the cache, read it chunk by chunk, make it visible.

    reserving -> queued -> connecting -> requested -> receiving -> releasing -> ready | failed

*Ready* means that every byte arrived, that the memory was flushed after the last of them, and that the
prefill side confirmed at release that its lease held until then.  Every other ending is an error with a name,
and it is raised only when no byte of the job can land any more.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.control.messages import Fetch, pack_blocks
from hawk.errors import (
    DeadlineExceeded,
    HawkError,
    InternalError,
    InvalidArgument,
    LeaseExpired,
    TransportError,
    UnknownRequest,
    VerificationFailed,
)
from hawk.jobs.dialogue import Dialogue
from hawk.jobs.reads import Reads
from hawk.jobs.receive import Receiver
from hawk.jobs.scheduler import Ask
from hawk.jobs.states import State, Stoppable
from hawk.jobs.verify import Verifier
from hawk.observe.log import get as get_log
from hawk.plan.check import check_blocks, entries
from hawk.plan.types import Selection
from hawk.transports.registry import choose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from hawk.jobs.admission import Place
    from hawk.jobs.caches import CacheBook, CacheEntry
    from hawk.jobs.links import Links
    from hawk.jobs.peers import Peers, PeerSession
    from hawk.jobs.planner import Planner
    from hawk.observe.metrics import Metrics
    from hawk.transports.base import Link, Transport

log = get_log("hawk.jobs.fetch")

CONNECT_TIMEOUT = 10.0
CONNECT_SHARE = 0.8
"""Part of a fetch's time that connecting may take, so that "nobody is there" is said, and not "too late"."""


@dataclass(frozen=True)
class FetchContext:
    """What all fetches of an agent share; `reads` are those that go on at a time."""

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
    verifier: Verifier = field(default_factory=Verifier)
    scrub: bool = False
    scrub_targets: bool = False
    reads: Reads = field(default_factory=Reads)


@dataclass(frozen=True)
class FetchRequest:
    """What one fetch is asked to do; `blocks` counts from token 0, tokens 0 means all from `first` on.

    generation  the run of the prefill agent that made the ticket, or empty where there is none
    client      whose share of this agent's work it counts against
    priority    among the fetches of a client, the higher first
    due         loop time by which it should be ready; `inf` where nobody said
    """

    job: str
    request: str
    claim: str
    source: str
    address: str
    generation: str
    cache: CacheEntry
    blocks: NDArray[np.int64]
    first: int
    tokens: int
    timeout: float
    wait: bool
    client: str = ""
    priority: int = 0
    due: float = math.inf

    def ask(self, nbytes: int, left: int) -> Ask:
        """What stands for this job where it waits for others, with `left` bytes to bring."""
        return Ask(self.client, nbytes, self.priority, self.due, left)

    @property
    def early(self) -> bool:
        """Whether it may come before its offer.  One that has a ticket was made already, or never will be again."""
        return self.wait and not self.generation


@dataclass
class FetchResult:
    """What a ready fetch brought: counts in tokens and bytes, seconds per phase, bytes per channel.

    attempt     the job id on the wire, by which the prefill side knows the latest attempt
    """

    first: int = 0
    tokens: int = 0
    nbytes: int = 0
    note: bytes = b""
    transport: str = ""
    mode: str = ""
    attempt: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    channels: list[int] = field(default_factory=list)


class FetchJob(Stoppable):
    """One job on the decode side; `on_progress(state, bytes, total)` is called at every change.

    place    its place among the jobs of this agent; None where they are not counted
    """

    def __init__(
        self,
        context: FetchContext,
        request: FetchRequest,
        on_progress: Callable[[State, int, int], None],
        place: Place | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        self.request = request
        self.state = State.RESERVING
        self.result = FetchResult()
        self._on_progress = on_progress
        self._place = place
        self._blocks = 0
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes that will come, 0 until that is known."""
        return self._total

    def _move_to(self, state: State) -> None:
        self.state = state
        self._on_progress(state, self.result.nbytes, self._total)

    def stop(self, error: HawkError) -> None:
        """Ends the job with `error`; its blocks are in quarantine until no byte can land any more."""
        super().stop(error)
        self.request.cache.quarantine(self.request.job)

    async def run(self) -> FetchResult:
        """Runs the job to its end; returns only when ready, raises the named error of every other ending."""
        request, cache = self.request, self.request.cache
        caches = self.context.caches
        began = time.perf_counter()
        caches.use(cache)
        error: BaseException | None = None
        try:
            blocks = self._touched_blocks()
            cache.own(blocks, request.job)
            self._blocks = len(blocks)
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
            if self._place is not None:
                self._place.leave()
            cache.disown(request.job)
            caches.done(cache)
            self._move_to(State.READY if error is None else State.FAILED)
            error = None  # it has this frame in its traceback
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
        """One attempt, or as many as there are agreed transports where the config says `next`.

        An attempt whose bytes were wrong is made again as often as the config says.
        """
        await self._turn()
        left, retries = list(self.context.prefer), self.context.verifier.retries
        while True:
            try:
                await self._attempt(left)
                return
            except VerificationFailed as fault:
                if retries == 0:
                    raise
                retries -= 1
                log.warning("fetching again what was wrong", job=self.request.job, reason=str(fault))
                self.result = FetchResult()
            except TransportError as fault:
                tried = self.result.transport
                if self.context.on_failure != "next" or tried not in left or len(left) == 1:
                    raise
                left.remove(tried)
                self.context.metrics.fallback(fault.code)
                log.warning("trying the next transport", job=self.request.job, after=tried, reason=str(fault))
                self.result = FetchResult()

    async def _turn(self) -> None:
        """Stands in line for a place to work; one that comes before its offer waits on the other side instead."""
        if self._place is None or self.request.early:
            return
        if self._place.must_wait:
            self._move_to(State.QUEUED)
        layout = self.request.cache.layout
        nbytes = sum(layout.buffer_bytes) * layout.channels * self._blocks // layout.shape.blocks
        await self._place.work(self.request.ask(nbytes, nbytes))

    def _ttft(self) -> float:
        """What is left of the time within which it should be ready; 0 where nobody said, or it is over."""
        due = self.request.due
        return 0.0 if math.isinf(due) else max(due - asyncio.get_running_loop().time(), 0.0)

    async def _attempt(self, transports: list[str]) -> None:
        context, request = self.context, self.request
        self._move_to(State.CONNECTING)
        began = time.perf_counter()
        timeout = min(CONNECT_TIMEOUT, request.timeout * CONNECT_SHARE)
        async with context.peers.session(request.source, request.address, timeout=timeout) as session:
            choice = choose(transports, context.transports, session.endpoints)
            self.result.transport = choice.name
            log.debug("transport chosen", job=request.job, transport=choice.name, reason=choice.reason)
            link = await context.links.get(session, choice.name, timeout=timeout)
            dialogue = Dialogue(session, self._lease_ran_out)
            dialogue.attach()
            self.result.attempt = dialogue.id
            self.result.phases["connect"] = time.perf_counter() - began
            receiver = Receiver(context, request, self.result, self._arrived, dialogue.fail)
            try:
                await receiver.reserve(context.transports[choice.name].capabilities)
                try:
                    await self._exchange(session, dialogue, receiver, link)
                finally:
                    await receiver.stop()
            except BaseException as fault:
                try:
                    await receiver.wipe()
                finally:
                    await self._give_up(dialogue, fault)
                raise
            finally:
                dialogue.detach()

    def _arrived(self) -> None:
        self._on_progress(self.state, self.result.nbytes, self._total)

    async def _exchange(
        self, session: PeerSession, dialogue: Dialogue, receiver: Receiver, link: Link
    ) -> None:
        """Algorithm 1 from D's side: ask, read what is prepared, flush, release."""
        request, phases = self.request, self.result.phases
        began = time.perf_counter()
        self._move_to(State.REQUESTED)
        asked = Fetch(
            job=dialogue.id,
            request=request.request,
            claim=request.claim,
            target=request.cache.descr,
            blocks=pack_blocks(request.blocks),
            first=request.first,
            tokens=request.tokens,
            transport=self.result.transport,
            chunk=receiver.chunk_limit,
            credit=self.context.credit,
            deadline=request.timeout,
            wait=request.early,
            priority=request.priority,
            ttft=self._ttft(),
            verify=self.context.verifier.asks,
            share=self.context.verifier.share,
        )
        try:
            accepted = await dialogue.ask(asked)
        except UnknownRequest as fault:
            # Only now: the session may not have known yet, when it was asked, that its peer is another process.
            now = f"{session.generation:016x}"
            if request.generation in ("", now):
                raise
            raise UnknownRequest(
                f"the agent {session.name} was restarted since the ticket was made, and its offers are gone",
                field="ticket",
                got=f"generation {request.generation}",
                expected=now,
                hint="Offer the request again",
            ) from fault
        phases["accept"] = time.perf_counter() - began
        self.result.note = accepted.note
        if self._place is not None:
            self._place.begin()
        receiver.begin(accepted)
        self._total = receiver.total
        self._move_to(State.RECEIVING)

        for number in range(accepted.chunks):
            await receiver.room()
            receiver.start(await dialogue.prepared(number), link, dialogue.consumed)
        await receiver.all_done()
        await receiver.flush()
        self._move_to(State.RELEASING)
        began = time.perf_counter()
        await dialogue.release()
        phases["release"] = time.perf_counter() - began

    def _lease_ran_out(self) -> None:
        self.stop(
            LeaseExpired("the prefill side did not renew the lease in time", source=self.request.source)
        )

    async def _give_up(self, dialogue: Dialogue, fault: BaseException) -> None:
        """Tells P that nothing is read any more; raises P's own reason instead of a broken read, if P has one."""
        told = fault if isinstance(fault, HawkError) else HawkError("the fetch was cancelled")
        broken = isinstance(fault, TransportError)
        await dialogue.abort(self.stopped or told, wait=broken)
        ended = dialogue.ended
        if broken and ended is not None and ended.facts.get("by") != "consumer":
            raise ended from fault
