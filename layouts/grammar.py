"""The text of orders and renames: parsed here into a small tree, given meaning in `layout`.

    order    term... [ "|" term... ]                 most significant first
    split    "dim" "=" part { "+" part }              the parts of an axis, one after another
    part     NAME [ ":" operand ]                    without a size, only at the end: all that is left
    rename   NAME "=" term { "+" term }              terms of parts, one after another
    term     ( NAME | "(" term... ")" ) { ("/" | "%") operand }
    operand  NUMBER | NAME | "(" sum ")"             NAME is a parameter here
    sum      product { ("+" | "-") product }
    product  operand { ("*" | "/") operand }         a division must come out even

A chain binds from left to right: `slot%32/16` is `(slot%32)/16`.  The text comes over the wire from peers, so
its length, its nesting and its numbers are bounded.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.errors import LayoutError
from hawk.layouts.compiled import AXES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

MAX_TEXT = 4096
MAX_DEPTH = 16
MAX_NUMBER = 2**40

MAX_PARTS = 8

_TOKEN = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]*)|([0-9]+)|([()/%|=:*+-])|(\S))")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """`Did you mean 'head'?` where one of the known words is close to `word`, in whatever case, else None."""
    lower = {other.lower(): other for other in known}
    close = difflib.get_close_matches(word[:64].lower(), lower, n=1, cutoff=0.65)
    return f"Did you mean {lower[close[0]]!r}?" if close else None


def is_name(text: str) -> bool:
    """Whether `text` can name an axis or a parameter."""
    return len(text) <= 64 and _NAME.match(text) is not None


def axis_hint(word: str, known: Iterable[str]) -> str | None:
    """What to say to one who wrote `word` where an axis belongs."""
    if word == "token":
        return "Tokens are counted by 'block' and 'slot'"
    return nearest(word, known)


# -- arithmetic on parameters ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number:
    """A literal."""

    value: int


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter by name; `at` is its column (from 1)."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Binary:
    """`left op right` with op one of `+ - * /`."""

    op: str
    left: Arith
    right: Arith
    at: int


Arith = Number | Param | Binary


def evaluate(expr: Arith, params: Mapping[str, int], field: str) -> int:
    """The value of `expr`, an integer in 1..2**40; `LayoutError` names what is not."""
    value = _evaluate(expr, params, field)
    if not 1 <= value <= MAX_NUMBER:
        raise LayoutError(
            "a digit needs a positive number",
            field=field,
            got=f"{show(expr)} = {value}",
            expected=f"1..{MAX_NUMBER}",
        )
    return value


def _evaluate(expr: Arith, params: Mapping[str, int], field: str) -> int:
    if isinstance(expr, Number):
        return expr.value
    if isinstance(expr, Param):
        if expr.name not in params:
            raise LayoutError(
                "unknown parameter",
                field=field,
                got=f"{expr.name!r} at column {expr.at}",
                expected="a number or one of " + ", ".join(sorted(params))
                if params
                else "a number, for there are no [params]",
                hint=nearest(expr.name, params),
            )
        return params[expr.name]
    left, right = _evaluate(expr.left, params, field), _evaluate(expr.right, params, field)
    if expr.op == "/":
        if right == 0 or left % right:
            raise LayoutError(
                "a division does not come out even",
                field=field,
                got=f"{left} / {right} at column {expr.at}",
                expected="a divisor without a rest",
            )
        return left // right
    value = {"+": left + right, "-": left - right, "*": left * right}[expr.op]
    if abs(value) > MAX_NUMBER:
        raise LayoutError(
            "a number is too large", field=field, got=show(expr), expected=f"at most {MAX_NUMBER}"
        )
    return value


def show(expr: Arith) -> str:
    """The text of an arithmetic expression, in the form it would be written in."""
    if isinstance(expr, Number):
        return str(expr.value)
    if isinstance(expr, Param):
        return expr.name
    return f"({show(expr.left)}{expr.op}{show(expr.right)})"


# -- terms -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Name:
    """An axis or a renamed axis; `at` is its column (from 1)."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Group:
    """Terms fused into one axis, most significant first."""

    terms: tuple[Term, ...]
    at: int


@dataclass(frozen=True, slots=True)
class Term:
    """A name or a group and the chain of `/` and `%` behind it; `text` as it was written."""

    base: Name | Group
    ops: tuple[tuple[str, Arith], ...]
    text: str
    at: int


@dataclass(frozen=True, slots=True)
class Split:
    """`dim` in consecutive parts: names and sizes; None, the last one's only, is what the others leave."""

    parts: tuple[tuple[str, Arith | None], ...]


@dataclass(frozen=True, slots=True)
class Order:
    """An order: the terms of the page number and those of the inside.

    `cut` tells whether a `|` was written; without one all terms are in `page`.
    """

    page: tuple[Term, ...]
    inside: tuple[Term, ...]
    cut: bool


class _Parser:
    def __init__(self, text: str, field: str) -> None:
        if len(text) > MAX_TEXT:
            raise LayoutError(
                "the text is too long",
                field=field,
                got=f"{len(text)} characters",
                expected=f"at most {MAX_TEXT}",
            )
        self.text, self.field = text, field
        self.tokens: list[tuple[str, str, int]] = []
        self.ends: list[int] = [0]
        for match in _TOKEN.finditer(text):
            kind = ("name", "number", "sign", "other")[(match.lastindex or 4) - 1]
            word = match.group(match.lastindex or 4)
            self.tokens.append((kind, word, match.end() - len(word)))
            self.ends.append(match.end())
        self.pos = 0

    def peek(self) -> tuple[str, str, int]:
        return self.tokens[self.pos] if self.pos < len(self.tokens) else ("end", "", len(self.text))

    def take(self, word: str) -> bool:
        if self.peek()[1] == word and self.peek()[0] == "sign":
            self.pos += 1
            return True
        return False

    def error(self, expected: str, message: str = "cannot read this order") -> LayoutError:
        kind, word, start = self.peek()
        got = "the end of the text" if kind == "end" else f"{word[:64]!r}"
        return LayoutError(
            message,
            field=self.field,
            got=f"{got} at column {start + 1} of {self.text[:200]!r}",
            expected=expected,
        )

    def number(self) -> int:
        word = self.peek()[1]
        value = int(word) if len(word) <= 13 else MAX_NUMBER + 1
        if value > MAX_NUMBER:
            raise self.error(f"at most {MAX_NUMBER}", "a number is too large")
        self.pos += 1
        return value

    def operand(self, depth: int) -> Arith:
        kind, word, start = self.peek()
        if kind == "number":
            return Number(self.number())
        if kind == "name":
            self.pos += 1
            return Param(word, start + 1)
        if depth < MAX_DEPTH and self.take("("):
            expr = self.sum(depth + 1)
            if not self.take(")"):
                raise self.error("')', '+', '-', '*' or '/'")
            return expr
        raise self.error(
            "a number, a parameter or '('" if depth < MAX_DEPTH else f"at most {MAX_DEPTH} nested parentheses"
        )

    def sum(self, depth: int) -> Arith:
        return self.chain("+-", depth, lambda d: self.chain("*/", d, self.operand))

    def chain(self, signs: str, depth: int, inner: Callable[[int], Arith]) -> Arith:
        left = inner(depth)
        # Bounded by the text's length, but `show` and `evaluate` recurse into the left: bounded like nesting.
        for _ in range(MAX_DEPTH):
            kind, word, start = self.peek()
            if kind != "sign" or word not in signs:
                return left
            self.pos += 1
            left = Binary(word, left, inner(depth), start + 1)
        raise self.error(f"at most {MAX_DEPTH} operations in a row")

    def term(self, depth: int) -> Term:
        first = self.pos
        kind, word, start = self.peek()
        base: Name | Group
        if kind == "name":
            self.pos += 1
            base = Name(word, start + 1)
        elif depth < MAX_DEPTH and self.take("("):
            base = Group(self.terms(depth + 1), start + 1)
            if not self.take(")"):
                raise self.error("an axis, '(' or ')'")
        else:
            raise self.error(
                "an axis or '('" if depth < MAX_DEPTH else f"at most {MAX_DEPTH} nested parentheses"
            )
        ops: list[tuple[str, Arith]] = []
        while self.peek()[0] == "sign" and self.peek()[1] in "/%":
            sign = self.peek()[1]
            self.pos += 1
            ops.append((sign, self.operand(depth)))
        begin = self.tokens[first][2]
        return Term(base, tuple(ops), self.text[begin : self.ends[self.pos]], begin + 1)

    def terms(self, depth: int) -> tuple[Term, ...]:
        found = [self.term(depth)]
        while self.peek()[0] == "name" or self.peek()[1] == "(":
            found.append(self.term(depth))
        return tuple(found)

    def end(self, expected: str) -> None:
        if self.peek()[0] != "end":
            raise self.error(expected)


def parse_order(text: str, field: str = "order") -> Order:
    """The tree of an order such as `block head slot/32 dim/32 | slot%32 dim%32`.

    Raises `LayoutError` with the column, what stands there and what could.
    """
    parser = _Parser(text, field)
    page = parser.terms(0)
    inside: tuple[Term, ...] = ()
    cut = parser.take("|")
    if cut:
        inside = parser.terms(0)
    parser.end("an axis, '(', '/', '%'" + ("" if cut else ", '|'") + " or the end")
    return Order(page, inside, cut)


def parse_number(text: str, field: str) -> Arith:
    """The tree of an expression on parameters such as `S/32*2`; `LayoutError` as `parse_order`."""
    parser = _Parser(text, field)
    expr = parser.sum(0)
    parser.end("an operation or the end")
    return expr


def parse_rename(text: str, field: str = "rename") -> tuple[str, tuple[Term, ...]]:
    """Name and terms of a rename such as `m = (dim%(R/2) dim/(R/2))` or `m = (rope%8 rope/8) + rest`.

    Raises `LayoutError` as `parse_order`.
    """
    parser = _Parser(text, field)
    name = _new_name(parser, "rename")
    terms = [parser.term(0)]
    while parser.take("+"):
        if len(terms) == MAX_PARTS:
            raise parser.error(f"at most {MAX_PARTS} terms")
        terms.append(parser.term(0))
    parser.end("'+' or the end: the meaning is one term or a sum, so several are put in parentheses")
    return name, tuple(terms)


def parse_split(text: str, field: str = "split") -> Split:
    """The parts of a split such as `dim = latent:512 + rope`; `LayoutError` as `parse_order`."""
    parser = _Parser(text, field)
    axis = parser.peek()[1]
    if axis != "dim":
        raise parser.error("'dim', the axis that can be split", "cannot read this split")
    parser.pos += 1
    parts: list[tuple[str, Arith | None]] = []
    sign = "="
    while parser.take(sign):
        if len(parts) == MAX_PARTS:
            raise parser.error(f"at most {MAX_PARTS} parts")
        if parts and parts[-1][1] is None:
            raise parser.error("the end: a part without a size takes all that is left")
        parts.append(
            (_new_name(parser, "split", equals=False), parser.operand(0) if parser.take(":") else None)
        )
        sign = "+"
    if not parts:
        raise parser.error("'='", "cannot read this split")
    parser.end("':', '+' or the end" if parts[-1][1] is None else "'+' or the end")
    return Split(tuple(parts))


def _new_name(parser: _Parser, what: str, *, equals: bool = True) -> str:
    kind, name, _ = parser.peek()
    if kind != "name":
        raise parser.error("a new name" + (" and '='" if equals else ""), f"cannot read this {what}")
    if name in AXES:
        raise parser.error("a name that is not an axis already", "an axis cannot be given a new meaning")
    parser.pos += 1
    if equals and not parser.take("="):
        raise parser.error("'='", f"cannot read this {what}")
    return name
