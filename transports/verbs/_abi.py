"""Work requests as the verbs interface lays them out, built from segments without work per segment in Python.

`struct ibv_send_wr` and `struct ibv_sge` are part of the stable interface of libibverbs (`infiniband/verbs.h`, LP64),
so a batch is two arrays: requests chained by `next`, and the pieces of memory that they scatter into.  A READ takes
one remote stretch and scatters it, a WRITE gathers and fills one: either way rows that follow each other on the remote
side share a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from hawk.memory.region import I64
    from hawk.transports._pieces import Piece

    Table = NDArray[np.void]

SGE = np.dtype([("addr", "<u8"), ("length", "<u4"), ("lkey", "<u4")])

SEND_WR = np.dtype(
    {
        "names": ["wr_id", "next", "sg_list", "num_sge", "opcode", "flags", "extra", "remote_addr", "rkey"],
        "formats": ["<u8", "<u8", "<u8", "<i4", "<u4", "<u4", "<u4", "<u8", "<u4"],
        "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 48],
        "itemsize": 128,
    }
)
"""`extra` is the union of immediate data and the key to invalidate."""

# enum ibv_wr_opcode, enum ibv_send_flags
WRITE, WRITE_IMM, READ, LOCAL_INV, BIND_MW = 0, 1, 4, 7, 8
SIGNALED = 2

BUILD_ROWS = 8192
"""Rows that are built at a time: about a millisecond on the event loop."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A chain of requests `wr` that one doorbell posts, the last one signalled; their pieces are `sge`.

    mr, window    index of each piece's registration and of each request's remote window, `int64[n]`
    nbytes        bytes in all of them
    """

    wr: Table
    sge: Table
    mr: I64
    window: I64
    nbytes: int

    def __len__(self) -> int:
        return len(self.wr)

    def address(self, keys: NDArray[np.uint32], remote_keys: NDArray[np.uint32], first_id: int) -> None:
        """Fills in what depends on the queue pair: local keys by `mr`, remote ones by `window`, and wr_ids."""
        self.sge["lkey"] = keys[self.mr]
        self.wr["rkey"] = remote_keys[self.window]
        self.wr["wr_id"] = np.arange(first_id, first_id + len(self.wr), dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Shape:
    """How requests are cut.

    max_sge        pieces of one request
    message        bytes of one request
    batch_wrs      requests of one batch
    batch_bytes    bytes of one batch, about: a request is not cut for it
    opcode         READ or WRITE
    """

    max_sge: int
    message: int
    batch_wrs: int
    batch_bytes: int
    opcode: int = READ


@dataclass(frozen=True, slots=True)
class Places:
    """Where local regions and the remote side lie for the device.

    The regions are thought of as laid end to end: region r begins at `begin[r]`.  Registration i begins at
    `start[i]` in that line (ascending) and at address `address[i]`.  Windows begin at the remote offsets `windows`
    (ascending); seen from window w, remote byte 0 would have the address `remote[w]`.
    """

    begin: I64
    start: I64
    address: I64
    windows: I64
    remote: I64


def marker(number: int, address: int) -> Batch:
    """A WRITE of nothing that carries `number` as immediate data: one request, after all that was posted before."""
    wr = np.zeros(1, SEND_WR)
    wr["opcode"] = WRITE_IMM
    wr["flags"] = SIGNALED
    wr["extra"] = number
    wr["remote_addr"] = address
    return Batch(wr, np.zeros(0, SGE), np.zeros(0, np.int64), np.zeros(1, np.int64), 0)


def batches(piece: Piece, places: Places, shape: Shape) -> Iterator[Batch]:
    """All rows of a piece as batches, in order."""
    line = places.begin[piece.region] + piece.local
    rows = _Rows(line, piece.remote, piece.nbytes)
    rows = rows.cut_at(places.start, "line").cut_at(places.windows, "remote")
    yield from _build(rows.cut_to(max(shape.message // 2, 1)), places, shape)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows as places in the line of regions, remote offsets and lengths."""

    line: I64
    remote: I64
    nbytes: I64

    def cut_at(self, bounds: I64, column: str) -> _Rows:
        """Cuts rows where they cross a bound in `column`; most rows cross none."""
        if len(bounds) < 2:
            return self
        at = self.line if column == "line" else self.remote
        first = bounds.searchsorted(at, "right")
        last = bounds.searchsorted(at + self.nbytes, "left")
        parts = last - first + 1
        if int(parts.max()) == 1:
            return self
        row = np.repeat(np.arange(len(at)), parts)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)
        above = first[row] + nth  # the bound at which this part would end
        begin = np.where(nth == 0, at[row], bounds[above - 1])
        end = np.where(
            nth == parts[row] - 1, (at + self.nbytes)[row], bounds[np.minimum(above, len(bounds) - 1)]
        )
        skip = begin - at[row]
        return _Rows(self.line[row] + skip, self.remote[row] + skip, end - begin)

    def cut_to(self, limit: int) -> _Rows:
        """Cuts rows that are longer than `limit` bytes."""
        if int(self.nbytes.max()) <= limit:
            return self
        parts = -(-self.nbytes // limit)
        row = np.repeat(np.arange(len(parts)), parts)
        skip = (np.arange(len(row)) - np.repeat(np.cumsum(parts) - parts, parts)) * limit
        return _Rows(
            self.line[row] + skip, self.remote[row] + skip, np.minimum(self.nbytes[row] - skip, limit)
        )


def _build(rows: _Rows, places: Places, shape: Shape) -> Iterator[Batch]:
    n = len(rows.nbytes)
    mr = places.start.searchsorted(rows.line, "right") - 1
    sge = np.empty(n, SGE)
    sge["addr"] = places.address[mr] + rows.line - places.start[mr]
    sge["length"] = rows.nbytes
    first, window = _requests(rows, places, shape)
    count = np.diff(first, append=n)
    ends = np.cumsum(rows.nbytes)
    begins = ends[first] - rows.nbytes[first]

    wr = np.zeros(len(first), SEND_WR)
    wr["sg_list"] = int(sge.ctypes.data) + first * SGE.itemsize
    wr["num_sge"] = count
    wr["opcode"] = shape.opcode
    wr["remote_addr"] = places.remote[window] + rows.remote[first]
    wr["next"] = int(wr.ctypes.data) + np.arange(1, len(first) + 1) * SEND_WR.itemsize

    # Batches end where a count of requests or of bytes is full, whichever comes first.
    bucket = begins // shape.batch_bytes
    number = np.arange(len(first))
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    inside = number - np.repeat(starts, np.diff(starts, append=len(first)))
    stops = np.append(np.flatnonzero(inside % shape.batch_wrs == 0), len(first))
    last = stops[1:] - 1
    wr["next"][last] = 0
    wr["flags"][last] = SIGNALED
    piece_stops = np.append(first, n)[stops]
    totals = np.diff(np.append(begins, ends[-1])[stops])
    for i, total in enumerate(totals.tolist()):
        taken = slice(int(stops[i]), int(stops[i + 1]))
        pieces = slice(int(piece_stops[i]), int(piece_stops[i + 1]))
        yield Batch(wr[taken], sge[pieces], mr[pieces], window[taken], total)


def _requests(rows: _Rows, places: Places, shape: Shape) -> tuple[I64, I64]:
    """First row of every request, and each one's window.

    A request takes rows that follow each other remotely, up to `max_sge` of them, and begins anew whenever it has
    come to the next half of a message: with rows of half a message at most it never exceeds a whole one.
    """
    n = len(rows.nbytes)
    windows = places.windows.searchsorted(rows.remote, "right") - 1
    fresh = np.ones(n, bool)
    fresh[1:] = rows.remote[:-1] + rows.nbytes[:-1] != rows.remote[1:]
    fresh[1:] |= windows[1:] != windows[:-1]
    starts = np.flatnonzero(fresh)
    lengths = np.diff(starts, append=n)
    begin = np.repeat(rows.remote[starts], lengths)
    half = (rows.remote - begin) // max(shape.message // 2, 1)
    fresh[1:] |= half[1:] != half[:-1]
    starts = np.flatnonzero(fresh)
    inside = np.arange(n) - np.repeat(starts, np.diff(starts, append=n))
    first = np.flatnonzero(inside % shape.max_sge == 0)
    return first, windows[first]
