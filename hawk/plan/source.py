"""The source's side of the plan: which pieces a retile core has to write to fill the arena of a chunk."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.errors import InvalidArgument, counted
from hawk.plan.bind import first_outside
from hawk.plan.check import check_placement_shape, check_source
from hawk.plan.pattern import fixed_terms, leads
from hawk.plan.pieces import Where, bound
from hawk.plan.rows import Sides, rows_steps
from hawk.plan.target import cut_of
from hawk.plan.tensors import parts, placements, view
from hawk.plan.types import RetileStep, Steps
from hawk.plan.ways import program_part, ways
from hawk.retile.build import build_programs
from hawk.retile.lies import Lies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.types import Chunk, Placement, Selection, Step, TargetChunk
    from hawk.retile.program import Program

    I64 = NDArray[np.int64]


@lru_cache(maxsize=256)
def _entries(src: CompiledLayout, dst: CompiledLayout, selection: Selection, chunk: Chunk) -> int:
    """Entries of the source's table that a chunk needs; raises `InvalidArgument` as `check_source` does."""
    check_source(src, selection)
    end = min(selection.token + selection.tokens, (chunk.block + chunk.blocks) * dst.shape.block_size)
    return -(-end // src.shape.block_size)


def _check_source(src: CompiledLayout, src_blocks: I64, placement: Placement, target: TargetChunk) -> None:
    needed = _entries(src, target.layout, target.selection, target.chunk)
    if len(src_blocks) < needed:
        raise InvalidArgument(
            "the block table is too short",
            field="src_blocks",
            got=counted(len(src_blocks), "entry", "entries"),
            expected=f"{needed} or more",
        )
    bad = first_outside(src_blocks, src.shape.blocks)
    if bad >= 0:
        raise InvalidArgument(
            "no such block",
            field=f"src_blocks[{bad}]",
            got=int(src_blocks[bad]),
            expected=f"0..{src.shape.blocks - 1}",
        )
    check_placement_shape(src, placement, "src_placement")


class _Line(NamedTuple):
    """One step: its plane, and which of the lines that look alike gives its pieces."""

    plane: int
    layer: int
    kv: int
    program: Program
    alike: int


class _Lines(NamedTuple):
    """The steps of some layers, for any placement and tables.

    alike           (kv, number of the program, kv that stands for it in the target, residues of source and target)
    buffer, lift    of the source, for each line: the buffer's number, and bytes from its base in every channel
    plane, which    numbers of each line's plane, and of its kind
    kinds           the program of each kind, and which of those that look alike it is
    """

    lines: tuple[_Line, ...]
    alike: tuple[tuple[int, int, int, tuple[int, int]], ...]
    buffer: I64
    lift: I64
    plane: I64
    which: I64
    kinds: tuple[tuple[Program, int], ...]


@lru_cache(maxsize=256)
def _lines(
    src: CompiledLayout,
    dst: CompiledLayout,
    selection: Selection,
    first: int,
    layers: int,
    kvs: tuple[int, ...],
) -> _Lines:
    part = program_part(src, dst, selection)
    programs = {kv: build_programs(src, dst, kv, part) for kv in kvs}
    src_fixed = [fixed_terms(src, kv) for kv in range(src.shape.kvs)]
    dst_fixed = [fixed_terms(dst, kv) for kv in range(dst.shape.kvs)]
    src_layer = [selection.source_layer(layer) for layer in range(first, first + layers)]
    facts = [
        (src.piece(kv).kvs[0], dst.piece(kv).kvs[0], src.first_position(kv), dst.first_position(kv))
        for kv in range(dst.shape.kvs)
    ]
    terms = [
        [(int(a), int(b)) for a, b in zip(src_fixed[kv][src_layer], dst_fixed[kv][first:], strict=False)]
        for kv in range(dst.shape.kvs)
    ]
    leading, both = leads(dst), range(dst.shape.kvs) if dst.shares_pages else None
    found: list[_Line] = []
    alike: dict[object, int] = {}
    known: list[tuple[int, int, int, tuple[int, int]]] = []
    buffer, lift, which = [], [], []
    kinds: dict[tuple[int, int], int] = {}
    planes = product(range(first, first + layers), dst.plane_kvs)
    for plane, (layer, plane_kv) in enumerate(planes):
        # Where K and V share pages, the plane of K takes the passes of both.
        for kv in both or (plane_kv,):
            if kv not in programs:
                continue
            src_term, dst_term = terms[kv][layer - first]
            residues = src_term % src.channels, dst_term % dst.channels
            for number, program in enumerate(programs[kv]):
                key = number, residues, facts[kv]
                if key not in alike:
                    alike[key] = len(known)
                    known.append((kv, number, leading[plane_kv], residues))
                found.append(_Line(plane, layer, kv, program, alike[key]))
                which.append(kinds.setdefault((id(program), alike[key]), len(kinds)))
                buffer.append(src.buffer(src_layer[layer - first], kv))
                lift.append(src_term // src.channels * src.page_stride)
    return _Lines(
        tuple(found),
        tuple(known),
        np.asarray(buffer, np.int64),
        np.asarray(lift, np.int64),
        np.asarray([line.plane for line in found], np.int64),
        np.asarray(which, np.int64),
        tuple((found[which.index(kind)].program, alike) for (_, alike), kind in kinds.items()),
    )


@lru_cache(maxsize=256)
def _places(
    src: CompiledLayout, dst: CompiledLayout, selection: Selection, chunk: Chunk, kvs: tuple[int, ...]
) -> tuple[_Lines, int, tuple[tuple[Where, int], ...]]:
    """The lines, the rows that are cut off, and for those that look alike what `bound` is asked."""
    lines = _lines(src, dst, selection, chunk.layer, chunk.layers, kvs)
    places = (
        (Where(src, dst, kv, number, selection, chunk.block, chunk.blocks, *residues), lead)
        for kv, number, lead, residues in lines.alike
    )
    return lines, cut_of(dst, selection, chunk), tuple(places)


def retile_steps(
    src: CompiledLayout,
    src_blocks: I64,
    src_placement: Placement,
    target: TargetChunk,
    dst_blocks: I64,
) -> Steps[Step]:
    """One step or more for every plane of the chunk; planes that look alike share their `Pieces`.

    A plane takes more than one where it holds both K and V, or parts of dim in different orders.  What no program
    brings over goes through rows.

    src_blocks, dst_blocks    both whole block tables, `int64[n]`; `dst_blocks` the one that made `target`

    The steps together write every byte of the arena that `target.runs` names; rows before the token range are
    not touched, rows behind it and dims that do not exist are zeroed.

    Raises `InvalidArgument` for a table or placement that does not fit, `Unmappable` as `build_programs` does.
    """
    src_blocks = np.ascontiguousarray(src_blocks, dtype=np.int64)
    dst_blocks = np.ascontiguousarray(dst_blocks, dtype=np.int64)
    _check_source(src, src_blocks, src_placement, target)
    going = ways(src, target.layout, program_part(src, target.layout, target.selection))
    if len(going) == 1 and not going[0].rows and len(src.tensors) == len(target.layout.tensors) == 1:
        return tensor_steps(src, src_blocks, src_placement, target, dst_blocks, kvs=going[0].kvs)
    sides = Sides(src, src_blocks, placements(src, src_placement), target, parts(target, dst_blocks))
    found: list[Sequence[Step]] = []
    for way in going:
        if way.rows:
            found.append(rows_steps(tensor_steps, sides, way))
            continue
        number, (chunk, blocks) = way.sources[0], sides.parts[way.targets[0]]
        table = view(src.tensors[number], src, target.selection, target.chunk, src_blocks).blocks
        place = sides.placements[number]
        found.append(
            tensor_steps(src.tensors[number], table, place, chunk, blocks, kvs=way.kvs, tensor=number)
        )
    return _joined(found)


def _joined(found: list[Sequence[Step]]) -> Steps[Step]:
    """The steps of one after the other."""
    if len(found) == 1:
        return Steps(len(found[0]), found[0].__getitem__)
    ends = list(accumulate(len(steps) for steps in found))

    def make(number: int) -> Step:
        part = bisect_right(ends, number)
        return found[part][number - ends[part]]  # which counts from the end of it

    return Steps(ends[-1], make)


def tensor_steps(
    src: CompiledLayout,
    src_blocks: I64,
    src_placement: Placement,
    target: TargetChunk,
    dst_blocks: I64,
    *,
    kvs: tuple[int, ...],
    tensor: int = 0,
) -> Steps[RetileStep]:
    """The steps of one tensor and these values of kv, each by a program of its own; unchecked."""
    dst, selection = target.layout, target.selection
    chunk = target.chunk
    lines, cut, places = _places(src, dst, selection, chunk, kvs)
    src_table = src_blocks.tobytes()
    dst_table = dst_blocks[chunk.block : chunk.block + chunk.blocks].tobytes()
    pieces = [bound(where, lead, cut, src_table, dst_table) for where, lead in places]
    lift = lines.lift.tolist()

    def make(number: int) -> RetileStep:
        line = lines.lines[number]
        buffer = lines.buffer[number]
        return RetileStep(
            layer=line.layer,
            kv=line.kv,
            program=line.program,
            pieces=pieces[line.alike],
            src_region=tuple(src_placement.region[buffer].tolist()),
            src_offset=tuple((src_placement.offset[buffer] + lift[number]).tolist()),
            dst_offset=tuple(target.base[line.plane].tolist()),
            tensor=tensor,
        )

    kinds = tuple((program, pieces[alike]) for program, alike in lines.kinds)

    def lies() -> Lies:
        return Lies(
            kinds,
            lines.which,
            src_placement.region[lines.buffer].astype(np.int64),
            src_placement.offset[lines.buffer] + lines.lift[:, None],
            target.base[lines.plane],
        )

    return Steps(len(lines.lines), make, lies)
