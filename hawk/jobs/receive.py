"""Receiving chunks: plan, read, finish, each chunk on its own, a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import BadFrame, HawkError, InternalError, InvalidArgument
from hawk.jobs.caches import read_part
from hawk.jobs.chunks import bytes_of, cut, fewest_heads, least_of
from hawk.jobs.cover import Cover
from hawk.jobs.laying import Laying
from hawk.jobs.scrub import wipe
from hawk.jobs.staging import weighed
from hawk.jobs.states import settle
from hawk.jobs.verify import Arrivals
from hawk.memory.base import MoveSupport
from hawk.memory.groups import JoinedRanges
from hawk.observe.log import get as get_log
from hawk.plan.check import check_blocks, entries
from hawk.plan.part import selection as select
from hawk.plan.repeat import TargetPlans
from hawk.plan.segments import moved, staged, touched
from hawk.plan.types import Selection

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.messages import Accepted, Prepared
    from hawk.jobs.fetch import FetchContext
    from hawk.jobs.request import FetchRequest, FetchResult
    from hawk.jobs.staging import Staging
    from hawk.memory.region import ByteRanges, Segments
    from hawk.plan.part import Part
    from hawk.plan.types import Chunk, TargetChunk
    from hawk.transports.base import Capabilities, Link

log = get_log("hawk.jobs.receive")

_SMALL = 2 << 20
"""A request falls into `FetchContext.pipeline` chunks at least, if they do not become smaller than so many bytes, below
which a chunk's own costs outweigh what overlapping saves, or than GPUs carry in"""
_WORTH = 5e-4
"""so many seconds, which is what the launches of one cost."""

_WEIGHING = 0.0003
"""Seconds that it takes to weigh staged against direct, by planning a chunk: no more than it can save."""

DEPTH = 2
"""Chunks read at a time: while one's bytes flow the next is planned and the last one finished."""


class Receiver:
    """The receiving half of one fetch attempt.

    `start` begins a chunk; there is `room` for it while fewer than DEPTH run.  `idle` says that none runs, `check` what
    went wrong, `stop` ends what still runs and returns when no byte can land.  `arrived` is called after every chunk
    that is in its place, `failed` with the first error of one, and `ended` whenever one runs no more.
    """

    def __init__(
        self,
        context: FetchContext,
        request: FetchRequest,
        result: FetchResult,
        arrived: Callable[[], None],
        failed: Callable[[HawkError], None],
        ended: Callable[[], None],
        part: Part | None = None,
        *,
        alone: bool = True,
    ) -> None:
        self._context = context
        self._request = request
        self._result = result
        self._arrived = arrived
        self._failed = failed
        self._one_ended = ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._touched: list[ByteRanges] = []
        self._cover = Cover()
        self._part = part
        self._alone = alone
        self.total = 0
        self._plans: TargetPlans | None = None
        self._guess: Selection | None = None
        self._planned: tuple[TargetChunk, Segments | None, ByteRanges] | None = None
        self._staging: Staging | None = None
        self._error: HawkError | None = None
        self._stopped = False
        self._arrivals = Arrivals(context.verifier)
        self._laying = Laying(request.cache)
        layout = request.cache.layout
        result.channels = [0] * layout.channels
        self.chunk_limit = context.chunk

    def _select(self, first: int, tokens: int) -> Selection:
        """What this attempt brings of those tokens, as far as is known of the part that the source holds."""
        cache = self._request.cache
        if self._part is None:
            return Selection(layer=0, layers=cache.layout.shape.layers, token=first, tokens=tokens)
        return select(self._part, cache.part, first, tokens)

    async def reserve(self, capabilities: Capabilities) -> None:
        """Decides how chunks will be written and takes the staging that this needs, before anything is asked for."""
        context, request = self._context, self._request
        layout, memory = request.cache.layout, request.cache.memory
        tokens = request.tokens or len(request.blocks) * layout.shape.block_size - request.first
        guess = self._select(request.first, max(tokens, 1))
        if self._part is None and not self._alone:
            # Which heads will come is not known yet.  The least tells how chunks are best written.
            guess = fewest_heads(layout, guess)
        whole, least = bytes_of(layout, guess), least_of(layout, guess)
        if self._part is not None or self._alone:
            # A small request falls into a few chunks, too, so that retiling and reading overlap.
            worth = int(capabilities.bandwidth * _WORTH) if capabilities.into_gpus else _SMALL
            self.chunk_limit = min(context.chunk, max(whole // context.pipeline, _SMALL, worth, least))
        self._plans, self._guess = TargetPlans(layout, request.blocks, guess), guess
        chunk = cut(layout, guess, self.chunk_limit, "jobs.chunk")[0]
        if context.mode == "staged" and (memory is None or memory.move_support is MoveSupport.NONE):
            raise InvalidArgument(
                "staged needs a memory that moves bytes inside its channels",
                field="transport.mode",
                got="staged",
                expected="auto or direct for a cache in this memory",
            )
        saves = whole // layout.page_stride * capabilities.request_cost > _WEIGHING
        # A run takes one request at most when written directly, and one move when staged.
        staging = memory is not None and memory.move_support is not MoveSupport.NONE
        cheaper = memory is not None and memory.move_row_cost < capabilities.request_cost
        if context.mode == "auto" and not (saves and staging and cheaper):
            self._result.mode = "direct"
            # Once the request is on its way: P plans its side in the same time.
            asyncio.get_running_loop().call_soon(self._plan_ahead, chunk)
            return
        if self._plans.quick(chunk):
            planned = self._plans.plan(chunk)
        else:
            planned = await context.planner.call(self._plans.plan, chunk)
        self._staging = weighed(context, request, planned, capabilities, DEPTH)
        self._result.mode = "direct" if self._staging is None else "staged"

    def _plan_ahead(self, chunk: Chunk) -> None:
        """Plans a chunk before it is there: here where the plan is made in no time, else where all others are made."""
        if self._plans is None or self._stopped:
            return

        def plan() -> None:
            with contextlib.suppress(HawkError):  # said in due course, to whoever waits for this chunk
                self._planned = self._laid_out(chunk)

        if self._plans.quick(chunk):
            plan()
        else:
            self._context.planner.soon(plan)

    def _plan_next(self, chunk: Chunk) -> None:
        """Plans what probably follows a chunk, while that is read."""
        following = self._cover.following(chunk)
        if following is not None and self._staging is None:
            self._plan_ahead(following)

    def begin(self, accepted: Accepted) -> None:
        """P has accepted: what will come is known now."""
        layout, request = self._request.cache.layout, self._request
        if accepted.first != request.first or (request.tokens and accepted.tokens != request.tokens):
            raise BadFrame(
                "the peer accepted other tokens than were asked for",
                got=f"[{accepted.first}, {accepted.first + accepted.tokens})",
                expected=f"from {request.first}, {request.tokens or 'all'} tokens",
            )
        if accepted.part is not None:
            self._part = read_part(accepted.part, "peer.part")
        selection = self._select(accepted.first, accepted.tokens)
        if self._plans is None or selection != self._guess:
            check_blocks(layout, request.blocks, selection, "blocks")
            self._plans, self._planned = TargetPlans(layout, request.blocks, selection), None
        self._cover = Cover(selection, *entries(layout, selection))
        self.total = bytes_of(layout, selection)
        self._result.first, self._result.tokens = accepted.first, accepted.tokens
        self._arrivals.begin(accepted)

    def room(self) -> bool:
        """Whether one more chunk may begin."""
        return len(self._tasks) < DEPTH

    def idle(self) -> bool:
        """Whether no chunk runs."""
        return not self._tasks

    def check(self) -> None:
        """Raises the first error of any chunk; once it is idle, also what is missing or came twice."""
        if self._error is not None:
            raise self._error
        if self.idle():
            self._cover.check()

    def start(self, prepared: Prepared, link: Link, consumed: Callable[[int, bool], None]) -> None:
        """Begins to plan, read and finish a chunk, or does it where that needs no wait; raises `BadFrame`."""
        chunk = self._cover.take(prepared)
        if self._at_once(prepared, chunk, link, consumed):
            return
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._chunk(prepared, chunk, link, consumed))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        loop.call_soon(self._plan_next, chunk)  # once this one is on its way

    def _at_once(
        self, prepared: Prepared, chunk: Chunk, link: Link, consumed: Callable[[int, bool], None]
    ) -> bool:
        """A small chunk, planned and read in this very call; False where it takes a task, whatever has landed."""
        assert self._plans is not None
        if self._tasks or self._staging is not None or not self._plans.quick(chunk):
            return False
        request, result = self._request, self._result
        began = time.perf_counter()
        if self._planned is None or self._planned[0].chunk != chunk:
            self._planned = self._laid_out(chunk)  # for the task, too, if it takes one
        planned, segments, ranges = self._plan(prepared, chunk)
        assert segments is not None
        ask = request.ask(prepared.nbytes, self.total - result.nbytes)
        if not self._context.reads.passes(request.source, result.transport, ask):
            return False
        reads = time.perf_counter()
        self._touched.append(ranges)
        if not link.read_now(prepared.key, segments, request.cache.regions):
            return False
        took = time.perf_counter() - reads
        self._landed(prepared, planned)
        self._add("plan", reads - began)
        self._was_read(took)
        consumed(prepared.chunk, self._is_last(0))
        return True

    def _add(self, phase: str, seconds: float) -> None:
        phases = self._result.phases
        phases[phase] = phases.get(phase, 0.0) + seconds

    def _was_read(self, seconds: float) -> None:
        self._add("read", seconds)
        self._context.metrics.phase("read", seconds)

    def _landed(self, prepared: Prepared, planned: TargetChunk) -> None:
        """A chunk is in its place."""
        result = self._result
        self._arrivals.came(prepared, planned)
        result.nbytes += planned.nbytes
        self._arrived()  # first of all: somebody may wait for a first byte
        self._add("retile", prepared.retile)
        for channel, nbytes in enumerate(self._laying.channel_bytes(planned)):
            result.channels[channel] += nbytes

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._one_ended()
        fault = None if task.cancelled() else task.exception()
        if fault is None or self._error is not None or self._stopped:
            return
        if not isinstance(fault, HawkError):
            log.error("a chunk failed on a fault of ours", job=self._request.job, exc_info=fault)
            fault = InternalError(f"{type(fault).__name__}: {fault}")
        self._error = fault
        self._failed(fault)

    async def stop(self) -> None:
        """Ends what still runs; returns when no byte of this attempt can land any more."""
        again: tuple[object, ...] | None = None
        for task in list(self._tasks):
            task.cancel()
        for task in list(self._tasks):
            try:
                await settle(task)
            except asyncio.CancelledError as error:
                again = error.args
        # Nobody asks any more which chunk failed, and the error has this in its frames.
        self._error, self._stopped = None, True
        staging, self._staging = self._staging, None
        if staging is not None:
            try:
                await staging.free(scrub=self._context.scrub)
            except asyncio.CancelledError as error:
                again = error.args
        if again is not None:
            raise asyncio.CancelledError(*again)

    async def wipe(self) -> None:
        """Zeroes what this attempt may have written of the target; after `stop`, where the config says so."""
        if not self._context.scrub_targets:
            return
        again: tuple[object, ...] | None = None
        for ranges in self._touched:
            try:
                await wipe(self._request.cache.regions, ranges, self._request.cache.memory)
            except asyncio.CancelledError as error:
                again = error.args
        if again is not None:
            raise asyncio.CancelledError(*again)

    async def flush(self) -> None:
        """Makes all that was written visible to the device; after the last read of every queue."""
        began = time.perf_counter()
        memory = self._request.cache.memory
        if memory is not None and self._touched:
            await memory.flush(JoinedRanges.of(self._touched))
        self._result.phases["flush"] = time.perf_counter() - began

    async def verify(self) -> None:
        """Checks all that was written, after the flush; raises `VerificationFailed`."""
        await self._arrivals.verify(self._request.cache, self._result.phases, self._context.metrics)

    def _plan(self, prepared: Prepared, chunk: Chunk) -> tuple[TargetChunk, Segments | None, ByteRanges]:
        """The chunk's plan, its segments (None where it goes through staging), and the bytes it writes."""
        known, plans = self._planned, self._plans
        assert plans is not None
        if known is None or known[0].chunk != chunk or known[0].selection != plans.selection:
            known = self._laid_out(chunk)
        planned, segments, ranges = known
        if planned.nbytes != prepared.nbytes:
            raise BadFrame(
                "the peer's plan of this chunk differs from ours",
                field=f"chunk {prepared.chunk}",
                got=f"{prepared.nbytes} bytes",
                expected=f"{planned.nbytes} bytes",
                hint="Both agents must run versions of HAWK that plan alike",
            )
        return planned, None if segments is None else moved(segments, prepared.offset), ranges

    def _laid_out(self, chunk: Chunk) -> tuple[TargetChunk, Segments | None, ByteRanges]:
        """The same for a chunk that lies at the beginning of the arena."""
        assert self._plans is not None
        cache = self._request.cache
        planned = self._plans.plan(chunk)
        if self._staging is not None and self._staging.fits(planned):
            return planned, None, touched(planned, cache.placement)
        return planned, *self._laying.of(planned)

    async def _chunk(
        self, prepared: Prepared, chunk: Chunk, link: Link, consumed: Callable[[int, bool], None]
    ) -> None:
        began = time.perf_counter()
        assert self._plans is not None
        if self._plans.quick(chunk):
            planned, segments, ranges = self._plan(prepared, chunk)
        else:
            planned, segments, ranges = await self._context.planner.call(self._plan, prepared, chunk)
        self._add("plan", time.perf_counter() - began)
        if not (self._touched and self._touched[-1] is ranges):  # where it was tried at once
            self._touched.append(ranges)
        if segments is None:
            await self._staged(prepared, planned, link, consumed)
        else:
            await self._read(prepared, segments, link)
        self._landed(prepared, planned)
        if segments is not None:
            consumed(prepared.chunk, self._is_last(1))

    def _is_last(self, tasks: int) -> bool:
        """Whether nothing but a flush is left to do before everything is given back, which says the same."""
        return (
            self._alone and not self._arrivals.wanted and len(self._tasks) == tasks and self._cover.complete
        )

    async def _read(self, prepared: Prepared, segments: Segments, link: Link) -> None:
        request, nbytes = self._request, prepared.nbytes
        ask = request.ask(nbytes, self.total - self._result.nbytes)
        async with self._context.reads.turn(request.source, self._result.transport, ask):
            began = time.perf_counter()
            await link.read(prepared.key, segments, request.cache.regions, timeout=request.timeout)
        self._was_read(time.perf_counter() - began)

    async def _staged(
        self, prepared: Prepared, planned: TargetChunk, link: Link, consumed: Callable[[int, bool], None]
    ) -> None:
        """Each channel's bytes into a staging slot as one segment, then to their places by moves in the channel."""
        memory, cache = self._request.cache.memory, self._request.cache
        assert memory is not None
        assert self._staging is not None
        async with self._staging.slot() as begin:
            region = cache.placement.region[0]
            offset = np.full(cache.layout.channels, begin, dtype=np.int64)
            segments, moves = await self._context.planner.call(
                staged, planned, cache.placement, prepared.offset, region, offset
            )
            await self._read(prepared, segments, link)
            consumed(prepared.chunk, False)
            began = time.perf_counter()
            await memory.move(moves)
            took = time.perf_counter() - began
            self._add("finish", took)
            self._context.metrics.phase("finish", took)
