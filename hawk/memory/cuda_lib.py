"""The CUDA driver itself, through ctypes; see `hawk.memory.cuda_driver` for what each call means."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from hawk.memory import cuda_batch
from hawk.memory.cuda_driver import IPC_HANDLE_BYTES, POSIX_FD, CudaFault, Pointer
from hawk.retile import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.cuda_driver import Call

_SUCCESS, _INVALID_VALUE = 0, 1
_ON_DEVICE = 2
_MEMORY_TYPE, _MANAGED, _ORDINAL, _LEGACY, _HANDLE_TYPES = 2, 8, 9, 10, 14
_NON_BLOCKING = 1
_BLOCKING_SYNC, _NO_TIMING = 1, 2
_PORTABLE = 1
_LAZY_PEER_ACCESS = 1
_DMABUF = 1
_TO_OWNER = 100
_READ_WRITE = 3
_PINNED = _DEVICE = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("raw", c_ubyte * IPC_HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class _Physical(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of a device, its handles descriptors."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("other_systems", c_void_p),
        ("flags", c_ubyte * 8),
    )


_address, _handle = c_uint64, c_void_p
_CALLS: dict[str, Sequence[Any]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetUuid_v2": (c_char_p, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(_handle), c_int),
    "cuCtxPushCurrent_v2": (_handle,),
    "cuCtxPopCurrent_v2": (POINTER(_handle),),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuPointerGetAttribute": (c_void_p, c_int, _address),
    "cuMemAlloc_v2": (POINTER(_address), c_size_t),
    "cuMemFree_v2": (_address,),
    "cuMemGetAddressRange_v2": (POINTER(_address), POINTER(c_size_t), _address),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuStreamCreateWithPriority": (POINTER(_handle), c_uint, c_int),
    "cuStreamDestroy_v2": (_handle,),
    "cuStreamWaitEvent": (_handle, _handle, c_uint),
    "cuEventCreate": (POINTER(_handle), c_uint),
    "cuEventDestroy_v2": (_handle,),
    "cuEventRecord": (_handle, _handle),
    "cuEventQuery": (_handle,),
    "cuEventSynchronize": (_handle,),
    "cuEventElapsedTime": (POINTER(c_float), _handle, _handle),
    "cuLaunchKernel": (_handle, *(c_uint,) * 7, _handle, c_void_p, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _address, c_size_t, _handle),
    "cuMemcpyHtoDAsync_v2": (_address, c_void_p, c_size_t, _handle),
    "cuMemcpyAsync": (_address, _address, c_size_t, _handle),
    "cuMemsetD8Async": (_address, c_ubyte, c_size_t, _handle),
    "cuMemGetHandleForAddressRange": (c_void_p, _address, c_size_t, c_int, c_uint64),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
    "cuIpcGetMemHandle": (POINTER(_IpcHandle), _address),
    "cuIpcOpenMemHandle_v2": (POINTER(_address), _IpcHandle, c_uint),
    "cuIpcCloseMemHandle": (_address,),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, c_void_p, c_uint64),
    "cuMemRetainAllocationHandle": (POINTER(c_uint64), c_void_p),
    "cuMemRelease": (c_uint64,),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(_address), c_size_t, c_size_t, _address, c_uint64),
    "cuMemAddressFree": (_address, c_size_t),
    "cuMemMap": (_address, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (_address, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (_address, c_size_t),
}
_ABSENT = 500
"""CUDA_ERROR_NOT_FOUND: what a call that the library is too old for is said to have returned."""


class LibCuda:
    """libcuda.so.1.  Raises `OSError` where there is none, `CudaFault` where it drives nothing.

    Each device's primary context, which frameworks use too, is kept from its first use on.
    """

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._calls: dict[str, Any] = {}
        self._together = native.caller()
        self._at: dict[str, int] = {}
        for name, arguments in _CALLS.items():
            # None of them keeps Python's lock: a launch waits where a stream is full, maybe for a callback in Python.
            found = getattr(self._lib, name, None)
            if found is not None:
                found.restype, found.argtypes = c_int, arguments
                self._calls[name] = found
                if self._together is not None:
                    self._at[name] = ctypes.cast(found, c_void_p).value or 0
        self._contexts: dict[int, c_void_p] = {}
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        call = self._calls.get(name)
        code = _ABSENT if call is None else int(call(*arguments))
        if code != _SUCCESS:
            raise CudaFault(name, code, self._name(code))

    def _name(self, code: int) -> str:
        text = c_char_p()
        told = self._lib.cuGetErrorName(c_int(code), byref(text))
        return text.value.decode() if told == _SUCCESS and text.value else "unknown"

    def _number(self, name: str, *arguments: Any, kind: Any = c_uint64) -> int:
        """What a call writes behind its first argument."""
        found = kind()
        self._call(name, byref(found), *arguments)
        return int(found.value or 0)

    # -- devices

    def device_count(self) -> int:
        return self._number("cuDeviceGetCount", kind=c_int)

    def device_name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, 256, self._device(device))
        return text.value.decode(errors="replace")

    def _device(self, device: int) -> int:
        return self._number("cuDeviceGet", device, kind=c_int)

    def identity(self, device: int) -> str:
        raw = ctypes.create_string_buffer(16)
        self._call("cuDeviceGetUuid_v2", raw, self._device(device))
        return raw.raw.hex()

    def reaches(self, device: int, peer: int) -> bool:
        one, other = self._device(device), self._device(peer)
        return device == peer or bool(self._number("cuDeviceCanAccessPeer", one, other, kind=c_int))

    def attribute(self, device: int, which: int) -> int:
        try:
            return self._number("cuDeviceGetAttribute", which, self._device(device), kind=c_int)
        except CudaFault as fault:
            if fault.code == _INVALID_VALUE:
                return 0
            raise

    def pointer(self, address: int) -> Pointer:
        if self._of_pointer(_MEMORY_TYPE, address, c_uint) != _ON_DEVICE:
            return Pointer(-1)
        return Pointer(
            device=self._of_pointer(_ORDINAL, address, c_int),
            managed=bool(self._of_pointer(_MANAGED, address, c_uint)),
            legacy=bool(self._of_pointer(_LEGACY, address, c_ubyte)),
            by_fd=bool(self._of_pointer(_HANDLE_TYPES, address, c_uint64) & POSIX_FD),
        )

    def _of_pointer(self, which: int, address: int, kind: Any) -> int:
        try:
            return self._number("cuPointerGetAttribute", which, address, kind=kind)
        except CudaFault as fault:
            if fault.code == _INVALID_VALUE:  # memory that the driver knows nothing of
                return 0
            raise

    def enter(self, device: int) -> None:
        context = self._contexts.get(device)
        if context is None:
            found = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(found), self._device(device))
            context = self._contexts[device] = found
        self._call("cuCtxPushCurrent_v2", context)

    def leave(self) -> None:
        before = c_void_p()
        self._call("cuCtxPopCurrent_v2", byref(before))

    # -- memory

    def allocate(self, nbytes: int) -> int:
        return self._number("cuMemAlloc_v2", nbytes)

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def extent(self, address: int) -> tuple[int, int]:
        base, nbytes = c_uint64(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), address)
        return base.value, nbytes.value

    def pin(self, address: int, nbytes: int) -> None:
        self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def allocate_host(self, nbytes: int) -> int:
        return self._number("cuMemHostAlloc", nbytes, _PORTABLE, kind=c_void_p)

    def free_host(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    # -- streams and events

    def stream(self, *, low: bool, high: bool = False) -> int:
        least, greatest = c_int(), c_int()
        self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        priority = greatest.value if high else least.value if low else 0
        return self._number("cuStreamCreateWithPriority", _NON_BLOCKING, priority, kind=c_void_p)

    def drop_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def event(self) -> int:
        return self._number("cuEventCreate", _BLOCKING_SYNC | _NO_TIMING, kind=c_void_p)

    def timer(self) -> int:
        return self._number("cuEventCreate", _BLOCKING_SYNC, kind=c_void_p)

    def elapsed(self, begin: int, end: int) -> float:
        milliseconds = c_float()
        self._call("cuEventElapsedTime", byref(milliseconds), begin, end)
        return milliseconds.value * 1e-3

    def drop_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream or None)

    def wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream or None, event, 0)

    def reached(self, event: int) -> bool:
        try:
            self._call("cuEventQuery", event)
        except CudaFault as fault:
            if fault.code == cuda_batch.NOT_READY:
                return False
            raise
        return True

    def synchronise(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def outwait(self, event: int) -> None:
        self.run((("outwait", event),))

    def launch(
        self, function: int, blocks: int, threads: int, arguments: bytes, stream: int, shared: int = 0
    ) -> None:
        self.run((("launch", function, blocks, threads, arguments, stream, shared),))

    def run(self, calls: Sequence[Call]) -> None:
        held: list[object] = []
        rows = [row for call in calls for row in cuda_batch.rows(call, held)]
        if self._together is not None and all(name in self._at for _, name, *_ in rows):
            failed = self._together(cuda_batch.words(rows, self._at))
            if failed is not None:
                number, code = failed
                raise CudaFault(rows[number][1], code, self._name(code))
            return
        for kind, name, *arguments in rows:
            if kind == cuda_batch.UNTIL:
                cuda_batch.until(lambda: self.reached(arguments[0]), *arguments[2:])  # noqa: B023 - called here
            else:
                self._call(name, *arguments)

    # -- copies

    def to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", host, address, nbytes, stream or None)

    def to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", address, host, nbytes, stream or None)

    def across(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", target, source, nbytes, stream or None)

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, value, nbytes, stream or None)

    # -- for others

    def dmabuf(self, address: int, nbytes: int) -> int:
        fd = c_int(-1)
        self._call("cuMemGetHandleForAddressRange", byref(fd), address, nbytes, _DMABUF, 0)
        return fd.value

    def flush_writes(self) -> None:
        self._call("cuFlushGPUDirectRDMAWrites", 0, _TO_OWNER)

    def ipc_handle(self, address: int) -> bytes:
        found = _IpcHandle()
        self._call("cuIpcGetMemHandle", byref(found), address)
        return bytes(found.raw)

    def ipc_open(self, handle: bytes) -> int:
        given = _IpcHandle.from_buffer_copy(handle)
        return self._number("cuIpcOpenMemHandle_v2", given, _LAZY_PEER_ACCESS)

    def ipc_close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def create(self, nbytes: int, device: int) -> int:
        wanted = _Physical(_PINNED, POSIX_FD, _Location(_DEVICE, device))
        return self._number("cuMemCreate", nbytes, byref(wanted), 0)

    def retain(self, address: int) -> int:
        return self._number("cuMemRetainAllocationHandle", address)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        fd = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(fd), handle, POSIX_FD, 0)
        return fd.value

    def import_fd(self, fd: int) -> int:
        return self._number("cuMemImportFromShareableHandle", c_void_p(fd), POSIX_FD)

    def reserve(self, nbytes: int) -> int:
        return self._number("cuMemAddressReserve", nbytes, 0, 0, 0)

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: int, device: int) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)
        try:
            self.allow(address, nbytes, device)
        except CudaFault:
            self._call("cuMemUnmap", address, nbytes)
            raise

    def allow(self, address: int, nbytes: int, device: int) -> None:
        access = _Access(_Location(_DEVICE, device), _READ_WRITE)
        self._call("cuMemSetAccess", address, nbytes, byref(access), 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)
