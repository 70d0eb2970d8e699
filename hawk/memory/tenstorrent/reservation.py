"""A piece of every DRAM bank that the owner of the chip's allocator has set aside for HAWK."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BANKS = 64
MAX_CHIPS = 256
MAX_BANK_BYTES = 1 << 40
"""Bytes of a bank that no chip has; figures beyond it are mistakes."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The same `nbytes` at the same `address` in every bank of every chip named.

    chips      numbers of the chips as in `/dev/tenstorrent/N`, in the order of the mesh, each once
    address    bank-local address of the first byte, the same in every bank, as a buffer's address is
    nbytes     bytes of each bank
    banks      interleaved banks that the allocator deals pages over
    alignment  bytes that `address` and `nbytes` are multiples of; 0 for the chip's own (64 or 32)
    lowest     first address that the allocator deals out in each bank, and
    highest    one past its last; 0 where nobody asked it, which leaves what is known of the chip (`Chip.check`)
    holder     whatever keeps the range reserved, such as the tensor that it was taken by; never looked at

    Made from a config table, or by whoever owns the allocator.  HAWK writes nowhere else on the chip.
    """

    chips: tuple[int, ...]
    address: int
    nbytes: int
    banks: int
    alignment: int = 0
    holder: object = field(default=None, compare=False, repr=False)
    lowest: int = field(default=0, kw_only=True)
    highest: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("address", "nbytes", "banks", "alignment", "lowest", "highest"):
            if not _whole(getattr(self, name)):
                _wrong(name, repr(getattr(self, name)), "a whole number")
        given: object = self.chips
        if not isinstance(given, tuple) or not all(map(_whole, given)):
            _wrong("chips", repr(self.chips), "a tuple of whole numbers")
        if not 1 <= len(self.chips) <= MAX_CHIPS or len(set(self.chips)) != len(self.chips):
            _wrong("chips", list(self.chips), f"1 to {MAX_CHIPS} different numbers")
        if min(self.chips) < 0:
            _wrong("chips", min(self.chips), "numbers of chips from 0 on")
        if not 1 <= self.banks <= MAX_BANKS:
            _wrong("banks", self.banks, f"1 to {MAX_BANKS}")
        if not 0 <= self.address < MAX_BANK_BYTES:
            _wrong("address", hex(self.address), "an address in a bank")
        if not 0 < self.nbytes <= MAX_BANK_BYTES:
            _wrong("nbytes", self.nbytes, "a number of bytes of each bank")
        if self.alignment < 0 or self.alignment & (self.alignment - 1):
            _wrong("alignment", self.alignment, "a power of two, or 0 for the chip's own")
        if self.alignment:
            require_aligned(self, self.alignment)
        if self.lowest or self.highest:
            require_inside(self, self.lowest, self.highest or MAX_BANK_BYTES, "the allocator deals out")

    @property
    def end(self) -> int:
        """One past the last byte, bank-local."""
        return self.address + self.nbytes

    @property
    def total(self) -> int:
        """Bytes in all banks of one chip."""
        return self.banks * self.nbytes

    def meets(self, other: Reservation) -> bool:
        """Whether a byte of a chip belongs to both."""
        return (
            bool(set(self.chips) & set(other.chips)) and self.address < other.end and other.address < self.end
        )

    def of_chip(self, chip: int) -> Reservation:
        """The same of one chip.  Raises `InvalidArgument` for one that is not named."""
        if chip not in self.chips:
            _wrong("chip", chip, f"one of {list(self.chips)}")
        return replace(self, chips=(chip,))

    def each(self) -> Iterator[Reservation]:
        """One reservation a chip, in order."""
        for chip in self.chips:
            yield self.of_chip(chip)


def require_aligned(reservation: Reservation, alignment: int) -> None:
    """Raises `InvalidArgument` unless address and size are multiples of `alignment` bytes."""
    for name in ("address", "nbytes"):
        value = getattr(reservation, name)
        if value % alignment:
            raise InvalidArgument(
                "the chip's memory is reserved in larger steps",
                field=f"reservation.{name}",
                got=hex(value),
                expected=f"a multiple of {alignment}",
            )


def require_inside(reservation: Reservation, lowest: int, highest: int, whose: str) -> None:
    """Raises `InvalidArgument` unless all of it lies from `lowest` on and before `highest`, bank-local addresses."""
    for name, value, fits in (
        ("address", hex(reservation.address), reservation.address >= lowest),
        ("nbytes", f"{reservation.nbytes} bytes up to {reservation.end:#x}", reservation.end <= highest),
    ):
        if not fits:
            raise InvalidArgument(
                "the reservation has memory that is kept for others",
                field=f"reservation.{name}",
                got=value,
                expected=f"within {lowest:#x} to {highest:#x} of each bank, which is what {whose}",
            )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _wrong(name: str, got: object, expected: str) -> None:
    raise InvalidArgument("no reservation", field=f"reservation.{name}", got=got, expected=expected)
