"""The serving side of an agent towards its peers: one ROUTER, the handshake, and a `ServeJob` per fetch."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

from hawk.control.frames import PROTOCOL_VERSION
from hawk.control.messages import (
    Abort,
    Ended,
    Fetch,
    Hello,
    Notice,
    PeerMessage,
    Refused,
    Released,
    Welcome,
)
from hawk.control.server import Server
from hawk.errors import (
    Aborted,
    Busy,
    ControlError,
    Draining,
    HawkError,
    PeerLost,
    UnknownRequest,
)
from hawk.jobs.guests import Guests
from hawk.jobs.ledger import Ledger, Look
from hawk.jobs.peers import PEER_CODEC
from hawk.jobs.probes import Probes
from hawk.jobs.serve import ServeContext, ServeJob
from hawk.jobs.states import State, settle
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.beat import Beat
    from hawk.control.frames import Header
    from hawk.control.server import Peer
    from hawk.control.sockets import Endpoint
    from hawk.control.zap import Zap
    from hawk.jobs.admission import Admission, Place
    from hawk.jobs.ledger import Entry

log = get_log("hawk.jobs.serving")

LAST_WORDS = 0.5
"""Seconds that answers get to leave a process that ends: a consumer must hear that it may keep its cache."""

MOST_JOBS = 65_536
"""Jobs of all kinds at a time."""

_REMEMBERED = 4096
"""Answers of ended jobs kept for frames that come again."""


class Serving:
    """Answers peers.  A peer can only touch jobs that came from its own identity.

    admission   how many jobs are served at a time
    refuse      says why this agent serves nothing at all, or None where it does
    ledger      where jobs are entered
    on_ended    called after every job's end
    """

    def __init__(
        self,
        endpoint: Endpoint,
        zap: Zap | None,
        context: ServeContext,
        welcome: Callable[[], Welcome],
        *,
        beat: Beat,
        generation: int,
        admission: Admission,
        refuse: Callable[[], HawkError | None] = lambda: None,
        ledger: Ledger | None = None,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.context = context
        self.draining = False
        self._promised = True
        self._ledger = Ledger() if ledger is None else ledger
        self._on_ended = on_ended
        self.server: Server[PeerMessage] = Server(
            endpoint,
            PEER_CODEC,
            self._take,
            on_bad=self._bad,
            on_gone=self._gone,
            zap=zap,
            beat=beat,
            own_generation=generation,
        )
        self._welcome = welcome
        self.guests = Guests(self.server.peers, welcome, self.send, self._bad)
        self.probes = Probes(context, self.guests, self.send)
        self.admission = admission
        self._refuse = refuse
        self._jobs: dict[tuple[bytes, str], ServeJob] = {}
        self._tasks: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._past: OrderedDict[tuple[bytes, str], Released | Ended] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def jobs(self) -> int:
        """Jobs that are being served."""
        return len(self._jobs)

    def start(self) -> None:
        """Begins to answer."""
        self.server.start()

    def send(self, identity: bytes, message: PeerMessage) -> None:
        """Puts a message on the way; one that cannot go is dropped, for the peer asks again."""
        try:
            self.server.send(identity, message)
        except (Busy, ControlError) as error:
            log.debug("frame not sent", message=type(message).__name__, reason=str(error))

    def _take(self, identity: bytes, header: Header, message: PeerMessage) -> None:
        if isinstance(message, Hello):
            self.guests.hello(identity, message)
            return
        if isinstance(message, Notice):
            self.guests.notice(identity, message.draining)
            return
        if isinstance(message, Welcome | Refused):
            return
        if self.probes.take(identity, message):
            return
        key = (identity, message.job)
        job = self._jobs.get(key)
        if job is not None:
            job.on_message(message)
        elif key in self._past:
            self.send(identity, self._past[key])
        elif isinstance(message, Fetch):
            self._begin(key, identity, message)
        else:
            unknown = UnknownRequest("the peer has no such job", field="job", got=message.job)
            answer = Ended(message.job, unknown.to_wire())
            if isinstance(message, Abort):
                self._remember(key, answer)  # its fetch may still be on the way, and nobody wants it any more
            self.send(identity, answer)

    def _begin(self, key: tuple[bytes, str], identity: bytes, fetch: Fetch) -> None:
        consumer = self.guests.name(identity)
        try:
            if consumer is None:
                raise self.guests.unknown(identity, "fetch")
            place = self._place(fetch)
        except HawkError as error:
            self.send(identity, Ended(fetch.job, error.to_wire()))
            return
        peer = self.server.peers.get(identity)
        version = PROTOCOL_VERSION if peer is None else peer.version
        reader = self.guests.endpoint(identity, fetch.transport)
        job = ServeJob(
            self.context, fetch, consumer, place, lambda m: self.send(identity, m), version, reader
        )
        self._jobs[key] = job
        self._idle.clear()
        entry = self._ledger.open(
            fetch.job,
            "serve",
            request=fetch.request,
            peer=consumer,
            seconds=fetch.deadline,
            look=lambda: self._look(job),
        )
        self._tasks[key] = asyncio.get_running_loop().create_task(self._run(key, job, entry))

    def _place(self, fetch: Fetch) -> Place:
        """A place for a new job; raises what keeps this agent from serving it."""
        if self.draining and not (self._promised and self.context.offers.find(fetch.request)):
            raise Draining.refused(self._welcome().name, "jobs")
        refused = self._refuse()
        if refused is not None:
            raise refused
        if len(self._jobs) >= MOST_JOBS:
            # Those that are prepared and wait for their consumer's last word have left their places.
            raise Busy(
                f"the agent {self._welcome().name} knows at most {MOST_JOBS} jobs at a time", retry_after=1.0
            )
        early = fetch.wait and self.context.offers.find(fetch.request) is None
        return self.admission.enter(early=early)

    def _look(self, job: ServeJob) -> Look:
        transport = self._known(job.fetch.transport)
        return Look(job.state.value, job.phase, job.fetch.job, transport, nbytes=job.bytes_prepared)

    def _known(self, transport: str) -> str:
        """The transport's name, or `unknown`: what a peer asked for is no label for metrics."""
        return transport if transport in self.context.transports else "unknown"

    async def _run(self, key: tuple[bytes, str], job: ServeJob, entry: Entry) -> None:
        ending, reason = "cancelled", ""
        try:
            error = await job.run()
            ending, reason = ("released", "") if error is None else (error.code, str(error))
            transport = self._known(job.fetch.transport)
            self.context.metrics.job(ending, "serve", transport)
            self.context.metrics.moved("out", transport, job.bytes_read)
            (log.info if error is None else log.warning)(
                "serve ended",
                request=job.fetch.request,
                job=job.fetch.job,
                consumer=job.consumer,
                ending=ending,
                reason=reason or None,
                bytes=job.bytes_prepared,
            )
        finally:
            job.place.leave()
            del self._jobs[key], self._tasks[key]
            self._ledger.close(entry, ending, reason)
            if job.answer is not None:
                self._remember(key, job.answer)
            if not self._jobs:
                self._idle.set()
            self._on_ended()

    def _remember(self, key: tuple[bytes, str], answer: Released | Ended) -> None:
        self._past[key] = answer
        while len(self._past) > _REMEMBERED:
            self._past.popitem(last=False)

    def _bad(self, identity: bytes, error: HawkError) -> None:
        self.context.metrics.bad_frame(error.code)
        log.warning("bad frame", peer=self.guests.name(identity) or "a stranger", reason=str(error))

    def _gone(self, peer: Peer, error: PeerLost) -> None:
        name = self.guests.gone(peer.identity)
        theirs = [job for (identity, _), job in self._jobs.items() if identity == peer.identity]
        if name:
            log.info("peer gone", peer=name, reason=str(error), jobs=len(theirs))
        for job in theirs:
            job.stop(PeerLost("the consumer is gone", consumer=name, reason=error.message))

    async def idle(self) -> None:
        """Returns when no job is served."""
        await self._idle.wait()

    def drain(self, *, promised: bool = False) -> None:
        """Takes no new jobs; with `promised`, but those for open offers.

        Jobs that wait for an offer end now: none will be made any more.
        """
        self.draining, self._promised = True, promised
        for job in list(self._jobs.values()):
            if job.state is State.WAITING and not self.context.offers.find(job.fetch.request):
                job.stop(Draining.refused(self._welcome().name, "offers"))

    def accept(self) -> None:
        """Takes new jobs again."""
        self.draining = False

    async def close(self) -> None:
        """Ends every job and the socket."""
        self.draining = True
        for job in list(self._jobs.values()):
            job.stop(Aborted("the prefill agent is stopping", by="the prefill agent"))
        for task in list(self._tasks.values()):
            await settle(task)
        await self.probes.close()
        await self.server.read_by_all(LAST_WORDS)
        self.server.close()
