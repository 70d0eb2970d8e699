"""How memory of a GPU gets from the process that owns it to another one of the same machine.

    legacy    the handle of a whole allocation, and an offset in it: memory that `cuMemAlloc` or `cudaMalloc` made
    fd        descriptors of physical memory: memory that was mapped by its owner and made to be passed on so

Frameworks' expandable segments are of the second kind, if at all: one array can lie in several mappings that follow
each other, each with a descriptor of its own.  Memory pools made without either kind of handle (stream-ordered pools,
pools of a sleep mode) can be passed on in no way; `export` refuses them and says what would work.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hawk.errors import DeviceLost, HawkMemoryError, InvalidArgument, RegistrationFailed
from hawk.memory.cuda_driver import IPC_HANDLE_BYTES, CudaFault

if TYPE_CHECKING:
    from hawk.memory.cuda import CudaDevice
    from hawk.memory.cuda_driver import Driver

Way = Literal["legacy", "fd"]

MOST_MAPPINGS = 64
"""Mappings that one range may lie in: as many descriptors as one message carries."""

WAYS = (
    "Memory that other processes can reach: plain allocations (cudaMalloc), or mapped memory that was made with "
    "descriptors; for torch without expandable segments leave PYTORCH_CUDA_ALLOC_CONF's expandable_segments off. "
    "An agent embedded in the owner's process (hawk.Agent) reaches any of its memory"
)


@dataclass(frozen=True, slots=True)
class Exported:
    """A range as another process can open it.

    offset     of its first byte, from the beginning of the allocation or of the first mapping
    handle     of the allocation, 64 bytes; empty where it goes by descriptors
    fds        of the mappings in order, and `sizes`, the bytes of each; whoever holds this closes them
    """

    way: Way
    nbytes: int
    offset: int
    handle: bytes = b""
    sizes: tuple[int, ...] = ()
    fds: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        legacy = self.way == "legacy"
        if self.nbytes < 1 or self.offset < 0 or (legacy and len(self.handle) != IPC_HANDLE_BYTES):
            raise InvalidArgument("no export of memory", field="export", got=repr(self))
        whole = sum(self.sizes)
        counted = 0 < len(self.sizes) <= MOST_MAPPINGS and min(self.sizes) > 0
        if not legacy and not (counted and self.offset + self.nbytes <= whole):
            raise InvalidArgument("no export of memory", field="export", got=repr(self))

    def close(self) -> None:
        """Closes the descriptors.  What another process made of them stays."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def export(device: CudaDevice, address: int, nbytes: int, *, name: str = "memory") -> Exported:
    """The range as another process can open it.

    Raises `RegistrationFailed` naming `name` and what would work where it can be passed on in no way, `DeviceLost`.
    """
    with device.current() as driver:
        known = driver.pointer(address)
        if known.device != device.number:
            raise RegistrationFailed(
                "the memory is not that GPU's",
                field=name,
                got=f"memory of cuda:{known.device}",
                expected=f"memory of cuda:{device.number}",
            )
        if known.legacy:
            return _legacy(driver, address, nbytes, name)
        if known.by_fd:
            return _mappings(driver, address, nbytes, name)
    what = "managed memory" if known.managed else "memory of a pool without handles"
    raise RegistrationFailed(
        "the memory cannot be passed on to another process", field=name, got=what, hint=WAYS
    )


def _legacy(driver: Driver, address: int, nbytes: int, name: str) -> Exported:
    base, whole = driver.extent(address)
    if address + nbytes > base + whole:
        raise RegistrationFailed(
            "the range reaches past its allocation",
            field=name,
            got=f"{address - base + nbytes} bytes from the allocation's first",
            expected=f"within {whole}",
        )
    return Exported("legacy", nbytes, address - base, driver.ipc_handle(base))


def _mappings(driver: Driver, address: int, nbytes: int, name: str) -> Exported:
    first, _ = driver.extent(address)
    at = first
    sizes: list[int] = []
    fds: list[int] = []
    try:
        while at < address + nbytes:
            base, size = driver.extent(at)
            if base != at or len(sizes) == MOST_MAPPINGS:
                raise RegistrationFailed(
                    "the memory lies in too many mappings, or in one that begins elsewhere",
                    field=name,
                    got=f"mapping {len(sizes)} at {base:#x}",
                    expected=f"at most {MOST_MAPPINGS}, one at {at:#x}",
                    hint=WAYS,
                )
            handle = driver.retain(at)
            try:
                fds.append(driver.export_fd(handle))
            finally:
                driver.release(handle)
            sizes.append(size)
            at += size
        return Exported("fd", nbytes, address - first, sizes=tuple(sizes), fds=tuple(fds))
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, CudaFault) and not error.sticky:
            raise RegistrationFailed(
                "the memory's mappings cannot be passed on", field=name, got=error, hint=WAYS
            ) from error
        raise


class Imported:
    """Another process' memory, seen here from `address` on, until `close`.

    Raises `RegistrationFailed` where the driver refuses what was exported, `DeviceLost`; nothing stays mapped then.
    """

    def __init__(self, device: CudaDevice, exported: Exported, *, name: str = "memory") -> None:
        self._device, self._way = device, exported.way
        self._base = self._reserved = 0
        self._mapped: list[tuple[int, int]] = []
        try:
            with device.current() as driver:
                if exported.way == "legacy":
                    self._base = driver.ipc_open(exported.handle)
                    _, whole = driver.extent(self._base)
                    if exported.offset + exported.nbytes > whole:
                        raise RegistrationFailed(
                            "the range reaches past its allocation",
                            field=name,
                            got=exported.offset + exported.nbytes,
                            expected=f"within {whole}",
                        )
                else:
                    self._map(driver, exported)
        except (DeviceLost, RegistrationFailed):
            self.close()
            raise
        except HawkMemoryError as error:
            self.close()
            raise RegistrationFailed(
                "another process' memory cannot be opened", field=name, got=error.got, hint=WAYS
            ) from error
        self.address = self._base + exported.offset
        self.nbytes = exported.nbytes

    def _map(self, driver: Driver, exported: Exported) -> None:
        whole = sum(exported.sizes)
        self._base = driver.reserve(whole)
        self._reserved = whole
        at = self._base
        for fd, size in zip(exported.fds, exported.sizes, strict=True):
            handle = driver.import_fd(fd)
            try:
                driver.map(at, size, handle, self._device.number)
                self._mapped.append((at, size))
            finally:
                driver.release(handle)  # the mapping keeps the memory
            at += size

    def close(self) -> None:
        """Unmaps it.  Safe to call twice.  Nothing may be on its way to or from it any more."""
        base, self._base = self._base, 0
        mapped, self._mapped = self._mapped, []
        if not base or self._device.lost is not None:
            return
        with contextlib.suppress(HawkMemoryError), self._device.current() as driver:
            if self._way == "legacy":
                driver.ipc_close(base)
                return
            for at, size in mapped:
                driver.unmap(at, size)
            driver.unreserve(base, self._reserved)
