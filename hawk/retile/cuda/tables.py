"""Steps of a chunk as what a kernel reads: which programs, where each unit's pieces begin, which of them are not whole.

Steps whose pieces are the same, as layers' are, share their words; only their bases differ.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import gcd, prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.errors import InvalidArgument
from hawk.retile import numpy_core
from hawk.retile.cuda import source
from hawk.retile.cuda.bases import bases_of
from hawk.retile.cuda.box import box_of
from hawk.retile.cuda.spec import VECTOR, Axis, Spec
from hawk.retile.nests import factor
from hawk.retile.program import Pieces
from hawk.retile.rows import RowsStep

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CodecInfo
    from hawk.retile.cpu import Step
    from hawk.retile.cuda.bases import Span
    from hawk.retile.cuda.shelf import Shelf
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
_LARGEST_UNIT = 4096


@dataclass(frozen=True)
class Bound:
    """One launch.

    table     what the kernel reads, `uint8[n]`; it has to lie at a multiple of `VECTOR`
    parts     `uint32[programs, len(PART_FIELDS)]`
    blocks    of threads
    """

    specs: tuple[Spec, ...]
    table: NDArray[np.uint8]
    parts: NDArray[np.uint32]
    blocks: int

    @property
    def key(self) -> tuple[object, ...]:
        """Of the kernel, which launches with the same have in common."""
        return self.specs

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return source.shared_bytes(self.specs)

    def text(self, under: str | None = None) -> str:
        """Of the kernel; see `hawk.retile.cuda.source.text`."""
        return source.text(self.specs, under)


def bind(
    steps: Iterable[Step | RowsStep], regions: Sequence[Span], arena: Span, shelf: Shelf[_Part] | None = None
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
            p = step.program
            kind = p.loops, p.src_codec, p.dst_codec, p.src_elements, p.dst_elements, id(step.pieces)
            kinds.setdefault(kind, []).append(step)
    parts = [_known(*kind, regions, arena, shelf) for kind in _coupled(list(kinds.values()))]
    return [_joined(parts[i : i + MAX_PARTS]) for i in range(0, len(parts), MAX_PARTS)]


class _Kind(NamedTuple):
    """Steps that share their pieces, and further pieces that are moved with each of them, or None."""

    steps: list[Step]
    others: Pieces | None


def _coupled(kinds: list[list[Step]]) -> list[_Kind]:
    """Kinds that fill the same places of the same pages in turn, as K and V do in words of both, made one.

    Apart each would write parts of words, which costs memory a read and a write of the whole.
    """
    found: list[_Kind] = []
    left = list(kinds)
    while left:
        first = left.pop(0)
        for i, second in enumerate(left):
            others = _beside(first, second)
            if others is not None:
                del left[i]
                found.append(_Kind(first, others))
                break
        else:
            found.append(_Kind(first, None))
    return found


def _beside(a: list[Step], b: list[Step]) -> Pieces | None:
    """The pieces of `b` as seen from the bases of `a`, where both lie side by side in every page of the target."""
    p, q = a[0], b[0]
    if p.program.loops != q.program.loops or p.program.src_codec != q.program.src_codec or len(a) != len(b):
        return None
    if p.program.dst_codec != q.program.dst_codec or p.program.dst_codec.group > 1:
        return None
    shifts = set()
    for x, y in zip(a, b, strict=True):
        if x.src_region != y.src_region or x.dst_offset != y.dst_offset or len(x.src_offset) != 1:
            return None
        shifts.add(y.src_offset[0] - x.src_offset[0])
    same = all(
        np.array_equal(getattr(p.pieces, n), getattr(q.pieces, n))
        for n in ("dst_channel", "dst_page", "lo", "hi", "cols")
    )
    apart = q.pieces.dst_start - p.pieces.dst_start
    if not same or len(shifts) != 1 or min(shifts) < 0 or (apart != apart[0]).any() or apart[0] <= 0:
        return None
    reads = q.pieces.hi > 0
    return replace(q.pieces, src_page=np.where(reads, q.pieces.src_page + min(shifts), 0))


class _Part(NamedTuple):
    """Steps of one kind; `sections` in the order of `PART_FIELDS` from `base` on."""

    spec: Spec
    units: int
    steps: int
    sections: tuple[NDArray[np.generic], ...]


def _joined(parts: list[_Part]) -> Bound:
    found, sections, at = np.zeros((len(parts), 6), np.uint32), [], 0
    for i, part in enumerate(parts):
        found[i, :2] = part.units, part.steps
        for k, section in enumerate(part.sections):
            raw = np.ascontiguousarray(section).reshape(-1).view(np.uint8)
            found[i, 2 + k] = at // VECTOR
            padded = np.zeros(-(-len(raw) // VECTOR) * VECTOR, np.uint8)
            padded[: len(raw)] = raw
            sections.append(padded)
            at += len(padded)
    table = np.concatenate(sections) if sections else np.zeros(VECTOR, np.uint8)
    return Bound(tuple(p.spec for p in parts), table, found, sum(p.units * p.steps for p in parts))


def _known(
    steps: list[Step], others: Pieces | None, regions: Sequence[Span], arena: Span, shelf: Shelf[_Part] | None
) -> _Part:
    """`_part`, from the shelf where only the bases differ from what lies there."""
    bases, room = bases_of(steps, regions, arena)
    if shelf is None or others is not None:
        return _part(steps, others, bases, room)
    channels = len(steps[0].src_offset)
    key = (
        id(steps[0].program),
        id(steps[0].pieces),
        channels,
        *(
            gcd(VECTOR, int(np.gcd.reduce(side.ravel())))
            for side in (bases[:, :channels], bases[:, channels:])
        ),
    )
    found = shelf.find(key, room)
    if found is None:
        found = _part(steps, others, bases, room)
        shelf.keep(key, room, found, (steps[0].program, steps[0].pieces))
    return found._replace(steps=len(steps), sections=(bases, *found.sections[1:]))


def _part(steps: list[Step], others: Pieces | None, bases: I64, room: list[int]) -> _Part:
    program, pieces = steps[0].program, steps[0].pieces
    src_channels = len(steps[0].src_offset)
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
    whole: Bools = np.logical_and.reduce(_whole(program, pieces).reshape(-1, count), axis=1)
    spec, src, dst = _spec(program, pieces, count, whole, bases, src_channels)
    if spec.fast and not box_of(spec).fast:
        whole = np.zeros_like(whole)
        spec, src, dst = _spec(program, pieces, count, whole, bases, src_channels)
    words = [s.words(n) for s, n in ((src, spec.src_channels), (dst, spec.dst_channels))]
    wide = any(int(w.max(initial=0)) >= NARROW - 1 for w in words)
    spec = replace(spec, wide=wide)
    partial = ~whole
    flags = np.where(partial, np.cumsum(partial) - 1, -1).astype(np.int32)
    rows = np.stack([getattr(pieces, name) for name in _COLUMNS], axis=1).reshape(-1, count, len(_COLUMNS))
    table = np.concatenate(words, axis=1)
    table[partial] = -1  # all bits set, which no word has, so that nothing else has to say it
    table = table.astype(np.uint64 if wide else np.uint32)
    return _Part(spec, len(whole), len(steps), (bases, table, flags, rows[partial]))


def _spec(
    program: Program, pieces: Pieces, count: int, whole: Bools, bases: I64, src_channels: int
) -> tuple[Spec, _Side, _Side]:
    """What to compile when these units are moved in vectors, and where they lie on both sides."""
    src = _Side.of(program.src_codec, program.src_elements, pieces, "src", count, whole)
    dst = _Side.of(program.dst_codec, program.dst_elements, pieces, "dst", count, whole)
    axes = _axes(src, dst, count)
    aligned = [_alignment(bases[:, :src_channels], src), _alignment(bases[:, src_channels:], dst)]
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


@dataclass(frozen=True)
class _Side:
    """Where whole units lie on one side.

    channel, at, shared    per unit and piece, and only the first where all lie alike; bytes in the channel
    own        whether each piece has its own
    pattern    of a unit's pieces, elements from the first; None with `own`
    unit       bytes that divide all of these
    """

    codec: CodecInfo
    whole: Bools
    channel: I64
    at: I64
    shared: I64
    own: bool
    pattern: I64 | None
    unit: int

    @classmethod
    def of(
        cls, codec: CodecInfo, elements: int, pieces: Pieces, side: str, count: int, whole: Bools
    ) -> _Side:
        channel, page, start = (
            getattr(pieces, f"{side}_{name}").reshape(-1, count)[whole]
            for name in ("channel", "page", "start")
        )
        at = page + codec.header_bytes(elements) + start * codec.bits // 8
        shared = page + start // codec.group if codec.group > 1 else at[:0]
        pattern = None
        if len(at) and codec.group == 1 and (channel == channel[:, :1]).all():
            lies = at - at[:, :1]
            width = codec.bits // 8
            if (lies == lies[0]).all() and (lies[0] % width == 0).all() and (np.diff(lies[0]) > 0).all():
                pattern, at, channel = lies[0] // width, at[:, :1], channel[:, :1]
        unit = gcd(_LARGEST_UNIT, int(np.gcd.reduce(at.ravel())), int(np.gcd.reduce(shared.ravel())))
        return cls(codec, whole, channel, at, shared, pattern is None, pattern, unit)

    def words(self, channels: int) -> I64:
        """Words of all units, `int64[units, words]`; of those that are not whole 0."""
        bits = (channels - 1).bit_length()
        each = [self.at, self.shared] if self.codec.group > 1 else [self.at]
        found = np.stack([a // self.unit << bits | self.channel for a in each], axis=-1)
        out = np.zeros((len(self.whole), self.at.shape[1] * len(each)), np.int64)
        out[self.whole] = found.reshape(len(found), out.shape[1])
        return out


def _axes(src: _Side, dst: _Side, count: int) -> tuple[Axis, ...]:
    """The pieces of a unit as axes with the steps of the sides that have a pattern."""
    number = np.arange(count, dtype=np.int64)
    steps = np.stack([number if side.pattern is None else side.pattern for side in (src, dst)], axis=1)
    loops = factor(steps, 1) or []
    return tuple(Axis(p.ext, 0 if src.own else p.src, 0 if dst.own else p.dst, piece=p.col) for p in loops)


def _alignment(bases: I64, side: _Side) -> tuple[int, int]:
    """What divides all addresses of elements, and of what groups share, up to `VECTOR`."""
    base = gcd(VECTOR, int(np.gcd.reduce(bases.ravel())))
    return gcd(base, int(np.gcd.reduce(side.at.ravel()))), gcd(base, int(np.gcd.reduce(side.shared.ravel())))
