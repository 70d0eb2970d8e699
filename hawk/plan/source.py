"""The source's side of the plan: which pieces a retile core has to write to fill the arena of a chunk."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InternalError, InvalidArgument
from hawk.plan.check import check_source, program_part
from hawk.plan.pattern import fixed_terms
from hawk.plan.scales import check_scales, parts, placements
from hawk.plan.types import RetileStep
from hawk.retile.build import build_programs
from hawk.retile.program import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import Axis, CompiledLayout
    from hawk.plan.types import Placement, PlaneRuns, TargetChunk
    from hawk.retile.program import Program

    I64 = NDArray[np.int64]


def _arena_pages(runs: PlaneRuns, channel: I64, page: I64) -> I64:
    """Byte offset in the plane's part of the arena of the pages at target offsets `page` of `channel`.

    Pages keep their distance between target and arena within a run, so the run that is the first to end behind
    the page's first byte tells where the page lies, even where only a part of it moves.
    """
    span = int(max(page.max(initial=0), (runs.target + runs.nbytes).max(initial=0))) + 1
    row = np.searchsorted(
        runs.channel * span + runs.target + runs.nbytes, channel * span + page, side="right"
    )
    if row.max(initial=0) >= len(runs.nbytes) or (runs.channel[row] != channel).any():
        raise InternalError("a piece lies in a page that the chunk does not touch")
    return page + runs.arena[row] - runs.target[row]


def _pieces(
    program: Program,
    src: CompiledLayout,
    src_blocks: I64,
    target: TargetChunk,
    dst_blocks: I64,
    kv: int,
    runs: PlaneRuns,
    src_residue: int,
    dst_residue: int,
) -> Pieces:
    """The pieces of a plane: block by block of the target, in it by token, head and dim, as the source mostly lies."""
    dst, chunk, selection = target.layout, target.chunk, target.selection
    size, rows = dst.shape.block_size, program.rows
    entry = np.arange(chunk.block, chunk.block + chunk.blocks, dtype=np.int64)
    token = (entry[:, None] * size + program.slots).ravel()
    slot = np.tile(program.slots, chunk.blocks)
    entry = np.repeat(entry, len(program.slots))
    padding = slot >= size
    lo = np.where(padding, 0, np.clip(selection.token - token, 0, rows))
    end = np.minimum(selection.token + selection.tokens - token, size - slot)
    hi = np.where(padding, 0, np.clip(end, 0, rows))
    # Pieces that hold nothing but rows before the range are their neighbour's.
    ours = lo < rows
    token, slot, entry, lo, hi = (a[ours] for a in (token, slot, entry, lo, hi))
    # Padding reads nothing; give it an address that exists, and drop that below.
    real = np.where(hi > 0, token, selection.token)
    src_size = src.shape.block_size
    head_in = program.heads < dst.shape.heads
    moved_by = selection.source_head - selection.head
    dim_in = program.dims < dst.shape.dim
    reads = (hi > 0)[:, None, None] & head_in[:, None] & dim_in
    shape = reads.shape

    def address(layout: CompiledLayout, where: str, terms: dict[Axis, I64], first: int) -> I64:
        piece = layout.piece(kv)
        term = piece.page_term if where == "page" else piece.inside_term
        total = np.full(len(slot), first, np.int64)
        for axis in ("block", "slot"):
            if axis in terms and not (axis == "block" and where == "inside"):
                total = total + term(axis, terms[axis])
        return total[:, None, None] + term("head", terms["head"])[:, None] + term("dim", terms["dim"])

    source: dict[Axis, I64] = {
        "block": src_blocks[real // src_size],
        "slot": real % src_size,
        "head": np.where(head_in, program.heads + moved_by, 0),
        "dim": np.where(dim_in, program.dims, 0),
    }
    into: dict[Axis, I64] = {
        "block": dst_blocks[entry],
        "slot": slot,
        "head": program.heads,
        "dim": program.dims,
    }
    src_number = address(src, "page", source, src_residue)
    dst_number = address(dst, "page", into, dst_residue)
    dst_channel = (dst_number % dst.channels).ravel()
    dst_page = (dst_number // dst.channels * dst.page_stride).ravel()

    def spread(row: I64) -> I64:
        return np.where(reads, row[:, None, None], 0).ravel()

    return Pieces(
        src_channel=np.where(reads, src_number % src.channels, 0).ravel(),
        src_page=np.where(reads, src_number // src.channels * src.page_stride, 0).ravel(),
        src_start=np.where(reads, address(src, "inside", source, src.first_position(kv)), 0).ravel(),
        dst_channel=dst_channel,
        dst_page=_arena_pages(runs, dst_channel, dst_page),
        dst_start=address(dst, "inside", into, dst.first_position(kv)).ravel(),
        lo=spread(lo),
        hi=spread(hi),
        cols=np.broadcast_to(program.cols, shape).ravel(),
    )


def _check_source(src: CompiledLayout, src_blocks: I64, placement: Placement, target: TargetChunk) -> None:
    selection, size = target.selection, src.shape.block_size
    end = min(
        selection.token + selection.tokens,
        (target.chunk.block + target.chunk.blocks) * target.layout.shape.block_size,
    )
    if len(src_blocks) < -(-end // size):
        raise InvalidArgument(
            "the block table is too short",
            field="src_blocks",
            got=f"{len(src_blocks)} entries",
            expected=f"{-(-end // size)} or more",
        )
    bad = np.flatnonzero((src_blocks < 0) | (src_blocks >= src.shape.blocks))
    if len(bad):
        raise InvalidArgument(
            "no such block",
            field=f"src_blocks[{int(bad[0])}]",
            got=int(src_blocks[bad[0]]),
            expected=f"0..{src.shape.blocks - 1}",
        )
    if placement.region.shape != (len(src.buffer_bytes), src.channels):
        raise InvalidArgument(
            "the placement is not one of this layout",
            field="src_placement.region",
            got=f"shape {placement.region.shape}",
            expected=f"shape {(len(src.buffer_bytes), src.channels)} (buffers, channels)",
        )


def _passes(
    target: TargetChunk, programs: Sequence[Sequence[Program]]
) -> Iterator[tuple[int, int, int, int]]:
    """(plane, layer, kv, number of the program) of every step."""
    shared = range(target.layout.shape.kvs) if target.layout.shares_pages else None
    for plane, (layer, first) in enumerate(target.planes):
        for kv in shared or (first,):
            for number in range(len(programs[kv])):
                yield plane, layer, kv, number


def retile_steps(
    src: CompiledLayout,
    src_blocks: I64,
    src_placement: Placement,
    target: TargetChunk,
    dst_blocks: I64,
) -> list[RetileStep]:
    """One step or more for every plane of the chunk, in arena order; planes that look alike share their `Pieces`.

    A plane takes more than one where it holds both K and V, or parts of dim in different orders.

    src_blocks, dst_blocks    both whole block tables, `int64[n]`; `dst_blocks` the one that made `target`

    The steps together write every byte of the arena that `target.runs` names; rows before the token range are
    not touched, rows behind it and dims that do not exist are zeroed.

    Raises `InvalidArgument` for a table or placement that does not fit, `Unmappable` as `build_programs` does.
    """
    src_blocks = np.ascontiguousarray(src_blocks, dtype=np.int64)
    dst_blocks = np.ascontiguousarray(dst_blocks, dtype=np.int64)
    _check_source(src, src_blocks, src_placement, target)
    check_source(src, target.selection)
    check_scales(src, target.layout)
    steps: list[RetileStep] = []
    tensors = zip(src.tensors, placements(src, src_placement), parts(target), strict=True)
    for number, (layout, placement, chunk) in enumerate(tensors):
        found = _tensor_steps(layout, src_blocks, placement, chunk, dst_blocks)
        steps += [replace(step, tensor=number) for step in found] if number else found
    return steps


def _tensor_steps(
    src: CompiledLayout, src_blocks: I64, src_placement: Placement, target: TargetChunk, dst_blocks: I64
) -> list[RetileStep]:
    dst, selection = target.layout, target.selection
    part = program_part(src, dst, selection)
    programs = [build_programs(src, dst, kv, part) for kv in range(dst.shape.kvs)]
    src_fixed = [fixed_terms(src, kv) for kv in range(src.shape.kvs)]
    dst_fixed = [fixed_terms(dst, kv) for kv in range(dst.shape.kvs)]
    known: dict[tuple[int, ...], Pieces] = {}
    steps: list[RetileStep] = []
    for plane, layer, kv, number in _passes(target, programs):
        program = programs[kv][number]
        src_layer = selection.source_layer(layer)
        src_term, dst_term = int(src_fixed[kv][src_layer]), int(dst_fixed[kv][layer])
        kind = target.kind[plane]
        at = (src.first_position(kv), dst.first_position(kv))
        key = (kind, number, src.piece(kv).kvs[0], src_term % src.channels, *at)
        pieces = known.get(key)
        if pieces is None:
            pieces = known[key] = _pieces(
                program,
                src,
                src_blocks,
                target,
                dst_blocks,
                kv,
                target.runs[kind],
                src_term % src.channels,
                dst_term % dst.channels,
            )
        buffer = src.buffer(src_layer, kv)
        lift = src_term // src.channels * src.page_stride
        steps.append(
            RetileStep(
                layer=layer,
                kv=kv,
                program=program,
                pieces=pieces,
                src_region=tuple(src_placement.region[buffer].tolist()),
                src_offset=tuple((src_placement.offset[buffer] + lift).tolist()),
                dst_offset=tuple(target.base[plane].tolist()),
            )
        )
    return steps
