"""Reads a declaration's tables.  They may come from a peer: every bound here is one that a hostile text would test."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

from hawk.errors import LayoutError
from hawk.layouts.bounds import BYTES, MAX_ALIGN, MAX_CHANNELS, bounded, short
from hawk.layouts.codecs import CODECS
from hawk.layouts.compiled import AXES
from hawk.layouts.declared import Piece, Scale, Sharding
from hawk.layouts.digits import MAX_ELEMENTS
from hawk.layouts.grammar import (
    Arith,
    Number,
    Order,
    is_name,
    nearest,
    parse_number,
    parse_order,
    parse_rename,
    parse_split,
)
from hawk.layouts.reading_parts import read_parts
from hawk.layouts.renaming import names_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hawk.layouts.compiled import Axis
    from hawk.layouts.declared import Placement

_NAME = re.compile(r"[a-z0-9]([a-z0-9._/-]{0,62}[a-z0-9])?\Z")

PIECE_KEYS = ("where", "order", "split", "rename")

MAX_PIECES = 8
MAX_RENAMES = 8
MAX_SPLITS = 4
MAX_PARAMS = 16


class Reader:
    """Turns the tables of one TOML into the fields of a `Layout`; every key is checked, unknown ones are refused."""

    def __init__(self, tables: dict[str, Any], origin: str) -> None:
        self.tables, self.origin = tables, origin

    def fields(self) -> dict[str, Any]:
        """All fields but the text and its origin; raises `LayoutError`."""
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
                "part",
                "scale",
            ),
        )
        name = self.string(top, "name")
        if not _NAME.match(name):
            raise self.error(
                "this cannot name a layout", "name", name, "at most 64 of a-z, 0-9, and . _ - / between them"
            )
        codec = self.string(top, "codec")
        codecs = tuple(self._strings(top, "codecs", [codec]))
        for key, value in (("codec", codec), *(("codecs", c) for c in codecs)):
            if value not in CODECS:
                raise self.error("unknown codec", key, value, ", ".join(CODECS), nearest(value, CODECS))
        if codec not in codecs:
            raise self.error(
                "the default codec is not among the allowed ones", "codec", codec, ", ".join(codecs)
            )
        kind, channels, banks, sharding = self._placement(top)
        parts = read_parts(self, top, codecs) if "part" in top else ()
        return {
            "name": name,
            "summary": self.string(top, "summary", ""),
            "source": self.string(top, "source", ""),
            "codec": codec,
            "codecs": codecs,
            "buffers": self._buffers(top),
            "align": bounded(top.get("align", 1), MAX_ALIGN, f"{self.origin}: align", BYTES),
            "placement": kind,
            "channels": channels,
            "banks": banks,
            "sharding": sharding,
            "params": self._params(top),
            "pieces": () if "part" in top else self._pieces(top),
            "scale": self.scale(top, codecs),
            "parts": parts,
        }

    def error(
        self, message: str, key: str, got: object = None, expected: object = None, hint: str | None = None
    ) -> LayoutError:
        """An error that names the origin and the key."""
        return LayoutError(
            message,
            field=f"{self.origin}: {key}",
            got=None if got is None else short(got, 200),
            expected=expected,
            hint=hint,
        )

    def keys(self, table: Mapping[str, Any], prefix: str, known: Iterable[str]) -> None:
        """Refuses a key of `table` that is not known."""
        for key in table:
            if key not in known:
                where = prefix + (key if is_name(key) else short(key))
                if not prefix and key in PIECE_KEYS:
                    raise self.error(
                        "this belongs to a piece", where, hint=f"Write [[piece]] on a line above {key}"
                    )
                raise self.error("unknown key", where, None, ", ".join(known), nearest(key, known))

    def string(self, table: Mapping[str, Any], key: str, default: str | None = None, prefix: str = "") -> str:
        """One line of text; without a default it has to be there."""
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

    def _strings(self, table: Mapping[str, Any], key: str, default: list[str], prefix: str = "") -> list[str]:
        value = table.get(key, default)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.error("of the wrong kind", prefix + key, value, "a list of strings that is not empty")
        if len(set(value)) != len(value):
            raise self.error("a name comes twice", prefix + key, value, "each once")
        return value

    def _placement(self, top: Mapping[str, Any]) -> tuple[Placement, int, tuple[int, ...], Sharding | None]:
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
        banks = self._banks(table)
        channels = bounded(
            table.get("channels", len(banks) or None), MAX_CHANNELS, f"{self.origin}: placement.channels"
        )
        if banks and channels != len(banks):
            raise self.error("not one channel a bank", "placement.channels", channels, len(banks))
        if kind == "interleaved":
            return "interleaved", channels, (), None
        return "sharded", channels, banks, self._sharding(table)

    def _banks(self, table: Mapping[str, Any]) -> tuple[int, ...]:
        banks = table.get("banks", [])
        if not isinstance(banks, list) or len(banks) > MAX_CHANNELS or ("banks" in table and not banks):
            raise self.error("of the wrong kind", "placement.banks", banks, "a list of memory channels")
        for i, bank in enumerate(banks):
            if not isinstance(bank, int) or isinstance(bank, bool) or not 0 <= bank < MAX_CHANNELS:
                raise self.error("no memory channel", f"placement.banks[{i}]", bank, f"0..{MAX_CHANNELS - 1}")
        if len(set(banks)) != len(banks):
            raise self.error("a bank comes twice", "placement.banks", banks, "each once")
        return tuple(banks)

    def _sharding(self, table: Mapping[str, Any]) -> Sharding:
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
                sizes.append(Number(self._number(size, key)))
        orientation = table.get("orientation", "row")
        if orientation not in ("row", "column"):
            raise self.error("unknown orientation", "placement.orientation", orientation, '"row" or "column"')
        return Sharding(sizes[0], sizes[1], down=orientation == "column")

    def scale(self, top: Mapping[str, Any], codecs: Iterable[str], where: str = "") -> Scale | None:
        """The table `scale` of a layout or of a part of it."""
        if "scale" not in top:
            return None
        table = top["scale"]
        if not isinstance(table, dict):
            raise self.error("of the wrong kind", f"{where}scale", table, "a table")
        place = table.get("place")
        known: dict[str, tuple[str, ...]] = {
            "buffer": ("dtype", "order", "group", "buffers"),
            "page": ("dtype", "order", "group"),
            "constant": ("value",),
            "header": (),
        }
        if not isinstance(place, str) or place not in known:
            raise self.error(
                "unknown place", f"{where}scale.place", place, ", ".join(known), nearest(str(place), known)
            )
        self.keys(table, f"{where}scale.", ("place", *known[place]))
        plain = [name for name in codecs if CODECS[name].group == 1]
        if place == "header":
            if plain:
                raise self.error(
                    "this codec has no scales in a header", f"{where}scale.place", plain[0], "grouped codecs"
                )
            return Scale("header")
        if not any(CODECS[name].bits == 8 for name in plain):
            raise self.error(
                "no codec here has scales", f"{where}scale", ", ".join(codecs), "one of eight bits an element"
            )
        if place == "constant":
            return Scale("constant", value=self._factor(table.get("value"), f"{where}scale.value"))
        codec = self.string(table, "dtype", prefix=f"{where}scale.")
        if codec not in ("fp32", "bf16", "fp16"):
            raise self.error("no type of scales", f"{where}scale.dtype", codec, "fp32, bf16, fp16")
        # Without an order there is one scale for all that a buffer holds.
        text = (
            self.string(table, "order", prefix=f"{where}scale.")
            if "order" in table or place == "page"
            else ""
        )
        order = parse_order(text, f"{self.origin}: {where}scale.order") if text else Order((), (), cut=False)
        return Scale(
            "page" if place == "page" else "buffer",
            codec=codec,
            order=order,
            text=text,
            group=self._group(table, order, f"{where}scale.group"),
            buffers=self._buffers(table, f"{where}scale.") if "buffers" in table else None,
        )

    def _group(self, table: Mapping[str, Any], order: Order, key: str) -> int:
        """How many dims share a scale; 0 where the order does not tell dims apart."""
        named = "dim" in names_in([*order.page, *order.inside])
        if "group" in table and not named:
            raise self.error(
                "scale.order does not name dim, so there are no groups", key, table["group"], "no group"
            )
        if named and "group" not in table:
            raise self.error(
                "scale.order names dim, so the group is needed", key, "none", "how many dims share a scale"
            )
        return bounded(table["group"], MAX_ELEMENTS, f"{self.origin}: {key}") if named else 0

    def _factor(self, value: object, key: str) -> float:
        expected = "a number from 2^-100 to 2^100 that binary32 holds"
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 2.0**-100 <= value <= 2.0**100
        ):
            raise self.error("no scale", key, value, expected)
        (stored,) = struct.unpack("<f", struct.pack("<f", value))
        if stored != value:
            raise self.error("no scale", key, value, f"{expected}, such as {stored!r}")
        return float(value)

    def _buffers(self, table: Mapping[str, Any], prefix: str = "") -> tuple[Axis, ...]:
        words = self.string(table, "buffers", "", prefix).split()
        for word in words:
            if word not in ("layer", "kv"):
                raise self.error(
                    "this axis cannot select buffers",
                    f"{prefix}buffers",
                    word,
                    "layer, kv",
                    nearest(word, ("layer", "kv")),
                )
        if len(set(words)) != len(words):
            raise self.error("a name comes twice", f"{prefix}buffers", " ".join(words), "each once")
        return tuple(axis for axis in AXES if axis in words)

    def _params(self, top: Mapping[str, Any]) -> tuple[tuple[str, int | Axis], ...]:
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
            found.append((name, axes[0] if axes else self._number(default, key)))
        return tuple(found)

    def _number(self, value: object, key: str) -> int:
        if isinstance(value, str):
            raise self.error(
                "unknown axis", key, value, "a number or one of " + ", ".join(AXES), nearest(value, AXES)
            )
        return bounded(value, MAX_ELEMENTS, f"{self.origin}: {key}")

    def _pieces(self, top: Mapping[str, Any]) -> tuple[Piece, ...]:
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
                " and ".join("any kv" if kv is None else f"kv={kv}" for kv in held),
                'one piece, or one for each of where = "kv=0", "kv=1"',
            )
        return tuple(pieces)

    def piece(self, table: Mapping[str, Any], prefix: str) -> Piece:
        """One order, with its splits and renames."""
        self.keys(table, prefix, PIECE_KEYS)
        kv: int | None = None
        if "where" in table:
            where = table["where"]
            known = {"kv=0": 0, "kv=1": 1}
            kv = known.get("".join(where.split())) if isinstance(where, str) else None
            if kv is None:
                raise self.error("cannot read this condition", f"{prefix}where", where, '"kv=0" or "kv=1"')
        text = self.string(table, "order", prefix=prefix)
        splits = self._texts(table, "split", prefix, MAX_SPLITS)
        renames = self._texts(table, "rename", prefix, MAX_RENAMES)
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

    def _texts(self, table: Mapping[str, Any], key: str, prefix: str, most: int) -> list[str]:
        value = table.get(key, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > most or not all(isinstance(t, str) for t in texts):
            raise self.error(
                "of the wrong kind", f"{prefix}{key}", value, f"a string, or a list of at most {most}"
            )
        return texts
