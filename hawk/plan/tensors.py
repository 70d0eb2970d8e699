"""The tensors of a cache: elements and the scales beside them, planned together and never one without the other.

The planes of a cache's second tensor follow those of the first in a chunk, and so on.  Each is a plan of its own; a
tensor whose rows are not of tokens is planned by blocks, or as one block for the whole cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.plan.types import Chunk, Placement, TargetChunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.types import PlaneRuns, Selection

    I64 = NDArray[np.int64]


class View(NamedTuple):
    """A selection, a chunk and a block table in a tensor's own count of heads, tokens and blocks."""

    selection: Selection
    chunk: Chunk
    blocks: I64


def view(
    tensor: CompiledLayout, cache: CompiledLayout, selection: Selection, chunk: Chunk, blocks: I64
) -> View:
    """What of `tensor` goes with a part of its `cache`."""
    if tensor.shape.heads != cache.shape.heads:
        # One row for all heads goes with any of them.
        selection = replace(selection, head=0, heads=0, source_head=0)
    if tensor.per == "block":
        size = cache.shape.block_size
        first, last = selection.token // size, -(-(selection.token + selection.tokens) // size)
        selection = replace(selection, token=first, tokens=last - first)
    elif tensor.per == "cache":
        selection, chunk = replace(selection, token=0, tokens=1), replace(chunk, block=0, blocks=1)
        blocks = np.zeros(1, np.int64)
    return View(selection, chunk, blocks)


def join(layout: CompiledLayout, chunks: Sequence[TargetChunk]) -> TargetChunk:
    """One chunk of all tensors of `layout`, each one's planes behind those before it, in every channel."""
    first = chunks[0]
    if len(chunks) == 1:
        return first
    kind: list[int] = []
    planes: list[tuple[int, int]] = []
    runs: list[PlaneRuns] = []
    for chunk in chunks:
        kind += [k + len(runs) for k in chunk.kind]
        runs += chunk.runs
        planes += chunk.planes
    plane_bytes = np.stack([r.channel_bytes for r in runs])[np.asarray(kind)]
    ends = np.cumsum(plane_bytes.T.ravel())
    base = (ends - plane_bytes.T.ravel()).reshape(layout.channels, -1).T
    insets = [inset for _, inset in layout.places]
    return replace(
        first,
        layout=layout,
        planes=tuple(planes),
        kind=tuple(kind),
        runs=tuple(runs),
        base=np.ascontiguousarray(base),
        shift=np.concatenate([chunk.shift + inset for chunk, inset in zip(chunks, insets, strict=True)]),
        nbytes=int(ends[-1]),
        tensors=tuple(len(chunk.planes) for chunk in chunks),
    )


def parts(target: TargetChunk, blocks: I64) -> list[tuple[TargetChunk, I64]]:
    """A chunk as one of each tensor, in the same arena, and the block table that each goes by."""
    if len(target.tensors) < 2:
        return [(target, blocks)]
    found, first = [], 0
    for layout, count in zip(target.layout.tensors, target.tensors, strict=True):
        rows = slice(first, first + count)
        own = view(layout, target.layout, target.selection, target.chunk, blocks)
        chunk = replace(
            target,
            layout=layout,
            selection=own.selection,
            chunk=own.chunk,
            planes=target.planes[rows],
            kind=target.kind[rows],
            base=target.base[rows],
            shift=target.shift[rows],
            tensors=(),
        )
        found.append((chunk, own.blocks))
        first += count
    return found


def placements(layout: CompiledLayout, placement: Placement) -> list[Placement]:
    """Where each tensor lies."""
    if len(layout.tensors) == 1:
        return [placement]
    found = []
    for tensor, (first, inset) in zip(layout.tensors, layout.places, strict=True):
        rows = slice(first, first + tensor.buffer_count)
        found.append(Placement(placement.region[rows], placement.offset[rows] + inset))
    return found
