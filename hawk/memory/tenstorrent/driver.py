"""One chip's device file, opened: calls of the driver, with its answers as errors of HAWK's."""

from __future__ import annotations

import contextlib
import errno
import threading
from typing import TYPE_CHECKING

from hawk.errors import DriverTooOld
from hawk.memory.tenstorrent import kmd

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Sequence


class Driver:
    """An open `/dev/tenstorrent/N`; `field` names the memory in errors.  Raises as `kmd.refused` says."""

    def __init__(self, chip: int, field: str, calls: kmd.Calls) -> None:
        self.calls = calls
        self.field = field
        self.path = kmd.path_of(chip)
        self._lock = (
            threading.Lock()
        )  # a descriptor that a call is in is neither closed nor another's by then
        try:
            self.fd = calls.open(self.path)
        except OSError as error:
            raise kmd.refused(error, f"open {self.path}", field) from error

    def ask(self, request: int, argument: ctypes.Structure, what: str) -> None:
        """One ioctl."""
        try:
            self.try_(request, argument)
        except OSError as error:
            raise kmd.refused(error, what, self.field, device=self.path) from error

    def try_(self, request: int, argument: ctypes.Structure) -> None:
        """One ioctl; raises `OSError` as it is."""
        with self._lock:
            if self.fd < 0:
                raise OSError(errno.EBADF, "the memory is closed")
            self.calls.ioctl(self.fd, request, argument)

    def quietly(self, request: int, argument: ctypes.Structure) -> None:
        """One ioctl that gives something back; what it cannot give back goes with the descriptor."""
        with contextlib.suppress(OSError):
            self.try_(request, argument)

    def version(self) -> tuple[int, int, int]:
        """The driver's.  Answers only while the chip is the one that was opened: after a reset it is `DeviceReset`."""
        info = kmd.DriverInfo(in_size=12)
        self.ask(kmd.GET_DRIVER_INFO, info, "say its version")
        return info.major, info.minor, info.patch

    def arch(self) -> str:
        """The chip's architecture, by its PCI numbers; their text where they are not known."""
        info = kmd.DeviceInfo(in_size=20)
        self.ask(kmd.GET_DEVICE_INFO, info, "say what chip it drives")
        known = kmd.ARCHES.get(info.device) if info.vendor == kmd.VENDOR else None
        return known or f"{info.vendor:04x}:{info.device:04x}"

    def require_export(self) -> None:
        """Raises `DriverTooOld` unless this driver, on this kernel, exports windows as dma-bufs."""
        version, kernel = self.version(), self.calls.release()
        if version[:2] < kmd.EXPORT_SINCE:
            raise _too_old(self.field, "driver", version, kmd.EXPORT_SINCE)
        if kernel < kmd.EXPORT_KERNEL:
            raise _too_old(self.field, "Linux", kernel, kmd.EXPORT_KERNEL)

    def close(self) -> None:
        """Closes the descriptor; what is still mapped or exported of it stays until that ends."""
        with self._lock:
            if self.fd >= 0:
                fd, self.fd = self.fd, -1
                self.calls.close(fd)


def _too_old(field: str, what: str, got: Sequence[int], since: Sequence[int]) -> DriverTooOld:
    return DriverTooOld(
        "windows are exported as dma-bufs by newer ones only",
        field=field,
        got=f"{what} {'.'.join(map(str, got))}",
        expected=f"{what} {'.'.join(map(str, since))} or later",
        hint='Update it, or set way = "host"',
    )
