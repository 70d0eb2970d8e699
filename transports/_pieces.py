"""Cuts a batch of segments into pieces of bounded size, without work per segment in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hawk.memory.region import I32, I64, Region, Segments


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of segments (columns as in `Segments`), `total` bytes together."""

    region: I32
    local: I64
    remote: I64
    nbytes: I64
    total: int

    @property
    def low(self) -> int:
        """First remote byte."""
        return int(self.remote.min())

    @property
    def high(self) -> int:
        """One past the last remote byte."""
        return int((self.remote + self.nbytes).max())

    def ranges(self) -> tuple[I64, I64]:
        """Remote (offset, length) columns with neighbours joined; the bytes keep their order."""
        joins = self.remote[:-1] + self.nbytes[:-1] == self.remote[1:]
        first = np.flatnonzero(np.concatenate(([True], ~joins)))
        return self.remote[first], np.add.reduceat(self.nbytes, first)


def bases(regions: Sequence[Region]) -> I64:
    """Addresses of the regions, `int64[n]`; raises `InvalidArgument` for one that nothing may be written to."""
    for i, region in enumerate(regions):
        array = region.array
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise InvalidArgument(
                "not a run of bytes",
                field=f"regions[{i}]",
                got=f"{array.dtype}{list(array.shape)}",
                expected="contiguous uint8[n]",
            )
        if not array.flags.writeable:
            raise InvalidArgument("the region is read-only", field=f"regions[{i}]", got=region.name)
    return np.asarray([region.address for region in regions], dtype=np.int64)


def cut(segments: Segments | Piece, limit: int, max_rows: int) -> Iterator[Piece]:
    """Pieces of at most `limit` bytes and `max_rows` rows, in order; a row may be cut in two.

    Columns are views of the segments' own, but for the edges of rows that were cut.  A piece ends with its batch.
    """
    batches = (segments,) if isinstance(segments, Piece) else segments.batches()
    for batch in batches:
        yield from _cut(batch, limit, max_rows)


def _cut(segments: Segments | Piece, limit: int, max_rows: int) -> Iterator[Piece]:
    ends = np.cumsum(segments.nbytes)
    rows, total = len(ends), int(ends[-1])
    done = 0
    row = 0
    while done < total:
        stop = min(done + limit, int(ends[min(row + max_rows, rows) - 1]))
        last = int(ends.searchsorted(stop, "left"))
        taken = slice(row, last + 1)
        nbytes, local, remote = segments.nbytes[taken], segments.local[taken], segments.remote[taken]
        skip = done - (int(ends[row]) - int(nbytes[0]))
        spare = int(ends[last]) - stop
        if skip or spare:
            nbytes = nbytes.copy()
            nbytes[-1] -= spare
            nbytes[0] -= skip
        if skip:
            local, remote = local.copy(), remote.copy()
            local[0] += skip
            remote[0] += skip
        yield Piece(segments.region[taken], local, remote, nbytes, stop - done)
        done = stop
        row = last if spare else last + 1


def join(piece: Piece) -> Piece:
    """The same bytes with rows joined that follow each other on both sides."""
    region, local, remote, nbytes = piece.region, piece.local, piece.remote, piece.nbytes
    joins = remote[:-1] + nbytes[:-1] == remote[1:]
    joins &= local[:-1] + nbytes[:-1] == local[1:]
    joins &= region[:-1] == region[1:]
    if not joins.any():
        return piece
    first = np.flatnonzero(np.concatenate(([True], ~joins)))
    return Piece(region[first], local[first], remote[first], np.add.reduceat(nbytes, first), piece.total)
