"""One connection of the serving side."""

from __future__ import annotations

import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hawk.transports._grants import Held


class Guest:
    """One connection; `held` is the grant that it is inside of, `peer` the engine's word for whom to write to.

    waits    something of what it said is yet to be heard
    """

    __slots__ = ("deadline", "greeted", "held", "inbox", "outbox", "peer", "sock", "waits")

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.greeted = False
        self.held: Held | None = None
        self.inbox = bytearray()
        self.outbox = bytearray()
        self.peer: object | None = None
        self.waits = False


def tune(sock: socket.socket) -> None:
    """Options of every connection: words are short, and a host that vanished is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def limit_send(sock: socket.socket, seconds: float) -> None:
    """How long sending may wait, by the kernel's own limit: Python's would make the socket non-blocking."""
    whole = int(seconds)
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, int((seconds - whole) * 1e6))
    )
