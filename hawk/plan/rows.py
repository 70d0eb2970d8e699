"""The steps that bring planes over through rows: two passes, each an ordinary plan with rows on its other side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hawk.plan.target import tensor_chunk
from hawk.plan.types import Placement
from hawk.plan.ways import rows_between
from hawk.retile.rows import Pass, RowsStep, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.types import RetileStep, TargetChunk

    I64 = NDArray[np.int64]


class TensorSteps(Protocol):
    """The steps of one tensor by programs alone: `source.tensor_steps`, which this module lies below."""

    def __call__(
        self,
        src: CompiledLayout,
        src_blocks: I64,
        src_placement: Placement,
        target: TargetChunk,
        dst_blocks: I64,
        *,
        kvs: tuple[int, ...],
    ) -> list[RetileStep]:
        """Steps of the planes of `kvs` alone."""


def rows_steps(
    tensor_steps: TensorSteps,
    src: CompiledLayout,
    src_blocks: I64,
    src_placement: Placement,
    target: TargetChunk,
    dst_blocks: I64,
    kvs: tuple[int, ...],
) -> list[RowsStep]:
    """A step for each layer of the chunk and each of `kvs`; arguments as for `source.retile_steps`."""
    dst, selection, chunk = target.layout, target.selection, target.chunk
    heads = selection.target_heads(dst)[1]
    rows = rows_between(src, dst, heads)
    # Entry i of the request's table is block i of the chunk's rows, counted from the chunk's first.
    table = np.maximum(np.arange(chunk.block + chunk.blocks, dtype=np.int64) - chunk.block, 0)
    into = tensor_chunk(rows, table, replace(selection, head=0, heads=heads), chunk)
    reads = tensor_steps(src, src_blocks, src_placement, into, table, kvs=kvs)
    one = (rows.buffer_count, 1)
    nowhere = Placement(np.zeros(one, np.int32), np.zeros(one, np.int64))
    out = replace(selection, source_layers=(), head=selection.head, heads=heads, source_head=0)
    writes = tensor_steps(rows, table, nowhere, replace(target, selection=out), dst_blocks, kvs=kvs)
    taken, given = _passes(reads, source=True), _passes(writes, source=False)
    return [
        RowsStep(
            layer=layer,
            kv=kv,
            blocks=chunk.blocks,
            reads=(Tensor(rows, chunk.blocks, 0, 0, taken[layer, kv]),),
            writes=(Tensor(rows, chunk.blocks, 0, 0, given[layer, kv]),),
        )
        for layer, kv in taken
    ]


def _passes(steps: Iterable[RetileStep], *, source: bool) -> dict[tuple[int, int], tuple[Pass, ...]]:
    """The passes of each (layer, kv)."""
    found: dict[tuple[int, int], tuple[Pass, ...]] = {}
    for step in steps:
        offset = step.src_offset if source else step.dst_offset
        one = Pass(step.program, step.pieces, step.src_region if source else (), offset)
        found[step.layer, step.kv] = (*found.get((step.layer, step.kv), ()), one)
    return found
