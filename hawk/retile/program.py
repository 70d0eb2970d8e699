"""The retile program: what one pass has to do inside each piece, derived from two compiled layouts.

A *piece* is the largest box of elements that lies in one page of the source and in one page of the target,
`rows` tokens high.  All pieces of one (source, target, kv) share one program, a nest of loops with a source
and a target stride each; where each piece begins is a row of `Pieces`, which the plan fills in.  The CPU
cores and the generated GPU kernels run the same program; the reverse direction is the program built with the
layouts swapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts.compiled import CodecInfo

    I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Loop:
    """One loop of the nest: `ext` steps, each `src` elements on in the source page and `dst` in the target page.

    `row` and `col` are how many tokens and how many `dim` indices one step advances, in the order in which the
    target stores them; they decide which elements of a partial piece are valid.
    """

    ext: int
    src: int
    dst: int
    row: int
    col: int


@dataclass(frozen=True, slots=True)
class Program:
    """What to do in every piece.

    rows       tokens per piece; pieces begin at multiples of it in the request's token count, in source blocks
               and in target blocks alike
    loops      most significant first in the target's order
    heads      first head of each piece along the head axis, `int64[nh]`
    dims       first dim of each piece along the dim axis, `int64[nd]`; may reach into padding
    cols       how many of the piece's cols exist, `int64[nd]`: what `Pieces.cols` is for a piece that reads
    slots      first slot of each piece within a target block, `int64[ns]`; entries at or beyond the block size
               are padding rows
    src_elements, dst_elements    elements per page on either side, padding included
    """

    src_codec: CodecInfo
    dst_codec: CodecInfo
    rows: int
    loops: tuple[Loop, ...]
    heads: I64
    dims: I64
    cols: I64
    slots: I64
    src_elements: int
    dst_elements: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where each piece begins, one row a piece; all columns `int64[n]`.

    src_channel, src_page    channel and byte offset (in the channel's slice) of the source page
    src_start                element position in that page of the piece's first element
    dst_channel, dst_page    the same for the target page, in the arena
    dst_start                element position in the target page
    lo, hi                   rows `[lo, hi)` of the piece hold tokens of this job.  Rows before `lo` are left as
                             they are (neighbours), rows from `hi` on are set to zero (padding).
    cols                     dim indices counted from the piece's first that exist; the rest is set to zero

    A piece with `hi == 0` reads nothing of the source: its source columns are 0.
    """

    src_channel: I64
    src_page: I64
    src_start: I64
    dst_channel: I64
    dst_page: I64
    dst_start: I64
    lo: I64
    hi: I64
    cols: I64

    def __len__(self) -> int:
        return len(self.src_page)
