"""One part of a fetch: one offer of one prefill agent, read into the target chunk by chunk.

    connecting -> requested -> receiving -> (all parts are here, flushed and checked) -> releasing

Several parts are released in two steps: each prefill agent says first that its lease held, and keeps the offer.  Only
when all have said so the offers are given up, so that a fetch that fails has used up none of them.

What the parts of a fetch share is the `FetchJob`: the target's blocks, the deadline, the flush and the ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from hawk.control.channel import SILENT
from hawk.control.messages import Fetch, pack_blocks
from hawk.errors import (
    Aborted,
    DeadlineExceeded,
    HawkError,
    LeaseExpired,
    PeerUnreachable,
    TransportError,
    UnknownRequest,
    VerificationFailed,
    VersionMismatch,
)
from hawk.jobs.dialogue import UNNEEDED, Dialogue
from hawk.jobs.receive import Receiver
from hawk.jobs.states import State
from hawk.observe.log import get as get_log
from hawk.transports.registry import choose

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from hawk.jobs.fetch import FetchJob
    from hawk.jobs.peers import PeerSession
    from hawk.jobs.request import FetchRequest, FetchResult
    from hawk.transports.base import Link

log = get_log("hawk.jobs.part")

CONNECT_TIMEOUT = 10.0
CONNECT_SHARE = 0.8
"""Part of a fetch's time that connecting may take, so that "nobody is there" is said, and not "too late"."""

_LEAST = 0.1

PARTS_SINCE = 2
"""The first protocol version whose peers know parts."""


class PartJob:
    """One source's share of a fetch.

    here        every byte of it has arrived
    checked     they were flushed, and are right as far as that is looked at
    held        the prefill side has confirmed that its lease held until all were
    unneeded    others bring all that it could
    waits       what it waits for the prefill side to do, in words
    task        runs it, where there are several
    """

    def __init__(self, whole: FetchJob, request: FetchRequest, new_result: Callable[[], FetchResult]) -> None:
        self.context = whole.context
        self.request = request
        self.state = State.RESERVING
        self.here = False
        self.checked = False
        self.held = False
        self.unneeded = False
        self.waits = ""
        self.task: asyncio.Task[None] | None = None
        self.total = 0
        self.result = new_result()
        self._new_result = new_result
        self._whole = whole
        self._dialogue: Dialogue | None = None
        self._receiver: Receiver | None = None

    def _move_to(self, state: State) -> None:
        self.state = state
        self._whole.changed()

    def drop(self) -> None:
        """Others bring all that this could: ends it, as no failure."""
        self.unneeded = True
        if self.task is not None:
            self.task.cancel()
        self._whole.look()

    def ended(self, task: asyncio.Task[None]) -> None:
        """It has ended, one way or another."""
        fault = None if task.cancelled() else task.exception()
        if fault is None or self.unneeded or self.task is None:  # None: the fetch has ended in the same turn
            return
        if isinstance(fault, HawkError):
            fault.facts.setdefault("source", self.request.source)
            if self.request.part is not None:
                fault.facts.setdefault("part", str(self.request.part))
        self._whole.failed(fault)

    def let_go(self) -> None:
        """The fetch has ended: only the result is of use any more.

        Nor does it refer to the fetch any more, which has it among its parts: so the fetch, and with it the cache,
        is free as soon as nobody asks for the result.
        """
        self.task = self._dialogue = self._receiver = None
        del self._whole

    def look(self) -> None:
        """Something has changed about the other parts."""
        if self._dialogue is not None:
            self._dialogue.look()

    async def wait_for_others(self, ready: Callable[[], bool]) -> None:
        """Returns when `ready()`; the lease is kept up meanwhile, and what ends this part is raised."""
        assert self._dialogue is not None
        await self._dialogue.wait_until(ready)

    def settle(self) -> None:
        """The fetch is ready, whatever happens to this part from now on."""
        if self._dialogue is not None:
            self._dialogue.settle()

    async def flush(self) -> None:
        """Makes what it wrote visible to the device."""
        if self._receiver is not None:
            await self._receiver.flush()

    async def wipe(self) -> None:
        """Zeroes what it wrote, where the config says so; for one that was released before another failed."""
        if self._receiver is not None:
            await self._receiver.wipe()

    async def verify(self) -> None:
        """Checks what it wrote, where the config says so; raises `VerificationFailed`."""
        if self._receiver is not None:
            await self._receiver.verify()

    async def run(self) -> None:
        """Brings it; once it is not needed, nothing that happens to it is a failure."""
        try:
            await self._attempts()
        except HawkError:
            if not self.unneeded:
                raise

    async def _attempts(self) -> None:
        """One attempt, or as many as there are agreed transports where the config says `next`.

        An attempt whose bytes were wrong is made again as often as the config says.
        """
        left, retries = list(self.context.prefer), self.context.verifier.retries
        while True:
            try:
                await self._attempt(left)
                return
            except VerificationFailed as fault:
                if retries == 0 or self.checked:
                    raise
                retries -= 1
                log.warning("fetching again what was wrong", job=self.request.job, reason=str(fault))
                self._begin_again()
            except TransportError as fault:
                tried = self.result.transport
                last = self.context.on_failure != "next" or tried not in left or len(left) == 1
                if last or self.checked:
                    raise
                left.remove(tried)
                self.context.metrics.fallback(fault.code)
                log.warning("trying the next transport", job=self.request.job, after=tried, reason=str(fault))
                self._begin_again()

    def _begin_again(self) -> None:
        self.here, self.total, self.result = False, 0, self._new_result()
        self._whole.flushed = False

    async def _attempt(self, transports: list[str]) -> None:
        context, request = self.context, self.request
        self._move_to(State.CONNECTING)
        began = time.perf_counter()
        patience = request.timeout * CONNECT_SHARE
        until = began + patience
        self.waits = f"{request.source} to answer"
        async with self._session(until) as session:
            choice = choose(transports, context.transports, session.endpoints)
            self.result.transport = choice.name
            log.debug("transport chosen", job=request.job, transport=choice.name, reason=choice.reason)
            link = await self._link(session, choice.name, until)
            if context.landings is not None:
                capabilities = context.transports[choice.name].capabilities
                link = await context.landings.through(link, capabilities, request.cache.gpu)
            dialogue = self._dialogue = Dialogue(session, self._lease_ran_out)
            dialogue.attach()
            self.result.attempt = dialogue.id
            self.result.phases["connect"] = time.perf_counter() - began
            alone = len(self._whole.parts) == 1
            self.waits = ""
            receiver = self._receiver = Receiver(
                context,
                request,
                self.result,
                self._whole.changed,
                dialogue.fail,
                dialogue.look,
                request.part,
                alone=alone,
            )
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

    @contextlib.asynccontextmanager
    async def _session(self, until: float) -> AsyncIterator[PeerSession]:
        """The session with the peer, asked for again as long as it is there and too busy to answer, and there is time.

        A peer that is not there at all is given up sooner: the request may be computed elsewhere.
        """
        request = self.request
        async with contextlib.AsyncExitStack() as stack:
            while True:
                left = until - time.perf_counter()
                timeout = max(min(CONNECT_TIMEOUT, left), _LEAST)
                meeting = self.context.peers.session(
                    request.source, request.address, timeout=timeout, patience=max(left, _LEAST)
                )
                try:
                    session = await stack.enter_async_context(meeting)
                    break
                except PeerUnreachable as late:
                    if left <= CONNECT_TIMEOUT or late.facts.get("reason") != SILENT:
                        raise
                    log.info("asking again", job=request.job, peer=request.source, reason=str(late))
            yield session

    async def _link(self, session: PeerSession, transport: str, until: float) -> Link:
        """A link, tried for again as long as the peer is there and there is time: it may be busy for that long."""
        while True:
            left = until - time.perf_counter()
            try:
                return await self.context.links.get(
                    session, transport, timeout=max(min(CONNECT_TIMEOUT, left), _LEAST)
                )
            except DeadlineExceeded as late:
                if left <= CONNECT_TIMEOUT or session.state != "up":
                    raise
                log.info("connecting again", job=self.request.job, transport=transport, reason=str(late))

    async def _exchange(
        self, session: PeerSession, dialogue: Dialogue, receiver: Receiver, link: Link
    ) -> None:
        """Algorithm 1 from D's side: ask, read what is prepared, flush, release."""
        request, phases = self.request, self.result.phases
        self._check_version(session)
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
            ttft=request.ttft(),
            together=True,
            verify=self.context.verifier.asks,
            share=self.context.verifier.share,
        )
        lacks = ", and has no offer of it or no place for it" if request.early else ""
        self.waits = f"{session.name}, which has not accepted it{lacks}"
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
        self.waits = ""
        phases["accept"] = time.perf_counter() - began
        if not self._whole.needs(self, accepted):
            self.unneeded = True
            declined = Aborted("other parts hold the same", by="consumer", **{UNNEEDED: "yes"})
            await dialogue.abort(declined, wait=False)
            self._whole.look()
            return
        self.result.note = accepted.note
        receiver.begin(accepted)
        self.total = receiver.total
        self._move_to(State.RECEIVING)

        for number in range(accepted.chunks):
            await dialogue.read_until(receiver.room)
            self.waits = f"layers: chunk {number + 1} of {accepted.chunks} was not prepared"
            prepared = await dialogue.prepared(number)
            self.waits = ""
            receiver.start(prepared, link, dialogue.consumed)
            # Whoever waits for a first byte goes before what is left to do, and all others get their turns.
            await asyncio.sleep(0)
        await dialogue.read_until(receiver.idle)
        receiver.check()
        await self._whole.all_here(self)
        self._move_to(State.RELEASING)
        began = time.perf_counter()
        if self._whole.several:
            await dialogue.hold()
            await self._whole.all_held(self)
            if not await dialogue.conclude():
                log.info(
                    "a part's offer may stay open", job=request.job, attempt=dialogue.id, source=session.name
                )
        else:
            await dialogue.release()
        phases["release"] = time.perf_counter() - began

    def _check_version(self, session: PeerSession) -> None:
        """Raises `VersionMismatch` where parts are needed and the peer would take each for a whole."""
        if session.version >= PARTS_SINCE:
            return
        if (
            self.request.cache.descr.part is not None
            or self.request.part is not None
            or len(self._whole.parts) > 1
        ):
            raise VersionMismatch(
                "the peer's protocol version has no parts",
                field="peer",
                got=f"version {session.version}",
                expected=f"version {PARTS_SINCE}",
                peer=session.name,
                hint="Upgrade that agent, or register whole caches",
            )

    def _lease_ran_out(self) -> None:
        self._whole.stop(
            LeaseExpired("the prefill side did not renew the lease in time", source=self.request.source)
        )

    async def _give_up(self, dialogue: Dialogue, fault: BaseException) -> None:
        """Tells P that nothing is read any more; raises P's own reason instead of a broken read, if P has one."""
        told = fault if isinstance(fault, HawkError) else self._whole.fault
        told = told or HawkError("other parts hold the same" if self.unneeded else "the fetch was cancelled")
        broken = isinstance(fault, TransportError)
        await dialogue.abort(self._whole.stopped or told, wait=broken)
        ended = dialogue.ended
        if broken and ended is not None and ended.facts.get("by") != "consumer":
            raise ended from fault
