"""What the device of a rig sees of the blocks that a fetch writes, against the reference."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.end_to_end import caches as c
from tests.unit.jobs.rig import TARGET, TOKENS, Rig

PAIRS = [(3, 1), (0, 2), (1, 2)]
"""Target blocks of a fetch; the third is in the others' way."""

PAINT = 0x5A
Masks = list[tuple[np.ndarray, np.ndarray]]


@functools.lru_cache
def _right(pair: tuple[int, ...], offsets: tuple[int, ...], size: int) -> Masks:
    """By channel, which bytes a fetch into these blocks writes, and what with."""
    source = c.KVCache.from_numpy(
        [np.zeros(2 * 8 * 16 * c.HEADS * c.DIM, np.uint16) for _ in range(c.LAYERS)],
        c.source_spec(blocks=8),
    )
    c.fill(source)
    moved = c.Moved(source, np.arange(8), pair, 0, TOKENS)
    device = SimpleNamespace(offsets=offsets)
    drawn = []
    for canary in (c.CANARY, PAINT):
        channels = [np.full(size, canary, np.uint8) for _ in range(8)]
        c._put(channels, device, TARGET, moved)  # type: ignore[arg-type]
        drawn.append(channels)
    places = [np.flatnonzero(one == other) for one, other in zip(*drawn, strict=True)]
    return [(place, channel[place]) for place, channel in zip(places, drawn[0], strict=True)]


class Device:
    """The target's bytes: painted before a fetch, looked at after it."""

    def __init__(self, made: Rig) -> None:
        self._made, self._npu = made, made.npu
        self._offsets = tuple(int(row[0]) for row in made.target.placement.offset)

    def _masks(self, pair: tuple[int, ...]) -> Masks:
        return _right(pair, self._offsets, len(self._npu.regions[0].array))

    def paint(self, pair: tuple[int, ...]) -> None:
        """Nothing of these blocks is as a fetch would have it, neither written nor seen."""
        for channel, (places, _) in enumerate(self._masks(pair)):
            self._npu.regions[channel].array[places] = c.CANARY
            self._npu.visible[channel][places] = c.CANARY

    def is_right(self, pair: tuple[int, ...]) -> bool:
        """Whether the device sees what a fetch into these blocks has to bring."""
        return all(
            np.array_equal(self._npu.visible[channel][places], wanted)
            for channel, (places, wanted) in enumerate(self._masks(pair))
        )

    def bring(self, segments: Any, regions: Any) -> None:
        """Copies what a read brings from the prefill side's arena."""
        arena = self._made.arena.region.array
        columns = (segments.region, segments.local, segments.remote, segments.nbytes)
        for region, local, remote, nbytes in zip(*(column.tolist() for column in columns), strict=True):
            regions[region].array[local : local + nbytes] = arena[remote : remote + nbytes]
