"""What goes over the Unix socket (SOCK_SEQPACKET, one message each), little-endian throughout.

    reader -> server   hello     magic 8, version u32, token 16
    server -> reader   mapping   status u32, fd_offset u64, bytes u64; the arena's descriptor, read-only, beside it
    reader -> server   enter     op u32, low u64, high u64, key 32      before bytes of [low, high) are read
    server -> reader   verdict   status u32
    reader -> server   leave     op u32, 0, 0, zeros                     when no more are read
    server -> reader   verdict   status u32: whether the grant stood until now

A connection is inside at most one range at a time.  A hello of version 2 asks for a board and a page (`_board.py`):

    reader -> server   hello     with version 2
    server -> reader   verdict   status u32; beside it the board's descriptor, read-only, and the page's

and says nothing more until it ends.
"""

from __future__ import annotations

import struct

HELLO = struct.Struct("<8sI16s")
MAPPING = struct.Struct("<IQQ")
REQUEST = struct.Struct("<IQQ32s")
VERDICT = struct.Struct("<I")

HELLO_MAGIC = b"HAWK\x00shm"
VERSION = 1
BOARD_VERSION = 2
ENTER, LEAVE = 1, 2
OK, DENIED, FULL, EMPTY = 0, 1, 2, 3

LARGEST = 64
"""No message is longer than this, bytes."""
