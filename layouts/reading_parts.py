"""Reads the tables `[[part]]`: parts of a head that are tensors of their own, with codecs and scales of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hawk.layouts.codecs import CODECS
from hawk.layouts.declared import Part
from hawk.layouts.grammar import Number, is_name, nearest, parse_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hawk.errors import LayoutError
    from hawk.layouts.declared import Piece, Scale
    from hawk.layouts.grammar import Arith

MAX_PARTS = 4
_OF_PIECE = ("order", "split", "rename")


class Tables(Protocol):
    """What the reader of the whole declaration does for its parts; see `reading.Reader`."""

    origin: str

    def error(
        self, message: str, key: str, got: object = None, expected: object = None, hint: str | None = None
    ) -> LayoutError:
        """An error that names the origin and the key."""

    def keys(self, table: Mapping[str, Any], prefix: str, known: Iterable[str]) -> None:
        """Refuses a key that is not known."""

    def string(self, table: Mapping[str, Any], key: str, default: str | None = None, prefix: str = "") -> str:
        """One line of text."""

    def piece(self, table: Mapping[str, Any], prefix: str) -> Piece:
        """One order."""

    def scale(self, top: Mapping[str, Any], codecs: Iterable[str], where: str = "") -> Scale | None:
        """The table `scale`."""


def read_parts(reader: Tables, top: Mapping[str, Any], codecs: Sequence[str]) -> tuple[Part, ...]:
    """The parts of a head, in the order of their dims; `codecs` are those that the layout may be asked for.

    Raises `LayoutError` that names the key.
    """
    tables = top["part"]
    for key in ("piece", "scale"):
        if key in top:
            raise reader.error(
                "the parts have orders and scales of their own", key, "a table", "no such table"
            )
    if (
        not isinstance(tables, list)
        or not 2 <= len(tables) <= MAX_PARTS
        or not all(isinstance(t, dict) for t in tables)
    ):
        raise reader.error("of the wrong kind", "part", tables, f"2 to {MAX_PARTS} tables [[part]]")
    found = [
        _part(reader, table, f"part[{i}].", codecs, last=i + 1 == len(tables))
        for i, table in enumerate(tables)
    ]
    names = [part.name for part in found]
    if len(set(names)) != len(names):
        raise reader.error("a name comes twice", "part", " ".join(names), "each once")
    if found[0].inside:
        raise reader.error("there is no page before it to lie in", "part[0].place", "page", "buffer")
    return tuple(found)


def _part(
    reader: Tables, table: Mapping[str, Any], prefix: str, codecs: Sequence[str], *, last: bool
) -> Part:
    reader.keys(table, prefix, ("name", "size", "codec", "place", "scale", *_OF_PIECE))
    name = reader.string(table, "name", prefix=prefix)
    if not is_name(name):
        raise reader.error("this cannot name a part", f"{prefix}name", name, "letters, digits and _")
    own = table.get("codec")
    if own is not None and (not isinstance(own, str) or own not in CODECS):
        raise reader.error(
            "unknown codec", f"{prefix}codec", own, ", ".join(CODECS), nearest(str(own), CODECS)
        )
    place = table.get("place", "buffer")
    if place not in ("buffer", "page"):
        raise reader.error("unknown place", f"{prefix}place", place, "buffer, page")
    return Part(
        name=name,
        size=_size(reader, table.get("size"), f"{prefix}size", last=last),
        codec=own,
        inside=place == "page",
        piece=reader.piece({key: table[key] for key in _OF_PIECE if key in table}, prefix),
        scale=reader.scale(table, [own] if own else codecs, prefix),
    )


def _size(reader: Tables, size: object, key: str, *, last: bool) -> Arith | None:
    if size is None and last:
        return None
    if isinstance(size, str):
        return parse_number(size, f"{reader.origin}: {key}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise reader.error("of the wrong kind", key, size, "a number, or an expression on parameters")
    return Number(size)
