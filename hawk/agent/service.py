"""What local clients can ask of their agent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from hawk.agent.sessions import Session, allocate_cache, hand_over, map_registered
from hawk.control.frames import Codec
from hawk.control.messages import (
    AbortFetch,
    Allocate,
    AskStatus,
    Attach,
    Attached,
    AwaitOffer,
    Done,
    Failed,
    FetchEnded,
    LayersReady,
    LocalMessage,
    MemoryInfo,
    Offer,
    Offered,
    OfferEnded,
    Progress,
    Register,
    Registered,
    ReleaseCache,
    StartFetch,
    Ticket,
    Withdraw,
    decode_ticket,
    encode_ticket,
    unpack_blocks,
)
from hawk.control.server import Server
from hawk.errors import (
    Aborted,
    BadFrame,
    Busy,
    ControlError,
    Draining,
    HawkError,
    InternalError,
    InvalidArgument,
    PeerLost,
    UnknownRequest,
)
from hawk.jobs.fetch import FetchJob, FetchRequest
from hawk.jobs.offers import OfferEntry, Outcome
from hawk.jobs.states import State, settle
from hawk.observe.log import get as get_log
from hawk.plan.check import check_blocks
from hawk.plan.types import Selection

if TYPE_CHECKING:
    from hawk.agent.core import Agent
    from hawk.control.descriptors import DescriptorLink
    from hawk.control.frames import Header

log = get_log("hawk.agent.service")

LOCAL_CODEC: Codec[LocalMessage] = Codec(msgspec.msgpack.Decoder(LocalMessage))


class Service:
    """The local side of an agent: sessions, and one handler per kind of call.

    A call that cannot be answered at once runs as a task of its session; when the client's process dies its
    calls, fetches and offers end with it and its caches go when no job touches them any more.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._sessions: dict[bytes, Session] = {}
        self._by_identity: dict[bytes, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.server: Server[LocalMessage] = Server(
            agent.sockets.router(agent.config.agent.local, field="agent.local"),
            LOCAL_CODEC,
            self._take,
            on_bad=lambda _, error: agent.metrics.bad_frame(error.code),
            on_gone=lambda peer, _: None,
            beat=None,
            own_generation=agent.generation,
        )

    def start(self) -> None:
        """Begins to answer."""
        self.server.start()

    # -- sessions ----------------------------------------------------------------------------------------

    def opened(self, token: bytes, connection: DescriptorLink) -> None:
        """A client's descriptor socket has come."""
        self._sessions[token] = Session(token, connection)

    def closed(self, token: bytes) -> None:
        """The client's process closed its descriptor socket, or died."""
        session = self._sessions.pop(token, None)
        if session is None:
            return
        session.closed = True
        self._by_identity.pop(session.identity, None)
        self.server.forget(session.identity)
        task = asyncio.get_running_loop().create_task(self._end(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _end(self, session: Session) -> None:
        """Ends all that a client has left: calls, fetches, offers, then its caches."""
        gone = PeerLost("the client's process is gone", pid=session.pid)
        for task in list(session.tasks):
            task.cancel()
        for job, _ in list(session.fetches.values()):
            job.stop(gone)
        for request in list(session.offers):
            entry = self._agent.offers.find(request)
            if entry is not None:
                self._agent.offers.end(entry, Outcome.WITHDRAWN, gone)
        for cache in self._agent.caches.of_session(session.token):
            self._agent.caches.close(cache)
        for _, task in list(session.fetches.values()):
            await settle(task)
        log.info("client left", pid=session.pid)

    async def close(self) -> None:
        """Ends every session, then the socket."""
        for token in list(self._sessions):
            self.closed(token)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
        self.server.close()

    # -- calls -------------------------------------------------------------------------------------------

    def _reply(self, session: Session, message: LocalMessage) -> None:
        if session.closed:
            return
        try:
            self.server.send(session.identity, message)
        except (Busy, ControlError) as error:
            log.warning("answer not delivered", pid=session.pid, reason=str(error))

    def _take(self, identity: bytes, header: Header, message: LocalMessage) -> None:
        del header
        if isinstance(message, Attach):
            self._attach(identity, message)
            return
        session = self._by_identity.get(identity)
        call = getattr(message, "id", None)
        if session is None or call is None:
            error = BadFrame("the first word is attach", got=type(message).__name__)
            self._agent.metrics.bad_frame(error.code)
            if call is not None:
                self._answer_stranger(identity, Failed(call, error.to_wire()))
            return
        task = asyncio.get_running_loop().create_task(self._call(session, call, message))
        session.tasks.add(task)
        task.add_done_callback(session.tasks.discard)

    def _answer_stranger(self, identity: bytes, message: LocalMessage) -> None:
        try:
            self.server.send(identity, message)
        except (Busy, ControlError):
            return

    def _attach(self, identity: bytes, message: Attach) -> None:
        session = self._sessions.get(message.session)
        if session is None or session.identity not in (b"", identity):
            error = BadFrame("no descriptor socket presented this session", field="session")
            self._answer_stranger(identity, Failed(message.id, error.to_wire()))
            return
        session.identity, session.pid = identity, message.pid
        self._by_identity[identity] = session
        agent = self._agent
        self._reply(
            session,
            Attached(
                message.id,
                agent.config.agent.name,
                agent.config.agent.role,
                f"{agent.generation:016x}",
                [
                    MemoryInfo(m.name, m.kind, m.channels, m.channel_bytes, m.free_bytes())
                    for m in agent.memories.values()
                ],
            ),
        )
        log.info("client attached", pid=message.pid, software=message.software)

    async def _call(self, session: Session, call: int, message: LocalMessage) -> None:
        try:
            answer = await self._handle(session, call, message)
        except HawkError as error:
            answer = Failed(call, error.to_wire())
        except Exception as error:
            log.exception("a call failed on a fault of ours", call=type(message).__name__)
            answer = Failed(call, InternalError(f"{type(error).__name__}: {error}").to_wire())
        self._reply(session, answer)

    async def _handle(self, session: Session, call: int, message: LocalMessage) -> LocalMessage:
        agent = self._agent
        match message:
            case Register():
                here = agent.embedded and session.pid == agent.pid
                entry = await map_registered(session, message.cache, message.buffers, here)
                self._keep(session, entry)
                return Registered(call, entry.id)
            case Allocate():
                entry = allocate_cache(session, message.cache, agent.memory(message.memory))
                self._keep(session, entry)
                return await hand_over(session, call, entry)
            case ReleaseCache(cache=cache):
                entry = agent.caches.get(cache, session.token)
                agent.caches.close(entry)
                await entry.gone.wait()
            case Offer():
                return self._offer(session, message)
            case LayersReady(request=request, layers=layers):
                self._own(session, request)
                agent.offers.layers_ready(request, layers)
            case Withdraw(request=request):
                offer = self._own(session, request)
                withdrawn = Aborted("the prefill side withdrew the offer", request=request)
                agent.offers.end(offer, Outcome.WITHDRAWN, withdrawn)
                await offer.ended.wait()
            case AwaitOffer(request=request):
                offer = self._own(session, request)
                await offer.ended.wait()
                return OfferEnded(call, str(offer.outcome), offer.taken_by)
            case StartFetch():
                self._fetch(session, message)
            case AbortFetch(job=job):
                await self._abort(session, job)
            case AskStatus():
                return agent.status(call)
            case _:
                raise BadFrame("this message is not a client's to send", got=type(message).__name__)
        return Done(call)

    def _keep(self, session: Session, entry: Any) -> None:
        if session.closed:
            if entry.on_close is not None:
                entry.on_close()
            raise PeerLost("the client's process is gone", pid=session.pid)
        self._agent.caches.add(entry)

    # -- offers ------------------------------------------------------------------------------------------

    def _own(self, session: Session, request: str) -> OfferEntry:
        entry = self._agent.offers.find(request)
        if entry is None or entry.cache.session != session.token:
            raise UnknownRequest(
                "this client has no open offer for that request", field="request", got=request
            )
        return entry

    def _offer(self, session: Session, message: Offer) -> Offered:
        agent = self._agent
        if agent.draining:
            raise Draining("the agent is shutting down and takes no new offers")
        cache = agent.caches.get(message.cache, session.token)
        if message.tokens < 1:
            raise InvalidArgument("an offer holds at least one token", field="tokens", got=message.tokens)
        if message.ttl <= 0:
            raise InvalidArgument(
                "an offer lives for some time", field="ttl", got=message.ttl, expected="more than 0"
            )
        if message.layers > cache.layout.shape.layers:
            raise InvalidArgument(
                "the cache has fewer layers",
                field="layers",
                got=message.layers,
                expected=f"0..{cache.layout.shape.layers}",
            )
        selection = Selection(layer=0, layers=cache.layout.shape.layers, token=0, tokens=message.tokens)
        blocks = check_blocks(cache.layout, unpack_blocks(message.blocks), selection, "blocks")
        entry = OfferEntry(
            request=message.request,
            cache=cache,
            blocks=blocks,
            tokens=message.tokens,
            note=message.note,
            layers=message.layers,
            consumer=message.consumer,
        )
        agent.offers.add(entry, message.ttl)
        agent.caches.use(cache)
        session.offers.add(message.request)
        return Offered(
            message.id,
            encode_ticket(
                Ticket(
                    agent=agent.config.agent.name,
                    address=agent.advertised_address,
                    generation=f"{agent.generation:016x}",
                    request=message.request,
                    claim=entry.claim,
                    tokens=message.tokens,
                )
            ),
        )

    def offer_ended(self, entry: OfferEntry) -> None:
        """An offer is over and its source blocks are free: forget it."""
        self._agent.caches.done(entry.cache)
        session = self._sessions.get(entry.cache.session)
        if session is not None:
            session.offers.discard(entry.request)
        log.info("offer ended", request=entry.request, outcome=str(entry.outcome), consumer=entry.taken_by)

    # -- fetches -----------------------------------------------------------------------------------------

    def _fetch(self, session: Session, message: StartFetch) -> None:
        agent = self._agent
        if agent.draining:
            raise Draining("the agent is shutting down and takes no new fetches")
        if message.job in session.fetches:
            return
        if agent.fetching >= agent.config.jobs.max_jobs:
            raise Busy(
                f"this agent fetches at most {agent.config.jobs.max_jobs} jobs at a time", retry_after=0.2
            )
        cache = agent.caches.get(message.cache, session.token)
        claim = address = ""
        request, source, tokens = message.request, message.source, message.tokens
        if message.ticket:
            ticket = decode_ticket(message.ticket)
            request, source, claim, address = ticket.request, ticket.agent, ticket.claim, ticket.address
            tokens = tokens or max(ticket.tokens - message.first, 0)
        elif not (request and source):
            raise InvalidArgument("a fetch needs a ticket, or a request and its source", field="ticket")
        if message.timeout <= 0:
            raise InvalidArgument("a fetch has some time", field="timeout", got=message.timeout)
        job = FetchJob(
            agent.fetch_context,
            FetchRequest(
                job=message.job,
                request=request,
                claim=claim,
                source=source,
                address=address,
                cache=cache,
                blocks=unpack_blocks(message.blocks),
                first=message.first,
                tokens=tokens,
                timeout=message.timeout,
                wait=message.wait,
            ),
            lambda state, done, total: self._reply(
                session, Progress(message.job, state.value, done, max(total, done))
            ),
        )
        task = asyncio.get_running_loop().create_task(self._run(session, message.job, job))
        session.fetches[message.job] = (job, task)

    async def _run(self, session: Session, job_id: str, job: FetchJob) -> None:
        agent = self._agent
        agent.fetching += 1
        error: HawkError | None = None
        try:
            result = await job.run()
            ended = FetchEnded(
                job=job_id,
                error={},
                tokens=result.tokens,
                first=result.first,
                nbytes=result.nbytes,
                note=result.note,
                transport=result.transport,
                mode=result.mode,
                phases=result.phases,
                channels=result.channels,
            )
        except HawkError as fault:
            error = fault
            ended = FetchEnded(job=job_id, error=fault.to_wire())
        finally:
            agent.fetching -= 1
            session.fetches.pop(job_id, None)
            ending = "ready" if error is None else error.code
            agent.fetch_done(ending)
        agent.metrics.job(ending, "fetch", job.result.transport)
        agent.metrics.moved("in", job.result.transport, job.result.nbytes)
        log.info(
            "fetch ended",
            request=job.request.request,
            job=job_id,
            source=job.request.source,
            ending=ending,
            reason=None if error is None else str(error),
            bytes=job.result.nbytes,
            transport=job.result.transport,
            mode=job.result.mode,
            seconds=job.result.phases.get("total"),
        )
        self._reply(session, ended)

    async def _abort(self, session: Session, job_id: str) -> None:
        entry = session.fetches.get(job_id)
        if entry is None:
            return
        job, task = entry
        if job.state is not State.READY:
            job.stop(Aborted("the client ended the fetch"))
        await asyncio.wait({task})
