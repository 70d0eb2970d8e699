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

Memory of GPUs: the upper half of a welcome's flags is one more than the number of the GPU, as the server's engine calls
it, that the served region is memory of, and 0 for memory of the host; the upper half of a PUSH's op is that of the
target, as the reader's engine calls it.  Whoever knows of this says so in hello or welcome (`GPUS`); a reader that does
not is told of no region that is a GPU's.
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

GPUS = 2
"""The flag of whoever knows how memory of GPUs is told of."""

ROW = np.dtype("<i8")
ROW_BYTES = 24
MAX_ROWS = 4096
"""Rows of one push: what bounds the memory that a request can cost the serving side (96 KiB)."""

MAX_DESCRIPTION = 64 << 10


def with_gpu(low: int, gpu: int) -> int:
    """A word whose upper half tells of a GPU, -1 for memory of the host."""
    return low | (gpu + 1) << 16


def gpu_of(word: int) -> int:
    """The GPU that a word tells of, or -1."""
    return (word >> 16) - 1


class BadWire(ConnectionError):
    """The far side does not speak this protocol."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EPROTO, why)
