"""Reads a tree of frozen dataclasses from TOML and the environment; finds every problem in one pass.

Nothing here knows which options HAWK has: `hawk.config` declares them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from hawk.config_files import Leaf, Tree
from hawk.errors import HawkError, InvalidArgument
from hawk.units import (
    ADDRESS_EXPECTED,
    DURATION_EXPECTED,
    RATE_EXPECTED,
    SIZE_EXPECTED,
    kind_of,
    parse_address,
    parse_duration,
    parse_rate,
    parse_size,
)

T = TypeVar("T")
Check = Callable[[Any], str | None]
"""Says what would have been right about a converted value, or None if it is."""


def option(
    default: object,
    help: str,
    *,
    check: Check | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    secret: bool = False,
    shown_default: str | None = None,
) -> Any:
    """A dataclass field that documents itself.

    `help` is one sentence for `docs/config.md`; `secret` values are never printed; `shown_default` is
    what the documents say where the real default depends on the machine.
    """
    metadata = {
        "help": help,
        "check": check,
        "minimum": minimum,
        "maximum": maximum,
        "secret": secret,
        "shown_default": shown_default,
    }
    return field(default=default, metadata=metadata)


class BadValue(Exception):
    """A value is not what its field takes; `expected` says what it does take."""

    def __init__(self, expected: str) -> None:
        self.expected = expected
        super().__init__(expected)


# -- how a value is understood ---------------------------------------------------------------------------

_UNITS: dict[str, tuple[Callable[[object], int | float], str]] = {
    "duration": (parse_duration, DURATION_EXPECTED),
    "size": (parse_size, SIZE_EXPECTED),
    "rate": (parse_rate, RATE_EXPECTED),
    "address": (parse_address, ADDRESS_EXPECTED),
}
"""By the kind of a field: how its values are read, and what it takes."""


def unit_of(hint: Any, metadata: Mapping[str, Any]) -> str:
    """`"duration"`, `"size"`, `"rate"`, `"address"`, or nothing: a number without a unit."""
    return _strip_annotation(hint, metadata)[1]


def _strip_annotation(hint: Any, metadata: Mapping[str, Any]) -> tuple[Any, str]:
    """The bare type, and the unit that `Annotated` or the field's metadata gives it."""
    unit = str(metadata.get("unit") or "")
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        unit = unit or next((n for n in notes if n in _UNITS), "")
    return hint, unit


def convert(value: object, hint: Any, *, metadata: Mapping[str, Any], from_env: bool) -> object:
    """`value` as the field's type.  Raises `BadValue`.  From the environment everything is text."""
    hint, unit = _strip_annotation(hint, metadata)
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [k for k in get_args(hint) if k is not type(None)]
        if len(kinds) < len(get_args(hint)) and value == "":
            return None
        return convert(value, kinds[0], metadata=metadata, from_env=from_env)
    if unit:
        return _with_unit(value, unit)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise BadValue("one of " + ", ".join(f'"{choice}"' for choice in get_args(hint)))
        return value
    if get_origin(hint) is tuple:
        return _texts(value, from_env)
    if hint is bool:
        return _boolean(value, from_env)
    if hint in (int, float):
        return _number(value, hint, from_env)
    if hint in (str, Path):
        if not isinstance(value, str):
            raise BadValue("text in quotes")
        return hint(value)
    raise TypeError(f"an option cannot be of type {hint!r}")


def _with_unit(value: object, unit: str) -> int | float:
    parse, expected = _UNITS[unit]
    try:
        return parse(value)
    except InvalidArgument:
        raise BadValue(expected + _other_kind(value, unit if unit != "address" else "size")) from None


def _other_kind(value: object, unit: str = "") -> str:
    """What a value is that has another kind's unit."""
    kind = kind_of(value)
    return f", not {kind}" if kind and kind != f"a {unit}" else ""


def _boolean(value: object, from_env: bool) -> bool:
    if from_env and isinstance(value, str):
        value = {"true": True, "1": True, "false": False, "0": False}.get(value.lower())
    if not isinstance(value, bool):
        raise BadValue("true or false")
    return value


def _number(value: object, kind: type[int] | type[float], from_env: bool) -> int | float:
    """A count, an index, a factor: no unit belongs to it."""
    given = value
    if from_env and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = kind(value)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise BadValue(("a whole number" if kind is int else "a number") + _other_kind(given))
    return kind(value)


def _texts(value: object, from_env: bool) -> tuple[str, ...]:
    if from_env and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise BadValue("a list of texts" + (", separated by commas" if from_env else ""))
    return tuple(value)


# -- the reader ------------------------------------------------------------------------------------------


def nearest(word: str, known: typing.Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be."""
    close = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def _shown(value: object) -> str:
    text = (
        f'"{value}"'
        if isinstance(value, str)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass
class Reader:
    """Builds dataclasses from a tree, gathering problems instead of stopping at the first.

    `sources` tells where each value came from, by dotted path; `bad` holds the paths that had a problem,
    so that checks across fields can leave them out.
    """

    problems: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)

    def problem(
        self,
        path: str,
        text: str,
        leaf: Leaf | None = None,
        *,
        secret: bool = False,
        beside: Tree | None = None,
    ) -> None:
        """One line: where, what was said, what is wrong.  `beside` is the table in which something is missing."""
        self.bad.add(path)
        if leaf is None:
            neighbour = next(leaves(beside or {}, path), None)
            place = neighbour[1].source if neighbour else "configuration"
            self.problems.append(f"{place}: {path}: {text}")
            return
        said = "(not shown)" if secret else _shown(leaf.value)
        self.problems.append(f"{leaf.source}: {path} = {said}: {text}")

    def unknown(self, path: str, node: Tree | Leaf, known: typing.Iterable[str]) -> None:
        """A key that no option has."""
        above, _, key = path.rpartition(".")
        guess = nearest(key, known)
        dotted = f"{above}.{guess}" if above else guess
        hint = (
            f"did you mean {dotted}?" if guess else "known here: " + (", ".join(sorted(known)) or "nothing")
        )
        for leaf_path, leaf in leaves(node, path):
            self.problem(leaf_path, f"no such {'key' if node is leaf else 'table: ' + path}; {hint}", leaf)
        if isinstance(node, dict) and not node:
            self.problem(path, f"no such table; {hint}")

    def build(
        self, cls: type[T], node: Tree | Leaf | None, path: str, *, ignore: frozenset[str] = frozenset()
    ) -> T:
        """An instance of the dataclass `cls` from the table at `path`; keys in `ignore` are left to the caller.

        A field with a problem keeps its default (or an empty value), for the caller will not use the result.
        """
        table = self.table(node, path)
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = {f.name: f for f in dataclasses.fields(cls) if not f.metadata.get("filled_later")}  # type: ignore[arg-type]
        for key in table:
            if key not in fields and key not in ignore:
                self.unknown(_join(path, key), table[key], [*fields, *ignore])
        values: dict[str, Any] = {}
        for name, spec in fields.items():
            value, given = self._leaf(_join(path, name), table, hints[name], spec)
            if given:
                values[name] = value
        try:
            return cls(**values)
        except (HawkError, ValueError, TypeError) as error:
            before = len(self.problems)
            self._refused_alone(cls, values, table, path, fields)
            if len(self.problems) == before and self.bad.isdisjoint(_join(path, name) for name in fields):
                self._refused(error, table, path, fields)
            return typing.cast("T", None)

    def _refused_alone(
        self, cls: type[Any], values: Mapping[str, Any], table: Tree, path: str, fields: Mapping[str, Any]
    ) -> None:
        """Every value that the dataclass refuses by itself, beside defaults: it stops at the first it meets."""
        needed = {
            name: values[name]
            for name, spec in fields.items()
            if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        }
        for name, value in values.items():
            if _join(path, name) in self.bad:
                continue
            try:
                cls(**{**needed, name: value})
            except HawkError as error:
                if (error.field or "").rpartition(".")[2] == name:
                    self._refused(error, table, path, fields)
            except (ValueError, TypeError):
                continue  # names no field: told for the whole table, if nothing else is

    def _refused(self, error: Exception, table: Tree, path: str, fields: Mapping[str, Any]) -> None:
        """What the dataclass itself said about its values, at the field that it named if it named one."""
        text, place, leaf = str(error), path, None
        if isinstance(error, HawkError):
            text = error.message + (f"; expected {error.expected}" if error.expected else "")
            name = (error.field or "").rpartition(".")[2]
            if name in fields:
                place, found = _join(path, name), table.get(name)
                leaf = found if isinstance(found, Leaf) else None
        secret = leaf is not None and bool(fields[place.rpartition(".")[2]].metadata.get("secret"))
        self.problem(place, text, leaf, secret=secret, beside=table)

    def table(self, node: Tree | Leaf | None, path: str) -> Tree:
        """The node as a table; a plain value where a table belongs is a problem."""
        if isinstance(node, Leaf):
            self.problem(path, f"expected a table: [{path}]", node)
            return {}
        return node or {}

    def _leaf(self, path: str, table: Tree, hint: Any, spec: dataclasses.Field[Any]) -> tuple[object, bool]:
        """One field's value, and whether it was given (or has to be, so that something must stand for it)."""
        required = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        node: Tree | Leaf | None = table.get(spec.name)
        self.sources.setdefault(path, "default")
        if node is None:
            if required:
                self.problem(path, "has to be given", beside=table)
            return None, required
        if not isinstance(node, Leaf):
            self.problem(path, "is a table; expected a value", beside=node)
            return None, required
        self.sources[path] = node.source
        secret = bool(spec.metadata.get("secret"))
        try:
            value = convert(node.value, hint, metadata=spec.metadata, from_env=node.from_env)
            _judge(value, spec.metadata)
        except BadValue as error:
            self.problem(path, f"expected {error.expected}", node, secret=secret)
            return None, required
        return value, True


def _judge(value: object, metadata: Mapping[str, Any]) -> None:
    minimum = metadata.get("minimum")
    if minimum is not None and isinstance(value, int | float) and value < minimum:
        raise BadValue(f"at least {minimum}")
    maximum = metadata.get("maximum")
    if maximum is not None and isinstance(value, int | float) and value > maximum:
        raise BadValue(f"at most {maximum}")
    check: Check | None = metadata.get("check")
    if check is not None and (expected := check(value)):
        raise BadValue(expected)


def leaves(node: Tree | Leaf, path: str) -> typing.Iterator[tuple[str, Leaf]]:
    """Every value below `node`, with its dotted path."""
    if isinstance(node, Leaf):
        yield path, node
        return
    for key, below in node.items():
        yield from leaves(below, _join(path, key))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
