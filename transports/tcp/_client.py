"""The reading side of tcp: a link of several connections, and the lane that works each of them."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import AccessDenied, PeerUnreachable
from hawk.transports import _pieces
from hawk.transports._grants import KEY_BYTES
from hawk.transports._lanes import Lane, Lanes, Work
from hawk.transports._vectors import Vectors
from hawk.transports.base import Link
from hawk.transports.tcp import _wire

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.memory.region import Region, Segments
    from hawk.transports._pieces import Piece
    from hawk.transports.tcp._config import TcpConfig

_LEAST_PIECE = 1 << 20
"""Reads are not cut finer than this, bytes: below it a second connection costs more than it brings."""


class TcpLane(Lane):
    """One data connection."""

    def __init__(
        self, config: TcpConfig, host: str, port: int, token: bytes, on_step: Callable[[int], None]
    ) -> None:
        super().__init__(f"{host}:{port}", config.connect_timeout)
        self._config = config
        self._address = (host, port)
        self._token = token
        self._on_step = on_step
        self._answer = bytearray(_wire.ANSWER.size)

    def _connect(self, deadline: float) -> None:
        last: OSError | None = None
        for family, kind, protocol, _, address in socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM):
            try:
                return self._connect_to(family, kind, protocol, address, deadline)
            except TimeoutError:
                raise
            except OSError as error:
                if isinstance(error, PeerUnreachable) or self._interrupted:
                    raise
                self._drop()
                last = error
        raise last or PeerUnreachable("the host name means no address", got=self._address[0])

    def _connect_to(
        self, family: int, kind: int, protocol: int, address: tuple[object, ...], deadline: float
    ) -> None:
        sock = socket.socket(family, kind, protocol)
        self._adopt(sock)
        _wire.tune(sock, self._config.socket_buffer)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.connect(address)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.sendall(_wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, self._token))
        if _wire.receive_exactly(sock, memoryview(self._answer)) < len(self._answer):
            raise PeerUnreachable(
                "whoever listens there turned us away",
                peer=self.peer,
                hint="The peer was restarted or another program has its port; its endpoint is out of date",
            )
        magic, status, _ = _wire.ANSWER.unpack(self._answer)
        if magic != _wire.ANSWER_MAGIC or status not in (_wire.OK, _wire.FULL):
            raise PeerUnreachable("whoever listens there speaks another protocol", peer=self.peer)
        if status == _wire.FULL:
            raise PeerUnreachable(
                "the peer serves as many connections as it may",
                peer=self.peer,
                hint="Raise tcp.max_connections there",
            )
        sock.settimeout(None)

    def _carry(self, sock: socket.socket, work: Work, piece: Piece) -> None:
        piece = _pieces.join(piece)
        offset, length = piece.ranges()
        table = np.empty((len(offset), 2), "<i8")
        table[:, 0] = offset
        table[:, 1] = length
        request = _wire.REQUEST.pack(_wire.REQUEST_MAGIC, len(offset), piece.total, work.key)
        sock.sendall(request + table.tobytes())
        # Laid out while the request is under way.
        vectors = Vectors(work.bases[piece.region] + piece.local, piece.nbytes)
        if _wire.receive_exactly(sock, memoryview(self._answer)) < len(self._answer):
            raise ConnectionResetError("the peer ended before it answered")
        magic, status, total = _wire.ANSWER.unpack(self._answer)
        if magic == _wire.ANSWER_MAGIC and status == _wire.DENIED:
            raise AccessDenied(
                "the key is unknown, revoked, or does not cover the range",
                got=f"remote bytes {piece.low}..{piece.high}",
                peer=self.peer,
            )
        if magic != _wire.ANSWER_MAGIC or status != _wire.OK or total != piece.total:
            raise _wire.BadWire("the answer does not fit the request")
        fd, chunk = sock.fileno(), self._config.chunk
        while vectors.done < vectors.total:
            if self._interrupted:
                raise ConnectionAbortedError("stopped")
            vectors.receive(fd, chunk)
            self._on_step(vectors.done)


class TcpLink(Link):
    """Reads from one peer over `streams` connections."""

    def __init__(
        self, config: TcpConfig, host: str, port: int, token: bytes, on_step: Callable[[int], None]
    ) -> None:
        self._config = config
        self.on_close: Callable[[TcpLink], None] = lambda link: None
        self._lanes = Lanes(
            "hawk-tcp-read",
            [TcpLane(config, host, port, token, on_step) for _ in range(config.streams)],
        )

    async def open(self, timeout: float) -> None:
        """Connects every stream."""
        await self._lanes.start(timeout)

    async def read(
        self, key: bytes, segments: Segments, regions: Sequence[Region], *, timeout: float
    ) -> None:
        """See `Link.read`."""
        segments.check(regions)
        bases = _pieces.bases(regions)
        if len(segments) == 0:
            return
        if len(key) != KEY_BYTES:
            raise AccessDenied("no key of this transport has that length", got=len(key), expected=KEY_BYTES)
        share = -(-segments.total // self._config.streams)
        limit = min(max(share, _LEAST_PIECE), self._config.piece)
        pieces = _pieces.cut(segments, limit, _wire.MAX_RANGES)
        await self._lanes.carry(Work(key, pieces, bases, regions), timeout)

    @property
    def broken(self) -> bool:
        """See `Link.broken`."""
        return self._lanes.broken

    async def close(self) -> None:
        """See `Link.close`."""
        await self._lanes.close()
        self.on_close(self)
