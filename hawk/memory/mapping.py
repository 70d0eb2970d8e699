"""Mappings of descriptors, found again by the addresses of arrays over them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
"""Linux numbers that Python 3.11 has no names for (include/uapi/asm-generic/mman-common.h)."""

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000

# ctypes instead of the mmap module: that one keeps a second descriptor open for as long as the mapping lives,
# refuses to close while a numpy view exists, and holds the GIL while madvise fills gigabytes.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """One shared mapping of a descriptor from its byte `offset` on; unmapped when the last array over it is gone.

    address, nbytes    where it is in this process
    fd                 the descriptor, once it was told to `keep` it, until `drop_fd`; else -1
    """

    __slots__ = ("__weakref__", "_close", "_munmap", "address", "fd", "nbytes", "writable")

    def __init__(self, fd: int, nbytes: int, writable: bool, offset: int = 0) -> None:
        self.address = 0
        self.fd = -1
        self._munmap = _libc.munmap  # module globals may be gone when __del__ runs at exit
        self._close = os.close
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _libc.mmap(None, nbytes, prot, mmap.MAP_SHARED, fd, offset)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address = int(address)
        self.nbytes = nbytes
        self.writable = writable

    @property
    def __array_interface__(self) -> dict[str, Any]:
        # numpy keeps the object that has this attribute as the base of the array and of all its views.
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, not self.writable),
        }

    def advise(self, advice: int) -> int:
        """Returns 0 or the errno."""
        if _libc.madvise(self.address, self.nbytes, advice) == 0:
            return 0
        return ctypes.get_errno()

    def keep(self, fd: int) -> None:
        """Owns the descriptor from now on, and can be found by its addresses."""
        self.fd = fd
        _open[self.address] = self

    def drop_fd(self) -> None:
        """Closes the descriptor, and is found no more."""
        # Before the pages can go: the next mapping may get the same address.
        if _open.get(self.address) is self:
            del _open[self.address]
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            self._close(fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            self._close(self.fd)
        if self.address:
            self._munmap(self.address, self.nbytes)


class Patchwork:
    """A range of addresses set aside, onto which pieces of descriptors are mapped side by side.

    A page that nothing was placed on may not be touched.  All is unmapped when the last array over it is gone.
    """

    __slots__ = ("__weakref__", "_munmap", "address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.address = 0
        self._munmap = _libc.munmap
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        address = _libc.mmap(None, nbytes, _PROT_NONE, flags, -1, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address = int(address)
        self.nbytes = nbytes

    def place(self, at: int, fd: int, nbytes: int, offset: int) -> None:
        """Maps `nbytes` of a descriptor from `offset` on at byte `at`; all of them multiples of a page.

        Raises `OSError`.
        """
        if at < 0 or nbytes < 1 or at + nbytes > self.nbytes:
            raise OSError(errno.EINVAL, "outside the range that was set aside")
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(self.address + at, nbytes, prot, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}

    def __del__(self) -> None:
        if self.address:
            self._munmap(self.address, self.nbytes)


_open: weakref.WeakValueDictionary[int, Mapping] = weakref.WeakValueDictionary()
"""Every mapping of this process that has its descriptor, by its address."""


def find(address: int, nbytes: int) -> tuple[Mapping, int] | None:
    """The mapping with a descriptor that holds these bytes, and their offset in it; None for any other memory.

    This is how an array that a user made from `alloc`, sliced and viewed as he liked, is led back to the
    descriptor that another process can map.
    """
    for ref in _open.valuerefs():
        mapping = ref()
        if mapping is None or mapping.fd < 0:
            continue
        offset = address - mapping.address
        if offset >= 0 and offset + nbytes <= mapping.nbytes:
            return mapping, offset
    return None
