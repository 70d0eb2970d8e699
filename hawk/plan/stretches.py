"""What of a chunk is checked as one: stretches of the arena, the same on both sides of a transfer.

A stretch holds bytes of one plane in one channel, at most SPAN of the arena (more only where a chunk would fall into
too many).  Where they begin follows from the target's side of the plan alone; their content is the bytes that move,
in the order of the arena.  Neighbours' rows and gaps between pages are in none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.memory.region import Segments
from hawk.plan.pattern import ragged
from hawk.plan.segments import direct
from hawk.plan.types import Placement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.plan.types import TargetChunk

    I64 = NDArray[np.int64]

SPAN = 64 << 10
"""Arena bytes of a stretch: 8 bytes of check for each add little, and a mismatch is told within few pages."""

MOST = 1 << 16
"""Stretches of a chunk at most, where a channel has fewer planes than that: what fits well into one control frame."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretches:
    """Stretches one after the other, with the rows of bytes that each consists of.

    rows     `Segments.region` and `local` say where the bytes lie, `remote` where in the arena, from the chunk's
             first byte
    first    the first row of each, and one past the last row of the last, `int64[n + 1]`; each has a row or more
    begin    the arena byte, from the chunk's first, at which each begins, `int64[n]`
    """

    rows: Segments
    first: I64
    begin: I64

    def __len__(self) -> int:
        return len(self.begin)

    def take(self, chosen: I64) -> Stretches:
        """Only those of these numbers, ascending."""
        count = np.diff(self.first)[chosen]
        row = ragged(self.first[chosen], count)
        rows = self.rows
        return Stretches(
            Segments(rows.region[row], rows.local[row], rows.remote[row], rows.nbytes[row]),
            np.concatenate((np.zeros(1, np.int64), np.cumsum(count))),
            self.begin[chosen],
        )


def _begins(target: TargetChunk) -> I64:
    """Where stretches begin in the arena, and the chunk's end, ascending."""
    part = np.unique(target.base)
    part = part[part < target.nbytes]
    size = np.diff(np.append(part, target.nbytes))
    span = SPAN
    while span < target.nbytes and int((-(-size // span)).sum()) > MOST:
        span *= 2
    count = -(-size // span)
    return np.append(np.repeat(part, count) + ragged(np.zeros_like(count), count) * span, target.nbytes)


def _cut(rows: Segments, edges: I64) -> Stretches:
    """The rows, sorted by `remote`, cut where a stretch begins; stretches without any are left out."""
    begin, end = rows.remote, rows.remote + rows.nbytes
    low = np.searchsorted(edges, begin, side="right") - 1
    count = np.searchsorted(edges, end, side="left") - low
    row = np.repeat(np.arange(len(count)), count)
    number = ragged(low, count)
    start = np.maximum(begin[row], edges[number])
    cut = Segments(
        rows.region[row],
        rows.local[row] + start - begin[row],
        start,
        np.minimum(end[row], edges[number + 1]) - start,
    )
    first = np.flatnonzero(np.diff(number, prepend=-1))
    return Stretches(cut, np.append(first, len(number)), edges[number[first]])


def prepared(target: TargetChunk) -> Stretches:
    """The chunk's stretches where the sender has laid them out: region 0 is the chunk's part of the arena."""
    shape = (len(target.layout.buffer_bytes), target.layout.channels)
    # The arena's side of a segment does not depend on where the target lies; here it lies nowhere.
    nowhere = Placement(np.zeros(shape, np.int32), np.zeros(shape, np.int64))
    rows = direct(target, nowhere, 0)
    here = Segments(np.zeros(len(rows), np.int32), rows.remote, rows.remote, rows.nbytes)
    return _cut(here, _begins(target))


def landed(target: TargetChunk, placement: Placement) -> Stretches:
    """The chunk's stretches where the receiver has them, in the regions that `placement` names."""
    return _cut(direct(target, placement, 0), _begins(target))


def named(target: TargetChunk, begin: int) -> tuple[int, int, int, str]:
    """Layer, kv, channel and tensor ("elements" or "scales") of the stretch that begins at this byte of the arena."""
    base = target.base.T.ravel()
    # Parts without a byte begin where the next one does, and come before it.
    at = int(np.searchsorted(base, begin, side="right")) - 1
    channel, plane = divmod(at, len(target.planes))
    layer, kv = target.planes[plane]
    return layer, kv, channel, "scales" if target.tensor_of(plane).of_scales else "elements"
