"""What programs of the chip do for a memory, where the owner of the chip brings them.

They are awaited to their end: a job that is cancelled waits for them.  So they have to end, with an error where the
chip does not answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.region import ByteRanges, Moves


class Mover(Protocol):
    """Moves bytes inside banks on the chip itself; whoever owns the chip's programs has one.

    cost, row_cost   seconds a byte and a row, as `Memory.move_cost` and `move_row_cost`: measured ones.  A cost that is
                     infinite says that nobody has, and leaves plans direct
    call_cost        seconds that a call takes besides, where it has that; as `Memory.move_call_cost`

    One that raises `DeviceReset` may still write: the memory gives up for good then.
    """

    cost: float
    row_cost: float

    async def __call__(self, moves: Moves) -> None:
        """See `Memory.move`; offsets are those of the reservation.  Returns when all bytes have moved."""


class Pusher(Protocol):
    """Writes DRAM of the chip into pinned memory of the host, which is faster than to have the host read it.

    cost   seconds a byte
    """

    cost: float

    async def __call__(self, ranges: ByteRanges, noc: Sequence[int]) -> None:
        """Writes these ranges of the reservation: byte b of bank k to NOC address `noc[k] + b`.

        Returns when all bytes are in the host's memory, where processors see them.
        """
