"""The serving side of tcp: a door that lets connections in, and one thread for each that was let in."""

from __future__ import annotations

import contextlib
import errno
import hmac
import selectors
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import TransportError
from hawk.transports._forks import ends_with_process
from hawk.transports._listen import listen
from hawk.transports._threads import Crew, Wake, shut
from hawk.transports.tcp import _tls, _wire

if TYPE_CHECKING:
    from hawk.memory.region import I64
    from hawk.transports._grants import GrantTable, Held
    from hawk.transports.tcp._config import TcpConfig
    from hawk.transports.tcp._tls import Tls

_ACCEPT_BATCH = 64
_ACCEPT_PAUSE = 0.1


class _Stranger:
    """A connection that has not said hello: its bytes so far, never more than a hello has.

    shaking    TLS has not agreed yet
    """

    __slots__ = ("deadline", "got", "shaking", "sock")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.got = bytearray()
        self.shaking = isinstance(sock, ssl.SSLSocket)


class Server:
    """Listens, admits and serves.  Everything but `start`, `evict` and `close` runs in its own threads."""

    def __init__(self, config: TcpConfig, grants: GrantTable, token: bytes, tls: Tls | None = None) -> None:
        self._tls = tls
        self._config = config
        self._grants = grants
        self._token = token
        self._crew = Crew()
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._wake = Wake()
        self._closing = False
        self.port = 0

    def start(self) -> None:
        """Binds and listens.  Raises `TransportError` naming the address."""
        listener = listen("tcp", self._config.host, self._config.port, backlog=1024, tune=self._tune)
        self.port = int(listener.getsockname()[1])
        try:
            self._wake.open()
            self._listener = listener
            self._crew.start("hawk-tcp-door", self._keep_door)
        except (OSError, RuntimeError) as error:
            listener.close()
            self._listener = None
            self._wake.close()
            raise TransportError("cannot serve", transport="tcp", got=error) from error

    def _tune(self, listener: socket.socket) -> None:
        """What accepted connections inherit, in time for the window scale of the TCP handshake."""
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._config.socket_buffer)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._config.socket_buffer)

    @property
    def listening(self) -> bool:
        """Whether the door is kept; its thread closes the listener when it ends, however it ends."""
        return self._listener is not None and self._listener.fileno() >= 0

    def evict(self, guest: object) -> None:
        """Cuts a connection, whatever its thread waits in."""
        with self._lock:
            # One that is not in the set any more is closed, and its descriptor may be another's by now.
            if isinstance(guest, socket.socket) and guest in self._connections:
                shut(guest)

    async def close(self) -> None:
        """Closes the listener and every connection; returns when their threads have ended."""
        with self._lock:
            self._closing = True
            connections = list(self._connections)
        self._wake.ring()
        for sock in connections:
            self.evict(sock)
        await self._crew.join()
        self._wake.close()

    # -- the door --------------------------------------------------------------------------------------

    def _keep_door(self) -> None:
        listener, wake = self._listener, self._wake.fd
        assert listener is not None
        strangers: dict[int, _Stranger] = {}  # in order of arrival, so of deadline too
        paused_until = 0.0
        with selectors.DefaultSelector() as selector, listener:
            try:
                selector.register(wake, selectors.EVENT_READ)
                selector.register(listener, selectors.EVENT_READ)
                while not self._closing:
                    for key, _ in selector.select(self._door_wait(strangers, paused_until)):
                        if key.fileobj is listener:
                            if not self._accept(listener, strangers, selector):
                                # No descriptors left: strangers pay for that first, and we do not spin.
                                self._drop_oldest(strangers, selector)
                                selector.unregister(listener)
                                paused_until = time.monotonic() + _ACCEPT_PAUSE
                        elif key.fd in strangers:
                            self._listen_to(key.fd, strangers, selector)
                    now = time.monotonic()
                    if paused_until and now >= paused_until:
                        paused_until = 0.0
                        selector.register(listener, selectors.EVENT_READ)
                    while strangers and next(iter(strangers.values())).deadline <= now:
                        self._drop_oldest(strangers, selector)
            finally:
                for stranger in strangers.values():
                    stranger.sock.close()

    @staticmethod
    def _door_wait(strangers: dict[int, _Stranger], paused_until: float) -> float | None:
        times = [paused_until] if paused_until else []
        if strangers:
            times.append(next(iter(strangers.values())).deadline)
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _accept(
        self, listener: socket.socket, strangers: dict[int, _Stranger], selector: selectors.BaseSelector
    ) -> bool:
        for _ in range(_ACCEPT_BATCH):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    return False
                continue  # the caller went away while it waited
            sock.setblocking(False)
            if self._tls is not None:
                try:
                    sock = self._tls.welcome(sock)
                except OSError:
                    sock.close()
                    continue  # as above
            ends_with_process(sock)
            if len(strangers) >= self._config.max_strangers:
                self._drop_oldest(strangers, selector)
            strangers[sock.fileno()] = _Stranger(sock, time.monotonic() + self._config.handshake_timeout)
            selector.register(sock, selectors.EVENT_READ)
            # A peer says hello right away, so most are through the door before anyone could crowd them out.
            self._listen_to(sock.fileno(), strangers, selector)
        return True

    @staticmethod
    def _drop_oldest(strangers: dict[int, _Stranger], selector: selectors.BaseSelector) -> None:
        if strangers:
            stranger = strangers.pop(next(iter(strangers)))
            selector.unregister(stranger.sock)
            stranger.sock.close()

    def _listen_to(self, fd: int, strangers: dict[int, _Stranger], selector: selectors.BaseSelector) -> None:
        stranger = strangers[fd]
        got, size = stranger.got, _wire.HELLO.size
        try:
            if stranger.shaking and isinstance(stranger.sock, ssl.SSLSocket):
                stranger.sock.do_handshake()
                stranger.shaking = False
            while len(got) < size and _wire.HELLO_MAGIC.startswith(bytes(got[:8])):
                data = stranger.sock.recv(size - len(got))
                if not data:
                    break
                got += data
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            got.clear()
        del strangers[fd]
        selector.unregister(stranger.sock)
        if len(got) == size and self._admit(stranger.sock, bytes(got)):
            return
        stranger.sock.close()

    def _admit(self, sock: socket.socket, hello: bytes) -> bool:
        magic, version, token = _wire.HELLO.unpack(hello)
        if magic != _wire.HELLO_MAGIC or version != _wire.VERSION:
            return False
        if not hmac.compare_digest(token, self._token):
            return False
        with self._lock:
            if self._closing:
                return False
            full = len(self._connections) >= self._config.max_connections
            if not full:
                self._connections.add(sock)
        if full:
            with contextlib.suppress(OSError):
                sock.send(_wire.ANSWER.pack(_wire.ANSWER_MAGIC, _wire.FULL, 0))
            return False
        try:
            sock.setblocking(True)
            self._crew.start("hawk-tcp-serve", lambda: self._serve(sock))
        except (OSError, RuntimeError):
            with self._lock:
                self._connections.discard(sock)
            return False
        return True

    # -- one admitted connection -----------------------------------------------------------------------

    def _serve(self, sock: socket.socket) -> None:
        try:
            _wire.tune(sock, self._config.socket_buffer)
            _wire.limit_send(sock, self._config.stall_timeout)
            sock.sendall(_wire.ANSWER.pack(_wire.ANSWER_MAGIC, _wire.OK, 0))
            while (request := self._receive(sock)) is not None:
                self._answer(sock, *request)
        except OSError:
            pass  # the peer is gone, has talked nonsense or was cut off: its connection is all that ends
        finally:
            with self._lock:
                self._connections.discard(sock)
                sock.close()

    def _receive(self, sock: socket.socket) -> tuple[bytes, I64, I64, int] | None:
        """One request: key, offsets, lengths and their sum; None at a clean end."""
        header = bytearray(_wire.REQUEST.size)
        _wire.limit_receive(sock, 0.0)
        got = sock.recv_into(header)  # as long as it takes: links are kept open between jobs
        if got == 0:
            return None
        _wire.limit_receive(sock, self._config.handshake_timeout)
        if _wire.receive_exactly(sock, memoryview(header)[got:]) < len(header) - got:
            return None
        magic, count, total, key = _wire.REQUEST.unpack(header)
        if magic != _wire.REQUEST_MAGIC or not 0 < count <= _wire.MAX_RANGES:
            raise _wire.BadWire("not a request")
        table = bytearray(16 * count)
        if _wire.receive_exactly(sock, memoryview(table)) < len(table):
            return None
        ranges = np.frombuffer(table, dtype="<i8").reshape(count, 2)
        offset, length = ranges[:, 0], ranges[:, 1]
        # Below 2^62 no sum can overflow; what lies past the region is denied by the grant's bounds.
        if int(offset.min()) < 0 or int(length.min()) <= 0 or int(ranges.max()) >= 1 << 62:
            raise _wire.BadWire("a range is impossible")
        if int(length.astype(np.float64).sum()) >= 1 << 62 or int(length.sum()) != total:
            raise _wire.BadWire("the ranges do not add up")
        return key, offset, length, total

    def _answer(self, sock: socket.socket, key: bytes, offset: I64, length: I64, total: int) -> None:
        _wire.limit_send(sock, self._config.stall_timeout)
        low, high = int(offset.min()), int((offset + length).max())
        held = self._grants.enter(key, low, high, sock)
        if held is None:
            sock.sendall(_wire.ANSWER.pack(_wire.ANSWER_MAGIC, _wire.DENIED, 0))
            return
        try:
            self._stream(sock, held, offset, length, total)
        finally:
            self._grants.leave(held, sock)

    def _stream(self, sock: socket.socket, held: Held, offset: I64, length: I64, total: int) -> None:
        region = self._grants.region
        assert region is not None
        answer = _wire.ANSWER.pack(_wire.ANSWER_MAGIC, _wire.OK, total)
        if isinstance(sock, ssl.SSLSocket):
            sock.sendall(answer)
        else:
            sock.sendall(answer, socket.MSG_MORE)
        vectors = _tls.vectors(sock, offset + region.address, length)
        while vectors.done < total:
            if held.revoked:
                raise _wire.BadWire("revoked in mid-stream")
            vectors.send(sock, self._config.chunk)
