"""A driver whose GPUs are memory of this process, for what can be measured without one: Python's share, and the host's.

Whatever is put onto a stream has been done when the call returns, by a copy of the C library without Python's lock; or
it is left out, where only the calls themselves are to be counted.  Kernels are what `functions` says they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.jobs.gpus import Gpus
from hawk.memory import cuda_driver, cuda_rows
from hawk.memory.cuda_driver import Pointer
from hawk.retile.cpu import run_step
from hawk.retile.cuda import copies
from hawk.retile.cuda.lanes import Calls
from hawk.retile.native import copy_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hawk.memory.cuda_driver import Call
    from hawk.retile.cuda.bases import Span

_libc = ctypes.CDLL(None, use_errno=True)
_memcpy, _memset = _libc.memcpy, _libc.memset
_memcpy.restype = _memset.restype = ctypes.c_void_p
_memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

KERNEL = 0x8000
"""Handle of every kernel of a `Compiler`."""

_FAILED = ctypes.c_void_p(-1).value
_FIXED = 0x10


class StandIn:
    """See the module and `hawk.memory.cuda_driver.Driver`.

    devices      GPUs that there are, all of which reach each other
    copies       whether bytes are moved
    launched     kernels that were put onto streams so far
    functions    kernels by their handles: called with blocks, arguments and a stream
    """

    def __init__(self, devices: int = 2, *, copies: bool = True) -> None:
        self.devices, self.copies, self.launched = devices, copies, 0
        self.functions: dict[int, Callable[[int, bytes, int], None]] = {}
        self._lock = threading.Lock()
        self._next = 0x1000
        self._held: dict[int, tuple[int, int]] = {}
        self._files: dict[int, int] = {}
        self._physical: dict[int, tuple[int, int, int]] = {}
        self._when: dict[int, float] = {}
        self._here = threading.local()

    def _number(self) -> int:
        with self._lock:
            self._next += 16
            return self._next

    # -- devices

    def device_count(self) -> int:
        return self.devices

    def device_name(self, device: int) -> str:
        return f"memory of the host {device}"

    def identity(self, device: int) -> str:
        return f"{device:032x}"

    def reaches(self, device: int, peer: int) -> bool:
        return True

    def attribute(self, device: int, which: int) -> int:
        return 0

    def pointer(self, address: int) -> Pointer:
        for base, (nbytes, device) in self._held.items():
            if base <= address < base + nbytes:
                return Pointer(device)
        for base, (nbytes, device, _) in self._physical.items():
            if base <= address < base + nbytes:
                return Pointer(device, by_fd=True)
        return Pointer(-1)

    def enter(self, device: int) -> None:
        self._here.stack = [*getattr(self._here, "stack", ()), device]

    def leave(self) -> None:
        self._here.stack.pop()

    # -- memory

    def allocate(self, nbytes: int) -> int:
        at = _mapped(None, nbytes, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._held[at] = nbytes, self._here.stack[-1]
        return at

    def free(self, address: int) -> None:
        nbytes, _ = self._held.pop(address)
        _munmap(address, nbytes)

    def extent(self, address: int) -> tuple[int, int]:
        for base, (nbytes, *_) in (*self._held.items(), *self._physical.items()):
            if base <= address < base + nbytes:
                return base, nbytes
        return address, 1

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass

    def allocate_host(self, nbytes: int) -> int:
        return self.allocate(nbytes)

    def free_host(self, address: int) -> None:
        self.free(address)

    # -- streams and events

    def stream(self, *, low: bool, high: bool = False) -> int:
        return self._number()

    def drop_stream(self, stream: int) -> None:
        pass

    def event(self) -> int:
        return self._number()

    def timer(self) -> int:
        return self._number()

    def elapsed(self, begin: int, end: int) -> float:
        return self._when.get(end, 0.0) - self._when.get(begin, 0.0)

    def drop_event(self, event: int) -> None:
        self._when.pop(event, None)

    def record(self, event: int, stream: int) -> None:
        self._when[event] = time.perf_counter()

    def wait(self, stream: int, event: int) -> None:
        pass

    def reached(self, event: int) -> bool:
        return True

    def synchronise(self, event: int) -> None:
        pass

    def outwait(self, event: int) -> None:
        pass

    def run(self, calls: Sequence[Call]) -> None:
        for name, *given in calls:
            getattr(self, name)(*given)

    def launch(
        self, function: int, blocks: int, threads: int, arguments: bytes, stream: int, shared: int = 0
    ) -> None:
        self.launched += 1
        found = self.functions.get(function)
        if found is not None and self.copies:
            found(blocks, arguments, stream)

    def work(self, what: Callable[[], None]) -> None:
        """Does something of the stand-in's own."""
        what()

    # -- copies, on a stream

    def to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        self._copy(host, address, nbytes)

    def to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        self._copy(address, host, nbytes)

    def across(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(target, source, nbytes)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        if self.copies:
            _memset(address, value, nbytes)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        if self.copies:
            _memcpy(target, source, nbytes)

    # -- for others

    def dmabuf(self, address: int, nbytes: int) -> int:
        return os.memfd_create("stand-in")

    def flush_writes(self) -> None:
        pass

    def ipc_handle(self, address: int) -> bytes:
        raise NotImplementedError  # nothing here says that it could

    def ipc_open(self, handle: bytes) -> int:
        raise NotImplementedError

    def ipc_close(self, address: int) -> None:
        raise NotImplementedError

    def create(self, nbytes: int, device: int) -> int:
        fd = os.memfd_create("stand-in")
        os.ftruncate(fd, nbytes)
        return self._handle(fd)

    def _handle(self, fd: int) -> int:
        number = self._number()
        self._files[number] = fd
        return number

    def retain(self, address: int) -> int:
        return self._handle(os.dup(self._physical[self.extent(address)[0]][2]))

    def release(self, handle: int) -> None:
        os.close(self._files.pop(handle))

    def export_fd(self, handle: int) -> int:
        return os.dup(self._files[handle])

    def import_fd(self, fd: int) -> int:
        return self._handle(os.dup(fd))

    def reserve(self, nbytes: int) -> int:
        return _mapped(None, nbytes, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def unreserve(self, address: int, nbytes: int) -> None:
        _munmap(address, nbytes)

    def map(self, address: int, nbytes: int, handle: int, device: int) -> None:
        fd = os.dup(self._files[handle])
        _mapped(address, nbytes, fd, mmap.MAP_SHARED | _FIXED)
        self._physical[address] = nbytes, device, fd

    def allow(self, address: int, nbytes: int, device: int) -> None:
        pass

    def unmap(self, address: int, nbytes: int) -> None:
        os.close(self._physical.pop(address)[2])
        _mapped(address, nbytes, -1, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED)


def _mapped(address: int | None, nbytes: int, fd: int, flags: int) -> int:
    at = _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if at in (None, _FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(at)


def view(address: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The bytes at an address of a stand-in's memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Compiler:
    """What stands in CuPy's place: kernels of one handle, which the driver may know."""

    def __init__(self, devices: int = 2) -> None:
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDeviceCount=lambda: devices), Device=contextlib.nullcontext
        )
        self._made = SimpleNamespace(kernel=SimpleNamespace(ptr=KERNEL), max_dynamic_shared_size_bytes=0)

    def RawModule(self, code: str, options: object) -> SimpleNamespace:  # noqa: N802 - the other's name
        """A module all of whose functions are the one kernel."""
        return SimpleNamespace(get_function=lambda name: self._made)


class OnProcessors:
    """Retiles by the host's core where a GPU would, see `hawk.jobs.gpus.Kernels`."""

    def __init__(self, driver: StandIn) -> None:
        self._driver = driver

    def calls(
        self, steps: Sequence[Any], regions: Sequence[Span], arena: Span, stream: int, driver: object
    ) -> Calls:
        """See `Kernels.calls`."""
        arrays, into = [view(*span) for span in regions], view(*arena)

        def work() -> None:
            for step in steps:
                run_step(step, arrays, into)

        return Calls(then=[("work", work)])

    def close(self, driver: object) -> None:
        """Nothing of its own."""


class Rows:
    """What copies rows, see `hawk.memory.cuda_rows`."""

    function = KERNEL

    def __init__(self, driver: StandIn) -> None:
        driver.functions[KERNEL] = self._run

    @staticmethod
    def _run(blocks: int, arguments: bytes, stream: int) -> None:
        table, rows = struct.unpack("<QI4x", arguments)
        words = view(table, rows * 8 * copies.COLUMNS).view(np.int64).reshape(rows, copies.COLUMNS)
        nothing = np.zeros(1, np.int64)
        copy_segments(nothing, np.zeros(rows, np.int32), words[:, 1], 0, words[:, 0], words[:, 2])


@contextlib.contextmanager
def standing_in() -> Iterator[StandIn]:
    """Within the block the host's memory and processors stand in for two GPUs, in all of this process."""
    driver, gpus, rows, known = StandIn(), Gpus.make, cuda_rows.make, dict(cuda_rows._kernels)
    Gpus.make = staticmethod(lambda number: OnProcessors(driver))
    cuda_rows.make = lambda number: Rows(driver)
    cuda_rows._kernels.clear()
    try:
        with cuda_driver.using(driver):
            yield driver
    finally:
        Gpus.make, cuda_rows.make = gpus, rows
        cuda_rows._kernels.clear()
        cuda_rows._kernels.update(known)
