"""Scatter and gather between a socket and memory: one system call for up to 1024 places.

The standard library's own calls take one buffer object per place, which for pages of 2 KiB costs more than
moving the bytes.  Here the table of places is a numpy array that the kernel reads as it is.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.memory.region import I64

IOV_MAX = 1024


class _Message(ctypes.Structure):
    """`struct msghdr` of 64-bit Linux."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_sendmsg = _libc.sendmsg
_recvmsg = _libc.recvmsg
for _call in (_sendmsg, _recvmsg):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


class Vectors:
    """Places in memory that a socket fills, or is filled from, one after the other.

    address  virtual addresses, `int64[n]`; whoever makes this keeps the memory alive
    nbytes   lengths, `int64[n]`, all positive
    """

    __slots__ = ("_address", "_ends", "_message", "_pointer", "_row", "_table", "done", "total")

    def __init__(self, address: I64, nbytes: I64) -> None:
        # iovec is a pointer and a size_t: two words a row.
        self._table: NDArray[np.int64] = np.empty((len(nbytes), 2), np.int64)
        self._table[:, 0] = address
        self._table[:, 1] = nbytes
        self._address = address
        self._ends: NDArray[np.int64] = np.cumsum(nbytes)
        self._pointer = int(self._table.ctypes.data)
        self._message = _Message()
        self._row = 0
        self.done = 0
        self.total = int(self._ends[-1]) if len(nbytes) else 0

    def _aim(self, limit: int) -> None:
        """Points the message at the next places, at most `limit` bytes together."""
        row, done, ends = self._row, self.done, self._ends
        last = int(ends.searchsorted(done + limit, "right"))
        count = min(max(last - row, 1), IOV_MAX)
        start = int(ends[row - 1]) if row else 0
        room = int(ends[row]) - done
        self._table[row, 0] = int(self._address[row]) + done - start
        self._table[row, 1] = min(room, limit) if count == 1 else room
        self._message.iov = self._pointer + 16 * row
        self._message.iovlen = count

    def _advance(self, moved: int) -> None:
        self.done += moved
        self._row = int(self._ends.searchsorted(self.done, "right"))

    def send(self, sock: socket.socket, limit: int) -> None:
        """Sends up to `limit` bytes; blocks until at least one is taken.  Raises `OSError`."""
        self._aim(limit)
        self._advance(_transfer(_sendmsg, sock.fileno(), self._message, socket.MSG_NOSIGNAL))

    def receive(self, sock: socket.socket, limit: int) -> None:
        """Receives up to `limit` bytes, all of them unless the far side ends.  Raises `OSError`."""
        self._aim(limit)
        moved = _transfer(_recvmsg, sock.fileno(), self._message, socket.MSG_WAITALL)
        if moved == 0:
            raise ConnectionResetError(errno.ECONNRESET, "the far side ended in mid-stream")
        self._advance(moved)


def _transfer(call: ctypes._NamedFuncPointer, fd: int, message: _Message, flags: int) -> int:
    while True:
        moved = int(call(fd, ctypes.byref(message), flags))
        if moved >= 0:
            return moved
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
