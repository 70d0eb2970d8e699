"""One copy from a mapped source into many targets: by the C core where it is built, by the kernel elsewhere."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from hawk.memory.region import I32, I64

_BATCH = 1024
"""Places that one system call takes (IOV_MAX)."""

_LONG = 16 << 10
"""Mean length of rows, bytes, from which one call of the library for each is the faster way."""


class Copy(Protocol):
    """Copies `nbytes[i]` bytes from `src_base + remote[i]` to `dst_bases[region[i]] + local[i]`, for every row.

    `dst_bases` (`int64[regions]`) and `src_base` are addresses.  Releases the GIL while bytes move.
    """

    def __call__(
        self, dst_bases: I64, region: I32, local: I64, src_base: int, remote: I64, nbytes: I64
    ) -> None: ...


def best() -> Copy:
    """The fastest copy that this installation has."""
    native = _native()
    if native is not None and native.core_name() == "c":
        return cast("Copy", native.copy_segments)
    return kernel


@functools.cache
def _native() -> Any:
    try:
        return importlib.import_module("hawk.retile.native")
    except ImportError:
        return None


@functools.cache
def _process_vm_readv() -> Any:
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except AttributeError:
        return None
    size, pointer = ctypes.c_ulong, ctypes.c_void_p
    call.restype = ctypes.c_ssize_t
    call.argtypes = (ctypes.c_int, pointer, size, pointer, size, size)
    return call


def kernel(dst_bases: I64, region: I32, local: I64, src_base: int, remote: I64, nbytes: I64) -> None:
    """See `Copy`.  The kernel copies within this process, 1024 places a call; where it may not, `plain` does.

    Pages of 2 KiB cost no work in Python that way, so it is twice as fast on them; on long rows `plain` is.
    """
    call = _process_vm_readv()
    if call is None or int(nbytes.sum()) >= _LONG * len(nbytes):
        plain(dst_bases, region, local, src_base, remote, nbytes)
        return
    n = len(nbytes)
    to, at = np.empty((n, 2), np.int64), np.empty((n, 2), np.int64)
    to[:, 0] = dst_bases[region] + local
    at[:, 0] = remote + np.int64(src_base)
    to[:, 1] = at[:, 1] = nbytes
    to_pointer, at_pointer, this = int(to.ctypes.data), int(at.ctypes.data), os.getpid()
    for i in range(0, n, _BATCH):
        count = min(_BATCH, n - i)
        moved = call(this, to_pointer + 16 * i, count, at_pointer + 16 * i, count, 0)
        if moved != int(nbytes[i : i + count].sum()):
            # Forbidden in some containers, and a call moves at most 2 GiB.
            rows = slice(i, i + count)
            plain(dst_bases, region[rows], local[rows], src_base, remote[rows], nbytes[rows])


def plain(dst_bases: I64, region: I32, local: I64, src_base: int, remote: I64, nbytes: I64) -> None:
    """See `Copy`.  One call of the C library per row."""
    target = dst_bases[region] + local
    source = remote + np.int64(src_base)
    move = ctypes.memmove  # releases the GIL during each call
    for to, at, count in zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True):
        move(to, at, count)
