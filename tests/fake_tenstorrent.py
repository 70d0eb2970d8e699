"""A chip, its kernel driver and tt-umd made of memfds and arrays, at the lowest seams there are."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from hawk.memory import npu_abi
from hawk.memory.mapping import Patchwork
from hawk.memory.tenstorrent import Chip, kmd

MIB = 1 << 20
PAGE = 4096
AT = 48
"""Bits of a file offset below the number of the window that it is of."""


def chip(
    arch: str = "blackhole", *, channels: int = 8, channel_bytes: int = 4 << 30, number: int = 0
) -> Chip:
    """A chip with three cores a channel, at coordinates that are nobody's."""
    cores = tuple(tuple((20 + c, 40 + port) for port in range(3)) for c in range(channels))
    return Chip(number, arch, cores, channel_bytes)


@dataclass
class _Window:
    size: int
    config: kmd.ConfigureTlb | None = None
    memfd: int = -1
    low: int = 0
    exports: int = 0
    mapped: int = 0


@dataclass
class FakeKmd:
    """Answers as tt-kmd does.  What a window shows is a memfd of its own, dma-bufs are duplicates of that.

    windows     how many there are of each size
    fail        errno of the n-th call of a kind (an ioctl's number, "open", "place")
    dead        the chip was reset: every call says ENODEV
    taken_by    called before each ALLOCATE_TLB, so that others can take windows meanwhile
    """

    version: tuple[int, int, int] = (2, 10, 1)
    kernel: tuple[int, int] = (6, 8)
    device: int = 0xB140
    windows: dict[int, int] = field(default_factory=lambda: dict(kmd.WINDOWS["blackhole"]))
    fail: dict[tuple[object, int], int] = field(default_factory=dict)
    dead: bool = False
    adopter: str = "/dev/hawk_npu1"
    counts: dict[object, int] = field(default_factory=dict)
    fds: list[int] = field(default_factory=list)
    held: dict[int, _Window] = field(default_factory=dict)
    adopted: list[int] = field(default_factory=list)
    pinned: dict[int, int] = field(default_factory=dict)
    noc: dict[int, int] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)
    taken_by: Callable[[FakeKmd], None] = lambda kmd: None

    def _step(self, what: object) -> None:
        n = self.counts[what] = self.counts.get(what, 0) + 1
        code = errno.ENODEV if self.dead else self.fail.get((what, n), 0)
        if code:
            raise OSError(code, os.strerror(code))

    def open(self, path: str) -> int:
        assert path in ("/dev/tenstorrent/0", self.adopter), path
        self._step("open")
        fd = os.memfd_create("device")
        self.fds.append(fd)
        return fd

    def close(self, fd: int) -> None:
        self.fds.remove(fd)
        for window in self.held.values():
            if fd in self.exported(window):
                window.exports -= 1
        os.close(fd)

    def exported(self, window: _Window) -> set[int]:
        same = os.fstat(window.memfd).st_ino if window.memfd >= 0 else None
        return {fd for fd in self.fds if os.fstat(fd).st_ino == same}

    def release(self) -> tuple[int, int]:
        return self.kernel

    def ioctl(self, fd: int, request: int, argument: ctypes.Structure) -> None:
        assert fd in self.fds
        if request == npu_abi.ADOPT:
            self._step("adopt")
            assert isinstance(argument, npu_abi.Adopt)
            self.adopted.append(argument.fd)
            argument.channel = len(self.adopted) - 1
            return
        if request == kmd.ALLOCATE_TLB:
            self.taken_by(self)
        self._step(request)
        answers: dict[int, Callable[[Any], None]] = {
            kmd.GET_DRIVER_INFO: self._driver,
            kmd.GET_DEVICE_INFO: self._device,
            kmd.ALLOCATE_TLB: self._allocate,
            kmd.FREE_TLB: self._free,
            kmd.CONFIGURE_TLB: self._configure,
            kmd.EXPORT_TLB_DMABUF: self._export,
            kmd.PIN_PAGES: self._pin,
            kmd.UNPIN_PAGES: self._unpin,
        }
        answers[request](argument)

    def _driver(self, info: kmd.DriverInfo) -> None:
        assert info.in_size == 12
        info.interface = 2
        info.major, info.minor, info.patch = self.version

    def _device(self, info: kmd.DeviceInfo) -> None:
        info.vendor, info.device = 0x1E52, self.device

    def _allocate(self, asked: kmd.AllocateTlb) -> None:
        if asked.size not in self.windows:
            raise OSError(errno.EINVAL, "no windows of that size")
        if self.windows[asked.size] < 1:
            raise OSError(errno.ENOMEM, "no window is free")
        self.windows[asked.size] -= 1
        number = next(n for n in range(1000) if n not in self.held)
        self.held[number] = _Window(asked.size)
        asked.id = number
        asked.mmap_wc = (number + 1) << AT
        asked.mmap_uc = (number + 1001) << AT

    def _free(self, asked: kmd.FreeTlb) -> None:
        window = self.held.pop(asked.id)
        self.freed.append(asked.id)
        self.windows[window.size] += 1
        if window.memfd >= 0:
            os.close(window.memfd)

    def _configure(self, asked: kmd.ConfigureTlb) -> None:
        window = self.held[asked.id]
        if asked.addr % window.size:
            raise OSError(errno.EINVAL, "not a multiple of the window")
        window.config = kmd.ConfigureTlb.from_buffer_copy(asked)

    def _export(self, asked: kmd.ExportTlb) -> None:
        if self.version < (2, 10, 0):
            raise OSError(errno.ENOTTY, "no such ioctl")
        window = self.held[asked.tlb_id]
        assert asked.argsz == ctypes.sizeof(asked) == 32
        assert window.config is not None
        assert window.memfd < 0, "one export is enough"
        if asked.offset % PAGE or asked.size % PAGE or not 0 < asked.offset + asked.size <= window.size:
            raise OSError(errno.EINVAL, "no part of the window")
        window.memfd, window.low = os.memfd_create("window"), asked.offset
        os.ftruncate(window.memfd, asked.size)
        window.exports += 1
        asked.fd = os.dup(window.memfd)
        self.fds.append(asked.fd)

    def _pin(self, asked: kmd.PinPages) -> None:
        if asked.virtual_address % PAGE or asked.size % PAGE or asked.out_size != 16:
            raise OSError(errno.EINVAL, "no pages")
        self.pinned[asked.virtual_address] = asked.size
        asked.physical_address = 0x10000000
        if asked.flags & kmd.PIN_NOC_DMA:
            asked.noc_address = 0x1000000000000000 + len(self.pinned) * asked.size
            self.noc[asked.noc_address] = asked.virtual_address

    def pinned_at(self, noc: int) -> tuple[int, int]:
        """The host's address and the size of what was pinned with a NOC address."""
        return self.noc[noc], self.pinned[self.noc[noc]]

    def _unpin(self, asked: kmd.UnpinPages) -> None:
        if self.pinned.get(asked.virtual_address) != asked.size:
            raise OSError(errno.EINVAL, "not pinned")
        del self.pinned[asked.virtual_address]

    def place(self, into: Patchwork, at: int, fd: int, nbytes: int, offset: int) -> None:
        self._step("place")
        if fd in self.fds[:1]:
            window = self.held[(offset >> AT) - 1]
            inside = (offset & ((1 << AT) - 1)) - window.low
            into.place(at, window.memfd, nbytes, inside)
        else:  # the module's: addresses without bytes
            assert offset >> npu_abi.MAP_SHIFT < len(self.adopted)

    def shown(self, core: tuple[int, int], address: int, nbytes: int) -> bytes:
        """What DRAM holds as seen by the windows that are pointed at it; an address that none shows fails."""
        for window in self.held.values():
            config = window.config
            assert config is not None
            begin = config.addr + window.low
            size = os.fstat(window.memfd).st_size
            if (config.x_end, config.y_end) == core and begin <= address and address + nbytes <= begin + size:
                return os.pread(window.memfd, nbytes, address - begin)
        raise AssertionError(f"no window shows {nbytes} bytes at {address:#x} of {core}")


class FakeDevice:
    """A chip behind tt-umd whose DRAM takes what was written only when the same core is read."""

    def __init__(self, described: Chip | None = None) -> None:
        self.chip = described or chip(channel_bytes=16 * MIB)
        self.dram = {cores[0]: np.zeros(self.chip.channel_bytes, np.uint8) for cores in self.chip.channels}
        self.under_way: list[tuple[tuple[int, int], int, bytes]] = []
        self.wrote: list[tuple[tuple[int, int], int, int]] = []
        self.read_back: list[tuple[tuple[int, int], int, int]] = []
        self.closed = 0
        self.failing: Exception | None = None
        self.on_write: Callable[[], None] = lambda: None

    def write(self, core: tuple[int, int], address: int, data: np.ndarray) -> None:
        self.on_write()
        if self.failing is not None:
            raise self.failing
        assert address + data.nbytes <= self.dram[core].nbytes
        self.wrote.append((core, address, data.nbytes))
        self.under_way.append((core, address, data.tobytes()))

    def read(self, core: tuple[int, int], address: int, into: np.ndarray) -> None:
        if self.failing is not None:
            raise self.failing
        self.read_back.append((core, address, into.nbytes))
        for there, at, data in self.under_way:
            if there == core:
                self.dram[core][at : at + len(data)] = np.frombuffer(data, np.uint8)
        self.under_way = [entry for entry in self.under_way if entry[0] != core]
        into[:] = self.dram[core][address : address + into.nbytes]

    def close(self) -> None:
        self.closed += 1


def fake_umd(
    *,
    arch: str = "BLACKHOLE",
    channels: int = 8,
    channel_bytes: int = 4 << 30,
    fault: Exception | None = None,
) -> Any:
    """A module like `tt_umd`, whose one device has harvested nothing and whose cores come in no order."""
    cores = [SimpleNamespace(x=c, y=port) for port in (2, 0, 1) for c in reversed(range(channels))]
    store: dict[tuple[int, int], dict[int, bytes]] = {}
    calls: list[tuple[str, int, int]] = []

    def noc_write(x: int, y: int, address: int, data: memoryview) -> None:
        calls.append(("noc_write", address, len(data)))
        store.setdefault((x, y), {})[address] = bytes(data)

    def dma_write_to_device(x: int, y: int, address: int, data: memoryview) -> None:
        calls.append(("dma_write", address, len(data)))
        store.setdefault((x, y), {})[address] = bytes(data)

    def noc_read(noc: int, x: int, y: int, address: int, into: memoryview) -> None:
        assert noc == 0
        calls.append(("noc_read", address, len(into)))
        into[:] = store[x, y][address]

    soc = SimpleNamespace(
        get_cores=lambda kind, system: cores if (kind, system) == ("dram", "logical") else [],
        translate_coord_to=lambda core, system: SimpleNamespace(x=20 + core.x, y=40 + core.y),
    )

    def create(*_: object) -> Any:
        if fault is not None:
            raise fault
        return SimpleNamespace(
            init_tt_device=lambda: None,
            get_soc_descriptor=lambda: soc,
            get_arch=lambda: SimpleNamespace(name=arch),
            noc_write=noc_write,
            noc_read=noc_read,
            dma_write_to_device=dma_write_to_device,
            dma_read_from_device=noc_read,
        )

    return SimpleNamespace(
        TTDevice=SimpleNamespace(create=create),
        create_simulation_tt_device=create,
        CoreType=SimpleNamespace(DRAM="dram"),
        CoordSystem=SimpleNamespace(LOGICAL="logical", TRANSLATED="translated"),
        SocArchDescriptor=lambda arch: SimpleNamespace(dram_bank_size=channel_bytes),
        calls=calls,
    )
