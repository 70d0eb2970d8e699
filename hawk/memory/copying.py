"""Copies of many short pieces inside one region, without holding the GIL.

The C core does a whole table in one call.  Without it, rows that continue each other on both sides are joined
first, so that at least regular tables cost few Python calls.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

if TYPE_CHECKING:
    from hawk.memory.region import I32, I64, Region


class _CopySegments(Protocol):
    def __call__(
        self, dst_bases: I64, region: I32, local: I64, src_base: int, remote: I64, nbytes: I64
    ) -> None: ...


@cache
def _native() -> _CopySegments | None:
    # The copying half of the retile core; a machine without it still moves bytes, only slower.
    try:
        module = importlib.import_module("hawk.retile.native")
    except ImportError:
        return None
    return cast("_CopySegments | None", getattr(module, "copy_segments", None))


def copy_within(region: Region, source: I64, target: I64, nbytes: I64) -> None:
    """Copies row by row inside `region`; offsets and lengths in bytes, `int64[n]`.

    No source may overlap a target.  The caller has checked that every row lies inside the region.
    """
    native = _native()
    if native is not None:
        bases = np.asarray([region.address], np.int64)
        native(bases, np.zeros(len(nbytes), np.int32), target, region.address, source, nbytes)
    else:
        copy_by_memmove(region, source, target, nbytes)


def copy_by_memmove(region: Region, source: I64, target: I64, nbytes: I64) -> None:
    """As `copy_within`, with nothing but the C library."""
    if not len(nbytes):
        return
    joins = (source[1:] == source[:-1] + nbytes[:-1]) & (target[1:] == target[:-1] + nbytes[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    lengths = np.add.reduceat(nbytes, first)
    base = region.address
    # ctypes lets go of the GIL for the length of each call.
    for s, t, n in zip(source[first].tolist(), target[first].tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(base + t, base + s, n)
