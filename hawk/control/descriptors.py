"""One connection that carries file descriptors; `hawk.control.sidecar` makes them."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import weakref
from typing import TYPE_CHECKING

from hawk.errors import Busy, DeadlineExceeded, InvalidArgument, PeerLost

if TYPE_CHECKING:
    from collections.abc import Callable

TAG_BYTES = 16
PACKET_BYTES = 64
"""Larger than any packet, so that one that is too long shows."""
_PACKETS_PER_TURN = 16

_open_here: weakref.WeakSet[DescriptorLink] = weakref.WeakSet()


class DescriptorLink:
    """One connection that carries descriptors, each with a tag of 16 bytes, in both directions.

    Descriptors that came and are not claimed by `receive_fd` within `keep` seconds are closed.  At most
    `max_pending` wait to be claimed; a peer that sends more, or sends what is no tagged descriptor, is dropped.

    `closed` is true after the end, for which `reason` gives the cause.  `pid` is the peer's process.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        pid: int,
        on_closed: Callable[[], None] | None = None,
        max_pending: int = 256,
        keep: float = 30.0,
    ) -> None:
        self.pid = pid
        self.closed = False
        self.reason = ""
        self._socket = sock
        self._on_closed = on_closed
        self._max_pending = max_pending
        self._keep = keep
        self._loop = asyncio.get_running_loop()
        self._pending: dict[bytes, tuple[int, asyncio.TimerHandle]] = {}
        self._waiters: dict[bytes, asyncio.Future[None]] = {}
        self._room: asyncio.Future[None] | None = None
        self._sending = asyncio.Lock()
        self._loop.add_reader(sock.fileno(), self._on_readable)
        _open_here.add(self)

    @property
    def pending(self) -> int:
        """Descriptors that came and were not claimed yet."""
        return len(self._pending)

    async def send_fd(self, tag: bytes, fd: int, *, timeout: float = 5.0) -> None:
        """Sends a copy of `fd`; the caller keeps its own, and may close it as soon as this returns.

        Raises `Busy` if the peer does not read for `timeout` seconds, `PeerLost` if the connection ended, and
        `InvalidArgument` if the tag is not 16 bytes or `fd` is no open descriptor.
        """
        check_length(tag, TAG_BYTES, "tag")
        try:
            os.fstat(fd)
        except OSError as error:
            raise InvalidArgument(
                f"the descriptor cannot be sent: {error.strerror}", field="fd", got=fd, expected="an open one"
            ) from None
        try:
            async with asyncio.timeout(timeout), self._sending:
                while True:
                    if self.closed:
                        raise self._lost()
                    try:
                        _send_packet(self._socket, tag, fd)
                    except BlockingIOError:
                        await self._wait_for_room()
                    except OSError as error:
                        self._end(f"sending failed: {error.strerror}")
                        raise self._lost() from error
                    else:
                        return
        except TimeoutError:
            raise Busy("the peer takes no descriptors", retry_after=timeout, pid=self.pid) from None

    async def receive_fd(self, tag: bytes, timeout: float) -> int:
        """The descriptor that came, or comes, with `tag`.  The caller owns it and must close it.

        Raises `DeadlineExceeded` after `timeout` seconds, `PeerLost` if the connection ends first, and
        `InvalidArgument` if the tag is not 16 bytes or somebody else waits for it.  A wait that is cancelled
        leaves a descriptor that comes later to be claimed again, or closed in time.
        """
        check_length(tag, TAG_BYTES, "tag")
        if tag in self._waiters:
            raise InvalidArgument("somebody waits for this descriptor already", field="tag", got=tag.hex())
        if tag not in self._pending:
            if self.closed:
                raise self._lost()
            # The future only wakes; the descriptor stays in `_pending`, so that cancelling loses nothing.
            waiter = self._waiters[tag] = self._loop.create_future()
            try:
                async with asyncio.timeout(timeout):
                    await waiter
            except TimeoutError:
                raise DeadlineExceeded(
                    "the descriptor did not come", tag=tag.hex(), seconds=timeout, pid=self.pid
                ) from None
            finally:
                del self._waiters[tag]
        claimed = self._pending.pop(tag, None)
        if claimed is None:
            raise self._lost()
        fd, timer = claimed
        timer.cancel()
        return fd

    def close(self) -> None:
        """Ends the connection and closes every descriptor that nobody claimed.  Safe to call twice."""
        self._end("closed on this side")

    def _lost(self) -> PeerLost:
        return PeerLost("the descriptor connection ended", reason=self.reason or None, pid=self.pid)

    async def _wait_for_room(self) -> None:
        room = self._room = self._loop.create_future()
        number = self._socket.fileno()
        self._loop.add_writer(number, wake, room)
        try:
            await room
        finally:
            self._room = None
            if not self.closed:
                self._loop.remove_writer(number)

    def _on_readable(self) -> None:
        for _ in range(_PACKETS_PER_TURN):
            if self.closed:
                return
            try:
                data, fds, flags = receive_packet(self._socket)
            except BlockingIOError:
                return
            except OSError as error:
                self._end(f"the connection broke: {error.strerror}")
                return
            fault = self._accept(data, fds, flags)
            if fault:
                for fd in fds:
                    os.close(fd)
                self._end(fault)

    def _accept(self, tag: bytes, fds: list[int], flags: int) -> str:
        """Takes one packet in; returns what is wrong with it, empty if nothing, and then owns the descriptor."""
        if not tag and not fds:
            return "the peer ended the connection"
        if len(tag) != TAG_BYTES or len(fds) != 1 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            return "the peer sent what is no tagged descriptor"
        if tag in self._pending:
            return "the peer used a tag twice"
        if len(self._pending) >= self._max_pending:
            return f"the peer sent more than {self._max_pending} descriptors that nobody claimed"
        timer = self._loop.call_later(self._keep, self._expire, tag)
        self._pending[tag] = (fds[0], timer)
        waiter = self._waiters.get(tag)
        if waiter is not None:
            wake(waiter)
        return ""

    def _expire(self, tag: bytes) -> None:
        fd, _ = self._pending.pop(tag)
        os.close(fd)

    def _end(self, reason: str) -> None:
        if self.closed:
            return
        self.closed = True
        self.reason = reason
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for fd, timer in self._pending.values():
            timer.cancel()
            os.close(fd)
        self._pending.clear()
        for waiter in (*self._waiters.values(), self._room):
            if waiter is not None:
                wake(waiter)
        _open_here.discard(self)
        if self._on_closed is not None:
            self._on_closed()

    def _drop_in_child(self) -> None:
        """Closes the child's copies only; the event loop belongs to the parent and is left alone."""
        self.closed = True
        self.reason = "the process was forked"
        self._socket.close()
        for fd, _ in self._pending.values():
            os.close(fd)
        self._pending.clear()


def _after_fork_in_child() -> None:
    # A child that kept the connection open would keep its dead parent alive in the agent's eyes.
    for link in list(_open_here):
        link._drop_in_child()
    _open_here.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def receive_packet(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """One packet, without waiting: its bytes, the descriptors with it (the caller's from now on), the flags.

    Raises `BlockingIOError` if there is none, and another `OSError` if the connection broke.  The library's own
    `recv_fds` drops its flags, so that a program started in between would inherit the descriptors.
    """
    fds = array.array("i")
    # Room for one descriptor more than a packet may have, so that a second one shows; the kernel closes others.
    data, extra, flags, _ = sock.recvmsg(
        PACKET_BYTES, socket.CMSG_SPACE(2 * fds.itemsize), socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds), flags


def _send_packet(sock: socket.socket, tag: bytes, fd: int) -> None:
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
    sock.sendmsg([tag], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def check_length(value: bytes, nbytes: int, field: str) -> None:
    """Raises `InvalidArgument` unless `value` has `nbytes` bytes."""
    if len(value) != nbytes:
        raise InvalidArgument("the value has the wrong length", field=field, got=len(value), expected=nbytes)


def wake(future: asyncio.Future[None]) -> None:
    """Ends a wait; a future that is done, cancelled for instance, stays as it is."""
    if not future.done():
        future.set_result(None)
