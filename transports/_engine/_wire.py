"""What goes over the connection beside the engine, little-endian throughout.

    reader -> server   hello     magic 8, version u32, token 16, flags u32, length u32; its engine's description
    server -> reader   welcome   magic 4, status u32, address u64, bytes u64, flags u32, length u32; the description
    reader -> server   request   op u32, count u32, number u64, low u64, high u64, key 32
    server -> reader   verdict   status u32, number u64

A description goes with a welcome, so that nobody has what opens memory but who has the token; the reader's goes with
a hello that asks for pushes.  `address` is the served region's first byte as the server's engine calls it.

    ENTER    before bytes of [low, high) are read; verdict: whether the key covers them
    LEAVE    when no more are read; verdict: whether the grant stood until now
    TELL     `count` bytes follow: the reader's description, now that it has registered more; no verdict
    PUSH     `count` rows (offset, target address, bytes; i64 each) follow, all within [low, high): the server writes
             them, with `number` as the notice behind the last byte; verdict: whether all is written and the grant stood
"""

from __future__ import annotations

import errno
import struct

import numpy as np

HELLO = struct.Struct("<8sI16sII")
WELCOME = struct.Struct("<4sIQQII")
REQUEST = struct.Struct("<IIQQQ32s")
VERDICT = struct.Struct("<IQ")
NOTICE = struct.Struct("<Q")

HELLO_MAGIC = b"HAWK\x00eng"
WELCOME_MAGIC = b"WELC"
VERSION = 1
ENTER, LEAVE, PUSH, TELL = 1, 2, 3, 4
OK, DENIED, FULL, EMPTY, FAILED = 0, 1, 2, 3, 4
PUSHES = 1
"""The flag of a hello that asks for pushes, and of a welcome that promises them."""

ROW = np.dtype("<i8")
ROW_BYTES = 24
MAX_ROWS = 4096
"""Rows of one push: what bounds the memory that a request can cost the serving side (96 KiB)."""

MAX_DESCRIPTION = 64 << 10


class BadWire(ConnectionError):
    """The far side does not speak this protocol."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EPROTO, why)
