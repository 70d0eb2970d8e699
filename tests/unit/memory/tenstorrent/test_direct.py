"""Windows of the chip as regions: what they cover, what a network card is given, and every way in which it fails."""

import asyncio
import ctypes
import errno
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hawk.errors import (
    DeviceDenied,
    DeviceReset,
    DriverTooOld,
    HawkMemoryError,
    InvalidArgument,
    OutOfMemory,
    WindowsExhausted,
)
from hawk.memory import npu_abi
from hawk.memory.region import ByteRanges
from hawk.memory.tenstorrent import Chip, Reservation, Tenstorrent, TenstorrentConfig, kmd
from hawk.transports.verbs._device import LOCAL_WRITE
from hawk.transports.verbs._register import close, register
from hawk.transports.verbs.testing import FakeDriver
from tests.descriptors import fds
from tests.fake_tenstorrent import MIB, PAGE, FakeKmd, chip

BASE = 0x100080
NBYTES = 5 * MIB - PAGE
GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = fds()
    yield
    gc.collect()
    assert fds() == before


def made(
    fake: FakeKmd,
    *,
    nbytes: int = NBYTES,
    banks: int = 8,
    described: Chip | None = None,
    mover: Any = None,
    **options: Any,
) -> Tenstorrent:
    config = TenstorrentConfig(BASE, nbytes, banks, way="dma-buf", **options)
    return Tenstorrent(
        "npu0",
        Reservation((0,), BASE, nbytes, banks),
        config,
        chip=described or chip(),
        calls=fake,
        mover=mover,
    )


def ended(fake: FakeKmd, windows: dict[int, int]) -> None:
    assert fake.fds == []
    assert fake.held == {}
    assert fake.windows == windows


def ranges(*rows: tuple[int, int, int]) -> ByteRanges:
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    return ByteRanges(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy())


SMALL = {2 * MIB: 201}
"""A board whose 4 GiB windows are not to be had."""


@pytest.mark.parametrize("windows", [{4 * GIB: 8, 2 * MIB: 201}, SMALL])
def test_every_byte_lands_where_the_bank_has_it(windows: dict[int, int]) -> None:
    fake = FakeKmd(windows=dict(windows))
    npu = made(fake)
    extents = [0] if 4 * GIB in windows else [0, 2 * MIB - BASE, 4 * MIB - BASE]
    assert (npu.channels, npu.channel_bytes, npu.alignment, npu.way) == (8, NBYTES, 64, "dma-buf")
    for c, region in enumerate(npu.regions):
        assert region.name == f"npu0/channel{c}"
        assert list(region.extents) == extents
        assert region.nbytes == NBYTES
        region.array[:] = np.arange(NBYTES, dtype=np.uint32).astype(np.uint8) ^ np.uint8(c)
        for start, stop in zip(region.extents, [*region.extents[1:], NBYTES], strict=True):
            for at in (start, stop - 1):
                assert fake.shown((20 + c, 40), BASE + at, 1) == bytes([(at & 255) ^ c])
    configs = [w.config for w in fake.held.values()]
    assert {w.ordering for w in configs if w is not None} == {kmd.ORDERING["strict"]}
    npu.close()
    npu.close()
    ended(fake, windows)


def test_a_card_writes_through_the_exports_of_every_extent() -> None:
    fake = FakeKmd(windows=dict(SMALL))
    npu = made(fake)
    card = FakeDriver().open("fake0")
    for c, region in enumerate(npu.regions):
        registered = register([card], region, 1 << 30, LOCAL_WRITE)
        assert registered.start.tolist() == list(region.extents)
        # What is exported begins at a page and ends at one: no more of the chip than that is the card's.
        sizes = [os.fstat(h.dmabuf).st_size for h in region.handles]
        assert [h.offset for h in region.handles] == [BASE % PAGE, 0, 0]
        assert sum(sizes) == (NBYTES + BASE % PAGE + PAGE - 1) // PAGE * PAGE
        for handle, start in zip(region.handles, region.extents, strict=True):
            os.pwrite(handle.dmabuf, bytes([c + 1]), handle.offset)
            assert region.array[start] == c + 1
            assert fake.shown((20 + c, 40), BASE + start, 1) == bytes([c + 1])
        close(registered.slices[0])
    card.close()
    npu.close()
    ended(fake, SMALL)


async def test_a_flush_reads_behind_the_last_write_of_each_window_touched() -> None:
    fake = FakeKmd(windows=dict(SMALL))
    npu = made(fake)
    try:
        await npu.flush(ranges())
        assert npu.counts == {"windows": 24, "flushed_windows": 0}
        first = 2 * MIB - BASE
        await npu.flush(ranges((0, 0, 64), (0, 64, 64), (2, first - 4, 8), (7, 3 * MIB, 32)))
        assert npu.counts["flushed_windows"] == 4
        with pytest.raises(InvalidArgument, match=r"ranges\[0\]"):
            await npu.flush(ranges((8, 0, 1)))
    finally:
        npu.close()
    with pytest.raises(InvalidArgument, match="closed"):
        await npu.flush(ranges((0, 0, 1)))


async def test_a_chip_that_was_reset_is_said_before_a_window_is_touched() -> None:
    fake = FakeKmd()
    npu = made(fake)
    try:
        fake.dead = True
        with pytest.raises(DeviceReset, match=r"memory\.npu0: the chip was reset"):
            await npu.flush(ranges((1, 0, 64)))
        assert npu.counts["flushed_windows"] == 0
    finally:
        fake.dead = False
        npu.close()


def test_windows_run_short_the_region_is_less_before_anything_fails() -> None:
    fake = FakeKmd(windows={2 * MIB: 20})
    npu = made(fake, window_share=1.0, nbytes=8 * MIB)
    assert npu.channel_bytes == 4 * MIB - BASE
    assert "windows are short" in npu.said
    assert npu.counts["windows"] == 16
    npu.close()
    ended(fake, {2 * MIB: 20})


def test_too_few_windows_are_an_error_that_counts_them() -> None:
    fake = FakeKmd(windows={2 * MIB: 20})
    with pytest.raises(WindowsExhausted) as caught:
        made(fake, nbytes=8 * MIB, least=8 * MIB)
    assert isinstance(caught.value, OutOfMemory)
    assert caught.value.facts["windows"] == "0 of 4 GiB, 20 of 2 MiB"
    assert "window_share" in str(caught.value.hint)
    ended(fake, {2 * MIB: 20})
    with pytest.raises(WindowsExhausted, match="0 bytes of each bank covered"):
        made(FakeKmd(windows={2 * MIB: 7}))


def test_others_take_windows_meanwhile() -> None:
    """The 4 GiB ones go while we take ours; the rest is laid out anew with small ones, and nothing is kept."""
    fake = FakeKmd(windows={4 * GIB: 8, 2 * MIB: 201})

    def others(fake: FakeKmd) -> None:
        if fake.windows.get(4 * GIB) == 3:
            fake.windows[4 * GIB] = 0

    fake.taken_by = others
    npu = made(fake)
    assert npu.counts["windows"] == 24
    assert npu.channel_bytes == NBYTES
    npu.close()
    ended(fake, {4 * GIB: 5, 2 * MIB: 201})


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_no_more_windows_are_held_than_the_share(share: float) -> None:
    fake = FakeKmd()
    budget = int(201 * share)
    if budget < 8:
        with pytest.raises(WindowsExhausted):
            made(fake, window_share=share, large_window_share=0.0)
    else:
        npu = made(fake, window_share=share, large_window_share=0.0, nbytes=512 * MIB)
        assert npu.counts["windows"] == budget // 8 * 8
        npu.close()
    ended(fake, dict(kmd.WINDOWS["blackhole"]))


def test_two_banks_of_one_tile() -> None:
    wormhole = chip("wormhole_b0", channels=6, channel_bytes=2 * GIB)
    fake = FakeKmd(device=0x401E, windows=dict(kmd.WINDOWS["wormhole_b0"]))
    npu = made(fake, banks=12, described=wormhole)
    for c, region in enumerate(npu.regions):
        region.array[-4:] = c + 1
        last = (c % 2) * GIB + BASE + NBYTES - 4
        assert fake.shown((20 + c // 2, 40), last, 4) == bytes([c + 1]) * 4
    assert npu.alignment == 32
    npu.close()
    ended(fake, dict(kmd.WINDOWS["wormhole_b0"]))


@pytest.mark.parametrize(
    ("fake", "error", "told"),
    [
        (FakeKmd(version=(2, 9, 3)), DriverTooOld, r"got driver 2\.9\.3; expected driver 2\.10 or later"),
        (FakeKmd(kernel=(5, 4)), DriverTooOld, r"got Linux 5\.4; expected Linux 5\.8 or later"),
        (FakeKmd(fail={("open", 1): errno.ENOENT}), HawkMemoryError, "Load the driver tt-kmd"),
        (FakeKmd(fail={("open", 1): errno.EACCES}), DeviceDenied, "udev rule"),
        (FakeKmd(fail={(kmd.GET_DRIVER_INFO, 1): errno.ENODEV}), DeviceReset, "was reset"),
        (FakeKmd(fail={(kmd.ALLOCATE_TLB, 3): errno.ENODEV}), DeviceReset, "allocate a window"),
        (FakeKmd(fail={(kmd.CONFIGURE_TLB, 2): errno.EINVAL}), HawkMemoryError, "point a window at a bank"),
        (FakeKmd(fail={(kmd.EXPORT_TLB_DMABUF, 2): errno.EOPNOTSUPP}), DriverTooOld, "cannot export"),
        (FakeKmd(fail={(kmd.EXPORT_TLB_DMABUF, 8): errno.EMFILE}), HawkMemoryError, "export a window"),
        (FakeKmd(fail={("place", 2): errno.EBUSY}), HawkMemoryError, "npu0/channel1.*still maps it"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_stays_taken(
    fake: FakeKmd, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=f"(?s){told}") as caught:
        made(fake)
    assert type(caught.value) is error
    assert fake.fds == []
    # What a window that failed half-way had is the descriptor's, which is closed.
    assert len(fake.held) <= 8


def test_a_reservation_across_the_end_of_a_bank_takes_no_window() -> None:
    fake = FakeKmd()
    with pytest.raises(InvalidArgument, match="crosses the end of a bank"):
        made(fake, described=chip(channel_bytes=4 * MIB))
    assert fake.counts == {}


def test_a_module_adopts_the_windows_for_cards_that_register_by_address() -> None:
    fake = FakeKmd(windows=dict(SMALL))
    npu = made(fake, adopter="/dev/hawk_npu1")
    assert len(fake.adopted) == 24
    handles = [h for region in npu.regions for h in region.handles]
    assert len({h.address for h in handles}) == 24
    assert all(h.address % PAGE == h.offset for h in handles)
    card = FakeDriver()
    card.faults.dmabuf = errno.EOPNOTSUPP
    opened = card.open("fake0")
    region = npu.regions[3]
    registered = register([opened], region, 1 << 30, LOCAL_WRITE)
    assert registered.address.tolist() == [h.address for h in region.handles]
    close(registered.slices[0])
    opened.close()
    npu.close()
    ended(fake, SMALL)


def test_a_module_that_does_not_adopt() -> None:
    fake = FakeKmd(fail={("adopt", 2): errno.ENOSPC})
    with pytest.raises(HawkMemoryError, match=r"memory\.npu0\.adopter.*adopt=1"):
        made(fake, adopter="/dev/hawk_npu1")
    assert fake.fds == []


def test_arrays_outlive_the_memory() -> None:
    npu = made(FakeKmd())
    kept = npu.regions[0].array
    npu.close()
    kept[:] = 1
    assert int(kept.sum()) == NBYTES


async def test_a_flush_that_comes_to_run_when_the_memory_is_closed_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing was read behind the writes, so nobody may be told that they are there."""
    npu = made(FakeKmd())
    real = npu._way.flush

    def late(ranges: ByteRanges) -> None:
        npu.close()
        real(ranges)

    monkeypatch.setattr(npu._way, "flush", late)
    with pytest.raises(HawkMemoryError, match="closed"):
        await npu.flush(ranges((0, 0, 64)))


async def test_closing_while_a_flush_runs() -> None:
    fake = FakeKmd()
    npu = made(fake)
    real, inside, go_on = fake.ioctl, threading.Event(), threading.Event()

    def slow(fd: int, request: int, argument: Any) -> None:
        inside.set()
        go_on.wait(20)
        real(fd, request, argument)

    fake.ioctl = slow  # type: ignore[method-assign]
    flushing = asyncio.ensure_future(npu.flush(ranges(*((c, 0, NBYTES) for c in range(8)))))
    await asyncio.to_thread(inside.wait, 20)
    closing = asyncio.ensure_future(asyncio.to_thread(npu.close))
    while npu.regions:
        await asyncio.sleep(0)
    assert fake.fds, "the driver is still answering"
    go_on.set()
    await closing
    with pytest.raises(HawkMemoryError, match="closed"):
        await flushing
    assert fake.fds == []


def test_the_structures_are_the_drivers() -> None:
    sizes = {
        kmd.DeviceInfo: 24,
        kmd.DriverInfo: 16,
        kmd.AllocateTlb: 48,
        kmd.FreeTlb: 4,
        kmd.ConfigureTlb: 48,
        kmd.ExportTlb: 32,
        kmd.PinPages: 40,
        kmd.UnpinPages: 24,
        npu_abi.Adopt: 16,
    }
    assert {cls: ctypes.sizeof(cls) for cls in sizes} == sizes
    assert (kmd.EXPORT_TLB_DMABUF, kmd.GET_DEVICE_INFO) == (0xFA10, 0xFA00)
    assert kmd.ConfigureTlb.addr.offset == 8
    assert kmd.ConfigureTlb.noc.offset == 24
    assert kmd.ExportTlb.offset.offset == 16
