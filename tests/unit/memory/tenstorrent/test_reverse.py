"""From the chip to the host: by the chip's own writes into pinned memory where it has a program, else by reading."""

import asyncio
import ctypes
import errno
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hawk.memory.region import ByteRanges
from hawk.memory.tenstorrent import Reservation, Tenstorrent, TenstorrentConfig, kmd
from tests.descriptors import fds
from tests.fake_tenstorrent import MIB, FakeDevice, FakeKmd

BASE = 0x100080


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = fds()
    yield
    assert fds() == before


class Program:
    """Writes into pinned memory as the chip would, by the addresses that the driver gave."""

    def __init__(self, fake: FakeKmd, cost: float = 1e-10) -> None:
        self.fake = fake
        self.cost = cost
        self.bytes = 0

    async def __call__(self, ranges: ByteRanges, noc: Sequence[int]) -> None:
        columns = (ranges.region.tolist(), ranges.start.tolist(), ranges.nbytes.tolist())
        for bank, start, nbytes in zip(*columns, strict=True):
            address, size = self.fake.pinned_at(noc[bank])
            assert start + nbytes <= size
            ctypes.memset(address + start, bank + 1, nbytes)
            self.bytes += nbytes


def made(fake: FakeKmd, way: str, pusher: Any) -> Tenstorrent:
    return Tenstorrent(
        "npu0",
        Reservation((0,), BASE, MIB, 8),
        TenstorrentConfig(BASE, MIB, 8, way=way),  # type: ignore[arg-type]
        pusher=pusher,
        calls=fake,
        open_device=FakeDevice,
    )


def ranges(*rows: tuple[int, int, int]) -> ByteRanges:
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    return ByteRanges(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy())


@pytest.mark.parametrize("way", ["dma-buf", "host"])
async def test_the_chip_writes_into_the_pinned_shadow(way: str) -> None:
    fake = FakeKmd()
    program = Program(fake)
    npu = made(fake, way, program)
    assert (npu.back, npu.refreshes) == ("chip", True)
    assert "sources are written by the chip" in npu.said
    assert len(fake.pinned) == 8
    assert all(size == MIB for size in fake.pinned.values())
    await npu.refresh(ranges((3, 4096, 100), (7, MIB - 64, 64)))
    assert program.bytes == 164
    assert (npu.readable[3].array[4096:4196] == 4).all()
    assert (npu.readable[7].array[-64:] == 8).all()
    assert not npu.readable[3].array[:4096].any()
    # Staged there is one shadow; straight, the windows stay what cards write through.
    assert (npu.readable[0].array is npu.regions[0].array) is (way == "host")
    npu.close()
    assert fake.pinned == {}
    assert fake.fds == []


@pytest.mark.parametrize(
    ("way", "back", "refreshes"), [("dma-buf", "window", False), ("host", "tt-umd", True)]
)
async def test_without_a_faster_program_the_host_reads(way: str, back: str, refreshes: bool) -> None:
    slow = Program(FakeKmd(), cost=1.0)
    for pusher in (None, slow):
        npu = made(FakeKmd(), way, pusher)
        assert (npu.back, npu.refreshes) == (back, refreshes)
        assert ("writes of the chip" in npu.why_not) is (pusher is slow)
        assert [r.name for r in npu.readable] == [r.name for r in npu.regions]
        await npu.refresh(ranges((0, 0, 64)))
        npu.close()


@pytest.mark.parametrize("nth", [1, 5])
def test_pages_that_cannot_be_pinned_are_read_instead(nth: int) -> None:
    """Without an IOMMU only pages that follow each other are pinned."""
    fake = FakeKmd(fail={(kmd.PIN_PAGES, nth): errno.EINVAL})
    npu = made(fake, "host", Program(fake))
    assert npu.back == "tt-umd"
    assert "pin the shadow" in npu.why_not["writes of the chip"]
    assert fake.pinned == {}
    assert fake.fds == []
    npu.close()


async def test_a_cancelled_refresh_ends_with_the_chips_writes() -> None:
    """Until then the chip writes into pages that whoever cancelled may unpin next."""
    fake, inside, go_on, ended = FakeKmd(), asyncio.Event(), asyncio.Event(), []

    class Slow(Program):
        async def __call__(self, ranges: ByteRanges, noc: Sequence[int]) -> None:
            inside.set()
            await go_on.wait()
            await super().__call__(ranges, noc)
            ended.append(True)

    npu = made(fake, "dma-buf", Slow(fake))
    task = asyncio.create_task(npu.refresh(ranges((0, 0, 64))))
    await inside.wait()
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
    npu.close()


def test_a_program_that_is_none_leaves_nothing_open() -> None:
    fake = FakeKmd()
    with pytest.raises(AttributeError, match="cost"):
        made(fake, "dma-buf", object())
    assert fake.fds == []
    assert fake.held == {}
