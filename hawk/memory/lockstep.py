"""The allocator of interleaved device memory: one offset, valid in every bank.

Tensors of such a device are spread page by page over all its banks, and one address per tensor is all its
kernels know.  So an allocation needs the same offset to be free in every bank, and a piece taken in a single
bank takes that offset from all interleaved tensors.  Pure: no memory is touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.errors import InvalidArgument, OutOfMemory
from hawk.memory.base import Allocation
from hawk.memory.ranges import Range, RangeAllocator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class LockstepAllocator:
    """Allocates bottom-up in `channels` banks of `channel_bytes` each; top-down what does not stay long.

    Offsets and sizes are held in multiples of `alignment` bytes, as in `RangeAllocator`.
    """

    def __init__(self, channels: int, channel_bytes: int, alignment: int = 64, name: str = "npu") -> None:
        if channels < 1:
            raise InvalidArgument(
                "a memory without channels", field=f"{name}.channels", got=channels, expected=">= 1"
            )
        self.name = name
        self.banks = tuple(
            RangeAllocator(channel_bytes, alignment, f"{name}/channel{c}") for c in range(channels)
        )
        self.channels = channels
        self.channel_bytes = self.banks[0].nbytes
        self.alignment = alignment
        self._live: dict[int, tuple[Allocation, list[Range]]] = {}

    def allocate(
        self, nbytes: int, owner: str, *, channels: Sequence[int] | None = None, brief: bool = False
    ) -> Allocation:
        """The lowest offset with `nbytes` free in every bank (or in those given); the highest for what is `brief`.

        Raises `OutOfMemory`, naming the channel that stands in the way, what is free there and its largest
        piece; `InvalidArgument` for a channel that is not there or a size that is not positive.
        """
        chosen = self._chosen(channels)
        offset = self.last_fit(nbytes, chosen) if brief else self.first_fit(nbytes, chosen)
        if offset is None:
            raise self._out_of_memory(nbytes, chosen)
        ranges = [self.banks[c].claim(offset, nbytes, owner) for c in chosen]
        allocation = Allocation(offset=offset, nbytes=nbytes, channels=chosen, owner=owner)
        self._live[id(allocation)] = (allocation, ranges)
        return allocation

    def first_fit(self, nbytes: int, channels: Sequence[int]) -> int | None:
        """The lowest offset with `nbytes` free in each of `channels`, or None."""
        return self._agreed(channels, 0, lambda bank, offset: bank.first_fit(nbytes, offset))

    def last_fit(self, nbytes: int, channels: Sequence[int]) -> int | None:
        """The highest offset with `nbytes` free in each of `channels`, or None."""
        held = -(-nbytes // self.alignment) * self.alignment
        top = self.channel_bytes - held
        return self._agreed(channels, top, lambda bank, offset: bank.last_fit(nbytes, offset + held))

    def _agreed(
        self, channels: Sequence[int], offset: int, fit: Callable[[RangeAllocator, int], int | None]
    ) -> int | None:
        """The offset nearest to the first that fits in each of `channels`, or None."""
        # Each bank moves the candidate on to its own next fit, until all of them in a row agree on it.
        agreed = 0
        while agreed < len(channels):
            for c in channels:
                found = fit(self.banks[c], offset)
                if found is None:
                    return None
                agreed = agreed + 1 if found == offset else 1
                offset = found
                if agreed == len(channels):
                    break
        return offset

    def free(self, allocation: Allocation) -> None:
        """Gives an allocation back; it must be the object that `allocate` returned.

        Raises `InvalidArgument` if it is not ours, or was freed before.
        """
        entry = self._live.pop(id(allocation), None)
        if entry is None:
            raise InvalidArgument("not allocated here (freed before?)", field=self.name, got=allocation)
        for c, taken in zip(entry[0].channels, entry[1], strict=True):
            self.banks[c].free(taken)

    def allocations(self) -> list[Allocation]:
        """Everything that is allocated, in order of allocation."""
        return [a for a, _ in self._live.values()]

    def free_bytes(self) -> list[int]:
        """Free bytes per channel."""
        return [bank.free_bytes for bank in self.banks]

    def largest_common(self, channels: Sequence[int] | None = None) -> int:
        """Bytes of the largest piece that is free at one offset in all of `channels` (default: all)."""
        common = [(0, self.channel_bytes)]
        for c in self._chosen(channels):
            common = _intersect(common, self.banks[c].free_pieces())
        return max((end - start for start, end in common), default=0)

    def check(self) -> None:
        """Raises `InternalError` unless every bank's books are right."""
        for bank in self.banks:
            bank.check()

    def _chosen(self, channels: Sequence[int] | None) -> tuple[int, ...]:
        if channels is None:
            return tuple(range(self.channels))
        chosen = tuple(sorted(set(channels)))
        if not chosen or len(chosen) != len(channels) or chosen[0] < 0 or chosen[-1] >= self.channels:
            raise InvalidArgument(
                "not a set of channels",
                field=f"{self.name}.channels",
                got=list(channels),
                expected=f"distinct numbers in 0..{self.channels - 1}",
            )
        return chosen

    def _out_of_memory(self, nbytes: int, chosen: tuple[int, ...]) -> OutOfMemory:
        # The bank with the smallest piece; if that would do, no offset is free in all of them at once.
        tightest = min(chosen, key=lambda c: (self.banks[c].largest_free, self.banks[c].free_bytes))
        bank = self.banks[tightest]
        alone = bank.largest_free < nbytes
        return OutOfMemory(
            "no free piece is large enough" if alone else "no offset is free in all channels",
            field=bank.name,
            channel=tightest,
            asked=nbytes,
            free=bank.free_bytes,
            largest_piece=bank.largest_free,
            largest_common_piece=self.largest_common(chosen),
            channel_bytes=self.channel_bytes,
            alignment=self.alignment,
            hint=None if alone else "Buffers placed in single channels take their addresses from all of them",
        )


def _intersect(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            out.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return out
