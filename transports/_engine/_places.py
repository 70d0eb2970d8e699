"""The memory that rows of a read go to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import RegistrationFailed
from hawk.transports._pieces import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hawk.memory.region import Region
    from hawk.transports._lanes import Work


def used(work: Work, rows: Piece) -> list[Region]:
    """The regions that these rows lie in."""
    if len(work.regions) == 1:
        return list(work.regions)
    return [work.regions[i] for i in np.flatnonzero(np.bincount(rows.region)).tolist()]


def in_gpus(work: Work) -> bool:
    """Whether a read goes into memory of GPUs, or some of it."""
    return any(region.gpu >= 0 for region in work.regions)


def alike(work: Work, piece: Piece) -> Iterator[Piece]:
    """The rows in memory of the host, then those in each GPU's: one request of an engine is of one kind of memory."""
    if not in_gpus(work):
        yield piece
        return
    gpus = np.asarray([region.gpu for region in work.regions])[piece.region]
    kinds = np.unique(gpus).tolist()
    if len(kinds) == 1:
        yield piece
        return
    for gpu in kinds:
        rows = gpus == gpu
        nbytes = piece.nbytes[rows]
        yield Piece(piece.region[rows], piece.local[rows], piece.remote[rows], nbytes, int(nbytes.sum()))


def not_taken(region: Region, why: str) -> RegistrationFailed:
    """What a read into memory of a GPU is refused with."""
    return RegistrationFailed(
        "the engine cannot move bytes into memory of this GPU",
        field=region.name,
        got=f"memory of cuda:{region.gpu}: {why}",
        expected="memory of the host, from which they are copied on",
    )
