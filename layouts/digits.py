"""From the tree of an order to digits with strides, and the proof that they are a bijection.

The value of a term is a mixed-radix number: a list of *factors*, each `(index[axis] // div) % ext` of one
axis, most significant first.  `/n` and `%n` cut that list at n.  Where the cut falls inside a factor the
factor is split in two, which is right only if the lower part divides it - or if the factor is *open* and the
top of the list: then nothing is above it, and the surplus is padding.  An axis is open until a `%` closes it.
Factors of one value count as nothing.  What cannot be split so is not a sum of digits of single axes, and is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hawk.errors import LayoutError
from hawk.layouts.compiled import AXES, Digit
from hawk.layouts.grammar import Name, axis_hint, evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hawk.layouts.compiled import Axis
    from hawk.layouts.grammar import Order, Term

MAX_FACTORS = 64
MAX_ELEMENTS = 2**40


@dataclass(frozen=True, slots=True)
class Factor:
    """`(index[axis] // div) % ext`, or `index[axis] // div` where `open`; `text` is its term, for messages."""

    axis: Axis
    div: int
    ext: int
    open: bool = False
    text: str = ""

    def __str__(self) -> str:
        name = self.axis + (f"/{self.div}" if self.div != 1 else "") + f"%{self.ext}"
        return f"{name} (of {self.text!r})" if self.text else name


class Refiner:
    """Evaluates terms for one index box and one set of parameters."""

    def __init__(self, extents: Mapping[Axis, int], params: Mapping[str, int], field: str) -> None:
        self.extents, self.params, self.field = extents, params, field
        self.names: dict[str, list[Factor]] = {
            axis: [Factor(axis, 1, extents[axis], open=True)] for axis in AXES
        }
        self.renamed: dict[str, str] = {}

    def rename(self, name: str, term: Term, field: str) -> None:
        """Let `name` stand for `term` from here on."""
        outer, self.field = self.field, field
        self.name(name, self.value(term), field)
        self.field = outer

    def name(self, name: str, factors: list[Factor], field: str) -> None:
        """Let `name` stand for `factors` from here on."""
        if name in self.names:
            raise LayoutError(
                "this name has a meaning already", field=field, got=name, expected="a name of its own"
            )
        self.names[name] = factors

    def order(self, order: Order) -> tuple[list[Factor], list[Factor]]:
        """Factors of the page number and of the inside, those of extent 1 included."""
        parts = []
        for terms in (order.page, order.inside):
            factors: list[Factor] = []
            for term in terms:
                factors += [replace(f, text=term.text) for f in self.value(term)]
            parts.append(factors)
        page, inside = parts
        if not order.cut:
            # A page ends behind the least significant factor that tells layers, K and V, or blocks apart.
            outer = [i for i, f in enumerate(page) if f.axis in ("layer", "kv", "block")]
            cut = outer[-1] + 1 if outer else 0
            page, inside = page[:cut], page[cut:]
        for factor in inside:
            if factor.axis in ("layer", "block"):
                raise LayoutError(
                    "a page may not span layers or blocks",
                    field=self.field,
                    got=f"{factor} behind '|'",
                    expected="kv, head, slot and dim behind '|'",
                )
        return page, inside

    def value(self, term: Term) -> list[Factor]:
        """The factors of a term, most significant first."""
        if isinstance(term.base, Name):
            name = term.base.name
            if name not in self.names:
                raise LayoutError(
                    "unknown axis",
                    field=self.field,
                    got=f"{name[:64]!r} at column {term.base.at}",
                    expected="one of " + ", ".join(self.names),
                    hint=axis_hint(name, self.names),
                )
            factors = self.names[name]
        else:
            factors = [f for inner in term.base.terms for f in self.value(inner)]
        for op, operand in term.ops:
            n = evaluate(operand, self.params, self.field)
            if op == "%" and n > 1 and not factors:
                got = f"{term.text!r} at column {term.at}, which takes %{n} of what is always 0"
                raise LayoutError(
                    "this digit is not a digit of one axis",
                    field=self.field,
                    got=got,
                    expected="a digit that can be other than 0",
                )
            high, low = self.cut(factors, n, term)
            factors = high if op == "/" else low
        if len(factors) > MAX_FACTORS:
            raise LayoutError(
                "too many digits",
                field=self.field,
                got=f"{len(factors)} in {term.text[:80]!r}",
                expected=f"at most {MAX_FACTORS}",
            )
        return factors

    def cut(self, factors: list[Factor], n: int, term: Term) -> tuple[list[Factor], list[Factor]]:
        """(factors of `value // n`, factors of `value % n`)."""
        high, low = list(factors), list[Factor]()
        while n > 1 and high:
            factor = high.pop()
            if high and n % factor.ext == 0:
                low.append(factor)
                n //= factor.ext
                continue
            if factor.open and all(f.ext == 1 for f in high):
                # Kept even where it has one value only: a `%` behind this cut may widen it.
                high.append(replace(factor, div=factor.div * n, ext=-(-factor.ext // n)))
            elif factor.ext % n == 0:
                if factor.ext > n:
                    high.append(replace(factor, div=factor.div * n, ext=factor.ext // n))
            else:
                raise LayoutError(
                    "this digit is not a digit of one axis",
                    field=self.field,
                    got=f"{term.text!r} at column {term.at}, which cuts {replace(factor, text='')} at {n}",
                    expected=f"a factor of {factor.ext}",
                )
            low.append(replace(factor, ext=n))
            n = 1
        return high, [replace(factor, open=False) for factor in reversed(low)]


def prove(
    factors: Sequence[Factor], extents: Mapping[Axis, int], buffers: Sequence[Axis], field: str
) -> bool:
    """Whether the map from the index box onto positions leaves padding; `LayoutError` if it is no bijection.

    Positions are a mixed-radix number whose radices are the factors' extents, so they are covered exactly once
    if and only if each axis can be told from its factors: sorted by div, each begins where the one below ends.
    """
    padded = False
    for axis in AXES:
        own = sorted((f for f in factors if f.axis == axis), key=lambda f: (f.div, f.ext))
        if axis in buffers:
            if own:
                raise LayoutError(
                    "this axis selects the buffer and has no place in the order",
                    field=field,
                    got=str(own[0]),
                    expected=f"no digit of {axis}",
                )
            continue
        if not own:
            raise LayoutError(
                "this axis is missing in the order", field=field, got=f"no digit of {axis}", expected=axis
            )
        reach = 1
        for i, factor in enumerate(own):
            if factor.div < reach or (i and (factor.div, factor.ext) == (own[i - 1].div, own[i - 1].ext)):
                raise _twice(factor, own[i - 1], field)
            if factor.div > reach:
                gap = Factor(axis, reach, factor.div // reach)
                raise LayoutError(
                    "this digit is missing in the order",
                    field=field,
                    expected=str(gap),
                    got=f"{factor} above it",
                )
            reach *= factor.ext
        if reach < extents[axis]:
            raise LayoutError(
                "this digit is missing in the order",
                field=field,
                got=f"{axis} up to {reach - 1} of {extents[axis] - 1}",
                expected=str(Factor(axis, reach, -(-extents[axis] // reach))),
            )
        padded |= reach > extents[axis]
    return padded


def _twice(factor: Factor, other: Factor, field: str) -> LayoutError:
    """Two factors of one axis that overlap."""
    names = [re.findall(r"[A-Za-z_]\w*", f.text) for f in (factor, other)]
    hint = None
    if len({factor.axis in found for found in names}) == 2:
        hint = f"Where {factor.axis} is renamed the order names the new name alone"
    return LayoutError(
        "this digit is in the order twice", field=field, got=f"{factor} and {other}", hint=hint
    )


def strides(factors: Sequence[Factor], field: str) -> tuple[tuple[Digit, ...], int]:
    """The factors as digits with strides, neighbours that continue each other joined, and their product."""
    digits: list[Digit] = []
    stride = 1
    for factor in reversed(factors):
        if factor.ext > 1:
            below = digits[-1] if digits else None
            if below is not None and below.axis == factor.axis and below.div * below.ext == factor.div:
                digits[-1] = replace(below, ext=below.ext * factor.ext)
            else:
                digits.append(Digit(factor.axis, factor.div, factor.ext, stride))
            stride *= factor.ext
        if stride > MAX_ELEMENTS:
            raise LayoutError(
                "too large",
                field=field,
                got=f"more than {stride} positions",
                expected=f"at most {MAX_ELEMENTS}",
            )
    return tuple(reversed(digits)), stride


def show(digits: Sequence[Digit], extents: Mapping[Axis, int]) -> str:
    """Digits as an order would write them, `a/div%ext`, `%` left out at the top of an axis."""
    words = []
    for digit in digits:
        top = digit.div * digit.ext >= extents[digit.axis]
        words.append(
            digit.axis + (f"/{digit.div}" if digit.div > 1 else "") + ("" if top else f"%{digit.ext}")
        )
    return " ".join(words)
