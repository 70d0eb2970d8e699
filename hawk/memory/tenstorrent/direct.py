"""The direct way: windows into the chip's DRAM, exported as dma-bufs for network cards and mapped for processors."""

from __future__ import annotations

import contextlib
import errno
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import HawkMemoryError
from hawk.memory import npu_abi
from hawk.memory.mapping import Patchwork
from hawk.memory.region import Handle, Region
from hawk.memory.tenstorrent import kmd
from hawk.memory.tenstorrent.windows import PAGE, exhausted, laid

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hawk.memory.region import U8, ByteRanges
    from hawk.memory.tenstorrent.chip import Bank
    from hawk.memory.tenstorrent.driver import Driver
    from hawk.memory.tenstorrent.reservation import Reservation
    from hawk.memory.tenstorrent.windows import Window

ROUNDS = 8
"""How often the windows are laid out anew because others took some meanwhile, before that is given up."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A window that the driver gave: its number, where its bytes are mapped, what it covers and exports."""

    window: Window
    number: int
    mmap: int
    dmabuf: int
    low: int
    """First byte of the window that is exported and mapped: a page's."""


class DirectWay:
    """Windows over a reservation, or over as much of every bank as there are windows for.

    driver     the chip's, which this closes; also where the constructor raises
    free       how many windows of each size may be held, by size
    least      bytes of each bank that have to be covered
    ordering   of requests through the windows, see `kmd.ORDERING`
    adopter    a device of the module hawk_npu that adopts the dma-bufs, or "": for network cards whose driver registers
               none, see docs/kmod.md

    covered    bytes of each bank that regions have
    windows    how many are held
    flushes    how often windows were read behind a write, one a window

    Raises `DriverTooOld`, `WindowsExhausted` (with less than `least` covered), `DeviceReset`, `DeviceDenied` and other
    `HawkMemoryError`; nothing stays open or allocated then.
    """

    name = "dma-buf"

    def __init__(
        self,
        memory: str,
        driver: Driver,
        banks: Sequence[Bank],
        reservation: Reservation,
        *,
        free: Mapping[int, int],
        least: int,
        ordering: str = "strict",
        adopter: str = "",
    ) -> None:
        self._driver = driver
        self._memory = memory
        self._banks = banks
        self._held: list[_Held] = []
        self._adopter = -1
        self._adopted: list[Patchwork] = []
        self._closing = threading.Event()
        self.flushes = 0
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            driver.require_export()
            wanted, self.covered = self._taken(reservation, dict(free), least)
            for window, (number, at) in wanted:
                self._held.append(self._pointed(window, number, at, kmd.ORDERING[ordering]))
            if adopter:
                self._adopt(adopter)
            self.regions: tuple[Region, ...] = tuple(self._region(bank) for bank in range(len(banks)))
            undo.pop_all()

    @property
    def windows(self) -> int:
        """How many windows are held."""
        return len(self._held)

    # -- taking windows --------------------------------------------------------------------------------------

    def _taken(
        self, reservation: Reservation, free: dict[int, int], least: int
    ) -> tuple[list[tuple[Window, tuple[int, int]]], int]:
        """Windows as laid out, each with the number that the driver gave it and its place in the device file."""
        for _ in range(ROUNDS):
            wanted, covered = laid(self._banks, reservation, free)
            if covered < least:
                raise exhausted(self._memory, reservation, covered, least, free)
            got: list[tuple[int, int]] = []
            short = 0
            try:
                for window in wanted:
                    given = self._allocated(window.size)
                    if given is None:
                        short = window.size
                        break
                    got.append(given)
            except BaseException:
                self._give_back(number for number, _ in got)
                raise
            if not short:
                return list(zip(wanted, got, strict=True)), covered
            # Others have some: so many there are, and the rest is laid out with smaller ones, or is less.
            self._give_back(number for number, _ in got)
            free[short] = sum(window.size == short for window in wanted[: len(got)])
        raise exhausted(self._memory, reservation, 0, least, free)

    def _allocated(self, size: int) -> tuple[int, int] | None:
        """A window of a size, or None where there is none: all taken, or a BAR too small to have any."""
        asked = kmd.AllocateTlb(size=size)
        try:
            self._driver.try_(kmd.ALLOCATE_TLB, asked)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EINVAL):
                return None
            raise kmd.refused(error, "allocate a window", self._driver.field) from error
        return asked.id, asked.mmap_wc

    def _pointed(self, window: Window, number: int, mmap: int, ordering: int) -> _Held:
        """Points a window at its bank and exports what the reservation has of it, in whole pages."""
        held = _Held(window, number, mmap, -1, window.skip // PAGE * PAGE)
        try:
            x, y = self._banks[window.bank].core
            pointed = kmd.ConfigureTlb(id=number, addr=window.address, x_end=x, y_end=y, ordering=ordering)
            self._driver.ask(kmd.CONFIGURE_TLB, pointed, "point a window at a bank")
            asked = kmd.ExportTlb(tlb_id=number, fd=-1, offset=held.low, size=_pages(window))
            asked.argsz = kmd.EXPORT_BYTES
            self._driver.ask(kmd.EXPORT_TLB_DMABUF, asked, "export a window as a dma-buf")
        except BaseException:
            self._give_back([number])
            raise
        return _Held(window, number, mmap, asked.fd, held.low)

    def _give_back(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            # A window that is still mapped stays the descriptor's, and goes with it and the mapping.
            self._driver.quietly(kmd.FREE_TLB, kmd.FreeTlb(id=number))

    # -- regions ---------------------------------------------------------------------------------------------

    def _region(self, bank: int) -> Region:
        """A bank's windows side by side: an extent each, with its dma-buf."""
        mine = [held for held in self._held if held.window.bank == bank]
        head = mine[0].window.skip - mine[0].low
        last = mine[-1].window
        field = f"{self._memory}/channel{bank}"
        try:
            room = Patchwork(-(-(head + last.start + last.nbytes) // PAGE) * PAGE)
            for held in mine:
                at = held.window.start + head - (held.window.skip - held.low)
                self._driver.calls.place(room, at, self._driver.fd, _pages(held.window), held.mmap + held.low)
        except OSError as error:
            raise kmd.refused(error, "map a window", field) from error
        array: U8 = np.asarray(room)[head : head + self.covered]
        return Region(
            name=field,
            array=array,
            extents=tuple(held.window.start for held in mine),
            handles=tuple(self._handle(held) for held in mine),
        )

    def _handle(self, held: _Held) -> Handle:
        inside = held.window.skip - held.low
        address = 0
        if self._adopted:
            address = self._adopted[self._held.index(held)].address + inside
        return Handle(dmabuf=held.dmabuf, offset=inside, address=address)

    def _adopt(self, path: str) -> None:
        """Has the module adopt every dma-buf, so that stacks that register by address find them by it."""
        calls = self._driver.calls
        try:
            self._adopter = calls.open(path)
            for held in self._held:
                asked = npu_abi.Adopt(fd=held.dmabuf)
                calls.ioctl(self._adopter, npu_abi.ADOPT, asked)
                room = Patchwork(_pages(held.window))
                self._adopted.append(room)
                calls.place(room, 0, self._adopter, room.nbytes, asked.channel << npu_abi.MAP_SHIFT)
        except OSError as error:
            raise HawkMemoryError(
                "the module hawk_npu does not adopt the chip's windows",
                field=f"memory.{self._memory}.adopter",
                got=error.strerror or str(error),
                hint=f"Load it with adopt=1 (docs/kmod.md); it adopts at most {npu_abi.MAX_CHANNELS} windows",
            ) from error

    # -- what a memory asks ----------------------------------------------------------------------------------

    def flush(self, ranges: ByteRanges) -> None:
        """Reads behind the last write of each window that was touched; blocks until the answers are there.

        A read that waits for its answer passes no write that was before it in the same window.  Raises `DeviceReset`
        if the chip was reset, `HawkMemoryError` if the memory is closed meanwhile.
        """
        regions = self.regions
        words = self._last_words(ranges)
        self._go_on()  # of a memory that was closed before this ran no window is left to be read
        for held, at in words:
            self._go_on()
            # Touching a window after a reset is a SIGBUS, so the driver is asked first; it refuses to reset while
            # dma-bufs of ours live, but a chip can fall off its bus.
            self._driver.version()
            _word(regions[held.window.bank].array, at)
            self.flushes += 1

    def _go_on(self) -> None:
        if self._closing.is_set():
            raise HawkMemoryError("the memory was closed during a flush", field=self._memory)

    def _last_words(self, ranges: ByteRanges) -> list[tuple[_Held, int]]:
        """Each window touched, and where in its region the last byte written through it is."""
        last: dict[int, int] = {}
        for bank in np.unique(ranges.region).tolist():
            rows = ranges.region == bank
            begin, end = ranges.start[rows], ranges.start[rows] + ranges.nbytes[rows]
            for number, held in enumerate(self._held):
                window = held.window
                if window.bank != bank:
                    continue
                inside = (begin < window.start + window.nbytes) & (end > window.start)
                if inside.any():
                    last[number] = min(int(end[inside].max()), window.start + window.nbytes) - 1
        return [(self._held[number], at) for number, at in sorted(last.items())]

    def close(self) -> None:
        """Ends the exports, gives the windows back and closes the driver.

        A window whose bytes somebody still holds an array of goes with the last of them; one that a network card has
        registered, with that registration.
        """
        self._closing.set()
        self.regions = ()
        self._adopted.clear()
        calls = self._driver.calls
        if self._adopter >= 0:
            adopter, self._adopter = self._adopter, -1
            calls.close(adopter)
        held, self._held = self._held, []
        for one in held:
            calls.close(one.dmabuf)
        self._give_back(one.number for one in held)
        self._driver.close()


def _pages(window: Window) -> int:
    """Bytes of whole pages that hold a window's part of its region."""
    low = window.skip // PAGE * PAGE
    return -(-(window.skip + window.nbytes) // PAGE) * PAGE - low


def _word(array: U8, at: int) -> int:
    """One load of the aligned word that holds byte `at`, or of the byte where the array does not hold the word."""
    address = array.ctypes.data + at
    start = at - address % 4
    if start < 0 or start + 4 > array.nbytes:
        return int(array[at])
    return int(array[start : start + 4].view(np.uint32)[0])
