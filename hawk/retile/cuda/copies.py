"""A kernel that copies many rows in one launch: from addresses to addresses, each of any length and alignment.

Copy engines take a microsecond or so for each row; a page of a device's channel has moved in a tenth of that.  The
source may be another GPU's memory, where this one reaches it.  CuPy compiles and launches.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.retile.cuda import launch
from hawk.retile.cuda.source import header

if TYPE_CHECKING:
    from numpy.typing import NDArray

THREADS = 256

LONGEST = 32 << 10
"""Bytes of a row at most: two batches of a block; longer ones are cut, so that many blocks share them."""

COLUMNS = 3
"""Words of 8 bytes that a row of the table has: from, to, bytes."""

_BODY = """
struct args { u64 table; u32 rows; };

/* The largest power of two up to 16 that divides x. */
FN u32 common(u64 x)
{
    return x & 1 ? 1u : x & 2 ? 2u : x & 4 ? 4u : x & 8 ? 8u : 16u;
}

#define COPY_BY(N)                                                                                      \\
    for (u64 at = first + (u64)thread * N; at + N <= last; at += (u64)THREADS * N) {                    \\
        u32 t[4];                                                                                       \\
        load##N(t, from + at);                                                                          \\
        store##N(to + at, t);                                                                           \\
    }

FN void copy_row(u64 from, u64 to, u64 n, u32 thread)
{
    /* Both ends are equally far from a multiple of `width`: up to there and at the end single bytes. */
    const u32 width = common(from ^ to);
    u64 first = (0 - from) & (width - 1);
    u32 t[4];
    if (first > n)
        first = n;
    const u64 last = first + (n - first) / width * width;
    if (thread < first) {
        load1(t, from + thread);
        store1(to + thread, t);
    }
    if (thread < n - last) {
        load1(t, from + last + thread);
        store1(to + last + thread, t);
    }
    if (width == 16) {
        const u64 step = (u64)THREADS * 16, batch = step * BATCH;
        u64 at = first + (u64)thread * 16;
        for (; at + (batch - step) + 16 <= last; at += batch) {
            u32 all[BATCH * 4];
            UNROLL for (u32 k = 0; k < BATCH; k++)
                load16(all + 4 * k, from + at + k * step);
            UNROLL for (u32 k = 0; k < BATCH; k++)
                store16(to + at + k * step, all + 4 * k);
        }
        for (; at + 16 <= last; at += step) {
            load16(t, from + at);
            store16(to + at, t);
        }
    } else if (width == 8) {
        COPY_BY(8)
    } else if (width == 4) {
        COPY_BY(4)
    } else if (width == 2) {
        COPY_BY(2)
    } else {
        COPY_BY(1)
    }
}

KERNEL(retile, const struct args a)
PHASES(room)
    (void)room;
    if (block < a.rows) {
        const u64 *row = TABLE(u64, a.table) + (u64)block * 3;
        copy_row(LOOK(row), LOOK(row + 1), LOOK(row + 2), thread);
    }
END
"""


@lru_cache(maxsize=4)
def text(under: str | None = None) -> str:
    """The kernel; `under` is the header it stands on, that of a GPU by default."""
    return "\n".join(
        [
            f"#define THREADS {THREADS}",
            "#define BLOCKS 4",
            "#define BATCH 4",
            header("device.h") if under is None else under,
            _BODY,
        ]
    )


def table(
    source: NDArray[np.int64], target: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The kernel's table, `int64[rows, 3]`, of rows by their addresses; long ones are cut at `LONGEST`."""
    pieces = -(-nbytes // LONGEST)
    total = int(pieces.sum())
    if total == len(nbytes):
        return np.stack([source, target, nbytes], axis=1)
    row = np.repeat(np.arange(len(nbytes)), pieces)
    within = (np.arange(total) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * LONGEST
    rest = np.minimum(nbytes[row] - within, LONGEST)
    return np.stack([source[row] + within, target[row] + within, rest], axis=1)


class CopyKernel:
    """The kernel on one GPU: `function` is its handle, for the driver.

    Raises `ImportError` without CuPy, which compiles it, and what that raises without a driver.
    """

    def __init__(self, device: int) -> None:
        cupy: Any = import_module("cupy")
        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=text(), options=launch.OPTIONS)
            self._kept = module.get_function("retile").kernel  # for as long as the handle is used
        self.function = int(self._kept.ptr)


def arguments(table: int, rows: int) -> bytes:
    """The kernel's, for a table at that address of the GPU."""
    return struct.pack("<QI4x", table, rows)
