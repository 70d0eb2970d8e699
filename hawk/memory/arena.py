"""The arena: one touched, shareable region that jobs take pieces of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import Draining, InvalidArgument
from hawk.memory.ranges import Range, RangeAllocator
from hawk.memory.region import ByteRanges, Region
from hawk.memory.scrub import zero
from hawk.memory.shared import alloc

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Arena", "Range", "RangeAllocator"]


class Arena:
    """A memfd region and the ranges of it that jobs hold.

    Who gets room when several want it is not decided here: `hawk.jobs.room` does.  All methods belong to one event
    loop; the constructor blocks while it fills the memory and may run anywhere.

    nbytes       size in bytes, rounded down to a multiple of `alignment`
    alignment    every range starts at a multiple of this many bytes
    on_room      called whenever a range came back from quarantine, which its owner does not see
    scrub        `wipe` zeroes; without, it does nothing
    shadows      memory of transports' own that ranges stand for as well, see `Transport.shadow`
    """

    def __init__(
        self,
        nbytes: int,
        *,
        name: str = "arena",
        alignment: int = 4096,
        huge_pages: bool = False,
        scrub: bool = False,
    ) -> None:
        self.name = name
        self.scrub = scrub
        self.allocator = RangeAllocator(nbytes, alignment, name)
        self.on_room: Callable[[], None] = lambda: None
        self.shadows: list[Region] = []
        self._buffer = alloc(self.allocator.nbytes, name=name, huge_pages=huge_pages)
        self._region: Region | None = self._buffer.region()

    @property
    def region(self) -> Region:
        """The arena's memory.  Raises `InvalidArgument` once closed."""
        if self._region is None:
            raise InvalidArgument("the arena is closed", field=self.name)
        return self._region

    def check(self, nbytes: int) -> None:
        """Raises `OutOfMemory` for more than the whole arena, `Draining` if it is closed."""
        if self._region is None:
            raise Draining("the arena is closed", field=self.name)
        if not self.allocator.fits_empty(nbytes):
            raise self.allocator.out_of_memory(nbytes)

    def reserve(self, nbytes: int, owner: str) -> Range | None:
        """A range of `nbytes`, or None where no free piece is large enough; raises as `check` does."""
        self.check(nbytes)
        offset = self.allocator.first_fit(nbytes)
        return None if offset is None else self.allocator.claim(offset, nbytes, owner)

    def free(self, taken: Range) -> None:
        """Gives a range back.  Raises `InvalidArgument` if it is not allocated any more."""
        self.allocator.free(taken)

    async def wipe(self, taken: Range) -> None:
        """To be awaited before a range that was written to is given back: zeroes it where the arena is to."""
        if self.scrub and self._region is not None:
            places = [self._region, *self.shadows]
            each = np.ones(len(places), np.int64)
            columns = np.arange(len(places), dtype=np.int32), each * taken.offset, each * taken.nbytes
            await zero(places, ByteRanges(*columns))

    def quarantine(self, taken: Range, reason: str) -> None:
        """Takes a range from its owner, but keeps it from use: a byte may still move in it."""
        self.allocator.quarantine(taken, reason)

    def release_quarantined(self, taken: Range) -> None:
        """Makes a range in quarantine free."""
        self.allocator.release_quarantined(taken)
        self.on_room()

    def close(self) -> None:
        """Lets go of the memory.  Safe to call twice.

        The pages stay mapped for as long as somebody holds the region or a view of it.
        """
        self._region = None
        self._buffer.close()
