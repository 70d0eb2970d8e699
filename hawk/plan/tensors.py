"""The tensors of a cache: elements and the scales beside them, planned together and never one without the other.

The planes of a cache's second tensor follow those of the first in a chunk, and so on.  Each is a plan of its own; a
tensor whose rows are not of tokens is planned by blocks, or as one block for the whole cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
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


@lru_cache(maxsize=128)
def riding(layout: CompiledLayout) -> tuple[int | None, ...]:
    """For each tensor the one whose pages it moves with, where these hold both and always move whole; else None."""
    found: list[int | None] = []
    host = 0
    for number, tensor in enumerate(layout.tensors):
        if not tensor.inset:
            host = host if tensor.of_scales else number
            found.append(None)
            continue
        first = layout.tensors[host]
        alike = first.shape.heads == tensor.shape.heads and first.per == tensor.per
        pages = all(first.piece(kv).page == tensor.piece(kv).page for kv in range(first.shape.kvs))
        found.append(host if alike and pages and _whole(first) and _whole(tensor) else None)
    return tuple(found)


def _whole(tensor: CompiledLayout) -> bool:
    """Whether a page is of one token and head, so that it moves whole or not at all."""
    inside = [d for piece in tensor.pieces for d in piece.inside if d.ext > 1]
    return all(d.axis == "dim" for d in inside)


def carrier(layout: CompiledLayout, number: int) -> CompiledLayout:
    """The tensor, its pages as long as all that rides in them."""
    tensor, riders = layout.tensors[number], riding(layout)
    ends = [t.inset + t.page_bytes for t, host in zip(layout.tensors, riders, strict=True) if host == number]
    return replace(tensor, page_bytes=max(ends)) if ends else tensor


def join(layout: CompiledLayout, chunks: Sequence[TargetChunk | None]) -> TargetChunk:
    """One chunk of all tensors of `layout`, each one's planes behind those before it, in every channel.

    None for a tensor that rides in another's pages.
    """
    first = chunks[0]
    assert first is not None
    if len(chunks) == 1:
        return first
    kind: list[int] = []
    planes: list[tuple[int, int]] = []
    runs: list[PlaneRuns] = []
    for chunk in filter(None, chunks):
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
        shift=np.concatenate(
            [chunk.shift + inset for chunk, inset in zip(chunks, insets, strict=True) if chunk is not None]
        ),
        nbytes=int(ends[-1]),
        tensors=tuple(0 if chunk is None else len(chunk.planes) for chunk in chunks),
        tables=None,
    )


def parts(target: TargetChunk, blocks: I64) -> list[tuple[TargetChunk, I64]]:
    """A chunk as one of each tensor, in the same arena, and the block table that each goes by."""
    if len(target.tensors) < 2:
        return [(target, blocks)]
    found, first = [], 0
    rows = [slice(0, 0)] * len(target.tensors)
    for number, count in enumerate(target.tensors):
        rows[number], first = slice(first, first + count), first + count
    for number, (layout, host) in enumerate(zip(target.layout.tensors, riding(target.layout), strict=True)):
        own_rows = rows[number if host is None else host]
        base = target.base[own_rows]
        own = view(layout, target.layout, target.selection, target.chunk, blocks)
        chunk = replace(
            target,
            layout=layout,
            selection=own.selection,
            chunk=own.chunk,
            planes=target.planes[own_rows],
            kind=target.kind[own_rows],
            base=base if host is None else base + layout.inset,
            shift=target.shift[own_rows],
            tensors=(),
            tables=None,
        )
        found.append((chunk, own.blocks))
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
