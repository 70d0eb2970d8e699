"""What an agent says of itself to `hawk status`, `hawk peers`, `hawk jobs`, and to whoever asks whether it is ready."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hawk.control.messages import (
    AskJobs,
    JobList,
    PeerInfo,
    PeerList,
    PoolStatus,
    Status,
)
from hawk.jobs.states import State

if TYPE_CHECKING:
    from hawk.agent.core import Agent

_LONGEST = 1024
"""Characters of a reason."""

_LEASED = {State.PREPARING, State.PREPARED, State.RECEIVING, State.RELEASING}
_QUEUED = {State.RESERVING, State.WAITING, State.QUEUED}


def not_ready(agent: Agent) -> str | None:
    """Why the agent takes no new jobs just now, or None if it does."""
    if not agent.up:
        return "starting"
    if agent.draining:
        return "draining"
    down = [f"{name}: {why}" for name, t in agent.transports.items() if (why := t.trouble())]
    if down:
        return f"transport down ({'; '.join(down)})"
    allocator = agent.arena.allocator
    if agent.wrong_role("prefill") is None and allocator.free_bytes == 0:
        kept = allocator.quarantined_bytes
        return f"the arena is full ({kept} bytes of it in quarantine)" if kept else "the arena is full"
    return None


def status(agent: Agent, call: int) -> Status:
    """Pools and counts."""
    allocator = agent.arena.allocator
    free, kept, total = allocator.free_bytes, allocator.quarantined_bytes, agent.arena.region.nbytes
    pools = [PoolStatus("arena", total, free, total - free - kept, kept)]
    for name, memory in agent.memories.items():
        whole, spare = memory.channels * memory.channel_bytes, sum(memory.free_bytes())
        pools.append(PoolStatus(name, whole, spare, whole - spare, 0, memory.said[:1024]))
    entries = agent.caches.entries()
    return Status(
        id=call,
        name=agent.config.agent.name,
        role=agent.config.agent.role,
        control=agent.control_address,
        peers=agent.peers.states(),
        pools=pools,
        offers=len(agent.offers),
        serving=agent.serving.jobs,
        fetching=agent.fetching,
        caches=len(entries),
        blocks_owned=sum(len(e.owners) for e in entries),
        blocks_quarantined=sum(len(e.quarantined) for e in entries),
        endings=dict(agent.endings),
        transports={
            name: ", ".join(f"{k}={v}" for k, v in t.endpoint.items()) for name, t in agent.transports.items()
        },
        generation=f"{agent.generation:016x}",
        software=agent.software,
        pid=os.getpid(),
        uptime=time.monotonic() - agent.began,
        draining=agent.draining,
        not_ready=(not_ready(agent) or "")[:_LONGEST],
        clients=agent.service.clients,
        loop_lag=agent.metrics.last_lag,
        directory=agent.directory.state,
    )


def peers(agent: Agent, call: int) -> PeerList:
    """Who is known: those we read from, those whom we serve, those of directory and configuration."""
    jobs = Counts(agent)
    found = [
        PeerInfo(
            name=session.name,
            direction="reads-from",
            state=session.state,
            address=session.address,
            version=session.version if session.generation else 0,
            generation=f"{session.generation:016x}" if session.generation else "",
            role=session.role,
            software=session.software,
            transports=sorted(session.endpoints),
            jobs=jobs.of("fetch", session.name),
            draining=session.draining,
            trouble=session.trouble[:_LONGEST],
        )
        for session in agent.peers.sessions
    ]
    for peer, hello, draining in agent.serving.guests.met():
        found.append(
            PeerInfo(
                name=hello.name,
                direction="serves",
                state="up",
                version=peer.version,
                generation=f"{peer.generation:016x}",
                role=hello.role,
                software=hello.software,
                transports=sorted(hello.endpoints),
                jobs=jobs.of("serve", hello.name),
                draining=draining,
            )
        )
    seen = {info.name for info in found if info.direction == "reads-from"}
    for name, record in agent.directory.registered().items():
        if name not in seen:
            trouble = agent.peers.failed(name)[:_LONGEST]
            found.append(
                PeerInfo(
                    name=name,
                    direction="registered",
                    state="failed" if trouble else "not-tried",
                    address=record.address,
                    generation=record.generation,
                    role=record.role,
                    software=record.software,
                    transports=record.transports,
                    trouble=trouble,
                )
            )
            seen.add(name)
    for name, address in agent.directory.configured().items():
        if name not in seen:
            trouble = agent.peers.failed(name)[:_LONGEST]
            state = "failed" if trouble else "not-tried"
            found.append(
                PeerInfo(name=name, direction="configured", state=state, address=address, trouble=trouble)
            )
    return PeerList(call, sorted(found, key=lambda info: (info.name, info.direction)))


def jobs(agent: Agent, message: AskJobs) -> JobList:
    """Jobs under way, then the latest ended ones."""
    entries = agent.ledger.find(message.job, request=message.request, ended=message.ended)
    return JobList(
        message.id,
        [entry.info() for entry in entries[: message.most]],
        max(0, len(entries) - message.most),
    )


def measure(agent: Agent) -> None:
    """Sets the metrics that are read off the agent; called from the thread that serves them."""
    if not agent.up:
        return
    counts = Counts(agent)
    agent.metrics.jobs_now(queued=counts.queued, leases=counts.leases)
    up = {session.name: False for session in agent.peers.sessions}
    up |= {session.name: True for session in agent.peers.sessions if session.state == "up"}
    up |= {hello.name: True for _, hello, _ in agent.serving.guests.met()}
    # Who was here and is expected still is down; of others, who come and go, nothing is kept.
    known = agent.directory.registered()
    expected = set(agent.peers.keys) | set(agent.directory.configured()) | set(known)
    agent.peers_met = (agent.peers_met | set(up)) & (expected | set(up))
    for name, transport in list(agent.transports.items()):
        agent.metrics.transport_now(name, transport.counts())
    if agent.config.discovery.etcd:
        agent.metrics.directory_now("etcd", up=agent.directory.up, agents=len(known))
    agent.metrics.peers_now({name: up.get(name, False) for name in agent.peers_met})


class Counts:
    """Jobs under way, counted for metrics and lists."""

    def __init__(self, agent: Agent) -> None:
        self.queued = self.leases = 0
        self._by_peer: dict[tuple[str, str], int] = {}
        for role, peer, look in agent.ledger.states():
            self.queued += look.state in _QUEUED
            self.leases += look.state in _LEASED
            for name in peer.split(", "):  # of a request in parts
                self._by_peer[role, name] = self._by_peer.get((role, name), 0) + 1

    def of(self, role: str, peer: str) -> int:
        """Jobs of one role with one peer."""
        return self._by_peer.get((role, peer), 0)
