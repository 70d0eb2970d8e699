"""From the chip to the host, for caches in its memory that are sources.

To read a device's memory over PCIe, a processor waits for each word or two; for a device to write into the host's
costs it nothing.  So where the chip's owner brings a program for that, the chip writes into a shadow of the
reservation whose pages are pinned for it; else the host reads.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from hawk.errors import HawkMemoryError
from hawk.memory.shared import SharedBuffer, alloc, require_memory
from hawk.memory.tenstorrent import kmd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.region import Region
    from hawk.memory.tenstorrent.driver import Driver
    from hawk.memory.tenstorrent.reservation import Reservation

READ_COST = 1e-8
"""Seconds a byte that a host takes to read a chip's memory: 100 MB/s, an assumption that no card has borne out yet."""


class Pinned:
    """A shadow of every bank in the host's memory, its pages pinned for the chip's writes.

    driver     the chip's, an open descriptor of which pins them; this closes it
    regions    the shadow that is there already, such as the staged way's; one is made where None

    noc        NOC address of the first byte of each bank's shadow

    Raises `OutOfMemory`, or `HawkMemoryError` as the driver refuses: without an IOMMU it pins only pages that follow
    each other in physical memory.  Nothing stays pinned or allocated then.
    """

    def __init__(
        self, memory: str, driver: Driver, reservation: Reservation, regions: Sequence[Region] | None = None
    ) -> None:
        self._driver = driver
        self._buffers: list[SharedBuffer] = []
        self._pins: list[tuple[int, int]] = []
        self.noc: list[int] = []
        try:
            if regions is None:
                require_memory(reservation.total, memory)
                for bank in range(reservation.banks):
                    self._buffers.append(alloc(reservation.nbytes, name=f"{memory}/shadow{bank}"))
                regions = [buffer.region() for buffer in self._buffers]
            self.regions: tuple[Region, ...] = tuple(regions)
            for region in self.regions:
                self._pin(region)
        except BaseException:
            self.close()
            raise

    def _pin(self, region: Region) -> None:
        size = -(-region.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        asked = kmd.PinPages(out_size=16, flags=kmd.PIN_NOC_DMA, virtual_address=region.address, size=size)
        self._driver.ask(kmd.PIN_PAGES, asked, "pin the shadow's pages")
        self._pins.append((region.address, size))
        if not asked.noc_address:
            raise HawkMemoryError("the driver gave pinned pages no address on the chip", field=region.name)
        self.noc.append(int(asked.noc_address))

    def close(self) -> None:
        """Unpins and lets go; no program of the chip may be writing any more."""
        pins, self._pins = self._pins, []
        for address, size in pins:
            self._driver.quietly(kmd.UNPIN_PAGES, kmd.UnpinPages(virtual_address=address, size=size))
        self.regions = ()
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            buffer.close()
        self._driver.close()
