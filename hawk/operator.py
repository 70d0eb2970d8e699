"""What an operator asks of a live agent: its state, its peers, its jobs, and that it drains.

`hawk status`, `hawk peers`, `hawk jobs` and `hawk drain` are these calls, and every `hawk.Client` has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from hawk.arguments import duration, text
from hawk.connection import CALL_TIMEOUT, Connection
from hawk.control.messages import (
    AskJobs,
    AskPeers,
    AskStatus,
    Drain,
    Drained,
    JobInfo,
    JobList,
    PeerInfo,
    PeerList,
    Status,
    TransportTry,
    Tried,
    TryPeer,
)
from hawk.errors import InvalidArgument, UnknownRequest, VersionMismatch

if TYPE_CHECKING:
    import msgspec

_SINCE = 2
"""The protocol version that has these calls; `status` is older."""

_LONGEST_WAIT = 3600.0

M = TypeVar("M", bound="msgspec.Struct")


class Operator(Connection):
    """A connection that only looks on and commands; it owns no caches and makes no offers."""

    async def status(self) -> Status:
        """The agent's pools and counts."""
        return await self.call(AskStatus(0), Status)

    async def peers(self) -> list[PeerInfo]:
        """The agents that this one knows or talks with, by name."""
        return (await self._asked(AskPeers(0), PeerList)).peers

    async def jobs(self, *, ended: bool = True, most: int = 1000) -> list[JobInfo]:
        """Jobs under way, and with `ended` those that have ended too, the latest first; `most` are told at most."""
        return (await self._asked(AskJobs(id=0, ended=ended, most=most), JobList)).jobs

    async def job(self, name: str) -> JobInfo:
        """The one job whose id, here or on the wire, begins so; or else the latest of the request of that name.

        Raises `UnknownRequest` if there is none (any more), `InvalidArgument` if the ids of several begin so.
        """
        prefix = text(name, "job", 512, shortest=1)
        found: list[JobInfo] = []
        if len(prefix) <= 32 and set(prefix) <= set("0123456789abcdef"):
            found = (await self._asked(AskJobs(id=0, job=prefix, most=10), JobList)).jobs
        if not found:
            listed = (await self._asked(AskJobs(id=0, request=prefix), JobList)).jobs
            found = [job for job in listed if job.request == prefix][:1]
        if not found:
            raise UnknownRequest(
                f"the agent {self.name} knows no such job, nor a request of that name",
                field="job",
                got=prefix,
                hint="Ended jobs are remembered for a while only; `hawk jobs` lists them",
            )
        if len(found) > 1 and len({job.job for job in found}) > 1:
            names = ", ".join(job.job for job in found)
            raise InvalidArgument(
                "several jobs begin so", field="job", got=prefix, expected=f"one of {names}"
            )
        return found[0]

    async def drain(self, *, timeout: float | str = 0.0) -> Drained:
        """Makes the agent take no new work and finish what it promised; says how far it is after `timeout` at most.

        Open offers are promises too: they may still be fetched until they end.  The draining goes on after the
        answer, and after this client has left.
        """
        seconds = min(duration(timeout, "timeout"), _LONGEST_WAIT) if timeout else 0.0
        return await self._asked(Drain(id=0, timeout=seconds), Drained, timeout=seconds + CALL_TIMEOUT)

    async def try_peer(self, peer: str, *, timeout: float | str = 10.0) -> list[TransportTry]:
        """Makes the agent read a few bytes of another one by every transport that either has; says what came of each.

        Raises what keeps the agents from talking at all: `UnknownPeer`, `PeerUnreachable`, `VersionMismatch`.
        """
        seconds = min(duration(timeout, "timeout"), _LONGEST_WAIT)
        question = TryPeer(id=0, peer=peer, timeout=seconds)
        return (await self._asked(question, Tried, timeout=seconds + CALL_TIMEOUT)).tries

    async def resume(self) -> Drained:
        """Makes a draining agent take new work again; raises `InvalidArgument` where its process is ending."""
        return await self._asked(Drain(id=0, resume=True), Drained)

    async def _asked(self, message: msgspec.Struct, answer: type[M], *, timeout: float = CALL_TIMEOUT) -> M:
        self.check_context()
        if self.version < _SINCE:
            # It could not read the question, and would not answer.
            raise VersionMismatch(
                f"the agent {self.name} is too old to be asked this",
                got=f"protocol {self.version}",
                expected=f"protocol {_SINCE} or later",
                hint="Update the agent",
            )
        return await self.call(message, answer, timeout=timeout)
