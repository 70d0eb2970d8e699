"""The host's shadow: few and large writes, only of what was written, and a word of each bank read back behind them."""

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.errors import DeviceReset, HawkMemoryError, InvalidArgument, OutOfMemory
from hawk.memory.base import MoveSupport
from hawk.memory.region import ByteRanges, Moves
from hawk.memory.tenstorrent import Reservation, Tenstorrent, TenstorrentConfig
from hawk.memory.tenstorrent.staged import coalesced, pieces
from tests.descriptors import fds
from tests.fake_tenstorrent import MIB, FakeDevice, chip

BASE = 0x100080
NBYTES = MIB


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = fds()
    yield
    assert fds() == before


def made(device: FakeDevice, *, banks: int = 8, nbytes: int = NBYTES, **options: Any) -> Tenstorrent:
    config = TenstorrentConfig(BASE, nbytes, banks, way="host", **options)
    return Tenstorrent("npu0", Reservation((0,), BASE, nbytes, banks), config, open_device=lambda: device)


def ranges(*rows: tuple[int, int, int]) -> ByteRanges:
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    return ByteRanges(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy())


async def test_what_was_written_is_in_the_chips_banks_once_it_was_flushed() -> None:
    device = FakeDevice(chip("wormhole_b0", channels=6, channel_bytes=8 * MIB))
    npu = made(device, banks=12, piece=256 << 10)
    rng = np.random.default_rng(3)
    for region in npu.regions:
        region.array[:] = rng.integers(0, 256, NBYTES, np.uint8)
    await npu.flush(ranges(*((c, 0, NBYTES) for c in range(12))))
    for c, region in enumerate(npu.regions):
        at = (c % 2) * 4 * MIB + BASE
        assert np.array_equal(device.dram[20 + c // 2, 40][at : at + NBYTES], region.array)
    assert npu.counts["writes"] == 48
    assert npu.counts["written_bytes"] == 12 * NBYTES
    assert npu.counts["confirmed"] == 12
    assert device.under_way == []
    npu.close()
    npu.close()
    assert device.closed >= 1


async def test_pages_that_follow_each_other_are_one_write_and_gaps_are_left_alone() -> None:
    """A gap is the chip's: it may have written there since the shadow was filled."""
    device = FakeDevice()
    npu = made(device)
    chips = device.dram[20, 40]
    chips[:] = 0xEE
    region = npu.regions[0]
    region.array[:] = 0x11
    pages = [(0, 2048 * i, 2048) for i in range(64)]
    await npu.flush(ranges(*pages[::-1], (0, 200_000, 10), (0, 200_005, 20), (0, 200_032, 3)))
    assert [(at - BASE, n) for _, at, n in device.wrote] == [(0, 131072), (200_000, 25), (200_032, 3)]
    # The last word, as far as it was written.
    assert [(at - BASE, n) for _, at, n in device.read_back] == [(200_032, 3)]
    seen = chips[BASE : BASE + NBYTES]
    written = np.zeros(NBYTES, bool)
    for start, nbytes in ((0, 131072), (200_000, 25), (200_032, 3)):
        written[start : start + nbytes] = True
    assert (seen[written] == 0x11).all()
    assert (seen[~written] == 0xEE).all()
    npu.close()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=20),
    st.integers(1, 16),
)
def test_joined_ranges_are_the_same_bytes_each_once(rows: list[tuple[int, int, int]], most: int) -> None:
    wanted = {(bank, at) for bank, start, n in rows for at in range(start, start + n)}
    got = [
        (bank, at)
        for bank, start, nbytes in coalesced(ranges(*rows))
        for begin, end in pieces(start, nbytes, most)
        for at in range(begin, end)
        if end - begin <= most
    ]
    assert got == sorted(wanted)
    for _, start, nbytes in coalesced(ranges(*rows)):
        assert (start[1:] > (start + nbytes)[:-1]).all()  # what meets is one


async def test_a_chip_that_does_not_hold_what_was_written_is_said() -> None:
    class Forgetful(FakeDevice):
        def read(self, core: tuple[int, int], address: int, into: np.ndarray) -> None:
            self.under_way.clear()
            super().read(core, address, into)

    npu = made(Forgetful())
    npu.regions[5].array[:] = 7
    with pytest.raises(HawkMemoryError, match=r"npu0/channel5: the chip does not hold.*00000000.*07070707"):
        await npu.flush(ranges((5, 64, 64)))
    npu.close()


async def test_a_reset_ends_the_flush() -> None:
    device = FakeDevice()
    npu = made(device)
    device.failing = DeviceReset("the chip was reset or hangs", field="chip 0")
    with pytest.raises(DeviceReset):
        await npu.flush(ranges((0, 0, 64)))
    npu.close()


async def test_what_the_chip_wrote_is_refreshed() -> None:
    device = FakeDevice()
    npu = made(device)
    device.dram[22, 40][BASE + 128 : BASE + 256] = 0x5A
    await npu.refresh(ranges((2, 128, 128)))
    assert (npu.regions[2].array[128:256] == 0x5A).all()
    assert not npu.regions[2].array[:128].any()
    assert (npu.counts["reads"], npu.counts["read_bytes"]) == (1, 128)
    npu.close()


async def test_rows_may_be_moved_in_the_shadow_and_are_pushed_then() -> None:
    device = FakeDevice()
    npu = made(device)
    assert npu.move_support is MoveSupport.HOST
    npu.regions[1].array[:64] = range(64)
    one = np.asarray([1], np.int32)
    await npu.move(Moves(one, np.asarray([0]), np.asarray([4096]), np.asarray([64])))
    assert device.wrote == []
    await npu.flush(ranges((1, 4096, 64)))
    assert device.dram[21, 40][BASE + 4096 : BASE + 4160].tolist() == list(range(64))
    npu.close()


def test_what_a_program_of_the_chip_costs_does_not_count_where_the_host_moves() -> None:
    mover = SimpleNamespace(cost=1e-15, row_cost=1e-15)
    config = TenstorrentConfig(BASE, NBYTES, 8, way="host")
    npu = Tenstorrent(
        "npu0",
        Reservation((0,), BASE, NBYTES, 8),
        config,
        open_device=FakeDevice,
        mover=mover,  # type: ignore[arg-type]
    )
    assert npu.move_support is MoveSupport.HOST
    assert npu.move_cost == Tenstorrent.move_cost
    npu.close()


async def test_a_cancelled_flush_ends_with_the_writes_that_it_had_begun() -> None:
    device, inside, go_on = FakeDevice(), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go_on.wait(20)

    device.on_write = wait
    npu = made(device)
    task = asyncio.create_task(npu.flush(ranges((0, 0, 64))))
    await asyncio.to_thread(inside.wait, 20)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert device.under_way == []
    npu.close()


async def test_closing_ends_a_flush_after_the_piece_that_it_is_at() -> None:
    device, inside, go_on = FakeDevice(), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        go_on.wait(20)

    device.on_write = wait
    npu = made(device, piece=4096)
    task = asyncio.create_task(npu.flush(ranges((0, 0, NBYTES))))
    await asyncio.to_thread(inside.wait, 20)
    closing = asyncio.create_task(asyncio.to_thread(npu.close))
    while npu.regions:
        await asyncio.sleep(0)
    assert not device.closed
    go_on.set()
    await closing
    with pytest.raises(HawkMemoryError, match="closed"):
        await task
    assert len(device.wrote) < NBYTES // 4096
    assert device.closed


def test_a_shadow_that_the_host_has_no_room_for_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hawk.memory.shared.available_memory", lambda: 4 * MIB)
    device = FakeDevice()
    with pytest.raises(OutOfMemory, match="npu0"):
        made(device)
    assert device.closed == 1


def test_ranges_outside_a_bank_are_refused() -> None:
    npu = made(FakeDevice())
    with pytest.raises(InvalidArgument, match=r"ranges\[0\]"):
        asyncio.run(npu.flush(ranges((0, NBYTES - 1, 2))))
    npu.close()
