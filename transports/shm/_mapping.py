"""Views of memory that two processes share: an arena, a board, a page."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Any

_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value

# Not the mmap module: it keeps another descriptor open, and holds the GIL while pages are mapped.
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def sealed(fd: int) -> bool:
    """Whether the file can never become shorter; reading a mapping past its end would kill the process."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


class Mapping:
    """`[offset, offset + nbytes)` of a memfd, readable at `address` until `close`, or until nobody has it any more.

    An array made of it (`numpy.asarray`) keeps it, and must not outlive `close` where that is called.
    """

    _start = 0

    def __init__(self, fd: int, offset: int, nbytes: int, *, writable: bool = False) -> None:
        """Raises `OSError` if the descriptor cannot be mapped, or not safely."""
        if not sealed(fd) or offset < 0 or nbytes <= 0 or os.fstat(fd).st_size < offset + nbytes:
            raise OSError("the memory is no memfd of that size that is sealed against shrinking")
        self._munmap = _munmap  # the module's name may be gone when `__del__` runs at exit
        info = os.fstat(fd)
        self.identity = (info.st_dev, info.st_ino, offset, nbytes)
        lead = offset % mmap.PAGESIZE
        self._length = nbytes + lead
        self._writable = writable
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        start = _mmap(None, self._length, access, mmap.MAP_SHARED, fd, offset - lead)
        if start == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._start = int(start)
        self.address = self._start + lead
        self.nbytes = nbytes
        # A hint: page faults now, in one call, instead of one by one in the first copy.
        _madvise(self._start, self._length, _MADV_POPULATE_READ)

    def close(self) -> None:
        """Unmaps; the caller has seen to it that nobody reads any more."""
        if self._start:
            self._munmap(self._start, self._length)
            self._start = self.address = 0

    def __del__(self) -> None:
        self.close()

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.address, not self._writable)
        return {"version": 3, "shape": (self.nbytes,), "typestr": "|u1", "data": data}
