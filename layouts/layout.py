"""A layout's declaration: read from TOML, checked, and compiled for a shape.

The text stays with the layout (`Layout.text`): it travels to the other agent, which reads it with the same
checks, so neither side needs the other's files.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.errors import LayoutError
from hawk.layouts.bounds import short
from hawk.layouts.compiled import AXES
from hawk.layouts.compiling import Compiler
from hawk.layouts.compiling_parts import compile_parts
from hawk.layouts.reading import Reader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.layouts.compiled import Axis, CacheShape, CompiledLayout
    from hawk.layouts.declared import Part, Piece, Placement, Scale, Sharding

MAX_TEXT = 16384


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
    parts                    parts of a head that are tensors of their own; then `pieces` is empty, `scale` None
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
    parts: tuple[Part, ...]
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
                "the declaration is not TOML",
                field=origin,
                got=short(str(error), 200),
                expected="tables as docs/layouts.md has them",
            ) from None
        return cls(**Reader(tables, origin).fields(), text=text, origin=origin)

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
        if self.parts:
            return compile_parts(self, shape, codec, channels, align, params or {})
        return Compiler(self).compile(shape, codec, channels, align, params or {})
