"""The Unix socket beside the local control socket, over which file descriptors pass and a death shows at once.

ZeroMQ carries no descriptors and hides connections.  So a client also holds one connection to `PATH.fd`, a
SOCK_SEQPACKET socket, for as long as it lives.  Its end, by whatever cause, is seen by the agent as end of file.

    client -> agent   hello: magic "HWFD", version 1, session token      21 bytes
    agent -> client   one byte, 1: the session stands (otherwise the connection just ends)
    either way        tag (16 bytes) with one descriptor attached, any number of times

The token ties the connection to a session that the control socket speaks of; the tag ties a descriptor to a
message there.  A message and its descriptor may come in either order.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

from hawk.control.descriptors import DescriptorLink, check_length, receive_packet, wake
from hawk.control.local import SIDECAR_SUFFIX, LocalListener, listen, socket_path
from hawk.control.spare import shortage
from hawk.errors import ControlError, HawkError, PeerUnreachable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOKEN_BYTES = 16
_HELLO = b"HWFD\x01"
_WELCOME = b"\x01"
_PAUSE = 0.2
"""Seconds without accepting after descriptors ran out."""
_UCRED = struct.Struct("3i")


def sidecar_path(address: str) -> Path:
    """Where the descriptor socket of the local control socket `ipc://PATH` is: `PATH.fd`."""
    path = socket_path(address)
    return path.with_name(path.name + SIDECAR_SUFFIX)


class Sidecar:
    """The agent's side: accepts connections of this user's processes, each with the token of its session.

    on_session  `on_session(token, link)` when a client gave its token; a `HawkError` raised there refuses it
    on_closed   `on_closed(token)` once when the connection of a session ended, a process killed included
    hello       seconds within which a new connection must give its token
    max_links   connections at once, those that gave no token yet included; more are closed at once

    shut        whether nobody is let in just now

    `refused` counts connections that were dropped before they had a session.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_session: Callable[[bytes, DescriptorLink], None],
        on_closed: Callable[[bytes], None],
        hello: float = 2.0,
        max_links: int = 256,
        max_pending: int = 256,
        keep: float = 30.0,
        shut: Callable[[], bool] = lambda: False,
    ) -> None:
        self.path = path
        self._shut = shut
        self.refused = 0
        self._on_session = on_session
        self._on_closed = on_closed
        self._hello = hello
        self._max_links = max_links
        self._max_pending = max_pending
        self._keep = keep
        self._listener: LocalListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._strangers: dict[socket.socket, asyncio.TimerHandle] = {}
        self._sessions: dict[bytes, DescriptorLink] = {}

    @property
    def sessions(self) -> dict[bytes, DescriptorLink]:
        """The connections that stand, by token."""
        return dict(self._sessions)

    def start(self) -> None:
        """Listens, on the running event loop.  Raises `ControlError` if the path is in use."""
        self._listener = listen(self.path, socket.SOCK_SEQPACKET)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener.socket.fileno(), self._on_connection)

    def close(self) -> None:
        """Closes every connection and the socket; `on_closed` comes for each session.  Safe to call twice."""
        if self._listener is None or self._loop is None:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener.socket.fileno())
        self._listener.close()
        self._listener = None
        for sock in list(self._strangers):
            self._drop(sock)
        for link in list(self._sessions.values()):
            link.close()

    def _on_connection(self) -> None:
        if self._listener is None or self._loop is None:
            return
        try:
            sock, _ = self._listener.socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # The connection stays in the backlog, and the event would come again at once, for ever.
                self._loop.remove_reader(self._listener.socket.fileno())
                self._pause = self._loop.call_later(_PAUSE, self._listen_again)
            return  # otherwise it went away by itself
        sock.setblocking(False)
        # A client comes in by the control socket next, which would not survive a want of descriptors.
        full = len(self._strangers) + len(self._sessions) >= self._max_links or shortage() is not None
        full = full or self._shut()
        if full or _credentials(sock)[1] != os.geteuid():
            self.refused += 1
            sock.close()
            return
        self._strangers[sock] = self._loop.call_later(self._hello, self._refuse, sock)
        self._loop.add_reader(sock.fileno(), self._on_hello, sock)

    def _listen_again(self) -> None:
        if self._listener is not None and self._loop is not None:
            self._loop.add_reader(self._listener.socket.fileno(), self._on_connection)

    def _on_hello(self, sock: socket.socket) -> None:
        try:
            data, fds, _ = receive_packet(sock)
        except BlockingIOError:
            return
        except OSError:
            self._refuse(sock)
            return
        for fd in fds:
            os.close(fd)
        token = data[len(_HELLO) :]
        good = data[: len(_HELLO)] == _HELLO and len(token) == TOKEN_BYTES and not fds
        if not good or token in self._sessions:
            self._refuse(sock)
            return
        self._welcome(sock, token)

    def _welcome(self, sock: socket.socket, token: bytes) -> None:
        assert self._loop is not None
        self._strangers.pop(sock).cancel()
        self._loop.remove_reader(sock.fileno())
        link = DescriptorLink(
            sock,
            pid=_credentials(sock)[0],
            on_closed=lambda: self._ended(token),
            max_pending=self._max_pending,
            keep=self._keep,
        )
        try:
            self._on_session(token, link)
        except BaseException as error:
            self.refused += 1
            link.close()
            if isinstance(error, HawkError):
                return
            raise
        if link.closed:
            return
        self._sessions[token] = link
        try:
            sock.send(_WELCOME, socket.MSG_NOSIGNAL)
        except OSError:
            link.close()  # it died between hello and welcome; the session ends as any other

    def _ended(self, token: bytes) -> None:
        # A session that `on_session` refused was never entered, and has no end to tell of.
        if self._sessions.pop(token, None) is not None:
            self._on_closed(token)

    def _refuse(self, sock: socket.socket) -> None:
        self.refused += 1
        self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        assert self._loop is not None
        self._strangers.pop(sock).cancel()
        self._loop.remove_reader(sock.fileno())
        sock.close()


async def connect_sidecar(
    path: Path,
    token: bytes,
    *,
    timeout: float = 5.0,
    on_closed: Callable[[], None] | None = None,
    max_pending: int = 256,
    keep: float = 30.0,
) -> DescriptorLink:
    """Connects to an agent's descriptor socket as the session `token` (16 bytes).

    Raises `PeerUnreachable` if nobody listens or answers within `timeout` seconds, and `ControlError` if the agent
    refuses the session.
    """
    check_length(token, TOKEN_BYTES, "token")
    loop = asyncio.get_running_loop()
    named = os.fspath(path).removesuffix(SIDECAR_SUFFIX)  # users know the socket that this one stands beside
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    readable: asyncio.Future[None] = loop.create_future()
    try:
        # A Unix socket connects at once or not at all; a full backlog shows as EAGAIN.
        sock.connect(os.fspath(path))
        sock.send(_HELLO + token, socket.MSG_NOSIGNAL)
        loop.add_reader(sock.fileno(), wake, readable)
        try:
            async with asyncio.timeout(timeout):
                await readable
        finally:
            loop.remove_reader(sock.fileno())
        answer = sock.recv(len(_WELCOME))
        if answer != _WELCOME:
            raise ControlError("the agent refused the session", path=named)
        return DescriptorLink(
            sock, pid=_credentials(sock)[0], on_closed=on_closed, max_pending=max_pending, keep=keep
        )
    except TimeoutError:
        sock.close()
        raise PeerUnreachable("the agent did not answer in time", path=named, seconds=timeout) from None
    except OSError as error:
        sock.close()
        raise PeerUnreachable(
            f"the agent cannot be reached: {error.strerror or error}", path=named
        ) from error
    except BaseException:
        sock.close()
        raise


def _credentials(sock: socket.socket) -> tuple[int, int]:
    """The process id and user id of the other end, as they were when it connected."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return int(pid), int(uid)
