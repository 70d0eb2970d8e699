"""Splits and renames of `dim`: by digits where that is exact, else as a table of where each index is stored.

A rename puts the indices of `dim` into another order before digits are taken.  Where every digit of the new order is
a digit of `dim`, nothing else is needed.  Where it is not (a rotary part narrower than the head, a head size that
no tile divides) the order is applied to *stored* indices: a permutation of `0..dim-1`, kept as runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import LayoutError
from hawk.layouts.compiled import Run
from hawk.layouts.grammar import MAX_NUMBER, Binary, Name, Number, Param, evaluate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from hawk.layouts.declared import Piece
    from hawk.layouts.grammar import Order, Split, Term

    I64 = NDArray[np.int64]

MAX_DIM = 1 << 16
"""The largest head whose renames may be kept as runs."""

MAX_RUNS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a split: indices `[first, first + size)`; it may be empty."""

    first: int
    size: int


def parts_of(splits: Sequence[Split], dim: int, params: Mapping[str, int], field: str) -> dict[str, Part]:
    """The parts of all splits by name; `LayoutError` where sizes do not add up to `dim`."""
    found: dict[str, Part] = {}
    for split in splits:
        first = 0
        for name, expr in split.parts:
            if name in found or name in params:
                raise LayoutError(
                    "this name has a meaning already", field=field, got=name, expected="a name of its own"
                )
            size = dim - first if expr is None else evaluate(expr, params, field)
            if first + size > dim or size < 0:
                raise LayoutError(
                    "the parts are larger than the axis",
                    field=field,
                    got=f"{name}:{size} from {first} on",
                    expected=f"{dim} in all",
                )
            found[name] = Part(first, size)
            first += size
        if first != dim:
            raise LayoutError(
                "the parts do not fill the axis", field=field, got=first, expected=f"{dim} in all"
            )
    return found


def names_in(terms: Iterable[Term]) -> list[str]:
    """The names that the terms are made of, each once."""
    found: dict[str, None] = {}
    for term in terms:
        inner = [term.base.name] if isinstance(term.base, Name) else names_in(term.base.terms)
        found.update(dict.fromkeys(inner))
    return list(found)


def without_empty(terms: Sequence[Term], parts: Mapping[str, Part]) -> tuple[Term, ...]:
    """The terms of a sum but those of parts that are empty for this shape."""
    return tuple(t for t in terms if not _is_empty(t, parts))


def _is_empty(term: Term, parts: Mapping[str, Part]) -> bool:
    return any(name in parts and parts[name].size == 0 for name in names_in([term]))


def check_halves(piece: Piece, narrow: Sequence[str], params: Mapping[str, int], field: str) -> None:
    """Refuses halves of a parameter of `narrow`, which is less than the head, taken of the whole head.

    `(dim%(R/2) dim/(R/2))` weaves two halves where R is the head; where it is less, as for a rotary part, it would
    weave more than two runs, and it is a part of the head that is meant.
    """
    inner = [t for _, terms in piece.renames for term in terms for t in _terms_in(term)]
    for term in inner:
        for _, n in term.ops:
            if not (isinstance(n, Binary) and n.op == "/" and n.right == Number(2) and _is_dim(term)):
                continue
            if isinstance(n.left, Param) and n.left.name in narrow:
                name = n.left.name
                raise LayoutError(
                    "halves of what is less than the head are taken of the whole head",
                    field=field,
                    got=f"{term.text!r} at column {term.at} with {name} = {params[name]}",
                    expected=f"halves of a part of {params[name]}",
                    hint=f'Split first: split = "dim = rotary:{name} + rest", and rename the part',
                )


def _terms_in(term: Term) -> Iterator[Term]:
    yield term
    if not isinstance(term.base, Name):
        for inner in term.base.terms:
            yield from _terms_in(inner)


def _is_dim(term: Term) -> bool:
    return isinstance(term.base, Name) and term.base.name == "dim"


@dataclass(frozen=True, slots=True)
class _Table:
    """A name's value at every index of dim, whether it has one there, and how many values there are."""

    value: I64
    held: NDArray[np.bool_]
    count: int


class Tables:
    """Evaluates renames index by index."""

    def __init__(self, dim: int, parts: Mapping[str, Part], params: Mapping[str, int]) -> None:
        index = np.arange(dim, dtype=np.int64)
        self.dim, self.params = dim, params
        self.names = {"dim": _Table(index, np.ones(dim, np.bool_), dim)}
        for name, part in parts.items():
            held = (index >= part.first) & (index < part.first + part.size)
            self.names[name] = _Table(index - part.first, held, max(part.size, 1))

    def rename(self, name: str, terms: Sequence[Term], field: str) -> None:
        """Let `name` stand for the terms, one after another."""
        value, held, first = np.zeros(self.dim, np.int64), np.zeros(self.dim, np.bool_), 0
        for term in terms:
            table = self._value(term, field)
            if (held & table.held).any():
                raise LayoutError(
                    "two terms of a sum hold the same indices",
                    field=field,
                    got=f"{term.text!r} at column {term.at}",
                    expected="each index in one term",
                )
            value, held = np.where(table.held, first + table.value, value), held | table.held
            first += table.count
        self.names[name] = _Table(value, held, first)

    def runs(self, name: str, field: str) -> tuple[Run, ...]:
        """Where the indices of dim are stored when they lie in the order of `name`."""
        table = self.names[name]
        if not table.held.all() or not np.array_equal(np.sort(table.value), np.arange(self.dim)):
            raise LayoutError(
                "a rename must hold every index of dim once, without gaps",
                field=field,
                got=name,
                expected=f"{self.dim} indices",
            )
        return _runs(table.value, field)

    def _value(self, term: Term, field: str) -> _Table:
        if isinstance(term.base, Name):
            if term.base.name not in self.names:
                raise LayoutError(
                    "only parts of dim can be renamed",
                    field=field,
                    got=f"{term.base.name[:64]!r} at column {term.base.at}",
                    expected="one of " + ", ".join(self.names),
                )
            table = self.names[term.base.name]
        else:
            inner = [self._value(t, field) for t in term.base.terms]
            table = inner[0]
            for low in inner[1:]:
                self._bounded(table.count * low.count, term, field)
                table = _Table(
                    table.value * low.count + low.value, table.held & low.held, table.count * low.count
                )
        for op, operand in term.ops:
            n = evaluate(operand, self.params, field)
            value = table.value // n if op == "/" else table.value % n
            # A `%` beyond the count widens: what is above is padding, as it is of an axis.
            table = _Table(value, table.held, -(-table.count // n) if op == "/" else n)
        return table

    def _bounded(self, count: int, term: Term, field: str) -> None:
        if count > MAX_NUMBER:
            raise LayoutError(
                "too large", field=field, got=f"{term.text[:80]!r}", expected=f"at most {MAX_NUMBER} values"
            )


def _runs(stored: I64, field: str) -> tuple[Run, ...]:
    """A permutation as runs of equal steps, as long as they go from left to right."""
    found: list[Run] = []
    at, n = 0, len(stored)
    step = np.diff(stored)
    while at < n:
        end = at + 1
        if end < n:
            change = np.flatnonzero(step[at:] != step[at])
            end = n if len(change) == 0 else at + int(change[0]) + 1
        found.append(Run(at, end - at, int(stored[at]), int(step[at]) if end - at > 1 else 1))
        at = end
        if len(found) > MAX_RUNS:
            raise LayoutError(
                "a rename falls into too many runs",
                field=field,
                got=f"{len(found)} or more",
                expected=f"at most {MAX_RUNS}",
            )
    return tuple(found)


def stored_name(order: Order, renames: Sequence[str], parts: Mapping[str, Part]) -> str | None:
    """The rename that the order is written in, where it is the only thing of dim there; else None."""
    used = [n for n in names_in([*order.page, *order.inside]) if n == "dim" or n in parts or n in renames]
    return used[0] if len(used) == 1 and used[0] in renames else None
