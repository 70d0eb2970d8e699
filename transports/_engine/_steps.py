"""A piece of a read in the requests that an engine is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.transports import _pieces
from hawk.transports._engine import _places, _wire

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hawk.memory.region import I64, Region
    from hawk.transports._lanes import Work
    from hawk.transports._pieces import Piece

_LONG_ENOUGH = 0.01
"""Seconds that a request takes of rows that go to their places, where the engine is fast enough for a large one."""

_MOST_CHUNKS = 4
"""Such a request is of so many chunks at most: nothing can be called off but between two."""

_FEW = 1 / 16
"""The part of a piece's bytes that may be in short rows where all of it goes to its places."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request: the rows that it brings, and what the engine is asked for.

    gpu       the GPU whose memory the rows go into, or -1
    places    whether they go straight to their places; else one after the other into a buffer
    local     addresses, or offsets in the buffer
    """

    rows: Piece
    gpu: int
    places: bool
    local: I64
    remote: I64
    nbytes: I64


class Pace:
    """How much to ask for at a time, by how fast the last piece was; sizes in bytes."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._rate = 0.0

    def went(self, nbytes: int, seconds: float) -> None:
        """So much has come in that time."""
        if nbytes >= self._chunk:
            self._rate = nbytes / max(seconds, 1e-9)

    @property
    def stride(self) -> int:
        """Of rows that go to their places."""
        return int(min(max(self._rate * _LONG_ENOUGH, self._chunk), _MOST_CHUNKS * self._chunk))


def steps(
    work: Work, piece: Piece, chunk: int, stride: int, gather: int, taken: Callable[[Sequence[Region]], bool]
) -> Iterator[Step]:
    """The piece in steps, each laid out when it is asked for: rows of at least `gather` bytes go to their places.

    chunk, stride    bytes of a step, through a buffer and to their places
    taken            whether the engine can be given these regions as they are
    """
    for part in _places.alike(work, piece):
        used = _places.used(work, part)
        gpu = used[0].gpu
        # Into memory of a GPU no processor could deal rows out; whoever reads there gives long ones.
        places = gpu >= 0 or (_all_long(part, gather) and taken(used))
        for cut in _pieces.cut(part, stride if places else chunk, _wire.MAX_ROWS):
            rows = _pieces.join(cut)
            long = not places and rows.total >= gather * len(rows.nbytes)
            if places or (long and taken(_places.used(work, rows))):
                local = work.bases[rows.region] + rows.local
                yield Step(rows, gpu, True, local, rows.remote, rows.nbytes)
            else:
                remote, nbytes = rows.ranges()
                yield Step(rows, gpu, False, np.cumsum(nbytes) - nbytes, remote, nbytes)


def _all_long(part: Piece, gather: int) -> bool:
    if part.total < gather * len(part.nbytes):
        return False
    short = int(part.nbytes[part.nbytes < gather].sum())
    return short <= part.total * _FEW
