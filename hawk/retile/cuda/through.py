"""Steps through rows as launches: programs that read rows, a kernel that puts their values under the target's scales,
programs that write them.

What `hawk.retile.rows` does a batch at a time on processors is done here for many steps at once, in memory of the GPU
that is lent for it; where there is too little of it, some steps after others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from hawk.retile import scaling
from hawk.retile.cuda import source
from hawk.retile.cuda.bases import Span
from hawk.retile.cuda.bound import joined
from hawk.retile.cuda.spec import THREADS
from hawk.retile.cuda.straight import sorted_out
from hawk.retile.cuda.tables import MAX_PARTS, bind
from hawk.retile.rows import Direct, RowsStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from hawk.retile.cpu import Step
    from hawk.retile.cuda.bound import Bound, Part
    from hawk.retile.cuda.recipes import Recipes
    from hawk.retile.cuda.shelf import Shelf
    from hawk.retile.cuda.straight import Straight
    from hawk.retile.rows import Tensor

ROOM = 64 << 20
"""Bytes of rows at a time, where those of one step are not more."""

EACH = 4096
"""Elements of a block of threads where no scales are made."""

_ALIGN = 256

_HEAD = (
    *("BOXES", "EACH", "COUNT", "HEADS", "SLOTS", "DIM", "FIRST"),
    *("BOX_BLOCKS", "BOX_HEADS", "BOX_SLOTS", "BOX_DIM"),
    *("RULE", "WIDTH", "KIND", "MOST", "LEAST", "GREATEST", "READS"),
)
_READ = (
    *("READ_FIRST", "READ_DIM", "READ_FACTOR", "READ_MOST", "READ_SCALED", "READ_SCALE_HEADS"),
    *("READ_SCALE_SLOTS", "READ_SCALE_DIM", "READ_SCALE_ROWS", "READ_SIZE", "READ_BEGIN"),
)
_RULES = {"none": 0, "spread": 1, "made": 2, "ranged": 3}
_KINDS = {"fp32": 0, "bf16": 1, "fp16": 2}
_BY_TOKEN, _BY_ROW = 1, 2


@lru_cache(maxsize=4)
def text(under: str | None = None) -> str:
    """The kernel between; `under` is the header it stands on, that of a GPU by default."""
    names = [f"{name} = {i}" for part in (_HEAD, _READ) for i, name in enumerate(part)]
    names += [f"HEAD = {len(_HEAD)}", f"READ = {len(_READ)}", "STEP = 2", f"BY_ROW = {_BY_ROW}"]
    names += [f"{rule.upper()} = {number}" for rule, number in _RULES.items()]
    names += [f"KIND_{kind.upper()} = {number}" for kind, number in _KINDS.items()]
    return "\n".join(
        [
            f"#define THREADS {THREADS}",
            "#define BLOCKS 1",
            source.header("device.h") if under is None else under,
            source.header("codecs.h"),
            source.header("scales.h"),
            f"enum {{ {', '.join(names)} }};",
            source.header("rows.h"),
        ]
    )


@dataclass(frozen=True)
class Between:
    """A launch of the kernel between; what it has in common with `hawk.retile.cuda.tables.Bound` is named alike."""

    front: ClassVar[NDArray[np.int64]] = np.zeros(0, np.int64)
    rest: NDArray[np.uint8]
    parts: NDArray[np.uint32]
    blocks: int

    @property
    def table(self) -> NDArray[np.uint8]:
        """What the kernel reads."""
        return self.rest

    @property
    def key(self) -> tuple[object, ...]:
        """Of the kernel."""
        return ("between",)

    @property
    def shared_bytes(self) -> int:
        """A number of each thread, and the scale."""
        return 8 * THREADS + 16

    def text(self, under: str | None = None) -> str:
        """Of the kernel."""
        return text(under)


class Stage(NamedTuple):
    """A launch: whether it reads the source, writes the arena, and does either with rows."""

    bound: Bound | Between
    source: bool
    target: bool
    rows: bool = False


def stages(
    steps: Iterable[Step | RowsStep],
    regions: Sequence[Span],
    arena: Span,
    room: Callable[[int], Span],
    shelf: Shelf[Any] | None = None,
    recipes: Recipes | None = None,
) -> list[Stage]:
    """The launches that carry out `steps`, one after the other, from `regions` into `arena`.

    room              lends so many bytes for rows, where there are steps through them; called once
    shelf, recipes    what was worked out before

    Raises `InvalidArgument` as `hawk.retile.cuda.tables.bind` does.
    """
    lies = getattr(steps, "lies", None)  # of plain steps alone
    if recipes is not None and lies is not None:
        return [Stage(bound, True, True) for bound in recipes.bind(steps, lies, regions, arena, shelf)]
    plain: list[Step] = []
    rows: list[RowsStep] = []
    for step in steps:
        if isinstance(step, RowsStep):
            rows.append(step)
        else:
            plain.append(step)
    found = [Stage(bound, True, True) for bound in bind(plain, regions, arena, shelf)]
    if not rows:
        return found
    straight, left = sorted_out(rows, regions, arena, shelf)
    groups = list(_groups([_Placed.of(step) for step in left]))
    beside = [_Placed.of(step, scales=True) for one in straight for step in one.steps]
    lent = room(max(sum(one.nbytes for one in group) for group in (beside, *groups)))
    if straight:
        found += _straight(straight, beside, regions, arena, lent, shelf)
    for group in groups:
        found += _group(group, regions, arena, lent, shelf)
    return found


def _straight(
    straight: list[Straight],
    beside: list[_Placed],
    regions: Sequence[Span],
    arena: Span,
    lent: Span,
    shelf: Shelf[Any] | None,
) -> list[Stage]:
    """Scales into rows, elements to where they belong, the scales that were made out of rows."""
    at = 0
    lying = []
    for placed in beside:
        lying.append(placed.moved(at))
        at += placed.nbytes
    parts: list[Part] = []
    left = iter(lying)
    for one in straight:
        places = [next(left) for _ in one.steps]
        near, far = (
            [lent.address + max(side[0][1], 0) for side in sides]
            for sides in ([p.reads for p in places], [p.writes for p in places])
        )
        parts += one.placed(near, far)
    taken, given = _moves(lying, scales=True)
    return [
        *(Stage(bound, True, False, True) for bound in bind(taken, regions, lent, shelf)),
        *(Stage(joined(parts[i : i + MAX_PARTS]), True, True, True) for i in range(0, len(parts), MAX_PARTS)),
        *(Stage(bound, False, True, True) for bound in bind(given, [lent], arena, shelf)),
    ]


@dataclass(frozen=True, slots=True)
class _Placed:
    """A step and where its rows lie: of each tensor that is read and written, and of the scales of each, or -1."""

    step: RowsStep
    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]
    nbytes: int

    @classmethod
    def of(cls, step: RowsStep, *, scales: bool = False) -> _Placed:
        """With `scales` of these alone."""
        at, sides = 0, []
        for tensors in (step.reads, step.writes):
            places = []
            for tensor in tensors:
                two = []
                for one in (None if scales else tensor, tensor.scales):
                    two.append(-1 if one is None else at)
                    at += 0 if one is None else -(-one.blocks * one.rows.page_stride // _ALIGN) * _ALIGN
                places.append((two[0], two[1]))
            sides.append(tuple(places))
        return cls(step, sides[0], sides[1], at)

    def moved(self, by: int) -> _Placed:
        """The same, all of it further on."""
        reads, writes = (
            tuple((a + by, b + by if b >= 0 else b) for a, b in side) for side in (self.reads, self.writes)
        )
        return replace(self, reads=reads, writes=writes)


def _groups(placed: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """As many steps at a time as there is room for, one behind the other."""
    if not placed:
        return
    group: list[_Placed] = []
    used = 0
    for one in placed:
        if group and used + one.nbytes > ROOM:
            yield group
            group, used = [], 0
        group.append(one.moved(used))
        used += one.nbytes
    yield group


def _group(
    group: list[_Placed], regions: Sequence[Span], arena: Span, lent: Span, shelf: Shelf[Any] | None
) -> list[Stage]:
    taken, given = _moves(group)
    return [
        *(Stage(bound, True, False, True) for bound in bind(taken, regions, lent, shelf)),
        *(Stage(between, False, False, True) for between in _between(group, lent)),
        *(Stage(bound, False, True, True) for bound in bind(given, [lent], arena, shelf)),
    ]


def _moves(group: list[_Placed], *, scales: bool = False) -> tuple[list[Direct], list[Direct]]:
    """The passes into rows and out of them, of scales alone or of all tensors."""
    taken, given = [], []
    for placed in group:
        for tensor, at in _each(placed.step.reads, placed.reads, scales=scales):
            taken += [Direct(p.program, p.pieces, p.region, p.offset, (at,)) for p in tensor.passes]
        for tensor, at in _each(placed.step.writes, placed.writes, scales=scales):
            given += [Direct(p.program, p.pieces, (0,), (at,), p.offset) for p in tensor.passes]
    return taken, given


def _each(
    tensors: Sequence[Tensor], places: Sequence[tuple[int, int]], *, scales: bool
) -> Iterator[tuple[Tensor, int]]:
    """Tensors and their scales, or these alone, with their places."""
    for tensor, (at, beside) in zip(tensors, places, strict=True):
        if not scales:
            yield tensor, at
        if tensor.scales is not None:
            yield tensor.scales, beside


def _between(group: list[_Placed], lent: Span) -> list[Between]:
    """A launch for each kind of tensor that is written, for all steps that write one like it."""
    kinds: dict[tuple[int, ...], list[list[int]]] = {}
    for placed in group:
        for number, tensor in enumerate(placed.step.writes):
            facts = _facts(placed.step, tensor)
            addresses = [*placed.writes[number], *(at for two in placed.reads for at in two)]
            kinds.setdefault(facts, []).append([lent.address + at if at >= 0 else 0 for at in addresses])
    found = []
    for facts, places in kinds.items():
        table = np.array([*facts, *(n for one in places for n in one)], np.int64).view(np.uint8)
        blocks = facts[0] * len(places)
        found.append(Between(table, np.array([[len(places), 0]], np.uint32), blocks))
    return found


def _facts(step: RowsStep, tensor: Tensor) -> tuple[int, ...]:
    """The numbers of `_HEAD`, then those of `_READ` for each tensor that is read."""
    shape, scales = tensor.rows.shape, tensor.scales
    heads, slots, dim = shape.heads, shape.block_size, shape.dim
    if scales is None:
        box, boxes, each = (1, 1, 1, 1), -(-step.blocks * heads * slots * dim // EACH), EACH
    else:
        of = scales.rows.shape
        whole = scales.per == "cache"
        box = (
            step.blocks if whole else 1,
            1 if of.heads == heads else heads,
            1 if scales.per == "token" else slots,
            dim // of.dim,
        )
        each = box[0] * box[1] * box[2] * box[3]
        boxes = step.blocks * heads * slots * dim // each
    low, high = (0.0, 0.0) if scales is None else map(float, scaling.ends(scales.codec.name))
    head = {
        "BOXES": boxes,
        "EACH": each,
        "COUNT": step.blocks,
        "HEADS": heads,
        "SLOTS": slots,
        "DIM": dim,
        "FIRST": tensor.first - step.reads[0].first,
        "BOX_BLOCKS": box[0],
        "BOX_HEADS": box[1],
        "BOX_SLOTS": box[2],
        "BOX_DIM": box[3],
        "RULE": _RULES[tensor.rule] if scales is not None else 0,
        "WIDTH": tensor.rows.codec.bits // 8,
        "KIND": 0 if scales is None else _KINDS[scales.codec.name],
        "MOST": _double(scaling.most(tensor.codec)) if scales is not None else 0,
        "LEAST": _single(low),
        "GREATEST": _single(high),
        "READS": len(step.reads),
    }
    facts = [head[name] for name in _HEAD]
    for one in step.reads:
        read = _read(step, one)
        facts += [read[name] for name in _READ]
    return tuple(facts)


def _read(step: RowsStep, tensor: Tensor) -> dict[str, int]:
    codec, scales = tensor.codec, tensor.scales
    known = {
        "READ_FIRST": tensor.first - step.reads[0].first,
        "READ_DIM": tensor.rows.shape.dim,
        "READ_FACTOR": _single(codec.factor),
        "READ_MOST": _double(scaling.most(codec)) if codec.bits == 8 and codec.group == 1 else 0,
    }
    if scales is None:
        return dict.fromkeys(_READ, 0) | known
    shape = scales.rows.shape
    return known | {
        "READ_SCALED": _BY_TOKEN if scales.per == "token" else _BY_ROW,
        "READ_SCALE_HEADS": shape.heads,
        "READ_SCALE_SLOTS": shape.block_size,
        "READ_SCALE_DIM": shape.dim,
        "READ_SCALE_ROWS": scales.blocks,
        "READ_SIZE": scales.size if scales.per == "block" else 1 << 62,
        "READ_BEGIN": step.token - scales.token,
    }


def _single(value: float) -> int:
    """The bits of a number as binary32."""
    return int(np.float32(value).view(np.uint32))


def _double(value: float) -> int:
    """Its bits as binary64."""
    return int(np.float64(value).view(np.int64))
