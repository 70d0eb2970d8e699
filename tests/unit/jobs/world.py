"""Both sides of jobs with every frame, every read and the clock in the test's hands, and the books beside them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from hawk.control.messages import PeerMessage
from hawk.errors import Aborted, AccessDenied, HawkError, PeerLost, TransferFailed
from hawk.jobs.fetch import FetchJob
from hawk.jobs.past import Outcome
from hawk.jobs.request import FetchRequest
from hawk.jobs.states import State
from tests.end_to_end import caches as c
from tests.unit.jobs.books import Books, Reader, Wanted
from tests.unit.jobs.clock import ClockLoop, without_threads
from tests.unit.jobs.device import PAIRS, Device
from tests.unit.jobs.rig import PEER, TOKENS, Rig, rig

STAGES = ["asked", "accepted", "prepared", "told", "reading", "releasing", "released"]
"""How far a job is brought: Fetch, Accepted or Prepared is said; Accepted is heard, a read goes on; Release is said, or
answered."""

ENDS = ["stop", "cancel", "withdraw", "silence", "p", "d"]
"""By its client, twice; by the offer's; since no frame arrives; since one side takes the other for lost."""


class World:
    """A rig whose frames wait until they are delivered, and whose reads wait until they are let go.

    stubborn    whether reads that begin now heed no cancellation, as a thread in the middle of a copy
    at_once     whether reads, and the ends of grants, take no wait where they need none
    entered     reads that have begun
    """

    entered = 0

    def __init__(
        self,
        *,
        fenced: bool,
        arena: int,
        credit: int,
        lease: float,
        together: bool = False,
        at_once: bool = False,
    ) -> None:
        self.loop = ClockLoop()
        asyncio.set_event_loop(self.loop)
        self._stack = contextlib.AsyncExitStack()
        self.rig: Rig = self.loop.await_(
            self._stack.enter_async_context(rig(lease=lease, arena=arena, can_fence=fenced))
        )
        made = self.rig
        self.device = Device(made)
        self.books = Books(fenced=fenced, lease=lease, credit=credit, per_peer=1 << 17)
        self.frames: dict[str, list[PeerMessage]] = {"p": [], "d": []}
        self.reads: dict[Reader, asyncio.Future[str]] = {}
        self.offers: list[Any] = []
        self.tasks: dict[int, asyncio.Task[Any]] = {}
        self.jobs: dict[int, FetchJob] = {}
        self.stubborn = False
        self.parted = False
        self.log: list[str] = []
        made.context = replace(made.context, credit=credit)
        made.quarantine._interval = 1.0
        made.offers._limit = 1000
        made.to_d.together = together
        made.to_p._put = self._asked  # type: ignore[method-assign]
        made.to_d._put = self._said  # type: ignore[method-assign]
        without_threads(made)
        made.transport.read = self._read  # type: ignore[method-assign]
        made.transport.read_now = self._read_now  # type: ignore[method-assign]
        made.transport.at_once = at_once
        if not fenced:
            made.transport.after_revoke = lambda grant: all(r.start != grant.offset for r in self.reads)
        self._watch_arena()

    def _watch_arena(self) -> None:
        allocator, books = self.rig.arena.allocator, self.books
        claim, free = allocator.claim, allocator.free
        keep, back = allocator.quarantine, allocator.release_quarantined

        def claimed(offset: int, nbytes: int, owner: str) -> Any:
            books.claim(offset, nbytes, owner)
            return claim(offset, nbytes, owner)

        def freed(taken: Any) -> None:
            books.free(taken.offset, kept=False)
            free(taken)

        def kept(taken: Any, reason: str) -> None:
            books.keep(taken.offset)
            keep(taken, reason)

        def given_back(taken: Any) -> None:
            books.free(taken.offset, kept=True)
            back(taken)

        allocator.claim, allocator.free = claimed, freed  # type: ignore[method-assign]
        allocator.quarantine, allocator.release_quarantined = kept, given_back  # type: ignore[method-assign]

    # -- frames ------------------------------------------------------------------------------------------

    def _asked(self, frame: PeerMessage) -> None:
        self.books.asked(frame)
        if not self.parted:
            self.frames["p"].append(frame)

    def _said(self, frame: PeerMessage) -> None:
        self.books.said(frame, self.loop.now)
        if not self.parted:
            self.frames["d"].append(frame)

    def deliver(self, side: str, number: int = 0, *, keep: bool = False) -> None:
        """One of the frames that are on the way to a side arrives; with `keep` it will do so again."""
        waiting = self.frames[side]
        if not waiting:
            return
        number %= len(waiting)
        frame = waiting[number] if keep else waiting.pop(number)
        if side == "p":
            self.books.heard(frame, self.loop.now)
        wire = self.rig.to_p if side == "p" else self.rig.to_d
        self.loop.do(lambda: wire.deliver(frame))

    def drop(self, side: str, number: int) -> None:
        """One of them is lost."""
        if self.frames[side]:
            del self.frames[side][number % len(self.frames[side])]

    def flow(self, steps: int, *, reads: bool = True) -> None:
        """So many frames arrive in order, and with `reads` those end well, as long as there are any."""
        for _ in range(steps):
            if not any(self.frames.values()) and not (reads and self.reads):
                return
            for side in ("p", "d"):
                self.deliver(side)
            if reads:
                self.end_read(0, "well")

    def live(self, seconds: float) -> None:
        """So much time passes and nothing goes wrong in it."""
        end = self.loop.now + seconds
        while self.loop.now < end:
            self.flow(1000)
            self.loop.advance(min(0.25, end - self.loop.now + 1e-5))
        self.flow(1000)

    def reach(self, stage: str) -> None:
        """Frames arrive in order until the latest fetch is there; see `STAGES`."""
        last, allowed = max(self.tasks), STAGES.index(stage)
        for _ in range(60):
            attempts = self.books.wanted[last].attempts
            seen = {
                "asked": True,
                "accepted": any(a in self.books.accepted for a in attempts),
                "prepared": any(job in attempts for job, _ in self.books.prepared),
                "told": "receiving" in self.books.wanted[last].states,
                "reading": any(reader.job in attempts for reader in self.reads),
                "releasing": "releasing" in self.books.wanted[last].states,
                "released": any(a in self.books.answers for a in attempts),
            }
            if seen[stage] or self.tasks[last].done():
                return
            self.deliver("p")
            if allowed > STAGES.index("prepared"):
                self.deliver("d")
            if allowed > STAGES.index("reading"):
                self.end_read(0, "well")

    @property
    def free_pair(self) -> int:
        """Target blocks that no fetch writes."""
        live = {b for number in self.live_jobs for b in self.books.wanted[number].blocks}
        return next((i for i, pair in enumerate(PAIRS) if not live & set(pair)), 0)

    @property
    def live_jobs(self) -> list[int]:
        """Fetches that have not ended."""
        return [number for number, task in self.tasks.items() if not task.done()]

    def part(self) -> None:
        """Neither side ever hears of the other again."""
        self.parted, self.frames = True, {"p": [], "d": []}

    # -- reads -------------------------------------------------------------------------------------------

    async def _read(self, key: bytes, segments: Any, regions: Any, *, timeout: float) -> None:
        transport, reader = self.rig.transport, self.books.enter(key, self.loop.now)
        self.entered += 1
        how = self.reads[reader] = self.loop.create_future()
        stubborn, cancelled = self.stubborn, False
        transport.reading += 1
        try:
            if key not in transport.grants:
                raise AccessDenied("no such grant")
            while not how.done():
                try:
                    await asyncio.wait({how})
                except asyncio.CancelledError:
                    if not stubborn:
                        raise
                    cancelled = True
            if self.books.fenced and key not in transport.grants:
                raise AccessDenied("no such grant")
            if how.result() != "well":
                raise TransferFailed("cut off")
            self.books.land(reader)
            self.device.bring(segments, regions)
            if cancelled:
                raise asyncio.CancelledError
        finally:
            transport.reading -= 1
            del self.reads[reader]
            self.books.leave(reader)

    def _read_now(self, key: bytes, segments: Any, regions: Any) -> bool:
        if not (transport := self.rig.transport).at_once or key not in transport.grants:
            return False
        reader = self.books.enter(key, self.loop.now)
        self.entered += 1
        self.books.land(reader)
        self.device.bring(segments, regions)
        self.books.leave(reader)
        return True

    def end_read(self, number: int, how: str) -> None:
        """One of the reads under way ends `well` or `badly`."""
        left = [future for future in self.reads.values() if not future.done()]
        if left:
            self.loop.do(lambda: left[number % len(left)].set_result(how))

    # -- what users do -----------------------------------------------------------------------------------

    def offer(self, layers: int, ttl: float = 1000.0) -> None:
        """One more request is offered, of which so many layers are written."""
        name = f"r{len(self.offers)}"
        self.offers.append(self.loop.do(lambda: self.rig.offer(layers=layers, request=name, ttl=ttl)))

    def layers(self, number: int) -> None:
        """The rest of an offer's layers are written."""
        entry = self.offers[number]
        if not entry.ended.is_set():
            self.loop.do(lambda: self.rig.offers.layers_ready(entry, c.LAYERS))

    def withdraw(self, number: int) -> None:
        """An offer is withdrawn."""
        if not self.offers:
            return
        entry = self.offers[number]
        error = HawkError("withdrawn", by="the prefill side")
        self.loop.do(lambda: self.rig.offers.end(entry, Outcome.WITHDRAWN, error))

    def fetch(self, number: int, pair: int, timeout: float) -> int:
        """A fetch of an offer (or of one that nobody made, if negative) begins; returns its number."""
        made, blocks = self.rig, PAIRS[pair]
        wanted = self.books.begin(blocks, self.loop.now + timeout)
        if not wanted.busy:
            self.device.paint(blocks)
        entry = self.offers[number] if number >= 0 else SimpleNamespace(request="nobody's", claim="0" * 32)
        request = FetchRequest(
            job=secrets.token_hex(16),
            request=entry.request,
            claim=entry.claim,
            source="p0",
            address="",
            generation="",
            cache=made.target,
            blocks=np.array(blocks),
            first=0,
            tokens=TOKENS,
            timeout=timeout,
            wait=False,
        )

        def begin() -> None:
            job = FetchJob(made.context, request, lambda state, *_: self._moved(wanted, state))
            self.jobs[wanted.number] = job
            task = self.tasks[wanted.number] = self.loop.create_task(job.run())
            task.add_done_callback(lambda task: self._ended(wanted, task))

        self.loop.do(begin)
        return wanted.number

    def _moved(self, wanted: Wanted, state: State) -> None:
        self.books.move(wanted, state.value)
        for part in self.jobs[wanted.number].parts:
            if part.result.attempt and part.result.attempt not in wanted.attempts:
                wanted.attempts.append(part.result.attempt)

    def _ended(self, wanted: Wanted, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        ending = "cancelled" if task.cancelled() else "ready" if error is None else "bug"
        if isinstance(error, HawkError):
            ending = error.code if type(error) is not HawkError else "withdrawn"
        self.log.append(f"{wanted.number} {ending} {error}")
        if ending == "ready" and not self.device.is_right(wanted.blocks):
            self.books.wrong.append("ready, and the device sees other bytes")
        self.books.end(wanted, ending)

    def stop(self, number: int, how: str) -> None:
        """A fetch is ended from outside; see `ENDS`."""
        if how == "stop":
            self.loop.do(lambda: self.jobs[number].stop(Aborted("enough", by="the client")))
        elif how == "cancel":
            self.loop.do(self.tasks[number].cancel)
        elif how == "withdraw":
            request = self.jobs[number].request.request
            self.withdraw(next((i for i, e in enumerate(self.offers) if e.request == request), -1))
        elif how == "silence":
            self.loop.advance(self.books.lease * 1.1)
        else:
            self.lose(whose=how)

    def lose(self, *, whose: str) -> None:
        """A side takes the other for lost."""
        if whose == "d":
            self.loop.do(lambda: self.rig.peer.lose(PeerLost("the prefill side is gone")))
        else:
            gone = SimpleNamespace(identity=PEER)
            self.loop.do(lambda: self.rig.server.on_gone(gone, PeerLost("the consumer is gone")))

    def die(self, whose: str) -> None:
        """A side's process is no more."""
        self.part()
        if whose == "d":
            for task in self.tasks.values():
                self.loop.do(task.cancel)
        while any(not future.done() for future in self.reads.values()):
            self.end_read(0, "badly")
        self.lose(whose="p" if whose == "d" else "d")

    # -- looking -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Nothing runs just now, and all is as the books say."""
        made, books = self.rig, self.books
        self.loop.settle()
        for job in made.serving._jobs.values():
            books.serve(job.fetch.job, job.state.value)
        books.rest(self.loop.now)
        held = {p.start: p.owner for p in books.pieces.values() if not p.kept}
        assert {r.offset: r.owner for r in made.arena.allocator.ranges()} == held
        credit = sum(p.end - p.start for p in books.pieces.values() if not p.kept)
        assert made.room.used("peer d0") == made.room.used("transport tcp") == credit
        for entry in self.offers:
            released = books.released(entry.request)
            assert released == (entry.outcome is Outcome.CONSUMED), f"{entry.request}: {released} releases"
            assert not (entry.ended.is_set() and entry.claims)
        live = {b for w in books.wanted.values() if not (w.ended or w.busy) for b in w.blocks}
        assert made.target.owners.keys() | made.target.quarantined.keys() == live
        assert not books.wrong, books.wrong
        assert not self.loop.faults, self.loop.faults

    def end(self) -> None:
        """All is left to itself and everything ends; unless a side died, a job then succeeds."""
        self.stubborn = False
        for _ in range(400):
            self.live(0.5)
            self.check()
            if all(t.done() for t in self.tasks.values()) and not self.rig.serving.jobs:
                break
        else:
            raise AssertionError("jobs that do not end")
        for number in range(len(self.offers)):
            self.withdraw(number)
        self.live(2.0)
        self.check()
        if not self.parted:
            self.offer(c.LAYERS)
            last = self.fetch(len(self.offers) - 1, 0, 30.0)
            self.live(3.0)
            self.check()
            assert self.books.wanted[last].states[-1] == "ready", self.log
        self.loop.await_(self._stack.aclose())
        self._close()

    def abandon(self) -> None:
        """Lets go of everything after a failure."""
        with contextlib.suppress(Exception):
            self.part()
            while left := asyncio.all_tasks(self.loop):
                for task in left:
                    task.cancel()
                while any(not future.done() for future in self.reads.values()):
                    self.end_read(0, "badly")
                self.loop.advance(1.0)
            self.loop.await_(self.rig.close())
        self._close()

    def _close(self) -> None:
        asyncio.set_event_loop(None)
        self.loop.close()
