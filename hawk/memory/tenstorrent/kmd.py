"""What `/dev/tenstorrent/N` is told: the public interface of the kernel driver tt-kmd, and the errors it answers with.

Numbers and structures follow the driver's `ioctl.h` (its ioctl interface 2; dma-bufs from driver 2.10 on).  The numbers
carry no size or direction.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
from typing import TYPE_CHECKING, ClassVar, Protocol

from hawk.errors import DeviceDenied, DeviceReset, DriverTooOld, HawkMemoryError, WindowsExhausted

if TYPE_CHECKING:
    from hawk.memory.mapping import Patchwork

DEVICES = "/dev/tenstorrent"

INTERFACE = 2
EXPORT_SINCE = (2, 10)
"""The first driver that exports windows as dma-bufs, and"""
EXPORT_KERNEL = (5, 8)
"""the first kernel for which it does."""

_MAGIC = 0xFA
GET_DEVICE_INFO = _MAGIC << 8 | 0
GET_DRIVER_INFO = _MAGIC << 8 | 5
PIN_PAGES = _MAGIC << 8 | 7
UNPIN_PAGES = _MAGIC << 8 | 10
ALLOCATE_TLB = _MAGIC << 8 | 11
FREE_TLB = _MAGIC << 8 | 12
CONFIGURE_TLB = _MAGIC << 8 | 13
EXPORT_TLB_DMABUF = _MAGIC << 8 | 16

PIN_NOC_DMA = 2

ORDERING = {"relaxed": 0, "strict": 1, "posted": 2}
"""How a window orders its requests: relaxed may reorder, strict waits for each answer, posted waits for none."""

VENDOR = 0x1E52
ARCHES = {0x401E: "wormhole_b0", 0xB140: "blackhole"}
"""PCI device numbers."""

WINDOWS: dict[str, tuple[tuple[int, int], ...]] = {
    "blackhole": ((4 << 30, 8), (2 << 20, 201)),
    "wormhole_b0": ((16 << 20, 19), (2 << 20, 10), (1 << 20, 156)),
}
"""Sizes of windows, the largest first, and how many of each the driver has to give: it keeps one for itself.

There may be fewer, down to none (a firmware or BIOS that exposes a small BAR; other processes), which only asking
for one tells.
"""

U8, U16, U32, U64 = ctypes.c_uint8, ctypes.c_uint16, ctypes.c_uint32, ctypes.c_uint64


class DeviceInfo(ctypes.Structure):
    """`struct tenstorrent_get_device_info`."""

    _fields_: ClassVar = [
        ("in_size", U32),
        ("out_size", U32),
        ("vendor", U16),
        ("device", U16),
        ("subsystem_vendor", U16),
        ("subsystem", U16),
        ("bus_dev_fn", U16),
        ("max_dma_buf_log2", U16),
        ("domain", U16),
        ("reserved", U16),
    ]
    in_size: int
    vendor: int
    device: int
    bus_dev_fn: int
    domain: int


class DriverInfo(ctypes.Structure):
    """`struct tenstorrent_get_driver_info`."""

    _fields_: ClassVar = [
        ("in_size", U32),
        ("out_size", U32),
        ("interface", U32),
        ("major", U8),
        ("minor", U8),
        ("patch", U8),
        ("reserved", U8),
    ]
    in_size: int
    interface: int
    major: int
    minor: int
    patch: int


class AllocateTlb(ctypes.Structure):
    """`struct tenstorrent_allocate_tlb`: size in, the rest out."""

    _fields_: ClassVar = [
        ("size", U64),
        ("in_reserved", U64),
        ("id", U32),
        ("reserved0", U32),
        ("mmap_uc", U64),
        ("mmap_wc", U64),
        ("reserved1", U64),
    ]
    size: int
    id: int
    mmap_uc: int
    mmap_wc: int


class FreeTlb(ctypes.Structure):
    """`struct tenstorrent_free_tlb`."""

    _fields_: ClassVar = [("id", U32)]
    id: int


class ConfigureTlb(ctypes.Structure):
    """`struct tenstorrent_configure_tlb`, its `tenstorrent_noc_tlb_config` within."""

    _fields_: ClassVar = [
        ("id", U32),
        ("in_reserved", U32),
        ("addr", U64),
        ("x_end", U16),
        ("y_end", U16),
        ("x_start", U16),
        ("y_start", U16),
        ("noc", U8),
        ("mcast", U8),
        ("ordering", U8),
        ("linked", U8),
        ("static_vc", U8),
        ("reserved0", U8 * 3),
        ("reserved1", U32 * 2),
        ("out_reserved", U64),
    ]
    id: int
    addr: int
    x_end: int
    y_end: int
    ordering: int
    noc: int


class ExportTlb(ctypes.Structure):
    """`struct tenstorrent_export_tlb_dmabuf`."""

    _fields_: ClassVar = [
        ("argsz", U32),
        ("flags", U32),
        ("tlb_id", U32),
        ("fd", ctypes.c_int32),
        ("offset", U64),
        ("size", U64),
    ]
    argsz: int
    tlb_id: int
    fd: int
    offset: int
    size: int


EXPORT_BYTES = ctypes.sizeof(ExportTlb)
"""What the driver wants `argsz` to be."""


class PinPages(ctypes.Structure):
    """`struct tenstorrent_pin_pages` with its extended answer."""

    _fields_: ClassVar = [
        ("out_size", U32),
        ("flags", U32),
        ("virtual_address", U64),
        ("size", U64),
        ("physical_address", U64),
        ("noc_address", U64),
    ]
    out_size: int
    flags: int
    virtual_address: int
    size: int
    physical_address: int
    noc_address: int


class UnpinPages(ctypes.Structure):
    """`struct tenstorrent_unpin_pages`."""

    _fields_: ClassVar = [("virtual_address", U64), ("size", U64), ("reserved", U64)]
    virtual_address: int
    size: int


class Calls(Protocol):
    """What is asked of the kernel; a test answers in its place.  All raise `OSError`."""

    def open(self, path: str) -> int:
        """A descriptor of a device."""

    def ioctl(self, fd: int, request: int, argument: ctypes.Structure) -> None:
        """One ioctl, whose answer is in `argument`."""

    def place(self, into: Patchwork, at: int, fd: int, nbytes: int, offset: int) -> None:
        """Maps `nbytes` of a descriptor from file offset `offset` on, at byte `at` of a range that was set aside."""

    def close(self, fd: int) -> None:
        """Closes a descriptor of `open`, or one that an ioctl gave."""

    def release(self) -> tuple[int, int]:
        """The kernel's version."""


class Kernel:
    """The kernel itself."""

    def open(self, path: str) -> int:
        """See `Calls.open`.  Without O_APPEND the driver keeps the chip's DRAM powered while this is open."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def ioctl(self, fd: int, request: int, argument: ctypes.Structure) -> None:
        """See `Calls.ioctl`."""
        fcntl.ioctl(fd, request, argument, True)

    def place(self, into: Patchwork, at: int, fd: int, nbytes: int, offset: int) -> None:
        """See `Calls.place`."""
        into.place(at, fd, nbytes, offset)

    def close(self, fd: int) -> None:
        """See `Calls.close`."""
        os.close(fd)

    def release(self) -> tuple[int, int]:
        """See `Calls.release`."""
        match = re.match(r"(\d+)\.(\d+)", platform.release())
        return (int(match[1]), int(match[2])) if match else (0, 0)


def path_of(chip: int) -> str:
    """The device file of a chip."""
    return f"{DEVICES}/{chip}"


def refused(error: OSError, what: str, field: str, device: str | None = None) -> HawkMemoryError:
    """What an answer of the driver means, as an error of HAWK's."""
    said = error.strerror or str(error)
    if error.errno == errno.ENODEV:
        return DeviceReset(
            "the chip was reset or taken out while it was in use",
            field=field,
            got=f"{what}: {said}",
            hint="Start the agent anew once the chip is up again; what was in its memory is gone",
            device=device,
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return DeviceDenied(
            f"the driver does not let this process {what}",
            field=field,
            got=said,
            hint="Give the agent's user the device, by its group or a udev rule (docs/tenstorrent.md)",
            device=device,
        )
    if error.errno in (errno.EOPNOTSUPP, errno.ENOTTY):
        return DriverTooOld(
            f"the driver cannot {what}",
            field=field,
            got=said,
            expected=f"driver {'.'.join(map(str, EXPORT_SINCE))}, kernel {'.'.join(map(str, EXPORT_KERNEL))}",
            device=device,
        )
    if error.errno == errno.ENOMEM:
        return WindowsExhausted(f"the driver has no room to {what}", field=field, got=said, device=device)
    hint = None
    if error.errno == errno.EBUSY:
        hint = "Somebody still maps it or holds a dma-buf of it"
    elif error.errno == errno.ENOENT:
        hint = "Load the driver tt-kmd; `ls /dev/tenstorrent` lists the chips"
    return HawkMemoryError(f"the driver refused to {what}", field=field, got=said, hint=hint, device=device)
