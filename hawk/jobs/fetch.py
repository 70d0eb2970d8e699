"""The decode side of a job: reserve the target blocks, ask for the cache, read it chunk by chunk, make it visible.

    reserving -> queued -> connecting -> requested -> receiving -> releasing -> ready | failed

A request may come in parts, from several caches of several agents, each of which is brought by a `PartJob` of its
own.  They are read at the same time, flushed together when the last byte of all has arrived, and then released: held
first, and given up when all of them are held, so that one that fails ends the others and leaves every offer as it was.

*Ready* means that every byte arrived, that the memory was flushed after the last of them, and that the
prefill side confirmed at release that its lease held until then.  Every other ending is an error with a name,
and it is raised only when no byte of the job can land any more.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hawk.errors import DeadlineExceeded, HawkError, InternalError, InvalidArgument, PartsMismatch, counted
from hawk.jobs.caches import read_part
from hawk.jobs.part import PartJob
from hawk.jobs.reads import Reads
from hawk.jobs.request import FetchRequest, FetchResult, Source
from hawk.jobs.states import State, Stoppable, settle
from hawk.jobs.verify import Verifier
from hawk.observe.log import get as get_log
from hawk.plan.check import check_blocks, entries
from hawk.plan.part import Coverage, serves
from hawk.plan.types import Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from hawk.control.messages import Accepted
    from hawk.jobs.admission import Place
    from hawk.jobs.caches import CacheBook
    from hawk.jobs.lifting import Landings
    from hawk.jobs.links import Links
    from hawk.jobs.peers import Peers
    from hawk.jobs.planner import Planner
    from hawk.observe.metrics import Metrics
    from hawk.transports.base import Transport

log = get_log("hawk.jobs.fetch")

_PROGRESS = (
    State.RESERVING,
    State.QUEUED,
    State.CONNECTING,
    State.REQUESTED,
    State.RECEIVING,
    State.RELEASING,
)
"""States of a part that has not ended, in their order."""


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
    landings: Landings | None = None
    pipeline: int = 4


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
        self.parts: list[PartJob] = []
        self.fault: HawkError | None = None
        self._on_progress = on_progress
        self._place = place
        self._blocks = 0
        self._coverage = Coverage(request.cache.part)
        self._tokens: tuple[int, int] | None = None
        self._flushing = asyncio.Lock()
        self.flushed = False
        self._clock: asyncio.Timeout | None = None
        self._settled = False
        self._total_seconds: dict[str, float] = {}

    @property
    def result(self) -> FetchResult:
        """What was brought so far."""
        joined = FetchResult.joined([part.result for part in self._needed] or [FetchResult()])
        joined.phases.update(self._total_seconds)
        return joined

    @property
    def total(self) -> int:
        """Bytes that will come, 0 until that is known."""
        return sum(part.total for part in self._needed)

    @property
    def _needed(self) -> list[PartJob]:
        return [part for part in self.parts if not part.unneeded]

    def _move_to(self, state: State) -> None:
        self.state = state
        self._on_progress(state, sum(part.result.nbytes for part in self._needed), self.total)

    def changed(self) -> None:
        """A part has come further; the whole is where the last of them is."""
        if len(self.parts) == 1 and not (only := self.parts[0]).unneeded:
            self.state = only.state
            self._on_progress(only.state, only.result.nbytes, only.total)
            return
        self._move_to(min((part.state for part in self._needed), key=_PROGRESS.index, default=self.state))

    def stop(self, error: HawkError) -> None:
        """Ends the job with `error`; its blocks are in quarantine until no byte can land any more.

        Changes nothing once all parts are held, since the fetch is as good as ready.
        """
        if self._settled:
            return
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
            self.parts = [PartJob(self, request.of(source), FetchResult) for source in self._sources()]
            blocks = self._touched_blocks()
            cache.own(blocks, request.job)
            self._blocks = len(blocks)
            async with asyncio.timeout(request.timeout) as self._clock:
                await self.supervise(self._bring())
        except TimeoutError as fault:
            if isinstance(fault, HawkError):
                error = fault
                raise
            waits = next((part.waits for part in self.parts if part.waits), None)
            error = DeadlineExceeded(
                "the fetch did not end in time",
                request=request.request,
                source=", ".join(dict.fromkeys(source.source for source in request.sources)),
                state=self.state.value,
                waited_for=waits,
                seconds=request.timeout,
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
            for part in self.parts:
                part.let_go()
            self._clock = None
            cache.disown(request.job)
            caches.done(cache)
            self._move_to(State.READY if error is None else State.FAILED)
            error = self.fault = None  # they have this in their frames
        self._total_seconds["total"] = time.perf_counter() - began
        return self.result

    def _touched_blocks(self) -> NDArray[np.int64]:
        """The blocks that the job writes; raises `InvalidArgument` naming the entry that cannot be right."""
        request, shape = self.request, self.request.cache.layout.shape
        tokens = request.tokens or len(request.blocks) * shape.block_size - request.first
        if tokens < 1:
            raise InvalidArgument(
                "the block table ends before the first token",
                field="blocks",
                got=counted(len(request.blocks), "entry", "entries"),
                expected=f"more than {request.first // shape.block_size}",
            )
        wanted = Selection(layer=0, layers=shape.layers, token=request.first, tokens=tokens)
        blocks = check_blocks(request.cache.layout, request.blocks, wanted, "blocks")
        # A prefix that is there already is not the job's, nor is a block that no token of it touches: they may
        # serve others meanwhile.
        first, last = entries(request.cache.layout, wanted)
        return blocks[first:last]

    # -- parts -------------------------------------------------------------------------------------------

    def _sources(self) -> list[Source]:
        """Those that are needed, as far as their tickets say what they hold.

        The same ticket again, a part that others bring already, and one that the target needs nothing of are left
        out; of several copies the one that is this target's to read is taken, if it is there.  Raises `PartsMismatch`
        where parts do not fit each other, or where nothing would bring some.
        """
        mine = self.request.cache.part
        sources = list(enumerate(self.request.sources))
        sources.sort(key=lambda pair: pair[1].part is not None and not serves(pair[1].part, mine))
        chosen: list[tuple[int, Source]] = []
        claims: set[str] = set()
        for i, source in sources:
            if source.claim and source.claim in claims:
                continue
            claims.add(source.claim)
            if source.part is None or self._coverage.take(source.part, f"tickets[{i}].part"):
                chosen.append((i, source))
        needed = [source for _, source in sorted(chosen, key=lambda pair: pair[0])]
        known = [source for source in needed if source.part is not None]
        if self._coverage.complete or len(known) == len(needed):
            self._coverage.check()
            return known
        return needed

    async def _turn(self) -> None:
        """Stands in line for a place to work; one that comes before its offer waits on the other side instead."""
        if self._place is None or self.request.early:
            return
        if self._place.must_wait:
            self._move_to(State.QUEUED)
        layout = self.request.cache.layout
        nbytes = sum(layout.buffer_bytes) * layout.channels * self._blocks // layout.shape.blocks
        await self._place.work(self.request.ask(nbytes, nbytes))

    async def _bring(self) -> None:
        """All parts at once; the first that fails ends the others, and its error is raised when all have ended."""
        await self._turn()
        if len(self.parts) == 1:
            await self.parts[0].run()
        else:
            loop = asyncio.get_running_loop()
            tasks = [loop.create_task(part.run()) for part in self.parts]
            for part, task in zip(self.parts, tasks, strict=True):
                part.task = task
                task.add_done_callback(part.ended)
            await self._together(tasks)
        if not self.flushed:
            self._coverage.check("source")
            raise InternalError("the parts ended before they were complete", job=self.request.job)

    async def _together(self, tasks: list[asyncio.Task[None]]) -> None:
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            again: tuple[object, ...] | None = None
            for task in tasks:
                task.cancel()
            for task in tasks:
                try:
                    await settle(task)
                except asyncio.CancelledError as error:
                    again = error.args
            if again is not None:
                raise asyncio.CancelledError(*again)
        faults = [task.exception() for task in tasks if not task.cancelled()]
        first = self.fault or next((fault for fault in faults if fault is not None), None)
        if first is None:
            return
        for part, task in zip(self.parts, tasks, strict=True):
            if not task.cancelled() and task.exception() is None:
                await part.wipe()
        raise first

    def failed(self, fault: BaseException) -> None:
        """A part has failed: the others are about to end, and a byte of theirs may land until they have."""
        if isinstance(fault, HawkError) and self.fault is None:
            self.fault = fault
        self.request.cache.quarantine(self.request.job)

    def needs(self, part: PartJob, accepted: Accepted) -> bool:
        """Whether the offer that was accepted brings something, now that it is known what it holds.

        Raises `PartsMismatch` for parts that do not fit each other.
        """
        if self._place is not None:
            self._place.begin()
        tokens = accepted.first, accepted.tokens
        first = self._tokens = self._tokens or tokens
        if first != tokens:
            raise PartsMismatch(
                "the parts hold other tokens",
                field="tokens",
                got=f"{accepted.tokens} from {accepted.first}",
                expected=f"{first[1]} from {first[0]}",
            )
        # A peer that says nothing of parts has the whole, as a target of which nothing is said.
        held = self.request.cache.part if accepted.part is None else read_part(accepted.part, "peer.part")
        known = part.request.part
        if known is not None:
            if held != known:
                raise PartsMismatch(
                    "the peer offers another part than it did before", field="part", got=held, expected=known
                )
            return True
        if not self._coverage.take(held, "peer.part"):
            return False
        part.request = replace(part.request, part=held)
        if self._coverage.complete:
            for other in self.parts:
                if other.request.part is None:
                    other.drop()
        return True

    async def all_here(self, part: PartJob) -> None:
        """Returns when all parts have arrived, the memory was flushed after the last byte of all, and all are right.

        Raises what ends the part meanwhile, `VerificationFailed` for its own bytes, and `PartsMismatch` where nothing
        brought some heads or layers.
        """
        part.here = True
        self.look()
        await part.wait_for_others(lambda: all(p.here or p.unneeded for p in self.parts))
        async with self._flushing:
            if not self.flushed:
                self._coverage.check("source")
                for other in self.parts:
                    await other.flush()
                self.flushed = True
        await part.verify()
        part.checked = True
        self.look()
        await part.wait_for_others(lambda: all(p.checked or p.unneeded for p in self.parts))

    @property
    def several(self) -> bool:
        """Whether more than one part is needed; known once all of them are here."""
        return len(self._needed) > 1

    async def all_held(self, part: PartJob) -> None:
        """Returns when every part is held.  From then on nothing ends the fetch but success."""
        part.held = True
        self.look()
        try:
            await part.wait_for_others(self._settle)
        except BaseException:
            part.held = False  # at once: the others may be about to ask
            raise

    def _settle(self) -> bool:
        if self._settled or not all(part.held for part in self._needed):
            return self._settled
        assert self._clock is not None
        if self.stopped is not None or self.fault is not None or self._clock.expired():
            return False  # it has been told to end, and is about to
        self._clock.reschedule(None)
        self._settled = True
        for part in self._needed:
            part.settle()
        return True

    def look(self) -> None:
        """A part has arrived, or turned out not to be needed: the others look whether that was the last."""
        for part in self.parts:
            part.look()
