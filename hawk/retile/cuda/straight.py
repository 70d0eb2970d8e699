"""Steps through rows that need none: a program goes straight to the target, with scales on the way.

Scales themselves go through rows, for these are small: the source's are read before, those that were made are written
after.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.retile.cuda.bases import bases_of
from hawk.retile.cuda.box import box_of
from hawk.retile.cuda.scaled import ready
from hawk.retile.cuda.spec import VECTOR
from hawk.retile.cuda.tables import kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from hawk.retile.cuda.bases import Span
    from hawk.retile.cuda.bound import Part
    from hawk.retile.cuda.shelf import Shelf
    from hawk.retile.rows import Direct, RowsStep, Tensor

    I64 = NDArray[np.int64]

MOST_SHARED = 64 << 10
"""Shared memory of a unit at most, which every GPU has: scales of single elements would take more than these do."""

_PER = ("token", "block", "cache")
_RULES = ("none", "moved", "spread", "made", "ranged")
_STORED = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Straight:
    """Steps alike, and their parts of a launch, the addresses of scales still to be told."""

    steps: tuple[RowsStep, ...]
    parts: tuple[Part, ...]

    def placed(self, near: list[int], far: list[int]) -> list[Part]:
        """The parts where each step's scales lie at these addresses, of the source and of the target."""
        scales = np.array([near, far], np.int64).T
        return [
            part._replace(sections=(np.concatenate((part.sections[0], scales), axis=1), *part.sections[1:]))
            for part in self.parts
        ]


def sorted_out(
    steps: Iterable[RowsStep], regions: Sequence[Span], arena: Span, shelf: Shelf[Any] | None
) -> tuple[list[Straight], list[RowsStep]]:
    """Those that go straight, and those that do not.

    Raises `InvalidArgument` as `hawk.retile.cuda.tables.bind` does.
    """
    alike: dict[object, list[RowsStep]] = {}
    through: list[RowsStep] = []
    programs: dict[int, tuple[Direct, ...]] = {}
    for step in steps:
        found = () if step.direct is None else step.direct()
        if found:
            programs[id(step)] = found
            key = tuple(kind_of(one.program, one.pieces) for one in found), _facts(step)
            alike.setdefault(key, []).append(step)
        else:
            through.append(step)
    straight = []
    for group in alike.values():
        parts = []
        for ones in zip(*(programs[id(step)] for step in group), strict=True):
            part = _part(group[0], ones, regions, arena, shelf)
            if part is None:
                through += group
                break
            parts.append(part)
        else:
            straight.append(Straight(tuple(group), tuple(parts)))
    return straight, through


def _part(
    step: RowsStep, ones: Sequence[Direct], regions: Sequence[Span], arena: Span, shelf: Shelf[Any] | None
) -> Part | None:
    """The part of one program of steps alike, scales at no address; None where it cannot go straight."""
    first = ones[0]
    if not len(first.pieces):
        return None
    bases, room = bases_of(ones, regions, arena)
    sources = len(first.src_offset)
    sides = bases[:, :sources], bases[:, sources:]
    common = [gcd(VECTOR, int(np.gcd.reduce(side.ravel()))) for side in sides]
    key = (id(first.program), id(first.pieces), sources, *common, *_facts(step))
    found = None if shelf is None else shelf.find(key, room)
    if found is None:
        made = ready(step, first, sources, room)
        if made is None:
            return None
        found = made.part(sources, np.concatenate((bases, bases[:, :2] * 0), axis=1))
        if box_of(found.spec).shared_bytes > MOST_SHARED:
            return None
        if shelf is not None:
            shelf.keep(key, room, found, (first.program, first.pieces))
    return found._replace(steps=len(bases), sections=(bases, *found.sections[1:]))


def _facts(step: RowsStep) -> tuple[int, ...]:
    """What counts of a step's scales, beside the pieces of its elements."""
    shape, rule = step.writes[0].rows.shape, step.writes[0].rule
    own = (step.blocks, step.token, shape.heads, shape.block_size, shape.dim, _RULES.index(rule))
    return (*own, *_scales(step.reads[0].scales), *_scales(step.writes[0].scales))


def _scales(tensor: Tensor | None) -> tuple[int, ...]:
    if tensor is None:
        return (-1,)
    shape = tensor.rows.shape
    return (
        *(shape.heads, shape.block_size, shape.dim, tensor.blocks, tensor.size, tensor.token),
        *(_PER.index(tensor.per), _STORED.index(tensor.codec.name)),
    )
