"""Sessions with the agents that this one reads from."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from hawk.control.beat import Beat
from hawk.control.channel import Channel
from hawk.control.channel import State as ChannelState
from hawk.control.frames import Codec
from hawk.control.messages import Hello, Notice, PeerMessage, Refused, Welcome
from hawk.errors import (
    Aborted,
    Busy,
    ControlError,
    HawkError,
    PeerLost,
    PeerUnreachable,
    UnknownPeer,
    from_wire,
)
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from hawk.control.discovery import Directory
    from hawk.control.frames import Header
    from hawk.control.sockets import Sockets

log = get_log("hawk.jobs.peers")

PEER_CODEC: Codec[PeerMessage] = Codec(msgspec.msgpack.Decoder(PeerMessage))

NOTICE_VERSION = 2
"""The protocol version since which peers know `Notice` and `Refused`; others are told nothing, which harms nobody."""

_HELLO_AGAIN = 1.0


class PeerSession:
    """What this agent has with one other: a control channel, the peer's endpoints, and the jobs on it.

    name         the peer's name
    endpoints    how its memory can be read, by transport; empty until it said so
    role, software, draining    what else it said of itself
    users        jobs that use the session, or wait for it
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
        on_end: Callable[[PeerSession], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.name = name
        self.address = address
        self.users = 0
        self.endpoints: dict[str, dict[str, str]] = {}
        self.role = ""
        self.software = ""
        self.draining = False
        self._hello = hello
        self._on_end = on_end
        self._on_lost = on_lost
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
        """`connecting`, `up`, `refused` (it is there, and talks not with us), `lost` or `closed`."""
        up = self.channel.state is ChannelState.UP
        return "refused" if up and self._refused is not None else self.channel.state.value

    @property
    def trouble(self) -> str:
        """What keeps this agent from talking with the peer, as far as that is known; else empty."""
        return str(self._refused) if self._refused is not None else self.channel.trouble

    @property
    def generation(self) -> int:
        """The run of the peer that was heard last; 0 before the first."""
        return self.channel.peer_generation

    @property
    def version(self) -> int:
        """The protocol version that is spoken with the peer; it may change whenever the peer comes back."""
        return self.channel.version

    async def ready(self, timeout: float) -> None:
        """Waits until the peer has introduced itself; raises `PeerUnreachable` or `VersionMismatch`."""
        until = asyncio.get_running_loop().time() + timeout
        await self.channel.up(timeout, patient=False)
        if self._welcomed.is_set() and self._refused is None:
            return
        try:
            async with asyncio.timeout_at(until):
                while not self._welcomed.is_set():
                    self._up()
                    await self._welcome_or_pause()
        except TimeoutError:
            raise PeerUnreachable(
                "the peer did not introduce itself in time",
                peer=self.name,
                reason=self.channel.reason or None,
                seconds=timeout,
            ) from None
        if self._refused is not None:
            raise self._refused

    async def _welcome_or_pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HELLO_AGAIN):
                await self._welcomed.wait()

    def attach(
        self, job: str, on_message: Callable[[PeerMessage], None], on_lost: Callable[[HawkError], None]
    ) -> None:
        """Frames of `job` go to `on_message` from now on; `on_lost` is told when the peer died or restarted."""
        self._jobs[job] = (on_message, on_lost)

    def detach(self, job: str) -> None:
        """The job has ended; later frames of it are dropped."""
        self._jobs.pop(job, None)

    def send(self, message: PeerMessage) -> None:
        """Puts a message on the way; one that cannot go now is dropped, since every question is put again."""
        try:
            self.channel.send(message)
        except (Busy, ControlError) as error:
            log.debug("frame not sent", peer=self.name, message=type(message).__name__, reason=str(error))

    def close(self) -> None:
        """Ends the session; jobs on it are told."""
        self._drop(Aborted("this agent closed its session with the peer", peer=self.name))
        self.channel.close()

    def _up(self) -> None:
        self.send(self._hello())

    def _take(self, header: Header, message: PeerMessage) -> None:
        if isinstance(message, Welcome):
            if message.name != self.name:
                self._refuse(
                    PeerUnreachable(
                        "another agent answers at this address",
                        field=f"peers.{self.name}",
                        got=message.name,
                        address=self.address,
                    )
                )
            else:
                self._refused = None
                self.endpoints = {name: dict(facts) for name, facts in message.endpoints.items()}
                self.role, self.software = message.role, message.software
                self._drains(message.draining)
                self._welcomed.set()
            return
        if isinstance(message, Refused):
            self._refuse(from_wire(message.error))
            return
        if isinstance(message, Notice):
            self._drains(message.draining)
            return
        entry = self._jobs.get(getattr(message, "job", ""))
        if entry is not None:
            entry[0](message)

    def _refuse(self, error: HawkError) -> None:
        """The peer will not talk with this agent, now or not any more: nothing that is under way can go on."""
        if self._refused is None:
            log.warning("the peer talks not with this agent", peer=self.name, reason=str(error))
        self._refused = error
        self._welcomed.set()
        self._drop(error)

    def _drains(self, draining: bool) -> None:
        if draining != self.draining:
            self.draining = draining
            log.info("peer drains" if draining else "peer takes jobs again", peer=self.name)

    def _lost(self, error: HawkError) -> None:
        log.warning("peer lost", peer=self.name, reason=str(error), story=self.channel.story())
        self._strange()
        self._on_lost(self.name)
        self._drop(error if isinstance(error, ControlError) else PeerLost(str(error)))

    def _restarted(self, old: int, new: int) -> None:
        log.warning("peer restarted", peer=self.name, was=f"{old:016x}", generation=f"{new:016x}")
        self._strange()
        self._drop(PeerLost("the peer restarted", peer=self.name))

    def _strange(self) -> None:
        """Whoever is heard next has said nothing yet."""
        self._welcomed.clear()
        self._refused = None

    def _drop(self, error: HawkError) -> None:
        for _, on_lost in list(self._jobs.values()):
            on_lost(error)
        self._on_end(self)


class Peers:
    """The sessions of an agent, by the peer's name and address.

    on_end      told of a session that has lost its peer or was closed: what hangs on it is of no more use
    most        sessions kept; of more, those that no job uses go, the longest unused first
    """

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
        on_end: Callable[[PeerSession], None],
        most: int = 256,
    ) -> None:
        self._sockets = sockets
        self._directory = directory
        self.keys = dict(keys)
        self._hello = hello
        self._beat = beat
        self._generation = generation
        self._secure = secure
        self._on_end = on_end
        self._most = most
        self._sessions: OrderedDict[tuple[str, str], PeerSession] = OrderedDict()
        self._failed: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def replace_keys(self, keys: Mapping[str, str]) -> None:
        """Other keys from now on; a session with a peer whose key is another, or none any more, ends with its jobs."""
        old, self.keys = self.keys, dict(keys)
        self._failed.clear()
        for session in self.sessions:
            if self._secure and self.keys.get(session.name) != old.get(session.name):
                log.warning("the peer's key was changed or taken away", peer=session.name)
                self._end(session)

    def failed(self, name: str) -> str:
        """Why the last try to talk with that peer failed; empty if it did not, or was not made since a reload."""
        return self._failed.get(name, "")

    @property
    def sessions(self) -> list[PeerSession]:
        """All of them, the longest unused first."""
        return list(self._sessions.values())

    def notify(self, *, draining: bool) -> None:
        """Tells every peer that knows the word whether this agent drains."""
        for session in self.sessions:
            if session.state == "up" and session.version >= NOTICE_VERSION:
                session.send(Notice(draining))

    def states(self) -> dict[str, str]:
        """Name to state of every peer; of a peer with several addresses the best state."""
        states: dict[str, str] = {}
        for session in self._sessions.values():
            if states.get(session.name) != "up":
                states[session.name] = session.state
        return states

    @contextlib.asynccontextmanager
    async def session(
        self, name: str, address: str, *, timeout: float, patience: float | None = None
    ) -> AsyncIterator[PeerSession]:
        """The session with `name`, made if need be; it stays for as long as the block lasts.

        The peer has `timeout` seconds to answer; all together, with a directory that is away, may take `patience`.
        The directory's address wins; `address` (from a ticket) is used for a peer that it does not know.  Raises
        `UnknownPeer`, `PeerUnreachable`, `VersionMismatch`, `Busy` or `ConfigError` (no key of that peer).
        """
        try:
            session = await self._meet(name, address, timeout, patience or timeout)
        except Busy:
            raise
        except HawkError as error:
            self._failed[name] = str(error)
            while len(self._failed) > self._most:
                self._failed.popitem(last=False)
            raise
        self._failed.pop(name, None)
        try:
            yield session
        finally:
            session.users -= 1

    async def _meet(self, name: str, address: str, timeout: float, patience: float) -> PeerSession:
        """The session, with one user more, once the peer has introduced itself."""
        until = asyncio.get_running_loop().time() + patience
        try:
            where = await self._directory.resolve(name, address, wait=patience)
        except (UnknownPeer, PeerUnreachable):
            if not address:
                raise
            where = address
        self._leave_others(name, where)
        session = self._get(name, where)
        session.users += 1
        met = False
        try:
            await session.ready(min(timeout, max(until - asyncio.get_running_loop().time(), 0.0)))
            met = True
        except PeerUnreachable as error:
            log.warning("no answer", peer=name, reason=str(error), story=session.channel.story())
            self._directory.lost(name)
            raise
        finally:
            if not met:
                session.users -= 1
                if session.users == 0:
                    # Nobody was there.  Whoever tries next begins anew, and an address from a ticket leaves nothing.
                    self._end(session)
        return session

    def _leave_others(self, name: str, where: str) -> None:
        """The peer is elsewhere now: a session with its old place that nobody uses, and nobody answers, is over."""
        for session in self.sessions:
            if (
                session.name == name
                and session.address != where
                and not session.users
                and session.state != "up"
            ):
                self._end(session)

    def _get(self, name: str, where: str) -> PeerSession:
        key = (name, where)
        session = self._sessions.get(key)
        if session is None:
            self._make_room()
            session = self._sessions[key] = PeerSession(
                self._sockets,
                name,
                where,
                self.keys.get(name) if self._secure else None,
                self._hello,
                self._beat,
                self._generation,
                self._on_end,
                self._directory.lost,
            )
        self._sessions.move_to_end(key)
        return session

    def _make_room(self) -> None:
        if len(self._sessions) < self._most:
            return
        unused = next((s for s in self._sessions.values() if s.users == 0), None)
        if unused is None:
            raise Busy(f"this agent talks with at most {self._most} peers at a time", retry_after=1.0)
        self._end(unused)

    def _end(self, session: PeerSession) -> None:
        self._sessions.pop((session.name, session.address), None)
        session.close()

    def close(self) -> None:
        """Ends every session."""
        for session in list(self._sessions.values()):
            self._end(session)
