"""What the server says of its arena, little-endian; hello, enter and leave are those of shm (`shm/_wire.py`).

server -> reader   arena   status u32, way u32, offset u64, bytes u64, handle 64, mappings u32, bytes of each u64 * n;
                           beside it, where it goes by descriptors, one of each mapping
"""

from __future__ import annotations

import struct

from hawk.errors import HawkError, InvalidArgument
from hawk.memory.cuda_share import MOST_MAPPINGS, Exported, Way
from hawk.transports.shm._wire import MAPPING, OK

_ARENA = struct.Struct("<IIQQ64sI")
_WAYS: tuple[Way, ...] = ("legacy", "fd")

LARGEST = _ARENA.size + 8 * MOST_MAPPINGS
"""No message is longer than this, bytes."""


def arena(exported: Exported) -> bytes:
    """Where the arena is to be found."""
    sizes = exported.sizes
    head = _ARENA.pack(
        OK, _WAYS.index(exported.way), exported.offset, exported.nbytes, exported.handle, len(sizes)
    )
    return head + struct.pack(f"<{len(sizes)}Q", *sizes)


def read(message: bytes, fds: list[int]) -> Exported | int:
    """What `arena` said, with the descriptors that came beside it, or the status of a refusal.

    Raises `InvalidArgument` for what is no such message.
    """
    if len(message) < _ARENA.size:
        # shm's refusals are shorter, and begin with the same word.
        return int.from_bytes(message[:4], "little") if len(message) == MAPPING.size else -1
    status, way, offset, nbytes, handle, count = _ARENA.unpack_from(message)
    if status != OK:
        return int(status)
    if way >= len(_WAYS) or len(message) != _ARENA.size + 8 * count:
        raise InvalidArgument("no description of an arena", field="arena", got=f"{len(message)} bytes")
    sizes = struct.unpack_from(f"<{count}Q", message, _ARENA.size)
    if len(fds) != (count if _WAYS[way] == "fd" else 0):
        raise InvalidArgument("descriptors are missing", field="arena", got=len(fds), expected=count)
    try:
        return Exported(
            _WAYS[way], nbytes, offset, handle if _WAYS[way] == "legacy" else b"", sizes, tuple(fds)
        )
    except HawkError as error:
        raise InvalidArgument("no description of an arena", field="arena", got=error) from error
