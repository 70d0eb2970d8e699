"""What a declaration says, table by table, before a shape is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hawk.layouts.compiled import Axis
    from hawk.layouts.grammar import Arith, Order, Split, Term

Placement = Literal["linear", "interleaved", "sharded"]


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
class Part:
    """One `[[part]]`: neighbouring dims of every head that are a tensor of their own.

    size      how many dims; None: all that are left
    codec     how its elements are stored; None: as the layout is asked for
    inside    whether its pages lie in those of the part before it, behind these; else in buffers of its own
    piece     its order, in which `dim` counts the part's own
    """

    name: str
    size: Arith | None
    codec: str | None
    inside: bool
    piece: Piece
    scale: Scale | None


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
    buffers   axes that select buffers of scales; None: those of the layout
    """

    place: Literal["buffer", "page", "constant", "header"]
    value: float = 1.0
    codec: str = "fp32"
    order: Order | None = None
    text: str = ""
    group: int = 0
    buffers: tuple[Axis, ...] | None = None
