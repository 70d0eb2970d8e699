"""Windows: how much of each bank which windows cover, within a budget.  Pure.

A window is a piece of the chip's PCI memory that the driver points at a core's DRAM, at a multiple of its own size.
There are few, and other programs need some.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.errors import WindowsExhausted
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hawk.memory.tenstorrent.chip import Bank
    from hawk.memory.tenstorrent.reservation import Reservation

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Window:
    """One window to have.

    bank     index of the bank
    size     of the window
    address  what it is pointed at: a multiple of `size`, at the bank's core
    start    first byte of the region that lies in it
    nbytes   bytes of the region in it
    skip     bytes of the window before the region's
    """

    bank: int
    size: int
    address: int
    start: int
    nbytes: int
    skip: int


def budget(kinds: Sequence[tuple[int, int]], share: float, large_share: float) -> dict[int, int]:
    """How many windows of each size may be held: `large_share` of those of the largest, `share` of the others."""
    largest = max((size for size, _ in kinds), default=0)
    return {size: int(count * (large_share if size == largest else share) + 1e-9) for size, count in kinds}


def laid(
    banks: Sequence[Bank], reservation: Reservation, free: Mapping[int, int]
) -> tuple[list[Window], int]:
    """The windows over a reservation, and bytes of each bank that they cover: all of it, or as much as there are for.

    Every bank has the same bytes covered, since an allocation is at one offset in all of them.  Windows of a larger
    size come first, as long as there is one for every bank; then smaller ones go on where those ended.
    """
    left = {size: count for size, count in sorted(free.items(), reverse=True) if count > 0}
    ends = [bank.offset + reservation.address for bank in banks]
    stops = [bank.offset + reservation.end for bank in banks]
    made: list[Window] = []
    while any(end < stop for end, stop in zip(ends, stops, strict=True)):
        size = next((s for s, count in left.items() if count >= len(banks)), 0)
        if not size:
            break
        left[size] -= len(banks)
        for number, bank in enumerate(banks):
            address = ends[number] // size * size
            skip = ends[number] - address
            nbytes = min(size - skip, stops[number] - ends[number])
            start = ends[number] - bank.offset - reservation.address
            made.append(Window(number, size, address, start, nbytes, skip))
            ends[number] += nbytes
    # Banks at other offsets in their channel may lie otherwise in their windows: the shortest counts.
    covered = min(end - bank.offset - reservation.address for end, bank in zip(ends, banks, strict=True))
    return [w for w in (_cut(window, covered) for window in made) if w is not None], covered


def _cut(window: Window, covered: int) -> Window | None:
    nbytes = min(window.nbytes, covered - window.start)
    if nbytes <= 0:
        return None
    return Window(window.bank, window.size, window.address, window.start, nbytes, window.skip)


def exhausted(
    name: str, reservation: Reservation, covered: int, least: int, free: Mapping[int, int]
) -> WindowsExhausted:
    """Says that the windows cover less than is needed, and what would help."""
    there = ", ".join(f"{count} of {approximate_size(size)}" for size, count in free.items()) or "none"
    return WindowsExhausted(
        "too few windows into the chip's memory are free",
        field=f"memory.{name}",
        got=f"{covered} bytes of each bank covered",
        expected=f"at least {least} of the {reservation.nbytes} reserved",
        windows=there,
        hint="Raise window_share or large_window_share, end what else holds windows, reserve less, lower least, or "
        'leave the way to "auto" or "host"',
    )
