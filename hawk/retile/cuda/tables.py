"""Steps of a chunk as what a kernel reads: which programs, where each unit's pieces begin, which of them are not whole.

Steps whose pieces are the same, as layers' are, share their words; only their bases differ.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hawk.errors import InvalidArgument
from hawk.retile import numpy_core
from hawk.retile.cuda.bases import bases_of
from hawk.retile.cuda.bound import Bound, Part, joined
from hawk.retile.cuda.box import box_of
from hawk.retile.cuda.sides import Side, alignment, axes_of
from hawk.retile.cuda.spec import VECTOR, Spec
from hawk.retile.program import Pieces
from hawk.retile.rows import RowsStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from hawk.retile.cpu import Step
    from hawk.retile.cuda.bases import Span
    from hawk.retile.cuda.shelf import Shelf
    from hawk.retile.cuda.spec import Scales
    from hawk.retile.program import Program

    Bools = NDArray[np.bool_]
    I64 = NDArray[np.int64]

UNIT_BYTES = 4 << 10
"""Source bytes of a unit at most: many blocks of threads share a processor's memory."""

MAX_PARTS = 4
"""Programs of one kernel."""

NARROW = 1 << 32
"""Words below this take 32 bits, others 64; all bits set are no word."""

_COLUMNS = tuple(f.name for f in fields(Pieces))


def bind(
    steps: Iterable[Step | RowsStep], regions: Sequence[Span], arena: Span, shelf: Shelf[Part] | None = None
) -> list[Bound]:
    """The launches that carry out `steps` from `regions` into `arena`, which begins at the chunk's first byte.

    One, but where there are more than `MAX_PARTS` programs.  What has the pieces of something on the `shelf`, as
    chunks of other layers have, is not worked out again.

    Raises
    ------
    InvalidArgument
        a step names a region or an offset that is not there, its pieces do not fit, or it goes through rows
    """
    kinds: dict[object, list[Step]] = {}
    for step in steps:
        if isinstance(step, RowsStep):
            raise InvalidArgument(
                "a step through rows is several launches",
                field="steps",
                got="a step through rows",
                expected="steps of one program; hawk.retile.cuda.through takes both",
            )
        if len(step.pieces):
            kinds.setdefault(kind_of(step.program, step.pieces), []).append(step)
    parts = []
    for kind in kinds.values():
        bases, room = bases_of(kind, regions, arena)
        parts.append(Kind(kind[0].program, kind[0].pieces, len(kind[0].src_offset), bases, room, kind))
    found = [part(*kind, shelf) for kind in coupled(parts, _shift)]
    return [joined(found[i : i + MAX_PARTS]) for i in range(0, len(found), MAX_PARTS)]


def kind_of(program: Program, pieces: Pieces) -> object:
    """What steps have in common that one part of a launch carries out."""
    p = program
    return p.loops, p.src_codec, p.dst_codec, p.src_elements, p.dst_elements, id(pieces)


class Kind(NamedTuple):
    """Steps that share their pieces; `own` is what whoever made it knows them by.

    bases    `int64[steps, channels of both sides]`, those of the `sources` first
    room     the fewest bytes behind them, by channel
    """

    program: Program
    pieces: Pieces
    sources: int
    bases: I64
    room: list[int]
    own: Any


def coupled(
    kinds: Sequence[Kind], shift: Callable[[Kind, Kind], int | None]
) -> list[tuple[Kind, Kind | None, Pieces | None]]:
    """Kinds that fill the same places of the same pages in turn, as K and V do in words of both, made one.

    Apart each would write parts of words, which costs memory a read and a write of the whole.  Behind a kind stands
    that which is moved with it, and the pieces of that as seen from the bases of the first.

    shift    how many bytes farther on in the source than each step of one kind the other's begins, where they have the
             same target; else None
    """
    found: list[tuple[Kind, Kind | None, Pieces | None]] = []
    left = list(kinds)
    while left:
        first = left.pop(0)
        for i, second in enumerate(left):
            others = _beside(first, second, shift)
            if others is not None:
                found.append((first, left.pop(i), others))
                break
        else:
            found.append((first, None, None))
    return found


def _shift(a: Kind, b: Kind) -> int | None:
    shifts = set()
    for x, y in zip(a.own, b.own, strict=True):
        if x.src_region != y.src_region or x.dst_offset != y.dst_offset or len(x.src_offset) != 1:
            return None
        shifts.add(y.src_offset[0] - x.src_offset[0])
    return shifts.pop() if len(shifts) == 1 else None


def _beside(a: Kind, b: Kind, shift: Callable[[Kind, Kind], int | None]) -> Pieces | None:
    """The pieces of `b` as seen from the bases of `a`, where both lie side by side in every page of the target."""
    p, q = a.program, b.program
    if p.loops != q.loops or p.src_codec != q.src_codec or len(a.bases) != len(b.bases):
        return None
    if p.dst_codec != q.dst_codec or p.dst_codec.group > 1 or len(a.pieces) != len(b.pieces):
        return None
    columns = ("dst_channel", "dst_page", "lo", "hi", "cols")
    if not all(np.array_equal(getattr(a.pieces, n), getattr(b.pieces, n)) for n in columns):
        return None
    apart = b.pieces.dst_start - a.pieces.dst_start
    by = shift(a, b)
    if by is None or by < 0 or (apart != apart[0]).any() or apart[0] <= 0:
        return None
    return replace(b.pieces, src_page=np.where(b.pieces.hi > 0, b.pieces.src_page + by, 0))


def part(kind: Kind, _: Kind | None, others: Pieces | None, shelf: Shelf[Part] | None) -> Part:
    """The part of a launch; from the shelf where only the bases differ from what lies there."""
    program, pieces, sources, bases, room, _own = kind
    if shelf is None or others is not None:
        return _part(kind, others)
    key = (
        id(program),
        id(pieces),
        sources,
        *(gcd(VECTOR, int(np.gcd.reduce(side.ravel()))) for side in (bases[:, :sources], bases[:, sources:])),
    )
    found = shelf.find(key, room)
    if found is None:
        found = _part(kind, others)
        shelf.keep(key, room, found, (program, pieces))
    return found._replace(steps=len(bases), sections=(bases, *found.sections[1:]))


def _part(kind: Kind, others: Pieces | None) -> Part:
    program, pieces, src_channels, bases, room, _ = kind
    numpy_core.check(program, pieces, room[:src_channels], room[src_channels:])
    most = UNIT_BYTES
    if others is not None:
        numpy_core.check(program, others, room[:src_channels], room[src_channels:])
        most //= 2
        _, others, _ = split(program, others, most)
    program, pieces, each = split(program, pieces, most)
    count = _pieces_of_unit(program, each, most)
    if len(pieces) % count:
        count = 1
    if others is not None:
        pieces, count = _in_turn(pieces, others), 2 * count
    return in_units(program, pieces, count, bases, src_channels)


def in_units(
    program: Program,
    pieces: Pieces,
    count: int,
    bases: I64,
    src_channels: int,
    scales: Scales | None = None,
    numbers: Sequence[I64] = (),
) -> Part:
    """The part whose units are of `count` pieces in a row each.

    scales, numbers    what elements have on the way, and of each piece the number of its first scale, of either side;
                       behind the bases of channels stand those of scales then, two for each step
    """
    whole: Bools = np.logical_and.reduce(_whole(program, pieces).reshape(-1, count), axis=1)
    channels = bases if scales is None else bases[:, :-2]
    spec, src, dst = _spec(program, pieces, count, whole, channels, src_channels, scales)
    if spec.fast and not box_of(spec).fast:
        whole = np.zeros_like(whole)
        spec, src, dst = _spec(program, pieces, count, whole, channels, src_channels, scales)
    words = [s.words(n) for s, n in ((src, spec.src_channels), (dst, spec.dst_channels))]
    partial = ~whole
    for side in words:
        side[partial] = -1  # all bits set, which no word has, so that nothing else has to say it
    table = np.concatenate([*words, *(n.reshape(-1, count) for n in numbers)], axis=1)
    wide = int(table.max(initial=0)) >= NARROW - 1
    flags = np.where(partial, np.cumsum(partial) - 1, -1).astype(np.int32)
    rows = np.stack([getattr(pieces, name) for name in _COLUMNS], axis=1).reshape(-1, count, len(_COLUMNS))
    table = table.astype(np.uint64 if wide else np.uint32)
    return Part(replace(spec, wide=wide), len(whole), len(bases), (bases, table, flags, rows[partial]))


def _spec(
    program: Program,
    pieces: Pieces,
    count: int,
    whole: Bools,
    bases: I64,
    src_channels: int,
    scales: Scales | None,
) -> tuple[Spec, Side, Side]:
    """What to compile when these units are moved in vectors, and where they lie on both sides."""
    within = 1 if scales is None else scales.within
    for patterns in (True, False):
        src = Side.of(program.src_codec, program.src_elements, pieces, "src", count, whole, patterns)
        dst = Side.of(program.dst_codec, program.dst_elements, pieces, "dst", count, whole, patterns)
        axes = axes_of(src, dst, count, within)
        if axes is not None:
            break
    assert axes is not None
    aligned = [alignment(bases[:, :src_channels], src), alignment(bases[:, src_channels:], dst)]
    spec = Spec(
        src_codec=program.src_codec,
        dst_codec=program.dst_codec,
        src_header=program.src_codec.header_bytes(program.src_elements),
        dst_header=program.dst_codec.header_bytes(program.dst_elements),
        loops=program.loops,
        pieces=count,
        axes=axes,
        src_own=src.own,
        dst_own=dst.own,
        src_align=aligned[0][0],
        dst_align=aligned[1][0],
        shared_align=aligned[0][1],
        fast=bool(whole.any()),
        src_channels=src_channels,
        dst_channels=bases.shape[1] - src_channels,
        src_unit=src.unit,
        dst_unit=dst.unit,
        wide=False,
        scales=scales,
    )
    return spec, src, dst


# -- units -----------------------------------------------------------------------------------------------


def split(program: Program, pieces: Pieces, most: int = 0) -> tuple[Program, Pieces, int]:
    """The same work in pieces of at most `most` source bytes, cut where the source is coarsest; how many each became.

    Pieces stay larger where only loops inside of groups are left.
    """
    most = most or UNIT_BYTES
    every = 1
    while True:
        size = prod(p.ext for p in program.loops) * program.src_codec.bits // 8
        groups = program.src_codec.group, program.dst_codec.group
        coarse = [p for p in program.loops if p.src >= groups[0] and p.dst >= groups[1]]
        if size <= most or not coarse:
            return program, pieces, every
        loop = max(coarse, key=lambda p: p.src)
        cuts = next((k for k in range(2, loop.ext) if loop.ext % k == 0 and size // k <= most), loop.ext)
        ext = loop.ext // cuts
        at = np.arange(cuts, dtype=np.int64) * ext
        columns = {name: np.repeat(getattr(pieces, name), cuts) for name in _COLUMNS}
        for name, step in (("src_start", loop.src), ("dst_start", loop.dst)):
            columns[name] = columns[name] + np.tile(at * step, len(pieces))
        for name, step in (("lo", loop.row), ("hi", loop.row), ("cols", loop.col)):
            columns[name] = columns[name] - np.tile(at * step, len(pieces))
        loops = tuple(
            replace(p, ext=ext) if p is loop else p for p in program.loops if p is not loop or ext > 1
        )
        program, pieces, every = replace(program, loops=loops), Pieces(**columns), every * cuts


def _in_turn(a: Pieces, b: Pieces) -> Pieces:
    """The first of both, the second of both, and so on."""
    return Pieces(**{n: np.stack((getattr(a, n), getattr(b, n)), axis=1).ravel() for n in _COLUMNS})


def _pieces_of_unit(program: Program, cuts: int, most: int) -> int:
    """How many pieces one block of threads takes: those of a row of heads and dims, or an even part of them."""
    size = prod(p.ext for p in program.loops) * program.src_codec.bits // 8
    inner, best = 1, 1
    for extent in (cuts, len(program.dims), len(program.heads)):
        fitting = [d for d in range(1, extent + 1) if extent % d == 0 and inner * d * size <= most]
        best = max(best, inner * max(fitting, default=1))
        if not fitting or fitting[-1] != extent:
            break
        inner *= extent
    return best


def _whole(program: Program, pieces: Pieces) -> Bools:
    """Which pieces are moved entirely, from places that groups begin at."""
    row = sum((p.ext - 1) * p.row for p in program.loops)
    col = sum((p.ext - 1) * p.col for p in program.loops)
    group = max(program.src_codec.group, 8 // program.src_codec.bits)
    found: Bools = (pieces.lo <= 0) & (pieces.hi > row) & (pieces.cols > col)
    found &= pieces.src_start % group == 0
    return found
