"""Plans of one job's chunks, of which most differ in nothing but the layer.

Where every layer has base addresses of its own, on both sides, all chunks of as many layers and the same table
entries have the same runs and the same pieces; only the buffers differ.  So a job plans each shape of chunk once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hawk.plan.source import retile_steps
from hawk.plan.target import chunk_bytes, target_chunk
from hawk.plan.tensors import placements
from hawk.plan.types import Steps
from hawk.retile.rows import RowsStep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.types import Chunk, Placement, Selection, Step, TargetChunk
    from hawk.retile.lies import Lies

    I64 = NDArray[np.int64]

_SHAPES = 64
"""Shapes of chunks remembered; a job has a handful."""


_FEW = 4096
"""Runs of a chunk up to which handing it to a thread costs more than planning it."""


@lru_cache(maxsize=256)
def _by_layer(layout: CompiledLayout) -> bool:
    """Whether every layer has base addresses of its own."""
    return all("layer" in tensor.buffers for tensor in layout.tensors)


def _shape(chunk: Chunk) -> tuple[int, int, int]:
    return chunk.block, chunk.blocks, chunk.layers


class TargetPlans:
    """`target_chunk` for the chunks of one job; see there for the arguments and what is raised."""

    def __init__(self, dst: CompiledLayout, blocks: I64, selection: Selection) -> None:
        self._dst = dst
        self._blocks = blocks
        self._selection = selection
        self._alike = _by_layer(dst)
        self._known: dict[tuple[int, int, int], TargetChunk] = {}

    @property
    def selection(self) -> Selection:
        """Of the job."""
        return self._selection

    @property
    def keeps(self) -> bool:
        """Whether the plan of a chunk is remembered for those like it."""
        return self._alike

    def quick(self, chunk: Chunk) -> bool:
        """Whether planning this chunk, and what is derived from its runs, takes well under a millisecond."""
        known = self._known.get(_shape(chunk)) if self._alike else None
        if known is None:
            pages = chunk_bytes(self._dst, self._selection, chunk) // self._dst.page_stride
            return pages < _FEW // 8
        return sum(len(known.runs[kind].nbytes) for kind in known.kind) < _FEW

    def plan(self, chunk: Chunk) -> TargetChunk:
        """The target's side of `chunk`."""
        shape = _shape(chunk)
        known = self._known.get(shape) if self._alike else None
        last = self._selection.layer + self._selection.layers
        if known is None or chunk.layer < self._selection.layer or chunk.layer + chunk.layers > last:
            planned = target_chunk(self._dst, self._blocks, self._selection, chunk)
            if len(self._known) < _SHAPES:
                self._known[shape] = planned
            return planned
        up = chunk.layer - known.chunk.layer
        if up == 0:
            return known
        return replace(known, chunk=chunk, planes=tuple((layer + up, kv) for layer, kv in known.planes))


class SourcePlans:
    """`retile_steps` for the chunks of one job; see there for the arguments and what is raised."""

    def __init__(
        self, src: CompiledLayout, src_blocks: I64, placement: Placement, dst: CompiledLayout, dst_blocks: I64
    ) -> None:
        self._src = src
        self._src_blocks = src_blocks
        self._placement = placement
        self._dst_blocks = dst_blocks
        self._alike = _by_layer(src) and _by_layer(dst)
        self._known: dict[tuple[int, int, int], tuple[int, Steps[Step]]] = {}
        self._buffers: I64 | None = None
        self._lifts: dict[int, tuple[Lies, I64, I64]] = {}

    def plan(self, target: TargetChunk) -> Steps[Step]:
        """The steps that fill the arena of `target`."""
        chunk, shape = target.chunk, _shape(target.chunk)
        known = self._known.get(shape) if self._alike else None
        if known is None:
            steps = retile_steps(self._src, self._src_blocks, self._placement, target, self._dst_blocks)
            if len(self._known) < _SHAPES:
                self._known[shape] = (chunk.layer, steps)
            return steps
        first, steps = known
        up, selection = chunk.layer - first, target.selection
        lies = None if steps.lies is None else lambda: self._lies(steps, up, selection)
        return Steps(len(steps), lambda number: self._moved(steps[number], up, selection), lies)

    def _lies(self, steps: Steps[Step], up: int, selection: Selection) -> Lies:
        """Where steps lie that are `up` layers above these."""
        assert steps.lies is not None
        found = self._lifts.get(id(steps))  # which lives as long as this
        if found is None:
            planes = np.array([(step.layer, step.kv) for step in steps], np.int64)
            found = self._lifts[id(steps)] = steps.lies(), planes, self._rows(planes, 0, selection)
        lies, planes, here = found
        there, offset = self._rows(planes, up, selection), self._placement.offset
        return lies._replace(
            region=self._placement.region[there].astype(np.int64),
            offset=lies.offset + (offset[there] - offset[here]),
        )

    def _rows(self, planes: I64, up: int, selection: Selection) -> I64:
        """Numbers of the source's buffers of planes (layer, kv), `up` layers above them."""
        if self._buffers is None:
            shape = self._src.shape
            self._buffers = np.array(
                [[self._src.buffer(layer, kv) for kv in range(shape.kvs)] for layer in range(shape.layers)],
                np.int64,
            )
        layer = planes[:, 0] + up
        if selection.source_layers:
            layer = np.asarray(selection.source_layers, np.int64)[layer - selection.layer]
        return self._buffers[layer, planes[:, 1]]

    def _moved(self, step: Step, up: int, selection: Selection) -> Step:
        layer = step.layer + up
        # By `RetileStep.tensor`: elements, and scales where there are some.
        tensors = list(zip(self._src.tensors, placements(self._src, self._placement), strict=False))

        def lifted(number: int, offset: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
            tensor, placement = tensors[number]
            here, there = (tensor.buffer(selection.source_layer(n), step.kv) for n in (step.layer, layer))
            lift = (placement.offset[there] - placement.offset[here]).tolist()
            return tuple(placement.region[there].tolist()), tuple(
                a + b for a, b in zip(offset, lift, strict=True)
            )

        if isinstance(step, RowsStep):
            return step.lifted(layer, lifted)
        region, offset = lifted(step.tensor, step.src_offset)
        return replace(step, layer=layer, src_region=region, src_offset=offset)
