"""The reading side of shm: a link that maps the peer's arena once and copies out of it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Protocol

from hawk.errors import AccessDenied, PeerUnreachable
from hawk.memory.shared import recv_fds
from hawk.transports import _copy, _pieces
from hawk.transports._grants import KEY_BYTES
from hawk.transports._lanes import Lane, Work
from hawk.transports._links import LanesLink
from hawk.transports._threads import shut
from hawk.transports.shm import _wire
from hawk.transports.shm._board import MOST_BYTES, MOST_ROWS, Pass
from hawk.transports.shm._mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.memory.region import Region, Segments
    from hawk.transports._pieces import Piece
    from hawk.transports.shm._config import ShmConfig

_MAX_ROWS = 1 << 18
"""Rows in one piece: bounds how long its tables take to lay out."""


_SHUT_AGAIN = 0.02


class Far(Protocol):
    """The peer's arena, as this process sees it."""

    nbytes: int


class _Shared:
    """The mapping that all lanes of a link use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapping: Mapping | None = None

    def take(self, fd: int, offset: int, nbytes: int) -> Mapping:
        """Maps the descriptor unless it is mapped already.  Raises `OSError`."""
        info = os.fstat(fd)
        with self._lock:
            known = self._mapping
            if known is None:
                self._mapping = known = Mapping(fd, offset, nbytes)
            elif known.identity != (info.st_dev, info.st_ino, offset, nbytes):
                raise OSError("the peer serves another arena than when this link was made")
            return known

    @property
    def mapping(self) -> Mapping | None:
        """The mapping, once a lane has connected."""
        return self._mapping

    def close(self) -> None:
        with self._lock:
            if self._mapping is not None:
                self._mapping.close()
                self._mapping = None


class ShmLane(Lane):
    """One connection to the server and the thread that copies."""

    def __init__(
        self, config: ShmConfig, path: str, token: bytes, shared: _Shared, on_step: Callable[[int], None]
    ) -> None:
        super().__init__(path, config.connect_timeout)
        self._config = config
        self._token = token
        self._shared = shared
        self._mapping: Far | None = None
        self._on_step = on_step

    def _connect(self, deadline: float) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._adopt(sock)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.connect(self.peer)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.sendall(_wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, self._token))
        message, fds = recv_fds(sock, _wire.LARGEST, 4)
        try:
            if len(message) != _wire.MAPPING.size:
                raise PeerUnreachable("whoever listens there turned us away", peer=self.peer)
            status, offset, nbytes = _wire.MAPPING.unpack(message)
            if status == _wire.FULL:
                raise PeerUnreachable(
                    "the peer serves as many connections as it may",
                    peer=self.peer,
                    hint="Raise shm.max_connections there",
                )
            if status != _wire.OK or len(fds) != 1:
                raise PeerUnreachable("the peer serves no arena", peer=self.peer)
            self._mapping = self._shared.take(fds[0], offset, nbytes)
        finally:
            for fd in fds:
                os.close(fd)
        sock.settimeout(None)

    def _ask(self, sock: socket.socket, op: int, low: int, high: int, key: bytes) -> bool:
        sock.sendall(_wire.REQUEST.pack(op, low, high, key))
        answer = sock.recv(_wire.LARGEST)
        if len(answer) != _wire.VERDICT.size:
            raise ConnectionResetError("the peer ended before it answered")
        return bool(_wire.VERDICT.unpack(answer)[0] == _wire.OK)

    def _carry(self, sock: socket.socket, work: Work, piece: Piece) -> None:
        mapping, low, high = self._mapping, piece.low, piece.high
        assert mapping is not None
        if high > mapping.nbytes or not self._ask(sock, _wire.ENTER, low, high, work.key):
            raise AccessDenied(
                "the key is unknown, revoked, or does not cover the range",
                got=f"remote bytes {low}..{high}",
                peer=self.peer,
            )
        # From here until we have left, the connection must stand: its end tells the server that we are out.
        with self._guard:
            if self._interrupted:
                raise ConnectionAbortedError("stopped")
            self._hands_off = True
        try:
            self._copy(work, piece, mapping)
        finally:
            with self._guard:
                self._hands_off = False
                interrupted = self._interrupted
        if interrupted:
            raise ConnectionAbortedError("stopped")
        if not self._ask(sock, _wire.LEAVE, 0, 0, bytes(KEY_BYTES)):
            raise AccessDenied("the key was revoked during the read", peer=self.peer)

    def _copy(self, work: Work, piece: Piece, far: Far) -> None:
        assert isinstance(far, Mapping)
        copy = _copy.best()
        done = 0
        for step in _pieces.cut(piece, self._config.chunk, _MAX_ROWS):
            if self._interrupted:
                return
            rows = _pieces.join(step)
            copy(work.bases, rows.region, rows.local, far.address, rows.remote, rows.nbytes)
            done += step.total
            self._on_step(done)


class ShmLink(LanesLink):
    """Reads from one peer on this machine."""

    def __init__(
        self,
        config: ShmConfig,
        path: str,
        token: bytes,
        on_step: Callable[[int], None],
        watched: Callable[[], bool],
    ) -> None:
        self._path, self._token = path, token
        self._watched = watched
        self._pass: Pass | None = None
        self._shared = _Shared()
        lanes = [ShmLane(config, path, token, self._shared, on_step) for _ in range(config.threads)]
        super().__init__("hawk-shm-read", lanes, least=config.chunk, most=config.piece, rows=_MAX_ROWS)

    async def _opened(self, until: float) -> None:
        """Beside the lanes' connections: those may end in the midst of a read that is none of theirs."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        left = max(until - time.monotonic(), 0.001)
        opening = asyncio.get_running_loop().run_in_executor(
            None, Pass.open, sock, self._path, self._token, left
        )
        cancelled: tuple[object, ...] | None = None
        while not opening.done():
            if cancelled is not None:
                # The thread cannot be ended, but what it waits for; before it has connected there is nothing to shut.
                shut(sock)
            try:
                await asyncio.wait({opening}, timeout=None if cancelled is None else _SHUT_AGAIN)
            except asyncio.CancelledError as error:
                cancelled = error.args
        self._pass = opening.result()
        if cancelled is not None:
            if self._pass is not None:
                self._pass.close()
                self._pass = None
            raise asyncio.CancelledError(*cancelled)

    async def read(
        self, key: bytes, segments: Segments, regions: Sequence[Region], *, timeout: float
    ) -> None:
        """See `Link.read`."""
        if not self.read_now(key, segments, regions):
            await super().read(key, segments, regions, timeout=timeout)

    def read_now(self, key: bytes, segments: Segments, regions: Sequence[Region]) -> bool:
        """See `Link.read_now`.  Where it is not to be had in this way the server says why not, when `read` asks."""
        mapping = self._shared.mapping
        if self._pass is None or mapping is None or len(key) != KEY_BYTES or self._watched() or self.broken:
            return False
        if not 0 < len(segments) <= MOST_ROWS or segments.total > MOST_BYTES:
            return False
        segments.check(regions)
        return self._pass.read(key, segments, _pieces.bases(regions), mapping)

    def _release(self) -> None:
        if self._pass is not None:
            self._pass.close()
            self._pass = None
        self._shared.close()
