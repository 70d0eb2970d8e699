"""What of a model's cache one worker holds, and whether several workers together hold what another one needs.

`hawk.plan.shards` says who sends what to whom where both groups are known.  Here each side knows its own part
alone, and what two of them share follows from the numbers: heads and layers count in the model on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument, PartsMismatch, Unmappable
from hawk.plan.shards import Grid, Model, shard
from hawk.plan.types import Selection

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST = 65_536
"""Heads, and layers, of a model."""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def span(numbers: range) -> str:
    """`[2, 4)` for people: `2..3`."""
    return f"{numbers.start}..{numbers.stop - 1}" if len(numbers) > 1 else str(numbers.start)


def _runs(numbers: Iterable[int]) -> str:
    """Ascending numbers as stretches: `0..3, 8`."""
    found: list[range] = []
    for n in numbers:
        if found and n == found[-1].stop:
            found[-1] = range(found[-1].start, n + 1)
        else:
            found.append(range(n, n + 1))
    shown = ", ".join(span(run) for run in found[:8])
    return shown + (", ..." if len(found) > 8 else "")


def _meet(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker's cache holds of a model's: KV heads `heads` of `of_heads`, layers `layers` of `of_layers`.

    Both ranges are numbers in the model, ascending without gaps.  Where layers of different kinds lie in caches of
    their own, the layers are numbered within their kind.  Of `copies` workers that hold the same, because there are
    more workers than heads, this is number `copy`.  Raises `InvalidArgument` naming the field.
    """

    heads: range
    of_heads: int
    layers: range
    of_layers: int
    copy: int = 0
    copies: int = 1

    def __post_init__(self) -> None:
        if not _whole(self.copies) or not 1 <= self.copies <= MOST:
            raise InvalidArgument(
                "some worker holds it",
                field="part.copies",
                got=repr(self.copies),
                expected=f"a whole number 1..{MOST}",
            )
        if not _whole(self.copy) or not 0 <= self.copy < self.copies:
            raise InvalidArgument(
                "no such copy", field="part.copy", got=repr(self.copy), expected=f"0..{self.copies - 1}"
            )
        for name in ("heads", "layers"):
            numbers, whole = getattr(self, name), getattr(self, f"of_{name}")
            if not _whole(whole) or not 1 <= whole <= MOST:
                raise InvalidArgument(
                    f"a model has some {name}",
                    field=f"part.of_{name}",
                    got=repr(whole),
                    expected=f"a whole number 1..{MOST}",
                )
            good = isinstance(numbers, range) and numbers.step == 1
            if not good or not 0 <= numbers.start < numbers.stop <= whole:
                raise InvalidArgument(
                    f"no such {name} of a model",
                    field=f"part.{name}",
                    got=repr(numbers),
                    expected=f"a range within range(0, {whole}), with step 1 and not empty",
                )

    @classmethod
    def of(
        cls,
        heads: int,
        layers: int,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        pp_rank: int = 0,
        pp_size: int = 1,
    ) -> Part:
        """The part of one worker among `tp_size` that share `heads` KV heads and `pp_size` that share `layers`.

        Rank r keeps heads `[r*heads//tp_size, (r+1)*heads//tp_size)`; of more workers than heads each keeps a copy
        of head `r*heads//tp_size`.  Stage s keeps layers `[s*layers//pp_size, (s+1)*layers//pp_size)`.  Raises
        `InvalidArgument` for a rank that does not exist.
        """
        model = Model("the model", layers, heads, 1)
        grid = Grid(tp=tp_size, pp=pp_size)
        for name, rank, size in (("tp_rank", tp_rank, tp_size), ("pp_rank", pp_rank, pp_size)):
            if not _whole(rank) or not 0 <= rank < size:
                raise InvalidArgument(
                    "no such worker", field=name, got=repr(rank), expected=f"a whole number 0..{size - 1}"
                )
        held = shard(model, grid, pp_rank * tp_size + tp_rank)
        return cls(held.heads, heads, held.layers, layers, held.replica, held.replicas)

    @property
    def whole(self) -> bool:
        """Whether it is all of the model."""
        return len(self.heads) == self.of_heads and len(self.layers) == self.of_layers

    def __str__(self) -> str:
        copy = f", copy {self.copy} of {self.copies}" if self.copies > 1 else ""
        heads = f"heads {span(self.heads)} of {self.of_heads}"
        return f"{heads}, layers {span(self.layers)} of {self.of_layers}{copy}"

    def readers(self, tp_size: int, pp_size: int = 1) -> int:
        """How many workers of a group of `tp_size * pp_size` read this part: the consumers of its offers.

        0 where other copies of it serve the whole group.
        """
        found = (
            Part.of(self.of_heads, self.of_layers, tp_rank=r, tp_size=tp_size, pp_rank=s, pp_size=pp_size)
            for s in range(pp_size)
            for r in range(tp_size)
        )
        return sum(serves(self, other) for other in found)


def meets(a: Part, b: Part) -> bool:
    """Whether two parts share an element."""
    return bool(_meet(a.heads, b.heads)) and bool(_meet(a.layers, b.layers))


def serves(source: Part, target: Part) -> bool:
    """Whether `target` reads this copy of what both hold: copies on one side take those on the other in turn."""
    return meets(source, target) and source.copy == target.copy * source.copies // target.copies


def check_totals(source: Part, target: Part, field: str = "part") -> None:
    """Raises `PartsMismatch` unless both are parts of a model of the same size."""
    for name in ("heads", "layers"):
        got, expected = getattr(source, f"of_{name}"), getattr(target, f"of_{name}")
        if got != expected:
            raise PartsMismatch(
                f"the two caches are parts of models that differ in {name}",
                field=f"{field}.{name}",
                got=f"{name} {span(getattr(source, name))} of {got}",
                expected=f"of {expected}, as the target's {span(getattr(target, name))}",
                hint="Register each cache with its part: CacheSpec.shard, or part=hawk.Part(...)",
            )


def selection(source: Part, target: Part, token: int, tokens: int) -> Selection:
    """What of `[token, token + tokens)` a cache that holds `source` gives to one that holds `target`.

    Raises `PartsMismatch` where they are parts of different models, `Unmappable` where they share nothing.
    """
    check_totals(source, target)
    heads, layers = _meet(source.heads, target.heads), _meet(source.layers, target.layers)
    if not heads or not layers:
        name = "layers" if heads else "heads"
        raise Unmappable(
            "the offer holds nothing that the target needs",
            field=f"part.{name}",
            got=str(source),
            expected=f"some of {name} {span(getattr(target, name))}",
        )
    layer, own = layers.start - target.layers.start, layers.start - source.layers.start
    every = len(heads) == len(source.heads) == len(target.heads)
    return Selection(
        layer=layer,
        layers=len(layers),
        token=token,
        tokens=tokens,
        source_layers=() if layer == own else tuple(range(own, own + len(layers))),
        head=0 if every else heads.start - target.heads.start,
        heads=0 if every else len(heads),
        source_head=0 if every else heads.start - source.heads.start,
    )


class Coverage:
    """Which elements of a target's part the parts of a request bring, each of them once."""

    def __init__(self, target: Part) -> None:
        self._target = target
        self._filled = np.zeros((len(target.layers), len(target.heads)), dtype=bool)

    def take(self, part: Part, field: str = "part") -> bool:
        """Whether `part` brings something that none before it did; from then on it counts as there.

        A part that repeats others, or shares nothing with the target, brings nothing.  Raises `PartsMismatch` for
        one that is of another model, or cut in another way, so that it repeats others in part only.
        """
        check_totals(part, self._target, field)
        heads, layers = _meet(part.heads, self._target.heads), _meet(part.layers, self._target.layers)
        if not heads or not layers:
            return False
        first_layer, first_head = self._target.layers.start, self._target.heads.start
        place = self._filled[
            layers.start - first_layer : layers.stop - first_layer,
            heads.start - first_head : heads.stop - first_head,
        ]
        if place.all():
            return False
        if place.any():
            raise PartsMismatch(
                "two parts overlap and neither repeats the other",
                field=field,
                got=str(part),
                expected=f"other heads or layers than {self._text(self._filled)}",
            )
        place[...] = True
        return True

    @property
    def complete(self) -> bool:
        """Whether every element of the target comes from one part."""
        return bool(self._filled.all())

    def check(self, field: str = "tickets") -> None:
        """Raises `PartsMismatch` naming heads and layers that no part brings."""
        if not self.complete:
            raise PartsMismatch(
                "parts are missing",
                field=field,
                got=f"nothing for {self._text(~self._filled)}",
                expected=str(self._target),
            )

    def _text(self, where: np.ndarray) -> str:
        """The first heads and layers that are marked, as a rectangle of them."""
        layer = int(np.flatnonzero(where.any(axis=1))[0])
        heads = np.flatnonzero(where[layer])
        alike = np.flatnonzero((where == where[layer]).all(axis=1))
        heads = heads + self._target.heads.start
        layers = alike + self._target.layers.start
        return f"heads {_runs(heads.tolist())} of layers {_runs(layers.tolist())}"
