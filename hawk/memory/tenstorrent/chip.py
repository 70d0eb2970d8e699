"""A chip as its driver describes it: DRAM banks, where each begins, and by which core it is reached.  Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.errors import HawkMemoryError, InvalidArgument
from hawk.memory.tenstorrent.reservation import require_aligned, require_inside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.tenstorrent.reservation import Reservation

ALIGNMENTS = {"wormhole_b0": 32, "blackhole": 64}
"""Bytes that addresses in DRAM are multiples of, by the architecture that the driver names."""

KEPT = {"wormhole_b0": (1 << 20, 0), "blackhole": (1 << 20, 16 << 20)}
"""Bytes at the beginning and at the end of each bank that the software of a chip's maker keeps, by the architecture.

What ttnn 0.81 deals out begins behind the first of these, and ends where the second begin (tt-metal's descriptions of
the chips: `dram_view_size`).
"""

WHOLE = {"wormhole_b0": 2 << 30, "blackhole": 4 << 30}
"""Bytes of a channel of such chips; of others the end that is kept is not known."""

Core = tuple[int, int]
"""x and y of a core in translated coordinates, which is what windows and writes take."""


@dataclass(frozen=True, slots=True)
class Bank:
    """One bank of the allocator's.

    core     the DRAM core by which it is reached
    offset   what is added to a bank-local address to have the address at that core
    nbytes   bytes of the bank
    """

    core: Core
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chip:
    """What a driver says of one chip.

    number         as in `/dev/tenstorrent/N`
    arch           as the driver names it
    channels       cores of each DRAM channel that is not harvested, in logical order; any of them reaches all of it
    channel_bytes  bytes of a channel
    """

    number: int
    arch: str
    channels: tuple[tuple[Core, ...], ...]
    channel_bytes: int

    def __post_init__(self) -> None:
        if not self.channels or not all(self.channels) or self.channel_bytes < 1:
            raise HawkMemoryError(
                "the driver tells of no DRAM",
                field=f"chip {self.number}",
                got=f"{len(self.channels)} channels",
            )

    @property
    def alignment(self) -> int:
        """Bytes that every address is a multiple of; the largest known for an architecture that is not."""
        return ALIGNMENTS.get(self.arch, max(ALIGNMENTS.values()))

    def banks(self, count: int, ports: Sequence[int] = ()) -> tuple[Bank, ...]:
        """The allocator's `count` banks, in its order: each channel is divided evenly, its banks follow each other.

        `ports` says for each bank which of its channel's cores to go by; the first where it says nothing.  Raises
        `InvalidArgument` where so many banks do not divide over the channels that the driver found.
        """
        if count % len(self.channels):
            raise InvalidArgument(
                "the banks do not divide over the chip's DRAM channels",
                field="reservation.banks",
                got=count,
                expected=f"a multiple of {len(self.channels)}, the channels of chip {self.number}",
            )
        each = count // len(self.channels)
        size = self.channel_bytes // each
        found = []
        for number in range(count):
            cores = self.channels[number // each]
            port = ports[number] if number < len(ports) else 0
            found.append(Bank(cores[port % len(cores)], (number % each) * size, size))
        return tuple(found)

    def check(self, reservation: Reservation) -> tuple[Bank, ...]:
        """The banks of a reservation, having looked that it lies in them.

        Raises `InvalidArgument`, naming the field, for one of another chip, one that is not aligned as the chip is, or
        one that would cross the end of a bank or, where its allocator was not asked, has what the chip's own software
        keeps at the beginning or the end of each.
        """
        if self.number not in reservation.chips:
            raise InvalidArgument(
                "reserved on other chips",
                field="reservation.chips",
                got=list(reservation.chips),
                expected=f"chip {self.number} among them",
            )
        require_aligned(reservation, reservation.alignment or self.alignment)
        banks = self.banks(reservation.banks)
        if reservation.end > banks[0].nbytes:
            raise InvalidArgument(
                "the reservation crosses the end of a bank",
                field="reservation.nbytes",
                got=f"{reservation.nbytes} bytes from {reservation.address:#x} on",
                expected=f"at most {max(0, banks[0].nbytes - reservation.address)}: a bank has {banks[0].nbytes}",
            )
        if self.channel_bytes == WHOLE.get(self.arch):
            low, high = KEPT[self.arch]
            low, high = reservation.lowest or low, reservation.highest or banks[0].nbytes - high
            require_inside(reservation, low, high, "the chip's own software leaves")
        return banks
