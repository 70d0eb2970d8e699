"""What every memory can do: own addresses, in channels.

A memory allocates the same address range in each of its channels (lock-step, as interleaved NPU memory is
allocated), makes what was written visible, and moves bytes inside a channel if it can.  It knows no layouts.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.region import ByteRanges, Moves, Region


class MoveSupport(enum.Enum):
    """Who can move bytes inside a channel."""

    NONE = "none"
    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True, slots=True)
class Allocation:
    """`nbytes` at byte `offset` of every channel in `channels`, owned by `owner` until freed."""

    offset: int
    nbytes: int
    channels: tuple[int, ...]
    owner: str


class Memory(ABC):
    """One device's memory, as regions that are its channels.

    Life cycle: the constructor takes the capacity and touches it, `close` gives all back.  Methods are called
    on the agent's event loop unless marked async; the async ones run their work off the loop.
    """

    kind: ClassVar[str]

    name: str
    channels: int
    channel_bytes: int
    alignment: int
    """Every allocation's offset, and every page, is a multiple of this many bytes."""
    move_cost: float = 1e-10
    """Seconds per byte that `move` costs, and"""
    move_row_cost: float = 5e-8
    """seconds per row of it: a host's memcpy unless the memory knows better."""
    move_call_cost: float = 0.0
    """Seconds that a call of `move` takes besides."""
    said: str = ""
    """How bytes get there, where there is more than one way: a line for people."""

    @property
    @abstractmethod
    def regions(self) -> Sequence[Region]:
        """One region per channel, in channel order."""

    @abstractmethod
    def allocate(
        self, nbytes: int, owner: str, *, channels: Sequence[int] | None = None, brief: bool = False
    ) -> Allocation:
        """The same `nbytes` at one offset in every channel (or in those given: the bad example).

        What is `brief`, such as staging, is placed away from what stays, so that it does not break up the
        free space under caches that come meanwhile.

        Raises `OutOfMemory`, naming the channel, what is free there and its largest free piece.
        """

    @abstractmethod
    def free(self, allocation: Allocation) -> None:
        """Gives an allocation back; raises `InvalidArgument` if it is not one of ours any more."""

    @abstractmethod
    async def flush(self, ranges: ByteRanges) -> None:
        """Returns when every byte already written into these ranges can be read by the device.

        Called after the last completion of every queue and before *ready*.
        """

    refreshes: bool = False
    """Whether what the device writes can be read here only after a `refresh`."""

    async def refresh(self, ranges: ByteRanges) -> None:  # noqa: B027  (most memories have nothing to do)
        """Returns when every byte that the device wrote into these ranges can be read through `readable`.

        Called, where `refreshes`, before processors read a cache in this memory.
        """

    @property
    def readable(self) -> Sequence[Region]:
        """What processors read of a cache that is a source: the regions, unless those are read too slowly."""
        return self.regions

    @property
    def move_support(self) -> MoveSupport:
        """Whether `move` works, and where."""
        return MoveSupport.NONE

    async def move(self, moves: Moves) -> None:
        """Copies inside channels; rows do not overlap.  Only where `move_support` is not NONE."""
        raise NotImplementedError

    @abstractmethod
    def free_bytes(self) -> list[int]:
        """Bytes that are free, per channel."""

    @abstractmethod
    def close(self) -> None:
        """Unmaps and closes everything.  Safe to call twice."""
