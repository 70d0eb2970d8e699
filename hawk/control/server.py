"""The listening end of a link: see `hawk.control.link` for what both ends promise each other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from hawk.control.beat import BEAT, PING, PONG, Beat
from hawk.control.frames import (
    PROTOCOL_VERSION,
    Codec,
    Header,
    Kind,
    Ping,
    Pong,
    decode_header,
    encode_body,
    encode_header,
    generation,
    refused_version,
)
from hawk.control.receive import ReceiveLoop
from hawk.errors import AccessDenied, BadFrame, Busy, ControlError, HawkError, PeerLost, VersionMismatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.sockets import Endpoint
    from hawk.control.zap import Zap

T = TypeVar("T")

_FRAMES = 2
"""A header and a body."""

_MISSED = 2
"""Beats without a frame after which a peer is asked whether its connection still stands."""


@dataclass(slots=True)
class Peer:
    """What a server knows of the process behind one identity.

    `name` is the peer's name by its CURVE key, empty where there is no authentication; `version` what it speaks.
    `missed` counts beats since its last frame was read, `silent` those of them at which nothing lay unread.
    """

    identity: bytes
    generation: int
    version: int
    name: str
    user: str = field(repr=False, default="")
    missed: int = 0
    silent: int = 0


class Server(Generic[T]):
    """The listening end: a ROUTER that talks with any number of channels, up to `max_peers`.

    endpoint    from `Sockets.router`; closed with the server
    codec       decodes what comes in
    handler     `handler(identity, header, message)`, called on the event loop
    on_bad      `on_bad(identity, error)` for each frame that was refused: `BadFrame`, `VersionMismatch`,
                `AccessDenied` (the key was taken off the list), `Busy` (one peer too many), `PeerLost` (meant
                for an earlier generation of this process)
    on_gone     `on_gone(peer, error)`, once, when a peer fell silent for `beat.timeout`, cannot be reached any
                more, or shows another generation
    zap         the authenticator, where the endpoint is authenticated
    beat        None where silence proves nothing (a local client may compute for minutes, and its death shows by
                the descriptor socket); call `forget` then

    Use `start` on the event loop and `close` at the end.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        codec: Codec[T],
        handler: Callable[[bytes, Header, T], None],
        *,
        on_bad: Callable[[bytes, HawkError], None],
        on_gone: Callable[[Peer, PeerLost], None],
        zap: Zap | None = None,
        beat: Beat | None = BEAT,
        max_peers: int = 1024,
        own_generation: int | None = None,
        version: int = PROTOCOL_VERSION,
    ) -> None:
        if endpoint.authenticated and zap is None:
            raise ControlError("an authenticated endpoint needs its authenticator", field="zap")
        self.endpoint = endpoint
        self.generation = generation() if own_generation is None else own_generation
        self.peers: dict[bytes, Peer] = {}
        self._codec = codec
        self._handler = handler
        self._on_bad = on_bad
        self._on_gone = on_gone
        self._zap = zap if endpoint.authenticated else None
        self._beat = beat
        self._max_peers = max_peers
        self._version = version
        self._timer: asyncio.TimerHandle | None = None
        self._seq = 0
        self._unread: dict[bytes, tuple[int, asyncio.Future[None]]] = {}
        self._receive = ReceiveLoop(
            endpoint.raw,
            self._take,
            on_bad=on_bad,
            with_user=endpoint.authenticated,
            max_frames=_FRAMES,
            max_bytes=endpoint.limits.frame_bytes,
        )

    @property
    def address(self) -> str:
        """Where the server listens."""
        return self.endpoint.address

    def start(self) -> None:
        """Begins to receive, on the running event loop."""
        self._receive.start()
        if self._beat is not None:
            self._timer = asyncio.get_running_loop().call_later(self._beat.interval, self._tick)

    async def read_by_all(self, timeout: float) -> None:
        """Returns when every peer has taken what was sent to it so far, or after `timeout` seconds.

        Whoever closes right after its last words takes them along: ZeroMQ drops what the far side has not read yet
        when a connection ends.  A peer answers a PING once it has handled all that came before.
        """
        loop = asyncio.get_running_loop()
        self._seq += 1
        for identity in list(self.peers):
            self._unread[identity] = (self._seq, loop.create_future())
            self._answer(identity, Kind.PING, PING.encode(Ping(self._seq)))
        waits = [wait for identity, (_, wait) in self._unread.items() if identity in self.peers]
        if waits:
            await asyncio.wait(waits, timeout=timeout)
        self._unread.clear()

    def _read(self, identity: bytes, seq: int) -> None:
        asked, wait = self._unread.get(identity, (0, None))
        if wait is not None and seq >= asked and not wait.done():
            wait.set_result(None)

    def close(self) -> None:
        """Stops, and closes the endpoint; no callback comes any more.  Safe to call twice."""
        self._receive.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.endpoint.close()
        self.peers.clear()

    def send(self, identity: bytes, message: object) -> None:
        """Sends to one peer, without waiting.

        Raises `Busy` if its queue is full, `PeerLost` if it is not connected (and then `on_gone` was called if
        the peer was known), `InvalidArgument` if the message cannot be encoded.
        """
        self._send(identity, Kind.MESSAGE, encode_body(message))

    def recheck(self) -> list[bytes]:
        """Looks at the list of keys anew: a peer whose key is not on it any more, or has another name, is gone.

        Returns the identities of those who have another name: they are there again under that one.
        """
        renamed: list[bytes] = []
        if self._zap is None:
            return renamed
        for peer in list(self.peers.values()):
            name = self._zap.name_of(peer.user)
            if name == peer.name:
                continue
            why = "is not authorised any more" if name is None else "has another name now"
            self._gone(peer.identity, PeerLost(f"the peer's key {why}", peer=peer.name, name=name))
            if name is not None:
                self.peers[peer.identity] = replace(peer, name=name, missed=0, silent=0)
                renamed.append(peer.identity)
        return renamed

    def forget(self, identity: bytes) -> None:
        """Drops what is known of a peer, without a callback; for an owner who knows that it ended."""
        self.peers.pop(identity, None)

    def _send(self, identity: bytes, kind: Kind, body: bytes) -> None:
        peer = self.peers.get(identity)
        version = self._version if peer is None else peer.version
        header = encode_header(Header(version, kind, self.generation, peer.generation if peer else 0))
        try:
            self.endpoint.send([header, body], identity)
        except PeerLost as error:
            self._gone(identity, error)
            raise
        finally:
            self._receive.poke()

    def _answer(self, identity: bytes, kind: Kind, body: bytes = b"") -> None:
        """Sends what the peer needs only if it is still there and reading."""
        try:
            self._send(identity, kind, body)
        except (Busy, PeerLost):
            return

    def _gone(self, identity: bytes, error: PeerLost) -> None:
        peer = self.peers.pop(identity, None)
        self._read(identity, self._seq)
        if peer is not None:
            self._on_gone(peer, error)

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            self._accept(identity, frames, self._receive.user)
        except VersionMismatch as error:
            # The answer's header says what this side speaks, so that a newer peer can step down.
            if refused_version(frames[0]) is None:
                self._answer(identity, Kind.VERSION)
            self._on_bad(identity, error)
        except (BadFrame, AccessDenied, Busy, PeerLost) as error:
            self._on_bad(identity, error)

    def _accept(self, identity: bytes, frames: list[bytes], user: str) -> None:
        name = ""
        if self._zap is not None:
            # The key was on the list when the connection was made; it may have been taken off since.
            known = self._zap.name_of(user)
            if known is None:
                raise AccessDenied("the peer's key is not authorised (any more)", field="key", got=user)
            name = known
        if len(frames) != _FRAMES:
            raise BadFrame("a message has two frames", got=len(frames), expected=_FRAMES)
        header = decode_header(frames[0], self._version)
        peer = self._peer(identity, header, user, name)
        peer.missed = peer.silent = 0
        if header.kind is Kind.PING:
            self._answer(identity, Kind.PONG, PONG.encode(Pong(PING.decode(frames[1]).seq)))
        elif header.kind is Kind.PONG:
            self._read(identity, PONG.decode(frames[1]).seq)
        elif header.kind is Kind.MESSAGE:
            if header.to_generation not in (0, self.generation):
                # Shows the peer at once that it talks to another process than it thinks.
                self._answer(identity, Kind.PONG, PONG.encode(Pong()))
                raise PeerLost(
                    "the message was meant for an earlier generation of this process",
                    field="to_generation",
                    got=header.to_generation,
                    expected=self.generation,
                )
            self._handler(identity, header, self._codec.decode(frames[1]))

    def _peer(self, identity: bytes, header: Header, user: str, name: str) -> Peer:
        peer = self.peers.get(identity)
        if peer is not None and peer.user != user:
            raise AccessDenied("the identity belongs to another peer", field="identity", owner=peer.name)
        if peer is not None and peer.generation != header.from_generation:
            self._gone(
                identity,
                PeerLost(
                    "the peer is another process than before",
                    was=peer.generation,
                    is_now=header.from_generation,
                ),
            )
            peer = None
        if peer is None:
            if len(self.peers) >= self._max_peers:
                raise Busy("too many peers", retry_after=1.0, most=self._max_peers)
            peer = Peer(identity, header.from_generation, header.version, name, user)
            self.peers[identity] = peer
        peer.version = header.version
        return peer

    def _tick(self) -> None:
        assert self._beat is not None
        self._timer = asyncio.get_running_loop().call_later(self._beat.interval, self._tick)
        if self._zap is not None:
            self._zap.look()
        # What a peer has said may be among what is still to be read: whoever is behind judges nobody.
        behind = self._receive.behind()
        for peer in list(self.peers.values()):
            peer.missed += 1
            peer.silent += not behind
            if peer.missed > _MISSED:
                # Of a connection that ended ZeroMQ tells only whoever sends on it.
                self._answer(peer.identity, Kind.PING, PING.encode(Ping()))
            if peer.identity not in self.peers:
                continue
            if peer.silent > self._beat.most_missed:
                error = PeerLost("the peer fell silent", peer=peer.name or None, seconds=self._beat.timeout)
                self._gone(peer.identity, error)
