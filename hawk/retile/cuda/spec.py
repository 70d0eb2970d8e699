"""What the text of a kernel depends on: the codecs of both sides, the loops of a piece, how pieces form a unit.

A *unit* is what one block of threads does: several pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from hawk.layouts.compiled import CodecInfo
    from hawk.retile.program import Loop

SideName = Literal["src", "dst"]

VECTOR = 16
"""Bytes that a thread reads or writes at once, where runs and addresses allow."""

THREADS = 64


@dataclass(frozen=True, slots=True)
class Axis:
    """`ext` steps of `src` and `dst` elements.

    row, col    tokens and dims that one step counts
    piece       pieces that one step counts
    dense       elements in the source's order of the unit
    room        bits in shared memory, gaps included
    near, far   numbers of scales that one step counts, of the source and of the target
    box         the same of the target's among those of the unit
    """

    ext: int
    src: int
    dst: int
    row: int = 0
    col: int = 0
    piece: int = 0
    dense: int = 0
    room: int = 0
    near: int = 0
    far: int = 0
    box: int = 0

    def cut(self, inner: int) -> tuple[Axis, Axis]:
        """The axis as two, the inner one of `inner` steps."""
        steps = (self.src, self.dst, self.row, self.col, self.piece, self.dense, self.room)
        scales = (self.near, self.far, self.box)
        return Axis(self.ext // inner, *(inner * s for s in (*steps, *scales))), replace(self, ext=inner)

    def step(self, side: SideName) -> int:
        """Elements on that side."""
        return self.src if side == "src" else self.dst


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales that elements have on the way: the source's multiply them, the target's are made and divide them.

    near        whether the source has some
    made        how those of the target are stored, None where none are made
    near_steps, far_steps    of each loop: numbers of scales that one step counts, of the source and of the target
    within      so many pieces in a row share all of their target's scales
    """

    near: bool
    made: str | None
    near_steps: tuple[int, ...]
    far_steps: tuple[int, ...]
    within: int


@dataclass(frozen=True, slots=True)
class Spec:
    """All that the text of a kernel depends on.

    loops         of a piece, in the target's order
    pieces        of a unit
    axes          of the pieces of a unit, most significant first; without steps where each piece has its own address
    src_own, dst_own    whether each piece has
    src_align, dst_align    bytes that divide all addresses of elements, up to `VECTOR`
    shared_align  the same of exponents and scales in the source
    fast          whether vectors may be used at all; else elements are moved one by one
    src_channels, dst_channels    how many there are
    src_unit, dst_unit    bytes by which table words count
    wide          whether these take 64 bits
    scales        what elements are multiplied and divided by, where they have scales
    """

    src_codec: CodecInfo
    dst_codec: CodecInfo
    src_header: int
    dst_header: int
    loops: tuple[Loop, ...]
    pieces: int
    axes: tuple[Axis, ...]
    src_own: bool
    dst_own: bool
    src_align: int
    dst_align: int
    shared_align: int
    fast: bool
    src_channels: int
    dst_channels: int
    src_unit: int
    dst_unit: int
    wide: bool
    scales: Scales | None = None

    def codec(self, side: SideName) -> CodecInfo:
        """Of that side."""
        return self.src_codec if side == "src" else self.dst_codec

    def own(self, side: SideName) -> bool:
        """Whether each piece has an address of its own there."""
        return self.src_own if side == "src" else self.dst_own

    def align(self, side: SideName) -> int:
        """What divides the addresses there."""
        return self.src_align if side == "src" else self.dst_align

    @property
    def piece_elements(self) -> int:
        """Elements of a piece."""
        return prod(loop.ext for loop in self.loops)

    @property
    def elements(self) -> int:
        """Elements of a unit."""
        return self.pieces * self.piece_elements

    @property
    def src_words(self) -> int:
        """Table words of a unit for its source: an address of elements, and one of what groups share."""
        return (self.pieces if self.src_own else 1) * (1 + (self.src_codec.group > 1))

    @property
    def dst_words(self) -> int:
        """The same for its target."""
        return (self.pieces if self.dst_own else 1) * (1 + (self.dst_codec.group > 1))

    @property
    def scale_words(self) -> int:
        """The same for the numbers of the first scales of its pieces, of the source and then of the target."""
        return 0 if self.scales is None else self.pieces * (self.scales.near + (self.scales.made is not None))

    @property
    def words(self) -> int:
        """All of them."""
        return self.src_words + self.dst_words + self.scale_words

    @property
    def bases(self) -> int:
        """Addresses of a step: of its channels, and where scales lie on either side."""
        return self.src_channels + self.dst_channels + (0 if self.scales is None else 2)
