"""The part of the fake driver that passes memory on, and what tests hold of the fake device."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hawk.memory import cuda_rows
from hawk.memory.cuda_driver import CudaFault
from hawk.retile.cuda.lanes import Calls
from hawk.retile.cuda.recipes import Recipes
from hawk.retile.cuda.shelf import Shelf

if TYPE_CHECKING:
    import pytest

    from tests.fake_cuda import FakeCuda


_MADE = "fake-physical"
_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p


def _map(address: int | None, nbytes: int, fd: int, flags: int) -> int:
    size, access = ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE
    at = _libc.mmap(ctypes.c_void_p(address), size, access, flags, fd, ctypes.c_long(0))
    assert at != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return at


@dataclass
class Block:
    """An allocation, or a mapping of physical memory: of a file, where `fd` is one."""

    array: np.ndarray
    device: int
    first: int
    nbytes: int
    kind: str = "plain"
    fd: int = -1
    allowed: set[int] = field(default_factory=set)


@dataclass
class Event:
    """`wanted` records were asked for, `done` of them have come."""

    wanted: int = 0
    done: int = 0


class Sharing:
    """Handles, descriptors and mappings; see `tests.fake_cuda.FakeCuda`, whose base it is."""

    def dmabuf(self, address: int, nbytes: int) -> int:
        self._call("dmabuf")
        return os.memfd_create("dmabuf")

    def flush_writes(self) -> None:
        self._call("flush_writes")

    def ipc_handle(self, address: int) -> bytes:
        self._call("ipc_handle")
        assert address in self.blocks, "not the beginning of an allocation"
        return address.to_bytes(64, "little")

    def ipc_open(self, handle: bytes) -> int:
        self._call("ipc_open")
        address = int.from_bytes(handle, "little")
        if address not in self.blocks:
            raise CudaFault("ipc_open", 1, "CUDA_ERROR_INVALID_VALUE")
        self.opened[address] = 1
        return address

    def ipc_close(self, address: int) -> None:
        self._call("ipc_close")
        del self.opened[address]

    # Physical memory.  That of tests is arrays, which mapping copies; what was made by `create` is a file, which other
    # processes see where they map it.

    def create(self, nbytes: int, device: int) -> int:
        self._call("create")
        fd = os.memfd_create(_MADE)
        os.ftruncate(fd, nbytes)
        return self._handle(fd)

    def _handle(self, memory: object) -> int:
        number = self._number()
        self.handles[number] = memory
        return number

    def segments(self, sizes: list[int], device: int = 0) -> int:
        """Test memory in mappings that follow each other; its first address."""
        room = np.arange(sum(sizes) + 512, dtype=np.uint32).astype(np.uint8)
        first = -room.ctypes.data % 256
        at = room.ctypes.data + first
        base = at
        for size in sizes:
            array = room[at - room.ctypes.data :][:size]
            self.blocks[at] = Block(array, device, at, size, "mapped")
            at += size
        self._room = room
        return base

    def retain(self, address: int) -> int:
        self._call("retain")
        block = self._find(address)
        return self._handle(block.array if block.fd < 0 else os.dup(block.fd))

    def release(self, handle: int) -> None:
        self._call("release")
        memory = self.handles.pop(handle)
        if isinstance(memory, int):
            os.close(memory)

    def export_fd(self, handle: int) -> int:
        self._call("export_fd")
        if isinstance(self.handles[handle], int):
            return os.dup(self.handles[handle])
        fd = os.memfd_create("physical")
        self.exported[fd] = self.handles[handle]
        return fd

    def import_fd(self, fd: int) -> int:
        self._call("import_fd")
        made = _MADE in os.readlink(f"/proc/self/fd/{fd}")
        return self._handle(os.dup(fd) if made else self.exported[fd])

    def reserve(self, nbytes: int) -> int:
        self._call("reserve")
        at = _map(None, nbytes, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.reserved[at] = nbytes
        return at

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("unreserve")
        assert self.reserved.pop(address) == nbytes
        assert _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0

    def map(self, address: int, nbytes: int, handle: int, device: int) -> None:
        self._call("map")
        memory = self.handles[handle]
        if isinstance(memory, int):
            _map(address, nbytes, memory, mmap.MAP_SHARED | _FIXED)
            array = self.at(address, nbytes)
            self.blocks[address] = Block(array, device, address, nbytes, "mapped", os.dup(memory))
        else:
            self.at(address, nbytes)[:] = memory
        self.opened[address] = 1

    def allow(self, address: int, nbytes: int, device: int) -> None:
        self._call("allow")
        block = self.blocks[address]
        if not self.reaches(device, block.device):
            raise CudaFault("allow", 1, "CUDA_ERROR_INVALID_VALUE")
        block.allowed.add(device)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("unmap")
        del self.opened[address]
        block = self.blocks.pop(address, None)
        if block is not None:
            os.close(block.fd)
            _map(address, nbytes, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED)


class FakeArray:
    """An array of the fake device, as other libraries' arrays look."""

    def __init__(self, driver: FakeCuda, address: int, dtype: np.dtype, shape: tuple[int, ...]) -> None:
        self._driver, self.address, self.dtype, self.shape = driver, address, dtype, shape
        self.strides: tuple[int, ...] | None = None

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": self.strides,
        }

    @property
    def bytes(self) -> np.ndarray:
        return self._driver.at(self.address, int(np.prod(self.shape)) * self.dtype.itemsize)


class Gate:
    """Holds a stream until it is opened."""

    def __init__(self, driver: FakeCuda, stream: int) -> None:
        self._driver, self._event = driver, Event(wanted=1)
        driver._put(stream, ("wait", self._event, 1))

    def open(self) -> None:
        with self._driver._lock:
            self._event.done = 1
            self._driver._lock.notify_all()


class FakeRows:
    """The kernel that copies rows, when the stream comes to it; put in `hawk.memory.cuda_rows.make`'s place."""

    function = 0xF00

    def __init__(self, driver: FakeCuda) -> None:
        self._driver, self.launched = driver, 0
        driver.functions[self.function] = self

    def run(self, blocks: int, arguments: bytes) -> None:
        table, rows = struct.unpack("<QI4x", arguments)
        assert blocks == rows
        words = self._driver.at(table, rows * 24).view(np.int64).reshape(rows, 3)
        for source, target, nbytes in words.tolist():
            ctypes.memmove(target, source, nbytes)


class Kernels:
    """Generated kernels, run by a processor when the stream comes to them; see `tests/unit/retile/cuda/on_cpu.py`."""

    def __init__(self, driver: FakeCuda, compiled: object) -> None:
        self._driver, self._compiled = driver, compiled
        self._shelf, self._recipes = Shelf(), Recipes()
        self.launched = 0
        self.fail: Exception | None = None

    def calls(self, steps: list, regions: list, arena: object, stream: int, driver: object) -> Calls:
        arrays = [self._driver.at(*span) for span in regions]
        launches = self._compiled.bound(steps, arrays, self._driver.at(*arena), self._shelf, self._recipes)

        def work() -> None:
            self.launched += 1
            for one in launches:
                assert self._compiled.launch(*one) == 0, "an access outside, or not aligned"

        if self.fail is not None:
            raise self.fail
        return Calls(then=[("put", stream, work)])

    def prepare(self, steps: list, regions: list, arena: object, stream: int) -> object:
        found = self.calls(steps, regions, arena, stream, None)
        return type(
            "Prepared", (), {"launch": staticmethod(lambda on: self._driver.put(on, found.then[0][2]))}
        )

    def close(self, driver: object) -> None:
        pass


def fake_rows(monkeypatch: pytest.MonkeyPatch, driver: FakeCuda) -> None:
    """Has rows on every GPU of `driver` copied by `FakeRows`; no kernel of another test is left over."""
    monkeypatch.setattr(cuda_rows, "make", lambda number: FakeRows(driver))
    monkeypatch.setattr(cuda_rows, "_kernels", {})
