"""What callers hand to a client, checked before it travels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.control.messages import pack_blocks
from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def block_table(blocks: ArrayLike, field: str = "blocks") -> bytes:
    """A block table for the wire; raises `InvalidArgument` unless it is a flat list of block numbers."""
    table = np.asarray(blocks)
    if table.ndim != 1 or table.size == 0 or table.dtype.kind not in "iu":
        raise InvalidArgument(
            "a block table is a flat, non-empty list of integers",
            field=field,
            got=f"shape {table.shape}, {table.dtype}",
        )
    if int(table.min()) < 0 or int(table.max()) > 2**31 - 1:
        bad = int(np.flatnonzero((table < 0) | (table > 2**31 - 1))[0])
        raise InvalidArgument(
            "no block number", field=f"{field}[{bad}]", got=int(table[bad]), expected="0 or more"
        )
    return pack_blocks(table)


def request_id(request: str) -> str:
    """The request id, if it can be one."""
    if not 1 <= len(request) <= 512:
        raise InvalidArgument(
            "a request id is a string",
            field="request",
            got=repr(request)[:80],
            expected="1 to 512 characters",
        )
    return request


def count(value: Any, field: str) -> int:
    """An integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) < 2**48:
        raise InvalidArgument(
            "not a count", field=field, got=repr(value)[:80], expected="an integer, 0 or more"
        )
    return int(value)


def small_note(note: bytes) -> bytes:
    """A note that may travel with an offer."""
    if len(note) > 4096:
        raise InvalidArgument(
            "a note is a few bytes", field="note", got=f"{len(note)} bytes", expected="bytes, at most 4096"
        )
    return note
