"""Which parts of a selection have come, so that each comes once and none is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import BadFrame
from hawk.plan.types import Chunk

if TYPE_CHECKING:
    from hawk.control.messages import Prepared
    from hawk.plan.types import Selection


class Cover:
    """Layers of a selection times entries `[first, last)` of the target's table; without one nothing is wanted."""

    def __init__(self, selection: Selection | None = None, first: int = 0, last: int = 0) -> None:
        self._first = first
        self._layer = 0 if selection is None else selection.layer
        layers = 0 if selection is None else selection.layers
        self._covered = np.zeros((layers, last - first), dtype=bool)
        self._most = 0

    def following(self, chunk: Chunk) -> Chunk | None:
        """What probably comes after a chunk that was taken: after whole layers as many, or those left; else unknown.

        Once chunks become smaller they go on as `hawk.jobs.chunks.tapered` has them.
        """
        first = chunk.layer + chunk.layers
        left = self._layer + len(self._covered) - first
        if left < 1 or (chunk.block, chunk.blocks) != (self._first, self._covered.shape[1]):
            return None
        layers = min(chunk.layers, left if chunk.layers == self._most else max(left // 2, 1))
        return Chunk(first, layers, chunk.block, chunk.blocks)

    def take(self, prepared: Prepared) -> Chunk:
        """The part of the cache that this chunk is; raises `BadFrame` unless it is wanted and new."""
        layer, block = prepared.layer - self._layer, prepared.block - self._first
        part = self._covered[max(layer, 0) : layer + prepared.layers, max(block, 0) : block + prepared.blocks]
        if (
            min(layer, block) < 0
            or part.shape != (prepared.layers, prepared.blocks)
            or part.size == 0
            or part.any()
        ):
            raise BadFrame(
                "the chunk is no part of what was asked for, or came before",
                field=f"chunk {prepared.chunk}",
                got=f"layers {prepared.layer}+{prepared.layers}, entries {prepared.block}+{prepared.blocks}",
            )
        part[...] = True
        self._most = max(self._most, prepared.layers)
        return Chunk(
            layer=prepared.layer, layers=prepared.layers, block=prepared.block, blocks=prepared.blocks
        )

    @property
    def complete(self) -> bool:
        """Whether all has come."""
        return bool(self._covered.all())

    def check(self) -> None:
        """Raises `BadFrame` where something has not come."""
        if not self.complete:
            layer, block = (int(i[0]) for i in np.nonzero(~self._covered))
            raise BadFrame(
                "the peer prepared less than it promised",
                field="chunks",
                got=f"nothing for layer {layer + self._layer}, table entry {block + self._first}",
            )
