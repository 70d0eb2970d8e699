"""A cache in a device's memory as a source: read only after the device was asked for just the pages that are read."""

import numpy as np

from hawk.memory.npu import EmulatedNpu
from hawk.memory.region import ByteRanges
from tests.unit.jobs.rig import rig


class Writes(EmulatedNpu):
    """A device whose bytes are seen only after a refresh; the regions are the rig's own source."""

    refreshes = True

    def __init__(self, arrays: list[np.ndarray], regions: list[object]) -> None:
        super().__init__("source", capacity=1 << 16, channels=1)
        self.theirs = arrays
        self.shown = regions
        self.asked = 0

    @property
    def readable(self):  # type: ignore[no-untyped-def]
        return self.shown

    async def refresh(self, ranges: ByteRanges) -> None:
        columns = (ranges.region.tolist(), ranges.start.tolist(), ranges.nbytes.tolist())
        for region, start, nbytes in zip(*columns, strict=True):
            part = slice(start, start + nbytes)
            self.shown[region].array[part] = self.theirs[region][part]  # type: ignore[attr-defined]
            self.asked += nbytes


async def test_what_is_read_was_refreshed_before_and_nothing_else() -> None:
    async with rig() as made:
        regions = list(made.source_entry.regions)
        whole = [region.array.copy() for region in regions]
        for region in regions:
            region.array[:] = 0xFF
        source = Writes(whole, regions)
        made.source_entry.memory = source
        entry = made.offer()
        await made.fetch(entry.claim).run()
        for region, array in zip(regions, whole, strict=True):
            region.array[:] = array  # what the check compares with
        made.check_bytes()
        assert 0 < source.asked <= sum(array.nbytes for array in whole)
        await made.serving.idle()
        made.source_entry.memory = None
        source.close()
