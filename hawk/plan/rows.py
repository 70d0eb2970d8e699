"""The steps that bring planes over through rows: two passes, each an ordinary plan with rows on its other side."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from hawk.layouts.codecs import CODECS
from hawk.plan.target import tensor_chunk
from hawk.plan.tensors import view
from hawk.plan.types import Chunk, Placement
from hawk.plan.ways import program_part, rows_of, through_rows
from hawk.retile.rows import Direct, Pass, RowsStep, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CodecInfo, CompiledLayout
    from hawk.plan.types import RetileStep, Selection, TargetChunk
    from hawk.plan.ways import Way
    from hawk.retile.rows import Rule

    I64 = NDArray[np.int64]

    ByPlane = dict[tuple[int, int], Tensor]
    Planes = dict[tuple[int, int], tuple[Direct, ...]]


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
    ) -> Sequence[RetileStep]:
        """Steps of the planes of `kvs` alone."""


class Sides(NamedTuple):
    """What a chunk is made of and from.

    placements    of each of the source's tensors
    target        the chunk of all tensors together
    parts         the chunk and the block table of each of the target's tensors
    """

    src: CompiledLayout
    src_blocks: I64
    placements: list[Placement]
    target: TargetChunk
    parts: list[tuple[TargetChunk, I64]]


def rows_steps(tensor_steps: TensorSteps, sides: Sides, way: Way) -> list[RowsStep]:
    """A step for each layer of the chunk and each kv of `way`."""
    src, target = sides.src, sides.target
    chunk, size = target.chunk, target.layout.shape.block_size
    ours = [src.tensors[i] for i in way.sources]
    theirs = [target.layout.tensors[i] for i in way.targets]
    kept = _kept(ours, theirs, way.rules)
    made = _Maker(tensor_steps, sides, way.kvs)
    scaled = bool(way.rules)
    reads = [
        made.read(i, t.codec if kept else CODECS["fp32"], scaled)
        for i, t in zip(way.sources, ours, strict=True)
    ]
    direct = _direct(tensor_steps, sides, way)
    none: Rule = "none"
    rules = way.rules or (none,) * len(theirs)
    writes = [
        made.write(i, t.codec if kept else CODECS["fp32"], rule)
        for i, t, rule in zip(way.targets, theirs, rules, strict=True)
    ]
    return [
        RowsStep(
            layer=layer,
            kv=kv,
            blocks=chunk.blocks,
            token=chunk.block * size,
            reads=tuple(tensor[layer, kv] for tensor in reads),
            writes=tuple(tensor[layer, kv] for tensor in writes),
            direct=direct and partial(_of_plane, direct, layer, kv),
        )
        for layer, kv in reads[0]
    ]


def _of_plane(made: Callable[[], Planes], layer: int, kv: int) -> tuple[Direct, ...]:
    return made()[layer, kv]


def _direct(tensor_steps: TensorSteps, sides: Sides, way: Way) -> Callable[[], Planes] | None:
    """What makes the programs that move the elements without rows, for all planes at once; None where none do."""
    if not way.rules or len(way.sources) != 1 or len(way.targets) != 1:
        return None
    number, src, target = way.sources[0], sides.src, sides.target
    tensor, (chunk, blocks) = src.tensors[number], sides.parts[way.targets[0]]
    part = program_part(tensor, chunk.layout, chunk.selection)
    if through_rows(tensor, chunk.layout, part) or not _told(tensor, chunk.layout, way.kvs):
        return None

    @cache
    def made() -> Planes:
        table = view(tensor, src, target.selection, target.chunk, sides.src_blocks).blocks
        found: Planes = {}
        for step in tensor_steps(tensor, table, sides.placements[number], chunk, blocks, kvs=way.kvs):
            one = Direct(step.program, step.pieces, step.src_region, step.src_offset, step.dst_offset)
            found[step.layer, step.kv] = (*found.get((step.layer, step.kv), ()), one)
        return found

    return made


def _told(src: CompiledLayout, dst: CompiledLayout, kvs: tuple[int, ...]) -> bool:
    """Whether loops over dims, which count these as they are stored, tell the groups that scales are of."""
    grouped = any(t.scale is not None and t.scale.shape.dim > 1 for t in (src, dst))
    return not grouped or not any(t.piece(kv).stored for t in (src, dst) for kv in kvs)


def _kept(ours: list[CompiledLayout], theirs: list[CompiledLayout], rules: tuple[Rule, ...]) -> bool:
    """Whether rows hold the elements' own bits: both sides store them alike, under the same scales or none."""
    if rules == ("spread",):
        return True
    codecs = {t.codec for t in (*ours, *theirs)}
    alone = not rules or all(t.scale is None for t in (*ours, *theirs))
    return alone and len(codecs) == 1 and next(iter(codecs)).group == 1


class _Maker:
    """Makes the tensors of steps, each for all planes at once."""

    def __init__(self, tensor_steps: TensorSteps, sides: Sides, kvs: tuple[int, ...]) -> None:
        self._steps, self._sides, self._kvs = tensor_steps, sides, kvs

    def read(self, number: int, codec: CodecInfo, scaled: bool) -> ByPlane:
        """A tensor of the source's elements, with its scales where these count."""
        src, target = self._sides.src, self._sides.target
        found = self._taken(number, codec, target.selection, target.chunk, self._sides.src_blocks)
        if not scaled or src.tensors[number].scale is None:
            return found
        scale = src.tensors[number + 1]
        selection, chunk, size, token = target.selection, target.chunk, src.shape.block_size, 0
        table = self._sides.src_blocks
        if scale.per == "block":
            ours = target.layout.shape.block_size
            first = max(selection.token, chunk.block * ours) // size
            end = min(selection.token + selection.tokens, (chunk.block + chunk.blocks) * ours)
            count, token = -(-end // size) - first, first * size
            selection = replace(selection, token=first, tokens=count)
            chunk = replace(chunk, block=first, blocks=count)
        elif scale.per == "cache":
            selection, chunk = replace(selection, token=0, tokens=1), replace(chunk, block=0, blocks=1)
            table = np.zeros(1, np.int64)
        beside = self._taken(number + 1, CODECS["fp32"], selection, chunk, table)
        return {
            plane: replace(tensor, scales=replace(beside[plane], per=scale.per, size=size, token=token))
            for plane, tensor in found.items()
        }

    def _taken(
        self, number: int, codec: CodecInfo, selection: Selection, chunk: Chunk, blocks: I64
    ) -> ByPlane:
        src, target = self._sides.src, self._sides.target
        tensor, heads = src.tensors[number], target.selection.target_heads(target.layout)[1]
        rows = rows_of(tensor, src, target.layout.shape, heads, codec)
        if tensor.shape.heads == src.shape.heads:
            selection = replace(selection, head=0, heads=heads)
        else:
            selection = replace(selection, head=0, heads=0, source_head=0)
        table = _table(chunk)
        into = tensor_chunk(rows, table, selection, chunk)
        steps = self._steps(tensor, blocks, self._sides.placements[number], into, table, kvs=self._kvs)
        return {
            plane: Tensor(rows, chunk.blocks, tensor.first, number, tensor.codec, passes)
            for plane, passes in _passes(steps, source=True).items()
        }

    def write(self, number: int, codec: CodecInfo, rule: Rule) -> ByPlane:
        """A tensor of the target's elements, with its scales where these are made or spread."""
        found = self._given(number, codec)
        if rule == "none":
            return found
        scale = self._sides.target.layout.tensors[number + 1]
        beside = self._given(number + 1, CODECS["fp32"])
        return {
            plane: replace(tensor, scales=replace(beside[plane], per=scale.per), rule=rule)
            for plane, tensor in found.items()
        }

    def _given(self, number: int, codec: CodecInfo) -> ByPlane:
        dst = self._sides.target.layout
        part, blocks = self._sides.parts[number]
        tensor, selection = part.layout, part.selection
        heads = self._sides.target.selection.target_heads(dst)[1]
        rows = rows_of(tensor, dst, dst.shape, heads, codec)
        out = replace(selection, source_layers=(), source_head=0)
        if tensor.shape.heads == dst.shape.heads:
            out = replace(out, heads=heads)
        one = (rows.buffer_count, 1)
        nowhere = Placement(np.zeros(one, np.int32), np.zeros(one, np.int64))
        steps = self._steps(
            rows, _table(part.chunk), nowhere, replace(part, selection=out), blocks, kvs=self._kvs
        )
        return {
            plane: Tensor(rows, part.chunk.blocks, tensor.first, number, tensor.codec, passes)
            for plane, passes in _passes(steps, source=False).items()
        }


def _table(chunk: Chunk) -> I64:
    """Entry i of the request's table is block i of the chunk's rows, counted from the chunk's first."""
    return np.maximum(np.arange(chunk.block + chunk.blocks, dtype=np.int64) - chunk.block, 0)


def _passes(steps: Iterable[RetileStep], *, source: bool) -> dict[tuple[int, int], tuple[Pass, ...]]:
    """The passes of each (layer, kv)."""
    found: dict[tuple[int, int], tuple[Pass, ...]] = {}
    for step in steps:
        offset = step.src_offset if source else step.dst_offset
        one = Pass(step.program, step.pieces, step.src_region if source else (), offset)
        found[step.layer, step.kv] = (*found.get((step.layer, step.kv), ()), one)
    return found
