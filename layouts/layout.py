"""A layout's declaration: read from TOML, checked, and compiled for a shape.

The text stays with the layout (`Layout.text`): it travels to the other agent, which reads it with the same
checks, so neither side needs the other's files.  Every bound here is one that a hostile text would test.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hawk.errors import LayoutError
from hawk.layouts.codecs import CODECS
from hawk.layouts.compiled import AXES, CacheShape, CompiledLayout, CompiledPiece
from hawk.layouts.digits import MAX_ELEMENTS, Factor, Refiner, prove, strides
from hawk.layouts.grammar import Order, Term, is_name, nearest, parse_order, parse_rename

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hawk.layouts.compiled import Axis, CodecInfo, Digit

MAX_TEXT = 16384
MAX_PIECES = 8
MAX_RENAMES = 8
MAX_PARAMS = 16
MAX_CHANNELS = 65536
MAX_ALIGN = 2**30


@dataclass(frozen=True, slots=True)
class Piece:
    """One `[[piece]]`: the values of kv it holds for (None: all), its order, its renames in sequence."""

    kv: int | None
    order: Order
    renames: tuple[tuple[str, Term], ...]
    text: str
    rename_texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a cache lies in memory, before a shape is known; the tables of the TOML, checked.

    name, summary, source    what it is called, what it is, and the public fact it was written from
    codec, codecs            how elements are stored by default, and what else may be asked for
    buffers                  axes that select separate base addresses, a subset of `("layer", "kv")`
    align                    page strides are rounded up to a multiple of it, bytes
    placement, channels      "linear" (one channel), or "interleaved" over that many (a default)
    params                   defaults of the parameters: a number, or the axis whose extent it is
    pieces                   orders, one for all or one for each value of kv
    text, origin             the TOML itself, and where it came from (for messages; not compared)
    """

    name: str
    summary: str
    source: str
    codec: str
    codecs: tuple[str, ...]
    buffers: tuple[Axis, ...]
    align: int
    placement: Literal["linear", "interleaved"]
    channels: int
    params: tuple[tuple[str, int | Axis], ...]
    pieces: tuple[Piece, ...]
    text: str = field(repr=False)
    origin: str = field(default="", compare=False)

    @classmethod
    def from_toml(cls, text: str, origin: str = "layout") -> Layout:
        """The layout that `text` declares; `origin` (a file or a peer) is for messages.

        Raises `LayoutError` that names origin, key, what came and what would be right.
        """
        if len(text) > MAX_TEXT:
            raise LayoutError(
                "the declaration is too long",
                field=origin,
                got=f"{len(text)} characters",
                expected=f"at most {MAX_TEXT}",
            )
        try:
            tables = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise LayoutError("the declaration is not TOML", field=origin, got=str(error)[:200]) from None
        return _Reader(tables, origin).layout(text)

    def to_toml(self) -> str:
        """The declaration, as `from_toml` reads it."""
        return self.text

    def compile(
        self,
        shape: CacheShape,
        *,
        codec: str | None = None,
        channels: int | None = None,
        align: int | None = None,
        params: Mapping[str, int] | None = None,
    ) -> CompiledLayout:
        """Digits with strides for a cache of `shape`, proved to be a bijection.

        `codec` (one of `codecs`), `channels` (interleaved layouts only), `align` (bytes) and `params` replace the
        declaration's defaults.  Raises `LayoutError` that names the digit where the order is no bijection for
        this shape, is no sum of digits of single axes, or does not fit the codec's groups.
        """
        extents: dict[Axis, int] = {axis: shape.extent(axis) for axis in AXES}
        for axis, extent in extents.items():
            if extent > MAX_ELEMENTS:
                raise self._error("too large", f"shape.{axis}", extent, f"at most {MAX_ELEMENTS}")
        info = self._codec(codec)
        channels = self._channels(channels)
        align = _bounded(self.align if align is None else align, MAX_ALIGN, self._where("align"))
        values = self._values(params or {}, extents)
        found = [self._piece(i, piece, shape, extents, values) for i, piece in enumerate(self.pieces)]
        found = [(piece, pages) for piece, pages in found if piece.kvs]
        held = [kv for piece, _ in found for kv in piece.kvs]
        missing = set(range(shape.kvs)) - set(held)
        if missing:
            raise self._error(
                "no piece holds this value of kv", "piece", None, f'where = "kv={min(missing)}"'
            )
        first, pages = found[0]
        for piece, others in found[1:]:
            self._agree(first, pages, piece, others)
        for piece, _ in found:
            self._groups(info, piece, extents)
        buffers = 1
        for axis in self.buffers:
            buffers *= extents[axis]
        if buffers * pages * first.elements > MAX_ELEMENTS:
            got = f"{buffers} buffers of {pages} pages of {first.elements} elements"
            raise self._error("the cache is too large", "shape", got, f"at most {MAX_ELEMENTS} elements")
        page_bytes = info.page_bytes(first.elements)
        return CompiledLayout(
            name=self.name,
            shape=shape,
            codec=info,
            buffers=self.buffers,
            pieces=tuple(piece for piece, _ in found),
            pages=pages,
            page_bytes=page_bytes,
            page_stride=-(-page_bytes // align) * align,
            channels=channels,
        )

    # -- the parts of compile ----------------------------------------------------------------------------

    def _where(self, key: str) -> str:
        return f"{self.name}: {key}"

    def _error(
        self, message: str, key: str, got: object, expected: object, hint: str | None = None
    ) -> LayoutError:
        return LayoutError(message, field=self._where(key), got=got, expected=expected, hint=hint)

    def _codec(self, codec: str | None) -> CodecInfo:
        name = self.codec if codec is None else codec
        if name not in self.codecs:
            raise self._error(
                "this layout does not hold this codec",
                "codec",
                str(name)[:64],
                ", ".join(self.codecs),
                nearest(str(name), self.codecs),
            )
        return CODECS[name]

    def _channels(self, channels: int | None) -> int:
        if channels is None:
            return self.channels
        _bounded(channels, MAX_CHANNELS, self._where("channels"))
        if self.placement == "linear" and channels != 1:
            raise self._error("a linear layout has one channel", "channels", channels, 1)
        return channels

    def _values(self, given: Mapping[str, int], extents: Mapping[Axis, int]) -> dict[str, int]:
        known = dict(self.params)
        for name in given:
            if name not in known:
                raise self._error(
                    "unknown parameter",
                    f"params.{name[:64]}",
                    None,
                    ", ".join(known) or "no parameters",
                    nearest(name, known),
                )
        values = {}
        for name, default in known.items():
            limit = extents[default] if isinstance(default, str) else MAX_ELEMENTS
            values[name] = _bounded(
                given.get(name, limit if isinstance(default, str) else default),
                limit,
                self._where(f"params.{name}"),
            )
        return values

    def _piece(
        self,
        number: int,
        piece: Piece,
        shape: CacheShape,
        extents: Mapping[Axis, int],
        values: Mapping[str, int],
    ) -> tuple[CompiledPiece, int]:
        key = self._where(f"piece[{number}]")
        refiner = Refiner(extents, values, f"{key}.order")
        for name, term in piece.renames:
            refiner.rename(name, term, f"{key}.rename")
        page, inside = refiner.order(piece.order)
        padded = prove([*page, *inside], extents, self.buffers, f"{key}.order")
        page_digits, pages = strides(page, f"{key}.order")
        inside_digits, elements = strides(inside, f"{key}.order")
        kvs = tuple(kv for kv in range(shape.kvs) if piece.kv in (None, kv))
        return CompiledPiece(kvs, page_digits, inside_digits, elements, padded), pages

    def _agree(self, first: CompiledPiece, pages: int, other: CompiledPiece, others: int) -> None:
        """Pieces share a buffer's page numbers, or its description: they must not overlap or leave gaps."""
        for what, a, b in (("pages", pages, others), ("elements per page", first.elements, other.elements)):
            if a != b:
                raise self._error(f"the pieces differ in {what}", "piece", f"{a} and {b}", "the same number")
        if "kv" not in self.buffers:
            # The pages with kv = k are those whose number has the digit k there: the same digit in every piece.
            ours, theirs = ([d for d in p.page if d.axis == "kv"] for p in (first, other))
            if ours != theirs:
                raise self._error(
                    "kv lies at different digits in two pieces, so they overlap",
                    "piece",
                    f"{_strides(ours)} and {_strides(theirs)}",
                    "the same stride",
                )

    def _groups(self, info: CodecInfo, piece: CompiledPiece, extents: Mapping[Axis, int]) -> None:
        if piece.elements * info.bits % 8:
            raise self._error(
                "a page is no whole number of bytes",
                "codec",
                f"{piece.elements} elements of {info.bits} bits",
                None,
            )
        left = info.group
        for digit in reversed(piece.inside):
            if left == 1:
                break
            if digit.axis != "dim" or (digit.ext % left and left % digit.ext):
                factor = Factor(digit.axis, digit.div, digit.ext)
                raise self._error(
                    f"the {info.group} elements that share an exponent are not of one row of dim",
                    "codec",
                    f"{info.name} over {factor}",
                    f"dim digits of {info.group} elements at the end of the order",
                )
            left = max(1, left // digit.ext)
        if left > 1:
            raise self._error(
                "a page is smaller than a group of the codec",
                "codec",
                f"{info.name} over {piece.elements} elements",
                f"{info.group} elements",
            )


def _strides(digits: Sequence[Digit]) -> str:
    return " ".join(f"{d.axis}/{d.div}%{d.ext} at stride {d.stride}" for d in digits) or "none"


def _bounded(value: object, limit: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise LayoutError(
            "out of range", field=where, got=str(value)[:64], expected=f"an integer in 1..{limit}"
        )
    return value


class _Reader:
    """Turns the tables of one TOML into a `Layout`; every key is checked, unknown ones are refused."""

    def __init__(self, tables: dict[str, Any], origin: str) -> None:
        self.tables, self.origin = tables, origin

    def layout(self, text: str) -> Layout:
        top = self.tables
        self.keys(
            top,
            "",
            (
                "name",
                "summary",
                "source",
                "codec",
                "codecs",
                "buffers",
                "align",
                "placement",
                "params",
                "piece",
            ),
        )
        name = self.string(top, "name")
        codec = self.string(top, "codec")
        codecs = tuple(self.strings(top, "codecs", [codec]))
        for key, value in (("codec", codec), *(("codecs", c) for c in codecs)):
            if value not in CODECS:
                raise self.error("unknown codec", key, value, ", ".join(CODECS), nearest(value, CODECS))
        if codec not in codecs:
            raise self.error(
                "the default codec is not among the allowed ones", "codec", codec, ", ".join(codecs)
            )
        kind, channels = self.placement(top)
        return Layout(
            name=name,
            summary=self.string(top, "summary", ""),
            source=self.string(top, "source", ""),
            codec=codec,
            codecs=codecs,
            buffers=self.buffers(top),
            align=_bounded(top.get("align", 1), MAX_ALIGN, f"{self.origin}: align"),
            placement=kind,
            channels=channels,
            params=self.params(top),
            pieces=self.pieces(top),
            text=text,
            origin=self.origin,
        )

    def error(
        self, message: str, key: str, got: object = None, expected: object = None, hint: str | None = None
    ) -> LayoutError:
        return LayoutError(
            message,
            field=f"{self.origin}: {key}",
            got=None if got is None else repr(got)[:200],
            expected=expected,
            hint=hint,
        )

    def keys(self, table: Mapping[str, Any], prefix: str, known: Iterable[str]) -> None:
        for key in table:
            if key not in known:
                raise self.error(
                    "unknown key", f"{prefix}{key[:64]}", None, ", ".join(known), nearest(key, known)
                )

    def string(self, table: Mapping[str, Any], key: str, default: str | None = None, prefix: str = "") -> str:
        value = table.get(key, default)
        if not isinstance(value, str) or (not value and default is None):
            raise self.error(
                "missing" if value is None else "of the wrong kind",
                prefix + key,
                value,
                "a string that is not empty",
            )
        return value

    def strings(self, table: Mapping[str, Any], key: str, default: list[str], prefix: str = "") -> list[str]:
        value = table.get(key, default)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.error("of the wrong kind", prefix + key, value, "a list of strings that is not empty")
        if len(set(value)) != len(value):
            raise self.error("a name comes twice", prefix + key, value)
        return value

    def placement(self, top: Mapping[str, Any]) -> tuple[Literal["linear", "interleaved"], int]:
        table = top.get("placement", {"kind": "linear"})
        if not isinstance(table, dict):
            raise self.error("of the wrong kind", "placement", table, "a table")
        self.keys(table, "placement.", ("kind", "channels"))
        kind = table.get("kind")
        if kind == "interleaved":
            return "interleaved", _bounded(
                table.get("channels"), MAX_CHANNELS, f"{self.origin}: placement.channels"
            )
        if kind != "linear":
            raise self.error(
                "unknown placement",
                "placement.kind",
                kind,
                "linear, interleaved",
                nearest(str(kind), ("linear", "interleaved")),
            )
        if table.get("channels", 1) != 1:
            raise self.error("a linear layout has one channel", "placement.channels", table["channels"], 1)
        return "linear", 1

    def buffers(self, top: Mapping[str, Any]) -> tuple[Axis, ...]:
        words = self.string(top, "buffers", "").split()
        for word in words:
            if word not in ("layer", "kv"):
                raise self.error(
                    "this axis cannot select buffers",
                    "buffers",
                    word,
                    "layer, kv",
                    nearest(word, ("layer", "kv")),
                )
        if len(set(words)) != len(words):
            raise self.error("a name comes twice", "buffers", " ".join(words))
        return tuple(axis for axis in AXES if axis in words)

    def params(self, top: Mapping[str, Any]) -> tuple[tuple[str, int | Axis], ...]:
        table = top.get("params", {})
        if not isinstance(table, dict) or len(table) > MAX_PARAMS:
            raise self.error(
                "of the wrong kind", "params", table, f"a table of at most {MAX_PARAMS} defaults"
            )
        found: list[tuple[str, int | Axis]] = []
        for name, default in table.items():
            key = f"params.{name[:64]}"
            if not is_name(name) or name in AXES:
                raise self.error(
                    "this cannot name a parameter", key, name, "letters, digits and _, and not an axis"
                )
            axes = [axis for axis in AXES if axis == default]
            found.append((name, axes[0] if axes else self.number(default, key)))
        return tuple(found)

    def number(self, value: object, key: str) -> int:
        if isinstance(value, str):
            raise self.error(
                "unknown axis", key, value, "a number or one of " + ", ".join(AXES), nearest(value, AXES)
            )
        return _bounded(value, MAX_ELEMENTS, f"{self.origin}: {key}")

    def pieces(self, top: Mapping[str, Any]) -> tuple[Piece, ...]:
        tables = top.get("piece")
        if (
            not isinstance(tables, list)
            or not 1 <= len(tables) <= MAX_PIECES
            or not all(isinstance(t, dict) for t in tables)
        ):
            raise self.error(
                "missing or of the wrong kind", "piece", tables, f"1 to {MAX_PIECES} tables [[piece]]"
            )
        pieces = [self.piece(table, f"piece[{i}].") for i, table in enumerate(tables)]
        held = [piece.kv for piece in pieces]
        if len(set(held)) != len(held) or (None in held and len(held) > 1):
            raise self.error(
                "two pieces hold the same values of kv",
                "piece",
                None,
                'one piece, or one for each of where = "kv=0", "kv=1"',
            )
        return tuple(pieces)

    def piece(self, table: Mapping[str, Any], prefix: str) -> Piece:
        self.keys(table, prefix, ("where", "order", "rename"))
        kv: int | None = None
        if "where" in table:
            where = table["where"]
            known = {"kv=0": 0, "kv=1": 1}
            kv = known.get("".join(where.split())) if isinstance(where, str) else None
            if kv is None:
                raise self.error("cannot read this condition", f"{prefix}where", where, '"kv=0" or "kv=1"')
        text = self.string(table, "order", prefix=prefix)
        rename = table.get("rename", [])
        texts = [rename] if isinstance(rename, str) else rename
        if (
            not isinstance(texts, list)
            or len(texts) > MAX_RENAMES
            or not all(isinstance(t, str) for t in texts)
        ):
            raise self.error(
                "of the wrong kind",
                f"{prefix}rename",
                rename,
                f"a string, or a list of at most {MAX_RENAMES}",
            )
        key = f"{self.origin}: {prefix}"
        return Piece(
            kv=kv,
            order=parse_order(text, f"{key}order"),
            renames=tuple(parse_rename(t, f"{key}rename") for t in texts),
            text=text,
            rename_texts=tuple(texts),
        )
