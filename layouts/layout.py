"""A layout's declaration: read from TOML, checked, and compiled for a shape.

The text stays with the layout (`Layout.text`): it travels to the other agent, which reads it with the same
checks, so neither side needs the other's files.  Every bound here is one that a hostile text would test.
"""

from __future__ import annotations

import re
import struct
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from hawk.errors import LayoutError
from hawk.layouts.codecs import CODECS
from hawk.layouts.compiled import AXES
from hawk.layouts.compiling import MAX_ALIGN, MAX_CHANNELS, Compiler, bounded, short
from hawk.layouts.digits import MAX_ELEMENTS
from hawk.layouts.grammar import (
    Arith,
    Number,
    Order,
    Split,
    Term,
    is_name,
    nearest,
    parse_number,
    parse_order,
    parse_rename,
    parse_split,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hawk.layouts.compiled import Axis, CacheShape, CompiledLayout

Placement = Literal["linear", "interleaved", "sharded"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9._/-]{0,62}[a-z0-9])?\Z")

MAX_TEXT = 16384
MAX_PIECES = 8
MAX_RENAMES = 8
MAX_SPLITS = 4
MAX_PARAMS = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """One `[[piece]]`: the values of kv it holds for (None: all), its order, its splits, its renames in sequence."""

    kv: int | None
    order: Order
    splits: tuple[Split, ...]
    renames: tuple[tuple[str, tuple[Term, ...]], ...]
    text: str
    split_texts: tuple[str, ...]
    rename_texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """How `placement.kind = "sharded"` deals pages: in shards of a matrix of pages, each wholly in one bank.

    rows, columns    pages of a shard down and across; the matrix is as wide as the dim digits at the end of the
                     page number, and as high as all the others
    down             whether shards are numbered down the columns of the matrix of shards, not along its rows
    """

    rows: Arith
    columns: Arith
    down: bool


@dataclass(frozen=True, slots=True)
class Scale:
    """The table `[scale]`: what elements of eight bits are multiplied by, and where that lies.

    place     "buffer": a tensor of its own; "page": behind the elements of each page; "constant": nowhere, it is
              `value`; "header": where the codecs, all of them grouped, keep it
    codec     how scales are stored
    order     of the tensor of scales; an axis that it does not name has one scale for all its indices
    group     indices of dim that share a scale, where the order names dim
    """

    place: Literal["buffer", "page", "constant", "header"]
    value: float = 1.0
    codec: str = "fp32"
    order: Order | None = None
    text: str = ""
    group: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """How a cache lies in memory, before a shape is known; the tables of the TOML, checked.

    name, summary, source    what it is called, what it is, and the public fact it was written from
    codec, codecs            how elements are stored by default, and what else may be asked for
    buffers                  axes that select separate base addresses, a subset of `("layer", "kv")`
    align                    page strides are rounded up to a multiple of it, bytes
    placement, channels      "linear" (one channel), or "interleaved" or "sharded" over that many (a default)
    banks, sharding          the memory channels that shards are dealt to in turn (empty: all, in order), and how
    params                   defaults of the parameters: a number, or the axis whose extent it is
    pieces                   orders, one for all or one for each value of kv
    scale                    what elements of eight bits are multiplied by, or None
    text, origin             the TOML itself, and where it came from (for messages; not compared)
    """

    name: str
    summary: str
    source: str
    codec: str
    codecs: tuple[str, ...]
    buffers: tuple[Axis, ...]
    align: int
    placement: Placement
    channels: int
    banks: tuple[int, ...]
    sharding: Sharding | None
    params: tuple[tuple[str, int | Axis], ...]
    pieces: tuple[Piece, ...]
    scale: Scale | None
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
            raise LayoutError(
                "the declaration is not TOML", field=origin, got=short(str(error), 200)
            ) from None
        return _Reader(tables, origin).layout(text)

    def to_toml(self) -> str:
        """The declaration, as `from_toml` reads it."""
        return self.text

    def plain_axes(self) -> tuple[str, ...] | None:
        """The axes of a buffer as an ordinary array, major first; None where the order is not made of plain axes."""
        if len(self.pieces) != 1:
            return None
        terms = (*self.pieces[0].order.page, *self.pieces[0].order.inside)
        if any(term.ops or term.text not in AXES for term in terms):
            return None
        return tuple(term.text for term in terms)

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
        return Compiler(self).compile(shape, codec, channels, align, params or {})


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
                "scale",
            ),
        )
        name = self.string(top, "name")
        if not _NAME.match(name):
            raise self.error(
                "this cannot name a layout", "name", name, "at most 64 of a-z, 0-9, and . _ - / between them"
            )
        codec = self.string(top, "codec")
        codecs = tuple(self.strings(top, "codecs", [codec]))
        for key, value in (("codec", codec), *(("codecs", c) for c in codecs)):
            if value not in CODECS:
                raise self.error("unknown codec", key, value, ", ".join(CODECS), nearest(value, CODECS))
        if codec not in codecs:
            raise self.error(
                "the default codec is not among the allowed ones", "codec", codec, ", ".join(codecs)
            )
        kind, channels, banks, sharding = self.placement(top)
        return Layout(
            name=name,
            summary=self.string(top, "summary", ""),
            source=self.string(top, "source", ""),
            codec=codec,
            codecs=codecs,
            buffers=self.buffers(top),
            align=bounded(top.get("align", 1), MAX_ALIGN, f"{self.origin}: align"),
            placement=kind,
            channels=channels,
            banks=banks,
            sharding=sharding,
            params=self.params(top),
            pieces=self.pieces(top),
            scale=self.scale(top, codecs),
            text=text,
            origin=self.origin,
        )

    def error(
        self, message: str, key: str, got: object = None, expected: object = None, hint: str | None = None
    ) -> LayoutError:
        return LayoutError(
            message,
            field=f"{self.origin}: {key}",
            got=None if got is None else short(got, 200),
            expected=expected,
            hint=hint,
        )

    def keys(self, table: Mapping[str, Any], prefix: str, known: Iterable[str]) -> None:
        for key in table:
            if key not in known:
                where = prefix + (key if is_name(key) else short(key))
                raise self.error("unknown key", where, None, ", ".join(known), nearest(key, known))

    def string(self, table: Mapping[str, Any], key: str, default: str | None = None, prefix: str = "") -> str:
        value = table.get(key, default)
        if not isinstance(value, str) or (not value and default is None):
            raise self.error(
                "missing" if value is None else "of the wrong kind",
                prefix + key,
                value,
                "a string that is not empty",
            )
        if not value.isprintable():
            raise self.error(
                "holds characters that cannot be printed", prefix + key, value, "one line of text"
            )
        return value

    def strings(self, table: Mapping[str, Any], key: str, default: list[str], prefix: str = "") -> list[str]:
        value = table.get(key, default)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.error("of the wrong kind", prefix + key, value, "a list of strings that is not empty")
        if len(set(value)) != len(value):
            raise self.error("a name comes twice", prefix + key, value)
        return value

    def placement(self, top: Mapping[str, Any]) -> tuple[Placement, int, tuple[int, ...], Sharding | None]:
        table = top.get("placement", {"kind": "linear"})
        if not isinstance(table, dict):
            raise self.error("of the wrong kind", "placement", table, "a table")
        kind = table.get("kind")
        known: dict[str, tuple[str, ...]] = {
            "linear": ("channels",),
            "interleaved": ("channels",),
            "sharded": ("channels", "banks", "shard", "orientation"),
        }
        if not isinstance(kind, str) or kind not in known:
            raise self.error(
                "unknown placement", "placement.kind", kind, ", ".join(known), nearest(str(kind), known)
            )
        self.keys(table, "placement.", ("kind", *known[kind]))
        if kind == "linear":
            if table.get("channels", 1) != 1:
                raise self.error(
                    "a linear layout has one channel", "placement.channels", table["channels"], 1
                )
            return "linear", 1, (), None
        banks = self.banks(table)
        channels = bounded(
            table.get("channels", len(banks) or None), MAX_CHANNELS, f"{self.origin}: placement.channels"
        )
        if banks and channels != len(banks):
            raise self.error("not one channel a bank", "placement.channels", channels, len(banks))
        if kind == "interleaved":
            return "interleaved", channels, (), None
        return "sharded", channels, banks, self.sharding(table)

    def banks(self, table: Mapping[str, Any]) -> tuple[int, ...]:
        banks = table.get("banks", [])
        if not isinstance(banks, list) or len(banks) > MAX_CHANNELS or ("banks" in table and not banks):
            raise self.error("of the wrong kind", "placement.banks", banks, "a list of memory channels")
        for i, bank in enumerate(banks):
            if not isinstance(bank, int) or isinstance(bank, bool) or not 0 <= bank < MAX_CHANNELS:
                raise self.error("no memory channel", f"placement.banks[{i}]", bank, f"0..{MAX_CHANNELS - 1}")
        if len(set(banks)) != len(banks):
            raise self.error("a bank comes twice", "placement.banks", banks)
        return tuple(banks)

    def sharding(self, table: Mapping[str, Any]) -> Sharding:
        shard = table.get("shard")
        if not isinstance(shard, list) or len(shard) != 2:
            raise self.error(
                "of the wrong kind", "placement.shard", shard, "pages down and pages across, as a list of two"
            )
        sizes: list[Arith] = []
        for i, size in enumerate(shard):
            key = f"placement.shard[{i}]"
            if isinstance(size, str):
                sizes.append(parse_number(size, f"{self.origin}: {key}"))
            else:
                sizes.append(Number(self.number(size, key)))
        orientation = table.get("orientation", "row")
        if orientation not in ("row", "column"):
            raise self.error("unknown orientation", "placement.orientation", orientation, '"row" or "column"')
        return Sharding(sizes[0], sizes[1], down=orientation == "column")

    def scale(self, top: Mapping[str, Any], codecs: Iterable[str]) -> Scale | None:
        if "scale" not in top:
            return None
        table = top["scale"]
        if not isinstance(table, dict):
            raise self.error("of the wrong kind", "scale", table, "a table")
        place = table.get("place")
        known: dict[str, tuple[str, ...]] = {
            "buffer": ("dtype", "order", "group"),
            "page": ("dtype", "order", "group"),
            "constant": ("value",),
            "header": (),
        }
        if not isinstance(place, str) or place not in known:
            raise self.error(
                "unknown place", "scale.place", place, ", ".join(known), nearest(str(place), known)
            )
        self.keys(table, "scale.", ("place", *known[place]))
        plain = [name for name in codecs if CODECS[name].group == 1]
        if place == "header":
            if plain:
                raise self.error(
                    "this codec has no scales in a header", "scale.place", plain[0], "grouped codecs"
                )
            return Scale("header")
        if not any(CODECS[name].bits == 8 for name in plain):
            raise self.error(
                "no codec here has scales", "scale", ", ".join(codecs), "one of eight bits an element"
            )
        if place == "constant":
            return Scale("constant", value=self.factor(table.get("value")))
        codec = self.string(table, "dtype", prefix="scale.")
        if codec not in ("fp32", "bf16", "fp16"):
            raise self.error("no type of scales", "scale.dtype", codec, "fp32, bf16, fp16")
        text = self.string(table, "order", prefix="scale.")
        group = bounded(table.get("group", 0) or MAX_ELEMENTS, MAX_ELEMENTS, f"{self.origin}: scale.group")
        order = parse_order(text, f"{self.origin}: scale.order")
        return Scale(
            "page" if place == "page" else "buffer", codec=codec, order=order, text=text, group=group
        )

    def factor(self, value: object) -> float:
        expected = "a number from 2^-100 to 2^100 that binary32 holds"
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 2.0**-100 <= value <= 2.0**100
        ):
            raise self.error("no scale", "scale.value", value, expected)
        (stored,) = struct.unpack("<f", struct.pack("<f", value))
        if stored != value:
            raise self.error("no scale", "scale.value", value, f"{expected}, such as {stored!r}")
        return float(value)

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
            key = f"params.{name if is_name(name) else short(name)}"
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
        return bounded(value, MAX_ELEMENTS, f"{self.origin}: {key}")

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
        self.keys(table, prefix, ("where", "order", "split", "rename"))
        kv: int | None = None
        if "where" in table:
            where = table["where"]
            known = {"kv=0": 0, "kv=1": 1}
            kv = known.get("".join(where.split())) if isinstance(where, str) else None
            if kv is None:
                raise self.error("cannot read this condition", f"{prefix}where", where, '"kv=0" or "kv=1"')
        text = self.string(table, "order", prefix=prefix)
        splits = self.texts(table, "split", prefix, MAX_SPLITS)
        renames = self.texts(table, "rename", prefix, MAX_RENAMES)
        key = f"{self.origin}: {prefix}"
        return Piece(
            kv=kv,
            order=parse_order(text, f"{key}order"),
            splits=tuple(parse_split(t, f"{key}split") for t in splits),
            renames=tuple(parse_rename(t, f"{key}rename") for t in renames),
            text=text,
            split_texts=tuple(splits),
            rename_texts=tuple(renames),
        )

    def texts(self, table: Mapping[str, Any], key: str, prefix: str, most: int) -> list[str]:
        value = table.get(key, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > most or not all(isinstance(t, str) for t in texts):
            raise self.error(
                "of the wrong kind", f"{prefix}{key}", value, f"a string, or a list of at most {most}"
            )
        return texts
