"""A whole job in one process into a chip that takes what was written only once somebody read behind it."""

import math

import numpy as np
import pytest

from hawk.errors import DeviceReset
from hawk.integrations.ttnn import BankMover
from hawk.memory.region import ByteRanges
from hawk.memory.tenstorrent import Reservation, Tenstorrent, TenstorrentConfig
from tests import fake_ttnn
from tests import fake_ttnn_programs as programs
from tests.end_to_end import caches as c
from tests.fake_tenstorrent import MIB, FakeDevice, FakeKmd, chip
from tests.unit.jobs import rig as rigs
from tests.unit.jobs.rig import CAPACITY, rig

BASE = 0x100080
EACH = CAPACITY // 8


class StagedChip(Tenstorrent):
    """The rig's device: `visible` is the chip's own DRAM, not the shadow."""

    def __init__(self) -> None:
        self.device = FakeDevice(chip(channel_bytes=2 * MIB))
        for dram in self.device.dram.values():
            dram[:] = c.CANARY
        config = TenstorrentConfig(BASE, EACH, 8, way="host", piece=64 << 10)
        super().__init__("npu0", Reservation((0,), BASE, EACH, 8), config, open_device=lambda: self.device)
        for region in self.regions:
            region.array[:] = c.CANARY

    @property
    def visible(self) -> list[np.ndarray]:
        return [self.device.dram[20 + bank, 40][BASE : BASE + EACH] for bank in range(8)]


class WindowedChip(Tenstorrent):
    """The same through windows, of which two lie on each bank's part; `visible` is what the windows show."""

    BASE = 2 * MIB - EACH // 3 // 4096 * 4096

    def __init__(self) -> None:
        self.fake = FakeKmd(windows={2 * MIB: 40})
        config = TenstorrentConfig(self.BASE, EACH, 8, way="dma-buf")
        super().__init__("npu0", Reservation((0,), self.BASE, EACH, 8), config, chip=chip(), calls=self.fake)
        for region in self.regions:
            region.array[:] = c.CANARY

    @property
    def visible(self) -> list[np.ndarray]:
        found = []
        for bank, region in enumerate(self.regions):
            ends = [*region.extents[1:], EACH]
            parts = zip(region.extents, ends, strict=True)
            shown = b"".join(
                self.fake.shown((20 + bank, 40), self.BASE + begin, end - begin) for begin, end in parts
            )
            found.append(np.frombuffer(shown, np.uint8))
        return found


@pytest.fixture(autouse=True)
def a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "HoldingNpu", StagedChip)


async def test_every_byte_goes_through_windows_and_each_is_read_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rigs, "HoldingNpu", WindowedChip)
    async with rig() as made:
        npu = made.npu
        assert isinstance(npu, WindowedChip)
        assert {len(region.extents) for region in npu.regions} == {2}
        entry = made.offer()
        await made.fetch(entry.claim).run()
        made.check_bytes()
        assert npu.counts["flushed_windows"] >= 8
        await made.serving.idle()
    assert npu.fake.fds == []


@pytest.mark.parametrize("mode", ["direct", "staged"])
async def test_every_byte_is_in_the_chip_when_the_job_is_ready(mode: str) -> None:
    async with rig(mode=mode) as made:
        entry = made.offer()
        await made.fetch(entry.claim).run()
        made.check_bytes()
        npu = made.npu
        assert isinstance(npu, StagedChip)
        assert npu.device.under_way == []
        counts = npu.counts
        assert counts["written_bytes"] >= 2 * c.LAYERS * rigs.TOKENS * c.HEADS * c.DIM * 2
        # Few: both blocks are apart, and each is one write a bank and plane; pages that follow each other were joined.
        assert counts["writes"] == 2 * 8 * 2 * c.LAYERS
        await made.serving.idle()


class MovingChip(WindowedChip):
    """The same, and a stand-in for ttnn whose chip is this one moves bytes inside its banks."""

    def __init__(self) -> None:
        super().__init__()
        npu = self

        class Chip(fake_ttnn.Mesh):
            def view(self, chip: int, bank: int, address: int, nbytes: int) -> np.ndarray:
                inside = address - npu.BASE
                if 0 <= inside < EACH:
                    return npu.regions[bank].array[inside : inside + nbytes]
                return super().view(chip, bank, address, nbytes)

        self.mesh = Chip(banks=8, bank_bytes=MIB)
        self.mover = BankMover(self.mesh, Reservation((0,), self.BASE, EACH, 8), slots=4, piece=512)
        self._moves_there = self.mover
        self.move_cost, self.move_row_cost = 1e-12, 1e-9

    def close(self) -> None:
        super().close()
        self.mover.close()


@pytest.mark.parametrize("measured", [True, False])
async def test_staged_pages_are_moved_by_a_program_of_the_chips(
    measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = programs.Programs()
    lent.install(monkeypatch)
    monkeypatch.setattr(rigs, "HoldingNpu", MovingChip)
    async with rig(mode="staged" if measured else "auto") as made:
        npu = made.npu
        assert isinstance(npu, MovingChip)
        if not measured:
            npu.move_cost = math.inf
        job = made.fetch(made.offer().claim)
        await job.run()
        made.check_bytes()
        assert job.result.mode == ("staged" if measured else "direct")
        assert bool(lent.seen) == measured
        assert npu.mover.launched == len(lent.seen)
        await made.serving.idle()


async def test_a_move_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    lent = programs.Programs(lambda *_: None)
    lent.install(monkeypatch)
    monkeypatch.setattr(rigs, "HoldingNpu", MovingChip)
    async with rig(mode="staged") as made:
        await made.fetch(made.offer().claim).run()
        with pytest.raises(AssertionError):
            made.check_bytes()
        await made.serving.idle()


async def test_without_the_flush_nothing_is_in_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""

    async def nothing(self: Tenstorrent, ranges: ByteRanges) -> None:
        del self, ranges

    monkeypatch.setattr(Tenstorrent, "flush", nothing)
    async with rig() as made:
        entry = made.offer()
        await made.fetch(entry.claim).run()
        with pytest.raises(AssertionError):
            made.check_bytes()
        await made.serving.idle()


async def test_a_chip_that_was_reset_fails_the_job_by_name() -> None:
    async with rig() as made:
        entry = made.offer()
        npu = made.npu
        assert isinstance(npu, StagedChip)
        npu.device.failing = DeviceReset("the chip was reset or hangs", field="chip 0")
        with pytest.raises(DeviceReset):
            await made.fetch(entry.claim).run()
        npu.device.failing = None
        await made.serving.idle()
