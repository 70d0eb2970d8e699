"""The staged way: the host holds a shadow of the reservation, and what was written there is pushed to the chip."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import HawkMemoryError
from hawk.memory.shared import SharedBuffer, alloc, require_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hawk.memory.region import I64, ByteRanges, Region
    from hawk.memory.tenstorrent.chip import Bank
    from hawk.memory.tenstorrent.reservation import Reservation
    from hawk.memory.tenstorrent.umd import Device

WORD = 4


class StagedWay:
    """Host memory as large as the reservation, pushed bank by bank in large pieces when it is flushed.

    device     the chip, which this closes; also where the constructor raises
    piece      bytes of a write at most

    writes, written_bytes   pieces that went to the chip, and bytes in them
    reads, read_bytes       pieces that came from it
    confirmed               words read back behind writes, one a bank and flush

    Only what was written is pushed, never a byte between: the chip may have written that meanwhile, and the shadow does
    not know.  The constructor blocks while the shadow is filled; raises `OutOfMemory` if the host has not that much.
    """

    name = "host"

    def __init__(
        self,
        memory: str,
        device: Device,
        banks: Sequence[Bank],
        reservation: Reservation,
        *,
        piece: int = 4 << 20,
        huge_pages: bool = False,
    ) -> None:
        self._memory = memory
        self._device = device
        self._banks = banks
        self._base = reservation.address
        self._piece = piece
        self._buffers: list[SharedBuffer] = []
        self._closing = threading.Event()
        self._busy = threading.Lock()
        self.writes = self.written_bytes = self.reads = self.read_bytes = self.confirmed = 0
        try:
            require_memory(reservation.total, memory)
            for bank in range(len(banks)):
                self._buffers.append(
                    alloc(reservation.nbytes, name=f"{memory}/channel{bank}", huge_pages=huge_pages)
                )
            self.regions: tuple[Region, ...] = tuple(buffer.region() for buffer in self._buffers)
        except BaseException:
            self.close()
            raise
        self.covered = reservation.nbytes

    def flush(self, ranges: ByteRanges) -> None:
        """Writes these ranges to the chip and reads a word of each bank back; blocks until its answers are there.

        The word is the last that was written, so that it can only be there when all before it is.  Raises
        `DeviceReset` and other `HawkMemoryError` as the driver tells, also if the chip does not hold what was written.
        """
        regions = self.regions
        with self._busy:
            for bank, start, nbytes in coalesced(ranges):
                end = 0
                for at in pieces(start, nbytes, self._piece):
                    self._go_on()
                    data = regions[bank].array[at[0] : at[1]]
                    self._device.write(self._banks[bank].core, self._at(bank, at[0]), data)
                    self.writes += 1
                    self.written_bytes += data.nbytes
                    end = at[1]
                self._confirm(bank, regions[bank], max(end - WORD, int(start[-1])), end)

    def _confirm(self, bank: int, region: Region, begin: int, end: int) -> None:
        there = np.empty(end - begin, np.uint8)
        self._device.read(self._banks[bank].core, self._at(bank, begin), there)
        self.confirmed += 1
        if not np.array_equal(there, region.array[begin:end]):
            raise HawkMemoryError(
                "the chip does not hold what was written to it",
                field=f"{self._memory}/channel{bank}",
                got=f"{there.tobytes().hex()} at byte {begin}",
                expected=region.array[begin:end].tobytes().hex(),
                hint="Was it reset, or is the range somebody else's, too?",
            )

    def refresh(self, ranges: ByteRanges) -> None:
        """Reads these ranges from the chip into the shadow; blocks.  Raises as `flush` does."""
        regions = self.regions
        with self._busy:
            for bank, start, nbytes in coalesced(ranges):
                for begin, end in pieces(start, nbytes, self._piece):
                    self._go_on()
                    into = regions[bank].array[begin:end]
                    self._device.read(self._banks[bank].core, self._at(bank, begin), into)
                    self.reads += 1
                    self.read_bytes += into.nbytes

    def _at(self, bank: int, start: int) -> int:
        return self._banks[bank].offset + self._base + start

    def _go_on(self) -> None:
        if self._closing.is_set():
            raise HawkMemoryError("the memory was closed meanwhile", field=self._memory)

    def close(self) -> None:
        """Ends what runs after the piece it is at, lets go of the shadow and closes the chip."""
        self._closing.set()
        with self._busy:
            self.regions = ()
            for buffer in self._buffers:
                buffer.close()
            self._device.close()


def coalesced(ranges: ByteRanges) -> Iterator[tuple[int, I64, I64]]:
    """Bank, starts and lengths of these ranges, in order of bank and address, joined where they meet or overlap."""
    for bank in np.unique(ranges.region).tolist():
        rows = ranges.region == bank
        order = np.argsort(ranges.start[rows], kind="stable")
        start = ranges.start[rows][order]
        reach = np.maximum.accumulate(start + ranges.nbytes[rows][order])
        first = np.concatenate(([True], start[1:] > reach[:-1]))
        last = np.concatenate((np.flatnonzero(first)[1:] - 1, [len(start) - 1]))
        yield bank, start[first], reach[last] - start[first]


def pieces(start: I64, nbytes: I64, most: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each piece of these ranges, of at most `most` bytes each."""
    for begin, size in zip(start.tolist(), nbytes.tolist(), strict=True):
        for at in range(begin, begin + size, most):
            yield at, min(at + most, begin + size)
