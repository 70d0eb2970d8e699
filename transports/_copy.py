"""One copy from a mapped source into many targets: the C core where it is built, the C library elsewhere."""

from __future__ import annotations

import ctypes
import functools
import importlib
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from hawk.memory.region import I32, I64


class Copy(Protocol):
    """Copies `nbytes[i]` bytes from `src_base + remote[i]` to `dst_bases[region[i]] + local[i]`, for every row.

    `dst_bases` (`int64[regions]`) and `src_base` are addresses.  Releases the GIL while bytes move.
    """

    def __call__(
        self, dst_bases: I64, region: I32, local: I64, src_base: int, remote: I64, nbytes: I64
    ) -> None: ...


@functools.cache
def best() -> Copy:
    """The fastest copy that this installation has."""
    try:
        native = importlib.import_module("hawk.retile.native")
        return cast("Copy", native.copy_segments)
    except (ImportError, AttributeError):
        return plain


def plain(dst_bases: I64, region: I32, local: I64, src_base: int, remote: I64, nbytes: I64) -> None:
    """See `Copy`.  One call per row, so rows that follow each other on both sides should be joined before."""
    target = dst_bases[region] + local
    source = remote + np.int64(src_base)
    move = ctypes.memmove  # releases the GIL during each call
    for to, at, count in zip(target.tolist(), source.tolist(), nbytes.tolist(), strict=True):
        move(to, at, count)
