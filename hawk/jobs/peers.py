"""Sessions with the agents that this one reads from, and the transport links that go with them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from hawk.control.beat import Beat
from hawk.control.channel import Channel
from hawk.control.frames import Codec
from hawk.control.messages import Hello, PeerMessage, Welcome
from hawk.errors import (
    Busy,
    ControlError,
    HawkError,
    PeerLost,
    PeerUnreachable,
    UnknownPeer,
)
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hawk.control.discovery import Directory
    from hawk.control.frames import Header
    from hawk.control.sockets import Sockets
    from hawk.transports.base import Link, Transport

log = get_log("hawk.jobs.peers")

PEER_CODEC: Codec[PeerMessage] = Codec(msgspec.msgpack.Decoder(PeerMessage))

_HELLO_AGAIN = 1.0


class PeerSession:
    """What this agent has with one other: a control channel, the peer's endpoints, and the jobs on it.

    name         the peer's name
    endpoints    how its memory can be read, by transport; empty until it said so
    """

    def __init__(
        self,
        sockets: Sockets,
        name: str,
        address: str,
        server_key: str | None,
        hello: Callable[[], Hello],
        beat: Beat,
        generation: int,
    ) -> None:
        self.name = name
        self.address = address
        self.endpoints: dict[str, dict[str, str]] = {}
        self._hello = hello
        self._jobs: dict[str, tuple[Callable[[PeerMessage], None], Callable[[HawkError], None]]] = {}
        self._welcomed = asyncio.Event()
        self._refused: HawkError | None = None
        self.channel: Channel[PeerMessage] = Channel(
            sockets.dealer(address, server_key=server_key, field=f"peers.{name}"),
            PEER_CODEC,
            self._take,
            on_lost=self._lost,
            on_restarted=self._restarted,
            on_up=self._up,
            on_bad=lambda error: log.warning("bad frame", peer=name, reason=str(error)),
            peer=name,
            beat=beat,
            own_generation=generation,
        )
        self.channel.start()

    @property
    def state(self) -> str:
        """`connecting`, `up`, `lost` or `closed`."""
        return self.channel.state.value

    async def ready(self, timeout: float) -> None:
        """Waits until the peer has introduced itself; raises `PeerUnreachable` or `VersionMismatch`."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        await self.channel.up(timeout)
        while not self._welcomed.is_set():
            if self._refused is not None:
                raise self._refused
            left = until - loop.time()
            if left <= 0:
                raise PeerUnreachable(
                    "the peer did not introduce itself in time", peer=self.name, seconds=timeout
                )
            try:
                await asyncio.wait_for(self._welcomed.wait(), min(left, _HELLO_AGAIN))
            except TimeoutError:
                self._up()
        if self._refused is not None:
            raise self._refused

    def attach(
        self, job: str, on_message: Callable[[PeerMessage], None], on_lost: Callable[[HawkError], None]
    ) -> None:
        """Frames of `job` go to `on_message` from now on; `on_lost` is told when the peer died or restarted."""
        self._jobs[job] = (on_message, on_lost)

    def detach(self, job: str) -> None:
        """The job has ended; later frames of it are dropped."""
        self._jobs.pop(job, None)

    @property
    def jobs(self) -> int:
        """Jobs that are attached."""
        return len(self._jobs)

    def send(self, message: PeerMessage) -> None:
        """Puts a message on the way; one that cannot go now is dropped, since every question is put again."""
        try:
            self.channel.send(message)
        except (Busy, ControlError) as error:
            log.debug("frame not sent", peer=self.name, message=type(message).__name__, reason=str(error))

    def close(self) -> None:
        """Ends the session; jobs on it are told."""
        self._drop(PeerLost("this agent closed its session with the peer", peer=self.name))
        self.channel.close()

    def _up(self) -> None:
        self.send(self._hello())

    def _take(self, header: Header, message: PeerMessage) -> None:
        if isinstance(message, Welcome):
            if message.name != self.name:
                self._refused = PeerUnreachable(
                    "another agent answers at this address",
                    field=f"peers.{self.name}",
                    got=message.name,
                    address=self.address,
                )
            else:
                self._refused = None
                self.endpoints = {name: dict(facts) for name, facts in message.endpoints.items()}
            self._welcomed.set()
            return
        entry = self._jobs.get(getattr(message, "job", ""))
        if entry is not None:
            entry[0](message)

    def _lost(self, error: HawkError) -> None:
        log.warning("peer lost", peer=self.name, reason=str(error))
        self._welcomed.clear()
        self._drop(error if isinstance(error, ControlError) else PeerLost(str(error)))

    def _restarted(self, old: int, new: int) -> None:
        log.warning("peer restarted", peer=self.name, was=f"{old:016x}", generation=f"{new:016x}")
        self._welcomed.clear()
        self._drop(PeerLost("the peer restarted", peer=self.name))

    def _drop(self, error: HawkError) -> None:
        for _, on_lost in list(self._jobs.values()):
            on_lost(error)


class Peers:
    """All sessions of an agent, by the peer's name."""

    def __init__(
        self,
        sockets: Sockets,
        directory: Directory,
        keys: Mapping[str, str],
        hello: Callable[[], Hello],
        *,
        beat: Beat,
        generation: int,
        secure: bool,
    ) -> None:
        self._sockets = sockets
        self._directory = directory
        self.keys = dict(keys)
        self._hello = hello
        self._beat = beat
        self._generation = generation
        self._secure = secure
        self._sessions: dict[str, PeerSession] = {}

    def states(self) -> dict[str, str]:
        """Name to state of every session."""
        return {name: session.state for name, session in self._sessions.items()}

    async def session(self, name: str, address: str, *, timeout: float) -> PeerSession:
        """The session with `name`, made if need be.

        The directory's address wins; `address` (from a ticket) is used for a peer that it does not know.  Raises
        `UnknownPeer`, `PeerUnreachable`, `VersionMismatch` or `ConfigError` (no key of that peer).
        """
        try:
            where = await self._directory.resolve(name)
        except UnknownPeer:
            if not address:
                raise
            where = address
        session = self._sessions.get(name)
        if session is not None and session.address != where:
            session.close()
            session = None
        if session is None:
            session = PeerSession(
                self._sockets,
                name,
                where,
                self.keys.get(name) if self._secure else None,
                self._hello,
                self._beat,
                self._generation,
            )
            self._sessions[name] = session
        await session.ready(timeout)
        return session

    def close(self) -> None:
        """Ends every session."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()


class Links:
    """Transport links to peers, one per peer and transport, made when first wanted and again when broken."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self._transports = transports
        self._links: dict[tuple[str, str], tuple[dict[str, str], Link]] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, session: PeerSession, transport: str, *, timeout: float) -> Link:
        """A working link to the session's peer; raises what `Transport.connect` raises."""
        key = (session.name, transport)
        async with self._locks.setdefault(key, asyncio.Lock()):
            endpoint = session.endpoints[transport]
            known = self._links.get(key)
            if known is not None and known[0] == endpoint and not known[1].broken:
                return known[1]
            if known is not None:
                del self._links[key]
                self._retire(known[1])
            link = await self._transports[transport].connect(endpoint, timeout=timeout)
            self._links[key] = (endpoint, link)
            return link

    def _retire(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes every link."""
        for _, link in self._links.values():
            self._retire(link)
        self._links.clear()
        with contextlib.suppress(HawkError):
            await asyncio.gather(*self._closing, return_exceptions=True)
