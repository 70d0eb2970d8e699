"""What local clients can ask of their agent."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING

import msgspec

from hawk.agent import fetching, offering, report
from hawk.agent.outbox import Outbox
from hawk.agent.sessions import Session, allocate_cache, hand_over, map_registered
from hawk.control.frames import Codec
from hawk.control.messages import (
    QUIET,
    AbortFetch,
    Allocate,
    AskJobs,
    AskPeers,
    AskStatus,
    Attach,
    Attached,
    AwaitOffer,
    Done,
    Drain,
    Failed,
    Forgo,
    LayersReady,
    LocalMessage,
    MemoryInfo,
    Offer,
    Register,
    Registered,
    ReleaseCache,
    StartFetch,
    Tried,
    TryPeer,
    Withdraw,
)
from hawk.control.passage import Passage
from hawk.control.server import Server
from hawk.errors import Aborted, BadFrame, Busy, ControlError, Draining, HawkError, InternalError, PeerLost
from hawk.jobs.offers import OfferEntry
from hawk.jobs.past import Outcome
from hawk.jobs.probes import try_transports
from hawk.jobs.scrub import wipe_cache
from hawk.jobs.serving import LAST_WORDS
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.agent.core import Agent
    from hawk.control.descriptors import DescriptorLink
    from hawk.jobs.caches import CacheEntry

log = get_log("hawk.agent.service")

LOCAL_CODEC: Codec[LocalMessage] = Codec(msgspec.msgpack.Decoder(LocalMessage))

MOST_CALLS = 1024
"""Calls of one client that may wait for their answers."""

_AT_ONCE = (Offer, Forgo, LayersReady, StartFetch, AskStatus, AskPeers, AskJobs)
"""Calls that have nothing to wait for."""

MOST_STRANGERS = 64
"""Connections without a session that are remembered."""


class Service:
    """The local side of an agent: sessions, and one handler per kind of call.

    A call that cannot be answered at once runs as a task of its session; when the client's process dies its
    calls, fetches and offers end with it and its caches go when no job touches them any more.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._sessions: dict[bytes, Session] = {}
        self._by_identity: dict[bytes, Session] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._passages: dict[bytes, Passage[LocalMessage]] = {}
        self._closing = False
        self._context = contextvars.copy_context()
        self.server: Server[LocalMessage] = Server(
            agent.sockets.router(agent.config.agent.local, field="agent.local"),
            LOCAL_CODEC,
            lambda identity, _, message: self._take(identity, message),
            on_bad=lambda _, error: agent.metrics.bad_frame(error.code),
            on_gone=lambda peer, _: None,
            beat=None,
            own_generation=agent.generation,
        )

    def start(self) -> None:
        """Begins to answer."""
        self._context = contextvars.copy_context()
        self.server.start()

    @property
    def clients(self) -> int:
        """Clients that are attached."""
        return len(self._by_identity)

    # -- sessions ----------------------------------------------------------------------------------------

    def opened(self, token: bytes, connection: DescriptorLink) -> None:
        """A client's descriptor socket has come."""
        if self._closing:
            raise Draining("the agent is shutting down")
        self._forget_strangers()
        self._sessions[token] = session = Session(token, connection)
        session.outbox = Outbox(lambda message: self._send(session.identity, message), connection.close)

    def passage(self, to_client: Callable[[LocalMessage], None]) -> Passage[LocalMessage]:
        """A way in for a client of this process and event loop; the session that it will name has come already."""
        made = Passage(
            LOCAL_CODEC,
            self._take,
            to_client,
            lambda identity: self._passages.pop(identity, None),
            self._context,
        )
        self._passages[made.identity] = made
        return made

    def _send(self, identity: bytes, message: LocalMessage) -> None:
        passage = self._passages.get(identity)
        if passage is None:
            self.server.send(identity, message)
        else:
            passage.answer(message)

    def _forget_strangers(self) -> None:
        """Silence proves nothing on this socket, so whoever left before it attached is forgotten here."""
        strangers = [identity for identity in self.server.peers if identity not in self._by_identity]
        for identity in strangers[:-MOST_STRANGERS]:
            self.server.forget(identity)

    def closed(self, token: bytes) -> None:
        """The client's process closed its descriptor socket, or died."""
        session = self._sessions.get(token)
        if session is not None:
            self._end(session, PeerLost("the client's process is gone", pid=session.pid))
            if (passage := self._passages.get(session.identity)) is not None:
                passage.close()

    def _end(self, session: Session, error: HawkError) -> None:
        del self._sessions[session.token]
        session.closed = True
        if session.outbox is not None:
            session.outbox.close()
        self._by_identity.pop(session.identity, None)
        self.server.forget(session.identity)
        task = asyncio.get_running_loop().create_task(self._end_all(session, error))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end_all(self, session: Session, error: HawkError) -> None:
        """Ends all that a client has left: calls, fetches, offers, then its caches."""
        for task in list(session.tasks):
            task.cancel()
        for entry in list(session.offers):
            self._agent.offers.end(entry, Outcome.WITHDRAWN, error)
        for cache in self._agent.caches.of_session(session.token):
            self._agent.caches.close(cache)
        await fetching.stop_all(session, error)
        (log.debug if session.quiet else log.info)("client left", pid=session.pid)

    async def close(self) -> None:
        """Ends every fetch (its client is told), then every session, then the socket."""
        self._closing = True
        stopping = Aborted("the agent is stopping", by="the agent")
        for session in list(self._sessions.values()):
            await fetching.stop_all(session, stopping)
        await self.server.read_by_all(LAST_WORDS)
        for session in list(self._sessions.values()):
            self._end(session, stopping)
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)
        for passage in list(self._passages.values()):  # only now: who called meanwhile was told why in vain
            passage.close()
        self.server.close()

    # -- calls -------------------------------------------------------------------------------------------

    def _reply(self, session: Session, message: LocalMessage) -> None:
        if not session.closed and session.outbox is not None:
            session.outbox.put(message)

    def _take(self, identity: bytes, message: LocalMessage) -> None:
        if isinstance(message, Attach):
            self._attach(identity, message)
            return
        session = self._by_identity.get(identity)
        call = getattr(message, "id", None)
        if session is None or call is None:
            error = self._unknown(BadFrame("the first word is attach", got=type(message).__name__))
            if call is not None:
                self._answer_stranger(identity, Failed(call, error.to_wire()))
            return
        if len(session.tasks) >= MOST_CALLS:
            busy = Busy(f"a client may wait for {MOST_CALLS} answers at a time", retry_after=0.1)
            self._reply(session, Failed(call, busy.to_wire()))
            return
        if isinstance(message, _AT_ONCE):
            self._reply(session, self._answer_at_once(session, call, message))
            return
        task = asyncio.get_running_loop().create_task(self._call(session, call, message))
        session.tasks.add(task)
        task.add_done_callback(session.tasks.discard)

    def _unknown(self, fault: BadFrame) -> HawkError:
        """What to tell somebody without a session: his fault, unless it is us who have ended his session already."""
        if self._closing:
            return Draining("the agent is shutting down")
        self._agent.metrics.bad_frame(fault.code)
        return fault

    def _answer_stranger(self, identity: bytes, message: LocalMessage) -> None:
        try:
            self._send(identity, message)
        except (Busy, ControlError):
            return

    def _attach(self, identity: bytes, message: Attach) -> None:
        session = self._sessions.get(message.session)
        if session is None or session.identity not in (b"", identity):
            error = self._unknown(BadFrame("no descriptor socket presented this session", field="session"))
            self._answer_stranger(identity, Failed(message.id, error.to_wire()))
            return
        # What the kernel says of the descriptor socket counts: who claims to be us could name our addresses.
        session.identity, session.pid = identity, session.connection.pid
        self._by_identity[identity] = session
        agent = self._agent
        memories = [
            MemoryInfo(m.name, m.kind, m.channels, m.channel_bytes, m.free_bytes())
            for m in agent.memories.values()
        ]
        name, role = agent.config.agent.name, agent.config.agent.role
        self._reply(session, Attached(message.id, name, role, f"{agent.generation:016x}", memories))
        session.quiet = message.software.endswith(QUIET)
        (log.debug if session.quiet else log.info)(
            "client attached", pid=session.pid, software=message.software
        )

    def _answer_at_once(self, session: Session, call: int, message: LocalMessage) -> LocalMessage:
        try:
            return self._at_once(session, call, message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            return _failed(call, message, error)

    async def _call(self, session: Session, call: int, message: LocalMessage) -> None:
        try:
            answer = await self._handle(session, call, message)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller is told
            answer = _failed(call, message, error)
        self._reply(session, answer)

    def _at_once(self, session: Session, call: int, message: LocalMessage) -> LocalMessage:
        """What has nothing to wait for, and is answered without a task."""
        agent = self._agent
        match message:
            case Offer():
                return offering.offer(agent, session, message)
            case Forgo(request=request, claim=claim, why=why):
                agent.offers.forgo(request, claim, session.token, why)
            case LayersReady():
                offering.layers_ready(agent, session, message)
            case StartFetch():
                fetching.start(agent, session, message, lambda answer: self._reply(session, answer))
            case AskStatus():
                return report.status(agent, call)
            case AskPeers():
                return report.peers(agent, call)
            case AskJobs():
                return report.jobs(agent, message)
        return Done(call)

    async def _handle(self, session: Session, call: int, message: LocalMessage) -> LocalMessage:
        agent = self._agent
        match message:
            case Register():
                here = agent.embedded and session.pid == agent.pid
                entry = await map_registered(session, message.cache, message.buffers, here, agent.gpus)
                self._keep(session, entry)
                return Registered(call, entry.id)
            case Allocate():
                return await self._allocate(session, call, message)
            case ReleaseCache(cache=cache):
                entry = agent.caches.get(cache, session.token)
                agent.caches.close(entry)
                gone = Aborted("the prefill side released the cache", by="the prefill side")
                offering.withdraw_all(agent, entry, gone)
                fetching.stop_into(session, entry, Aborted("the client released the cache", by="the client"))
                await entry.gone.wait()
            case Withdraw(request=request, claim=claim):
                await offering.withdraw(agent, session, request, claim)
            case AwaitOffer(request=request, claim=claim):
                return await offering.ending(agent, session, call, request, claim)
            case AbortFetch(job=job):
                await fetching.abort(session, job)
            case TryPeer(peer=peer, timeout=timeout):
                return Tried(call, await try_transports(agent.fetch_context, peer, timeout))
            case Drain(resume=True):
                agent.drainer.resume()
                return agent.drainer.report(call)
            case Drain(timeout=timeout):
                agent.drainer.begin()
                await agent.drainer.wait(timeout)
                return agent.drainer.report(call)
            case _:
                raise BadFrame("this message is not a client's to send", got=type(message).__name__)
        return Done(call)

    async def _allocate(self, session: Session, call: int, message: Allocate) -> LocalMessage:
        agent = self._agent
        entry = allocate_cache(session, message.cache, agent.memory(message.memory))
        self._keep(session, entry)
        try:
            if agent.config.integrity.scrub:
                await wipe_cache(entry)
            return await hand_over(session, call, entry)
        except BaseException:
            agent.caches.close(entry)
            raise

    def _keep(self, session: Session, entry: CacheEntry) -> None:
        try:
            if session.closed:
                raise PeerLost("the client's process is gone", pid=session.pid)
            self._agent.caches.add(entry)
        except HawkError:
            entry.drop()
            raise

    def offer_ended(self, entry: OfferEntry) -> None:
        """An offer is over and its source blocks are free."""
        offering.ended(self._agent, self._sessions.get(entry.cache.session), entry)
        self._agent.drainer.touch()

    def gpu_lost(self, gpu: int, error: HawkError) -> None:
        """A GPU is lost: what was offered from its memory ends, and nothing else."""
        log.error("a GPU is lost to this process", gpu=gpu, reason=str(error))
        for entry in self._agent.caches.entries():
            if entry.gpu == gpu:
                offering.withdraw_all(self._agent, entry, error)


def _failed(call: int, message: LocalMessage, error: Exception) -> Failed:
    if not isinstance(error, HawkError):
        log.error("a call failed on a fault of ours", call=type(message).__name__, exc_info=error)
        error = InternalError(f"{type(error).__name__}: {error}")
    return Failed(call, error.to_wire())
