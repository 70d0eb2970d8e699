"""`[memory.NAME]` with `kind = "tenstorrent"`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hawk.errors import InvalidArgument
from hawk.memory.tenstorrent.reservation import MAX_BANK_BYTES, MAX_BANKS, Reservation
from hawk.units import Address, Size

Way = Literal["auto", "dma-buf", "host"]
Ordering = Literal["relaxed", "strict", "posted"]

MAX_CHIP = 9999
"""Numbers of device files beyond it are mistakes."""

SMALLEST_PIECE = 4096
"""Bytes; smaller writes would be nothing but calls."""


@dataclass(frozen=True, slots=True)
class TenstorrentConfig:
    """`[memory.NAME]` with `kind = "tenstorrent"`."""

    address: Address = field(
        metadata={
            "help": "address of the first reserved byte, the same in every bank (0x100080, say)",
            "maximum": MAX_BANK_BYTES - 1,
        }
    )
    nbytes: Size = field(
        metadata={"help": "bytes reserved in each bank", "minimum": 1, "maximum": MAX_BANK_BYTES}
    )
    banks: int = field(
        metadata={
            "help": "interleaved DRAM banks of the chip, as its allocator deals pages",
            "minimum": 1,
            "maximum": MAX_BANKS,
        }
    )
    chip: int = field(
        default=0,
        metadata={"help": "which chip: N of `/dev/tenstorrent/N`", "minimum": 0, "maximum": MAX_CHIP},
    )
    lowest: Address = field(
        default=0,
        metadata={
            "help": "first address that the chip's allocator deals out; 0: as is known of the chip",
            "maximum": MAX_BANK_BYTES - 1,
        },
    )
    highest: Address = field(
        default=0,
        metadata={
            "help": "one past the last address that it deals out; 0: as is known of the chip",
            "maximum": MAX_BANK_BYTES,
        },
    )
    way: Way = field(
        default="auto",
        metadata={"help": "windows for network cards, a shadow in the host's memory, or the best there is"},
    )
    least: Size = field(
        default=0,
        metadata={
            "help": "bytes of each bank that windows have to cover; 0: all of them, or any where `way` is `dma-buf`"
        },
    )
    window_share: float = field(
        default=0.5,
        metadata={
            "help": "share of the chip's windows that may be held, but for the largest",
            "minimum": 0,
            "maximum": 1,
        },
    )
    large_window_share: float = field(
        default=1.0,
        metadata={
            "help": "share of the chip's windows of the largest size that may be held",
            "minimum": 0,
            "maximum": 1,
        },
    )
    ordering: Ordering = field(default="strict", metadata={"help": "order of requests through a window"})
    adopter: str = field(
        default="",
        metadata={"help": "device of hawk_npu that adopts the windows (docs/kmod.md); none if empty"},
    )
    piece: Size = field(
        default=4 << 20,
        metadata={"help": "bytes of a write to the chip at most, staged", "minimum": SMALLEST_PIECE},
    )
    dma: bool = field(default=False, metadata={"help": "let the chip's DMA engine fetch what is staged"})
    huge_pages: bool = field(default=False, metadata={"help": "hint the kernel to use huge pages, staged"})
    simulator: str = field(
        default="", metadata={"help": "library of a simulator to write to instead of a chip, for trials"}
    )

    def __post_init__(self) -> None:
        self.reservation()
        for name in ("window_share", "large_window_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidArgument(
                    "no share of the windows", field=name, got=getattr(self, name), expected="0 to 1"
                )
        if self.piece < SMALLEST_PIECE:
            raise InvalidArgument(
                "too small", field="piece", got=self.piece, expected=f"at least {SMALLEST_PIECE} bytes"
            )
        if not 0 <= self.least <= self.nbytes:
            raise InvalidArgument(
                "no part of what is reserved", field="least", got=self.least, expected=f"0 to {self.nbytes}"
            )

    def reservation(self) -> Reservation:
        """What the table reserves."""
        return Reservation(
            (self.chip,), self.address, self.nbytes, self.banks, lowest=self.lowest, highest=self.highest
        )
