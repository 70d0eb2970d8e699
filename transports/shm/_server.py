"""The serving side of shm: one thread that hands out the arena's descriptor and knows who is inside what."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import selectors
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hawk.errors import TransportError
from hawk.folders import TemporaryFolder
from hawk.transports._forks import ends_with_process
from hawk.transports._threads import Crew, Wake
from hawk.transports.shm import _wire

if TYPE_CHECKING:
    from hawk.memory.region import Region
    from hawk.transports._grants import GrantTable, Held
    from hawk.transports.shm._board import Board
    from hawk.transports.shm._config import ShmConfig

_PATH_LIMIT = 107
"""Longest path of a Unix socket, bytes."""

_ACCEPT_PAUSE = 0.1


class _Guest:
    """One connection; `held` is the grant that it is inside of, `looks` whether it has a page for that instead."""

    __slots__ = ("deadline", "held", "looks", "sock")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline: float | None = deadline
        self.held: Held | None = None
        self.looks = False


class Server:
    """Listens on a Unix socket in a private folder.  Only `start` and `close` are for the event loop.

    transport    whose server it is
    """

    transport: ClassVar[str] = "shm"

    def __init__(
        self, config: ShmConfig, grants: GrantTable, token: bytes, board: Board | None = None
    ) -> None:
        self._config = config
        self._board = board
        self._grants = grants
        self._token = token
        self._crew = Crew()
        self._closing = False
        self._wake = Wake()
        self._folder: Path | None = None
        self._own_folder: TemporaryFolder | None = None
        self._listener: socket.socket | None = None
        self._passes = 0
        self.path = ""

    def start(self) -> None:
        """Makes the folder and listens.  Raises `TransportError` naming the path."""
        listener: socket.socket | None = None
        try:
            self._make_folder()
            assert self._folder is not None
            # The token makes the name unique, so that a socket left by a killed process is in nobody's way.  It is a
            # secret, and the name is none: whoever looks into the folder or at a status learns nothing of it.
            name = hashlib.blake2b(self._token, digest_size=16, person=b"hawk-shm-socket").hexdigest()
            self.path = str(self._folder / f"{name}.sock")
            if len(os.fsencode(self.path)) > _PATH_LIMIT:
                raise TransportError(
                    "the path is too long for a Unix socket",
                    field=f"{self.transport}.directory",
                    got=self.path,
                    expected=f"a folder whose path leaves the socket's at most {_PATH_LIMIT} bytes",
                )
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            ends_with_process(listener)
            listener.bind(self.path)
            os.chmod(self.path, 0o600)
            listener.listen(128)
            self._wake.open()
            self._listener = listener
            self._crew.start(f"hawk-{self.transport}-serve", self._run)
        except (OSError, RuntimeError, TransportError) as error:
            if listener is not None:
                listener.close()
            self._clean_up()
            if isinstance(error, TransportError):
                raise
            raise TransportError(
                "cannot listen",
                field=f"{self.transport}.directory",
                got=error,
                address=self.path or self._config.directory,
            ) from error

    @property
    def listening(self) -> bool:
        """Whether the door is kept; its thread closes the listener when it ends, however it ends."""
        return self._listener is not None and self._listener.fileno() >= 0

    def _make_folder(self) -> None:
        if not self._config.directory:
            base = os.environ.get("XDG_RUNTIME_DIR", "")
            usable = bool(base) and os.path.isdir(base) and os.access(base, os.W_OK | os.X_OK)
            self._own_folder = TemporaryFolder(f"hawk-{self.transport}-", base if usable else None)
            self._folder = self._own_folder.path
            return
        folder = Path(self._config.directory).absolute()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise TransportError(
                "the folder is not private",
                field=f"{self.transport}.directory",
                got=f"owner {info.st_uid}, mode {info.st_mode & 0o777:04o}",
                expected=f"owner {os.geteuid()}, mode 0700",
                address=str(folder),
            )
        self._folder = folder

    async def close(self) -> None:
        """Closes every connection and removes the socket."""
        self._closing = True
        self._wake.ring()
        await self._crew.join()
        self._clean_up()

    def _clean_up(self) -> None:
        self._wake.close()
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        if self._own_folder is not None:
            self._own_folder.close()
        self._listener = None

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        listener, wake = self._listener, self._wake.fd
        assert listener is not None
        guests: dict[int, _Guest] = {}
        paused_until = 0.0
        with selectors.DefaultSelector() as selector, listener:
            try:
                selector.register(wake, selectors.EVENT_READ)
                selector.register(listener, selectors.EVENT_READ)
                while not self._closing:
                    for key, _ in selector.select(self._wait(guests, paused_until)):
                        if key.fileobj is listener:
                            if not self._accept(listener, guests, selector):
                                selector.unregister(listener)
                                paused_until = time.monotonic() + _ACCEPT_PAUSE
                        elif (guest := guests.get(key.fd)) is not None and not self._hear(guest):
                            self._part(guest, guests, selector)
                    now = time.monotonic()
                    if paused_until and now >= paused_until:
                        paused_until = 0.0
                        selector.register(listener, selectors.EVENT_READ)
                    for guest in [g for g in guests.values() if g.deadline is not None and g.deadline <= now]:
                        self._part(guest, guests, selector)
            finally:
                for guest in list(guests.values()):
                    # That we hang up is no proof that the reader has left, so its grant stays in use.
                    guest.held = None
                    self._part(guest, guests, selector)

    @staticmethod
    def _wait(guests: dict[int, _Guest], paused_until: float) -> float | None:
        times = [guest.deadline for guest in guests.values() if guest.deadline is not None]
        if paused_until:
            times.append(paused_until)
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _accept(
        self, listener: socket.socket, guests: dict[int, _Guest], selector: selectors.BaseSelector
    ) -> bool:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        ends_with_process(sock)
        sock.setblocking(False)
        if not self._same_user(sock) or len(guests) - self._passes >= self._config.max_connections:
            if self._same_user(sock):
                self._send(sock, _wire.MAPPING.pack(_wire.FULL, 0, 0))
            sock.close()
            return True
        guests[sock.fileno()] = _Guest(sock, time.monotonic() + self._config.handshake_timeout)
        selector.register(sock, selectors.EVENT_READ)
        return True

    @staticmethod
    def _same_user(sock: socket.socket) -> bool:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return bool(struct.unpack("3i", credentials)[1] == os.geteuid())

    def _part(self, guest: _Guest, guests: dict[int, _Guest], selector: selectors.BaseSelector) -> None:
        guests.pop(guest.sock.fileno(), None)
        self._passes -= guest.looks
        selector.unregister(guest.sock)
        guest.sock.close()
        if guest.held is not None:
            self._grants.leave(guest.held, guest)

    def _hear(self, guest: _Guest) -> bool:
        """Answers one message; False where the connection is to end."""
        try:
            message = guest.sock.recv(_wire.LARGEST)
        except BlockingIOError:
            return True
        except OSError:
            message = b""
        if guest.deadline is not None:
            return self._greet(guest, message)
        if guest.looks:
            # Its end alone proves that it has left whatever it was in; anything else that it says means nothing.
            if not message and self._board is not None:
                self._board.gone(guest)
            return bool(message)
        if len(message) != _wire.REQUEST.size:
            # Junk from one who is inside a range is no proof of having left; the end of its connection is.
            return guest.held is not None and bool(message)
        op, low, high, key = _wire.REQUEST.unpack(message)
        if op == _wire.ENTER and guest.held is None:
            guest.held = self._grants.enter(key, low, high, guest)
            verdict = guest.held is not None
        elif op == _wire.LEAVE and guest.held is not None:
            held, guest.held = guest.held, None
            verdict = self._grants.leave(held, guest)
        else:
            return guest.held is not None
        return self._send(guest.sock, _wire.VERDICT.pack(_wire.OK if verdict else _wire.DENIED))

    def _greet(self, guest: _Guest, message: bytes) -> bool:
        if len(message) != _wire.HELLO.size:
            return False
        magic, version, token = _wire.HELLO.unpack(message)
        if magic != _wire.HELLO_MAGIC or version not in (_wire.VERSION, _wire.BOARD_VERSION):
            return False
        if not hmac.compare_digest(token, self._token):
            return False
        guest.deadline = None
        if version == _wire.BOARD_VERSION:
            return self._show_board(guest)
        region = self._grants.region
        if region is None:
            return self._send(guest.sock, _wire.MAPPING.pack(_wire.EMPTY, 0, 0)) and False
        return self._show_arena(guest.sock, region)

    def _show_arena(self, sock: socket.socket, region: Region) -> bool:
        """Says where the arena is to be found; False where that could not be said."""
        return self._hand_over(sock, _wire.MAPPING.pack(_wire.OK, region.fd_offset, region.nbytes), region.fd)

    def _show_board(self, guest: _Guest) -> bool:
        """Gives a reader the board and a page of its own; False where there is none for it."""
        if self._board is None or self._passes >= self._config.max_connections:
            return False
        try:
            page = self._board.admit(guest)
        except OSError:
            return False
        guest.looks = True
        self._passes += 1
        try:
            if self._hand_over(guest.sock, _wire.VERDICT.pack(_wire.OK), self._board.fd, page):
                return True
        finally:
            os.close(page)
        self._board.gone(guest)  # it never had it
        return False

    @staticmethod
    def _hand_over(sock: socket.socket, message: bytes, readable: int, *others: int) -> bool:
        """Sends descriptors; the first one lets its holder read only."""
        try:
            # Reopened, since a duplicate would share our right to write.
            fd = os.open(f"/proc/self/fd/{readable}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            socket.send_fds(sock, [message], [fd, *others])
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    @staticmethod
    def _send(sock: socket.socket, message: bytes) -> bool:
        try:
            return sock.send(message, socket.MSG_NOSIGNAL) == len(message)
        except OSError:
            return False  # a peer that does not read its answers is none
