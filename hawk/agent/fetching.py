"""What a client says of its fetches."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from hawk.control.messages import FetchEnded, Progress, StartFetch, Ticket, decode_ticket, unpack_blocks
from hawk.errors import Aborted, Draining, HawkError, InvalidArgument
from hawk.jobs.caches import read_part
from hawk.jobs.fetch import FetchJob
from hawk.jobs.ledger import Look
from hawk.jobs.request import FetchRequest, Source
from hawk.jobs.states import State, forget_frames
from hawk.memory.cuda import device
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.agent.core import Agent
    from hawk.agent.sessions import Session
    from hawk.control.messages import LocalMessage
    from hawk.jobs.caches import CacheEntry
    from hawk.jobs.ledger import Entry

log = get_log("hawk.agent.fetching")

STATE_AFTER = 0.005
"""Seconds that a fetch has to be in a state before its client is told: most pass sooner, and a word costs time."""

_PHASES = {
    State.RESERVING: "own",
    State.QUEUED: "queue",
    State.CONNECTING: "connect",
    State.REQUESTED: "accept",
    State.RECEIVING: "read",
    State.RELEASING: "release",
}
_COUNTED = ("connect", "accept", "flush", "release", "total")
"""Phases of a fetch that are counted at its end; those of its chunks are counted one by one."""


def start(agent: Agent, session: Session, message: StartFetch, reply: Callable[[LocalMessage], None]) -> None:
    """Begins a fetch, which ends with a `FetchEnded` to `reply`.  One that runs already is left to run."""
    if message.job in session.fetches:
        return
    refused = agent.wrong_role("decode")
    if refused is not None:
        raise refused
    if agent.draining:
        raise Draining.refused(agent.config.agent.name, "fetches")
    request = _request(agent, session, message)
    place = agent.limits.fetching.enter(early=request.early)

    told = _Told(message.job, reply)
    job = FetchJob(agent.fetch_context, request, told.progress, place)
    agent.fetching += 1
    entry = agent.ledger.open(
        message.job,
        "fetch",
        request=request.request,
        peer=_peers(request, 128),
        seconds=request.timeout,
        look=lambda: _look(job),
    )
    task = asyncio.get_running_loop().create_task(_run(agent, session, job, entry, told.end))
    session.fetches[message.job] = (job, task)


def _peers(request: FetchRequest, most: int) -> str:
    """Names of the agents that it is brought from, each once, in so many characters at most."""
    return ", ".join(dict.fromkeys(source.source for source in request.sources))[:most]


def _look(job: FetchJob) -> Look:
    result = job.result
    attempt, *others = result.attempt.split() or [""]
    return Look(
        job.state.value,
        _PHASES.get(job.state, ""),
        attempt,
        result.transport,
        result.mode,
        result.nbytes,
        job.total,
        result.phases,
        tuple(others),
    )


class _Told:
    """What a client hears of one fetch: bytes as soon as they arrive, and once a turn of the loop at most, its
    state when it has lasted for `STATE_AFTER`, and its end, which says more than either.
    """

    def __init__(self, job: str, reply: Callable[[LocalMessage], None]) -> None:
        self._job = job
        self._reply = reply
        self._latest: tuple[State, int, int] | None = None
        self._nbytes = 0
        self._timer: asyncio.Handle | None = None
        self._soon = False

    def progress(self, state: State, done: int, total: int) -> None:
        """The fetch has come so far."""
        self._latest = state, done, total
        if done != self._nbytes and not self._soon:
            self._stop()
            self._tell()
            self._soon = True
            self._timer = asyncio.get_running_loop().call_soon(self._turned)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(STATE_AFTER, self._tell)

    def end(self, message: LocalMessage) -> None:
        """The fetch has ended; no progress comes after this."""
        self._stop()
        self._reply(message)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turned(self) -> None:
        """The turn of the loop in which bytes arrived is over, in which more may have."""
        if self._latest is not None and self._latest[1] != self._nbytes:
            self._tell()
        self._timer, self._soon = None, False

    def _tell(self) -> None:
        self._timer, self._soon = None, False
        if self._latest is not None:
            state, self._nbytes, total = self._latest
            self._reply(Progress(self._job, state.value, self._nbytes, max(total, self._nbytes)))


def _request(agent: Agent, session: Session, message: StartFetch) -> FetchRequest:
    cache = agent.caches.get(message.cache, session.token)
    if cache.gpu >= 0:
        device(cache.gpu).check()
    request, tokens = message.request, message.tokens
    if message.ticket:
        tickets = [decode_ticket(text) for text in (message.ticket, *message.tickets)]
        request, offered = _one_request(tickets)
        sources = [_source(ticket, i) for i, ticket in enumerate(tickets)]
        tokens = tokens or max(offered - message.first, 0)
    elif request and message.source:
        sources = [Source(name) for name in (message.source, *message.sources)]
    else:
        raise InvalidArgument("a fetch needs a ticket, or a request and its source", field="ticket")
    if message.timeout <= 0:
        raise InvalidArgument("a fetch has some time", field="timeout", got=message.timeout)
    return FetchRequest(
        job=message.job,
        request=request,
        claim=sources[0].claim,
        source=sources[0].source,
        address=sources[0].address,
        generation=sources[0].generation,
        cache=cache,
        blocks=unpack_blocks(message.blocks),
        first=message.first,
        tokens=tokens,
        timeout=message.timeout,
        wait=message.wait,
        client=session.token.hex(),
        priority=message.priority,
        due=asyncio.get_running_loop().time() + message.ttft if message.ttft else math.inf,
        part=sources[0].part,
        others=tuple(sources[1:]),
    )


def _source(ticket: Ticket, number: int) -> Source:
    part = None if ticket.part is None else read_part(ticket.part, f"tickets[{number}].part")
    return Source(ticket.agent, ticket.address, ticket.generation, ticket.claim, part)


def _one_request(tickets: list[Ticket]) -> tuple[str, int]:
    """The request that all tickets are of, and its tokens; raises `InvalidArgument` naming one that differs."""
    first = tickets[0]
    for i, ticket in enumerate(tickets):
        for name in ("request", "tokens"):
            got, expected = getattr(ticket, name), getattr(first, name)
            if got != expected:
                raise InvalidArgument(
                    f"the tickets are parts of one request, and differ in {name}",
                    field=f"tickets[{i}].{name}",
                    got=got,
                    expected=expected,
                )
    return first.request, first.tokens


async def _run(
    agent: Agent, session: Session, job: FetchJob, entry: Entry, reply: Callable[[LocalMessage], None]
) -> None:
    request, ending = job.request, "cancelled"
    error: HawkError | None = None
    try:
        result = await job.run()
        ending = "ready"
        ended = FetchEnded(
            job=request.job,
            error={},
            tokens=result.tokens,
            first=result.first,
            nbytes=result.nbytes,
            note=result.note,
            transport=result.transport,
            mode=result.mode,
            phases=result.phases,
            channels=result.channels,
            parts=result.parts,
        )
    except HawkError as fault:
        error, ending = fault, fault.code
        ended = FetchEnded(job=request.job, error=fault.to_wire())
    finally:
        agent.fetching -= 1
        session.fetches.pop(request.job, None)
        agent.ledger.close(entry, ending, "" if error is None else str(error))
        agent.fetch_done(ending)
    result = job.result
    agent.metrics.job(ending, "fetch", result.transport)
    for part in job.parts:
        agent.metrics.moved("in", part.result.transport, part.result.nbytes)
    for phase in _COUNTED:
        if phase in result.phases:
            agent.metrics.phase(phase, result.phases[phase])
    (log.info if error is None else log.warning)(
        "fetch ended",
        request=request.request,
        job=request.job,
        attempt=result.attempt or None,
        source=_peers(request, 1024),
        ending=ending,
        reason=None if error is None else str(error),
        bytes=result.nbytes,
        transport=result.transport,
        mode=result.mode,
        seconds=result.phases.get("total"),
    )
    reply(ended)
    forget_frames(error)


async def abort(session: Session, job_id: str) -> None:
    """Ends a fetch unless it is ready; returns when no byte of it can land any more."""
    entry = session.fetches.get(job_id)
    if entry is None:
        return
    job, task = entry
    if job.state is not State.READY:
        job.stop(Aborted("the client ended the fetch", by="the client"))
    await asyncio.wait({task})


def stop_into(session: Session, cache: CacheEntry, error: HawkError) -> None:
    """Tells every fetch into a cache to end; the cache is gone when no byte of any can land any more."""
    for job, _ in session.fetches.values():
        if job.request.cache is cache and job.state is not State.READY:
            job.stop(error)


async def stop_all(session: Session, error: HawkError) -> None:
    """Ends every fetch of a client; returns when no byte of any can land any more."""
    running = list(session.fetches.values())
    for job, _ in running:
        job.stop(error)
    if running:
        await asyncio.wait({task for _, task in running})
