"""A cache in a device's memory as a source: read only after the device was asked for just the pages that are read."""

from types import SimpleNamespace

import numpy as np
import pytest

from hawk.jobs.refreshing import source_ranges
from hawk.layouts import CacheShape, load
from hawk.memory.npu import EmulatedNpu
from hawk.memory.region import ByteRanges
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Selection
from hawk.retile import cpu
from hawk.retile.rows import RowsStep
from tests.unit.jobs.rig import rig
from tests.unit.layouts.moving import placement


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


@pytest.mark.parametrize(
    ("source", "target", "codecs", "rows"),
    [
        ("tenstorrent/kv-hf", "tenstorrent/kv", ("bfp8_b", "bfp8_b"), True),
        ("tenstorrent/kv-hf", "tenstorrent/kv", ("bf16", "bf16"), False),
        ("vllm/nhd-fp8", "tenstorrent/kv", (None, "bf16"), True),
        ("vllm/mla-fp8", "vllm/mla", (None, None), True),
    ],
)
def test_pages_of_other_blocks_are_never_asked_for(source, target, codecs, rows):
    """They may just be arriving: what the device holds of them is older than what the shadow does."""
    latent = {"heads": 1, "dim": 576, "kvs": 1} if "mla" in source else {"heads": 2, "dim": 64}
    shape = CacheShape(layers=2, block_size=32, blocks=6, **latent)
    src = load(source).compile(shape, codec=codecs[0])
    dst = load(target).compile(shape, codec=codecs[1])
    mine, into = np.asarray([4, 1]), np.asarray([0, 3])
    chunk = target_chunk(dst, into, Selection(0, 2, 0, 50), Chunk(0, 2, 0, 2))
    steps = retile_steps(src, mine, placement(src), chunk, into)
    assert any(isinstance(step, RowsStep) for step in steps) is rows

    place = placement(src)
    sizes = np.repeat(src.buffer_bytes, src.channels)
    device = [np.random.default_rng(i).integers(0, 256, n, np.uint8) for i, n in enumerate(sizes)]
    shadow = [np.full(len(one), 0xFF, np.uint8) for one in device]
    cache = SimpleNamespace(placement=place, layout=src)
    asked = source_ranges(cache, steps)  # type: ignore[arg-type]
    columns = (asked.region.tolist(), asked.start.tolist(), asked.nbytes.tolist())
    for region, start, nbytes in zip(*columns, strict=True):
        shadow[region][start : start + nbytes] = device[region][start : start + nbytes]
    assert asked.total <= sum(sizes) // 3 + 16  # two blocks of six, and scales of the whole cache
    made = []
    for regions in (device, shadow):
        arena = np.zeros(chunk.nbytes, np.uint8)
        for step in steps:
            cpu.run_step(step, regions, arena)
        made.append(arena)
    assert np.array_equal(*made)
