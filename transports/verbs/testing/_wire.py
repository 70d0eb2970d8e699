"""What fake devices say to each other over a Unix socket, little-endian.

initiator -> responder   connect   queue pair number, its own number, packet number
initiator -> responder   request   opcode, address, length, key, and READs outstanding with this one, or immediate data;
                                   the bytes of a WRITE follow
responder -> initiator   piece     of a READ: status, length, then that many bytes; one or more until all are there
responder -> initiator   piece     of a WRITE: status, 0
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

CONNECT = struct.Struct("<III16s")
REQUEST = struct.Struct("<IQIII")
PIECE = struct.Struct("<II")

PIECE_BYTES = 256 << 10
"""Bytes that are sent under one check of the key."""


def address(gid: bytes) -> str:
    """Where the device with this GID listens: a name in the abstract namespace, gone with its process."""
    return f"\0hawk-fake-rdma-{gid.hex()}"


def receive(sock: socket.socket, view: memoryview) -> None:
    """Fills `view`.  Raises `OSError`."""
    done = 0
    while done < len(view):
        got = sock.recv_into(view[done:])
        if got == 0:
            raise ConnectionResetError("ended")
        done += got
