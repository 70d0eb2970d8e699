"""The NPU behind the kernel module, with the kernel's answers made up at the ioctl seam."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from hawk.errors import HawkMemoryError, InvalidArgument, OutOfMemory, RegistrationFailed
from hawk.memory import npu_abi as abi
from hawk.memory import registry
from hawk.memory.base import MoveSupport
from hawk.memory.npu_device import Kernel, NpuConfig, NpuDevice
from hawk.memory.region import ByteRanges, Moves
from hawk.memory.windows import is_dmabuf, map_window
from tests.descriptors import fds

CHANNEL = 1 << 20


@dataclass
class FakeNpu:
    """Answers as the module does, over a memfd; `fail` makes the n-th call of a kind fail."""

    provider: int = abi.EMULATED
    flags: int = abi.CAN_EXPORT | abi.HAS_PAGES
    channels: int = 4
    version: int = abi.ABI_VERSION
    fail: dict[tuple[object, int], int] = field(default_factory=dict)
    open_fds: list[int] = field(default_factory=list)
    claimed: set[int] = field(default_factory=set)
    flushed: list[tuple[int, int, int]] = field(default_factory=list)
    counts: dict[object, int] = field(default_factory=dict)
    gate: threading.Event | None = None

    def _step(self, what: object) -> None:
        n = self.counts[what] = self.counts.get(what, 0) + 1
        code = self.fail.get((what, n))
        if code is not None:
            raise OSError(code, os.strerror(code))

    def open(self, path: str) -> int:
        assert path == "/dev/hawk_npu0"
        self._step("open")
        fd = os.memfd_create("npu")
        os.ftruncate(fd, self.channels * CHANNEL)
        self.open_fds.append(fd)
        return fd

    def ioctl(self, fd: int, request: int, argument: ctypes.Structure) -> None:
        assert fd == self.open_fds[0]
        self._step(request)
        if request == abi.INFO:
            assert isinstance(argument, abi.Info)
            argument.abi_version, argument.provider = self.version, self.provider
            argument.channels, argument.flags = self.channels, self.flags
            argument.channel_bytes, argument.page_bytes = CHANNEL, 4096
        elif request == abi.CLAIM:
            assert isinstance(argument, abi.Channel)
            assert argument.flags == 0
            assert argument.channel not in self.claimed
            self.claimed.add(argument.channel)
        elif request == abi.EXPORT:
            assert isinstance(argument, abi.Export)
            assert argument.channel in self.claimed
            assert (argument.flags, argument.offset, argument.nbytes) == (0, 0, CHANNEL)
            argument.fd = os.dup(fd)
            self.open_fds.append(argument.fd)
        elif request == abi.FLUSH:
            assert isinstance(argument, abi.Range)
            if self.gate is not None:
                self.gate.wait(20)
            self.flushed.append((argument.channel, argument.offset, argument.nbytes))
        elif request == abi.CHECKSUM:
            assert isinstance(argument, abi.Checksum)
            argument.value = argument.channel << 32 | argument.offset
        else:
            raise OSError(errno.ENOTTY, "no such ioctl")

    def map(self, fd: int, nbytes: int, offset: int) -> np.ndarray:
        self._step("map")
        channel = offset >> abi.MAP_SHIFT
        assert channel in self.claimed
        return Kernel().map(fd, nbytes, channel * CHANNEL)

    def close(self, fd: int) -> None:
        self.open_fds.remove(fd)
        os.close(fd)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = fds()
    yield
    assert fds() == before


def ranges(rows: list[tuple[int, int, int]]) -> ByteRanges:
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    return ByteRanges(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy())


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_channels_are_claimed_mapped_and_exported(asked: int) -> None:
    fake = FakeNpu()
    npu = NpuDevice("npu0", channels=asked, calls=fake)
    count = asked or 4
    assert fake.claimed == set(range(count))
    assert (npu.channels, npu.channel_bytes, npu.provider) == (count, CHANNEL, "emulated")
    assert [r.name for r in npu.regions] == [f"npu0/channel{c}" for c in range(count)]
    assert len({r.dmabuf for r in npu.regions} | {r.fd for r in npu.regions}) == count + 1
    for c, region in enumerate(npu.regions):
        region.array[:] = c + 1
    assert os.pread(fake.open_fds[0], 1, CHANNEL * count - 1) == bytes([count])
    a = npu.allocate(1000, "kv")
    assert npu.free_bytes() == [CHANNEL - 1024] * count
    npu.free(a)
    npu.close()
    npu.close()
    assert fake.open_fds == []


@pytest.mark.parametrize(
    ("fake", "error", "told"),
    [
        (FakeNpu(fail={("open", 1): errno.ENOENT}), HawkMemoryError, "Load the kernel module hawk_npu"),
        (FakeNpu(fail={("open", 1): errno.EACCES}), HawkMemoryError, "udev"),
        (FakeNpu(fail={(abi.INFO, 1): errno.ENOTTY}), HawkMemoryError, "is it a device of hawk_npu"),
        (FakeNpu(version=2), HawkMemoryError, "got 2; expected 1"),
        (FakeNpu(provider=abi.DMABUF), HawkMemoryError, "got dmabuf; expected emulated or bar"),
        (FakeNpu(channels=1), InvalidArgument, "at most 1"),
        (FakeNpu(fail={(abi.CLAIM, 2): errno.EBUSY}), HawkMemoryError, "npu0/channel1.*another process"),
        (FakeNpu(fail={(abi.CLAIM, 2): errno.ENOMEM}), OutOfMemory, "npu0/channel1"),
        (FakeNpu(fail={("map", 2): errno.ENOMEM}), HawkMemoryError, "npu0/channel1.*cannot be mapped"),
        (FakeNpu(fail={(abi.EXPORT, 2): errno.EMFILE}), HawkMemoryError, "npu0/channel1.*exported"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_stays_open(
    fake: FakeNpu, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=f"(?s){told}"):
        NpuDevice("npu0", channels=2, calls=fake)
    assert fake.open_fds == []


async def test_one_flush_behind_the_last_write_of_each_channel() -> None:
    fake = FakeNpu()
    npu = NpuDevice("npu0", calls=fake)
    try:
        await npu.flush(ranges([]))
        await npu.flush(ranges([(2, 4096, 10), (0, 0, 64), (2, 100, 50), (0, 64, 1)]))
        assert sorted(fake.flushed) == [(0, 0, 65), (2, 100, 4006)]
        with pytest.raises(InvalidArgument, match=r"ranges\[0\]"):
            await npu.flush(ranges([(4, 0, 1)]))
        fake.fail[abi.FLUSH, 3] = errno.ENODEV
        with pytest.raises(HawkMemoryError, match="cannot be flushed"):
            await npu.flush(ranges([(1, 0, 1)]))
    finally:
        npu.close()


async def test_a_cancelled_flush_ends_only_when_the_module_has_answered() -> None:
    fake = FakeNpu(gate=threading.Event())
    npu = NpuDevice("npu0", calls=fake)
    assert fake.gate is not None
    try:
        task = asyncio.create_task(npu.flush(ranges([(1, 0, 8)])))
        while not fake.counts.get(abi.FLUSH):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        fake.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fake.flushed == [(1, 0, 8)]
    finally:
        fake.gate.set()
        npu.close()


async def test_moves_where_the_channels_are_pages() -> None:
    npu = NpuDevice("npu0", calls=FakeNpu())
    window = NpuDevice("npu0", calls=FakeNpu(provider=abi.BAR, flags=abi.CAN_EXPORT))
    try:
        assert npu.move_support is MoveSupport.HOST
        assert window.move_support is MoveSupport.NONE
        npu.regions[3].array[:8] = range(8)
        one = np.asarray([3], np.int32)
        await npu.move(Moves(one, np.asarray([0]), np.asarray([64]), np.asarray([8])))
        assert npu.regions[3].array[64:72].tolist() == list(range(8))
        assert npu.checksum(3, 64, 8) == 3 << 32 | 64
    finally:
        npu.close()
        window.close()


def test_it_is_a_kind_of_memory() -> None:
    assert registry.config_class("npu") is NpuConfig
    with pytest.raises(InvalidArgument, match="channels"):
        NpuConfig(channels=65)
    with pytest.raises(InvalidArgument, match="alignment"):
        NpuConfig(alignment=48)
    with pytest.raises(HawkMemoryError, match=r"memory\.n\.device.*Load the kernel module"):
        registry.create("npu", "n", NpuConfig(device="/dev/hawk_npu-not-there"))


def test_a_client_maps_memfds_as_ever_and_refuses_the_rest() -> None:
    fd = os.memfd_create("plain")
    try:
        assert not is_dmabuf(fd)
        assert not is_dmabuf(-1)
        with pytest.raises(RegistrationFailed, match=r"sealed|shrunk"):
            map_window(fd, 4096, name="npu0/channel0")
    finally:
        os.close(fd)


async def test_closing_while_a_flush_runs_gives_no_descriptor_away_that_it_uses() -> None:
    """The flush is in the kernel for its first channel: the descriptor stays for that call, and none comes after it."""
    fake = FakeNpu(gate=threading.Event())
    npu = NpuDevice("npu0", calls=fake)
    assert fake.gate is not None
    flushing = asyncio.ensure_future(npu.flush(ranges([(0, 0, 64), (1, 0, 64)])))
    while not fake.counts.get(abi.FLUSH):
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(asyncio.to_thread(npu.close))
    while npu.regions:
        await asyncio.sleep(0)
    assert fake.open_fds, "the kernel is still using it"
    fake.gate.set()
    await closing
    with pytest.raises(HawkMemoryError, match="closed"):
        await flushing
    assert fake.counts[abi.FLUSH] == 1
    assert not fake.open_fds


def test_a_dmabuf_that_cannot_be_kept_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("window")
    os.ftruncate(fd, 4096)

    def full(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("hawk.memory.windows.is_dmabuf", lambda _: True)
    monkeypatch.setattr("hawk.memory.windows.fcntl.fcntl", full)
    with pytest.raises(RegistrationFailed, match="Too many open files"):
        map_window(fd, 4096)
    os.close(fd)
