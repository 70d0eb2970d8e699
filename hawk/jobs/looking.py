"""Stretches of memory of a GPU, brought to where processors can check them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.memory.region import Segments
from hawk.plan.stretches import Stretches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.memory.cuda_look import Look
    from hawk.memory.region import Region

    U8 = NDArray[np.uint8]


def brought(
    found: Stretches, regions: Sequence[Region], look: Look, begin: int, end: int
) -> tuple[Stretches, U8]:
    """Stretches `[begin, end)` of memory of a GPU, and the bytes of the host that they are in now."""
    low, high = int(found.first[begin]), int(found.first[end])
    rows = found.rows
    address = np.asarray([region.address for region in regions], np.int64)
    nbytes = rows.nbytes[low:high]
    seen = look.bring(address[rows.region[low:high]] + rows.local[low:high], nbytes)
    # One stretch is one piece there.
    size = np.add.reduceat(nbytes, found.first[begin:end] - low)
    at = np.cumsum(size) - size
    place = Segments(np.zeros(len(size), np.int32), at, at, size)
    return Stretches(place, np.arange(len(size) + 1), at), seen
