"""What goes over a data connection, little-endian throughout.

    reader -> server   hello    magic 8, version u32, token 16                     once
    server -> reader   answer   magic 4, status u32, bytes u64                     to the hello: 0 bytes
    reader -> server   request  magic 4, count u32, bytes u64, key 32              then count x (offset i64, length i64)
    server -> reader   answer   magic 4, status u32, bytes u64                     then that many bytes

The token is the serving instance's, and travels in its endpoint through the control plane.  It admits a
connection and gives access to nothing; the key of a request does that.  All of this is inside TLS 1.3 where the
settings name certificates.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct

HELLO = struct.Struct("<8sI16s")
REQUEST = struct.Struct("<4sIQ32s")
ANSWER = struct.Struct("<4sIQ")

HELLO_MAGIC = b"HAWK\x00tcp"
VERSION = 1
REQUEST_MAGIC = b"READ"
ANSWER_MAGIC = b"ANSW"

OK, DENIED, FULL = 0, 1, 2

MAX_RANGES = 16384
"""Ranges in one request: what bounds the memory that a request can cost the serving side (256 KiB)."""


class BadWire(ConnectionError):
    """The far side does not speak this protocol."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EPROTO, why)


def receive_exactly(sock: socket.socket, view: memoryview) -> int:
    """Fills `view`; returns how much came before the far side ended."""
    done = 0
    while done < len(view):
        got = sock.recv_into(view[done:])
        if got == 0:
            break
        done += got
    return done


def limit_receive(sock: socket.socket, seconds: float) -> None:
    """How long receiving may wait; 0 waits for ever.  Said anew after every `limit_send`."""
    _limit(sock, socket.SO_RCVTIMEO, seconds)


def limit_send(sock: socket.socket, seconds: float) -> None:
    """How long sending may wait; 0 waits for ever.  Said anew after every `limit_receive`."""
    _limit(sock, socket.SO_SNDTIMEO, seconds)


def _limit(sock: socket.socket, option: int, seconds: float) -> None:
    """The kernel's own limits, since Python's would make the socket non-blocking under our direct system calls.

    TLS makes none of those, and takes the kernel's limits for a reason to try again: it gets Python's, of which there
    is one for both directions.
    """
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(seconds or None)
        return
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", whole, int((seconds - whole) * 1e6)))


def tune(sock: socket.socket, buffer: int) -> None:
    """Options of every data connection."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
