"""The reading side of tcp: a link of several connections, and the lane that works each of them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import AccessDenied, PeerUnreachable
from hawk.transports import _pieces
from hawk.transports._lanes import Lane, Work
from hawk.transports._links import LanesLink
from hawk.transports.tcp import _tls, _wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.transports._pieces import Piece
    from hawk.transports.tcp._config import TcpConfig
    from hawk.transports.tcp._tls import Tls

_LEAST_PIECE = 1 << 20
"""Reads are not cut finer than this, bytes: below it a second connection costs more than it brings."""


@dataclass(frozen=True, slots=True)
class Way:
    """Where a peer serves, and what is needed to get in; `fingerprint` is that of its certificate, with TLS."""

    host: str
    port: int
    token: bytes
    tls: Tls | None = None
    fingerprint: str = ""


class TcpLane(Lane):
    """One data connection."""

    def __init__(self, config: TcpConfig, way: Way, on_step: Callable[[int], None]) -> None:
        super().__init__(f"{way.host}:{way.port}", config.connect_timeout)
        self._config = config
        self._way = way
        self._on_step = on_step
        self._answer = bytearray(_wire.ANSWER.size)

    def _connect(self, deadline: float) -> None:
        self._call(self._way.host, self._way.port, lambda sock, at: self._greet(sock, at, deadline))

    def _greet(self, sock: socket.socket, address: tuple[object, ...], deadline: float) -> None:
        _wire.tune(sock, self._config.socket_buffer)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.connect(address)
        if self._way.tls is not None:
            sealed = self._way.tls.call(sock)
            self._adopt(sealed)
            sealed.settimeout(max(deadline - time.monotonic(), 0.001))
            _tls.shake(sealed, self._way.fingerprint, self.peer)
            sock = sealed
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        # A certificate that the peer refuses is told by its first word, not in the handshake; it may have left since.
        with _tls.refusals(self.peer):
            with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
                sock.sendall(_wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, self._way.token))
            came = _wire.receive_exactly(sock, memoryview(self._answer))
        if came < len(self._answer):
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
        vectors = _tls.vectors(sock, work.bases[piece.region] + piece.local, piece.nbytes)
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
        while vectors.done < vectors.total:
            if self._interrupted:
                raise ConnectionAbortedError("stopped")
            vectors.receive(sock, self._config.chunk)
            self._on_step(vectors.done)


class TcpLink(LanesLink):
    """Reads from one peer over `streams` connections."""

    def __init__(self, config: TcpConfig, way: Way, on_step: Callable[[int], None]) -> None:
        lanes = [TcpLane(config, way, on_step) for _ in range(config.streams)]
        super().__init__("hawk-tcp-read", lanes, least=_LEAST_PIECE, most=config.piece, rows=_wire.MAX_RANGES)
