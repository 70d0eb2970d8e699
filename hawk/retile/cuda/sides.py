"""Where the units of a part lie on its sides: an address for each piece, or one for all where they lie in a pattern."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from hawk.retile.cuda.spec import VECTOR, Axis
from hawk.retile.nests import factor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts.compiled import CodecInfo
    from hawk.retile.program import Pieces

    Bools = NDArray[np.bool_]
    I64 = NDArray[np.int64]

_LARGEST_UNIT = 4096


@dataclass(frozen=True)
class Side:
    """Where whole units lie on one side.

    channel, at, shared    per unit and piece, and only the first where all lie alike; bytes in the channel
    own        whether each piece has its own
    pattern    of a unit's pieces, elements from the first; None with `own`
    unit       bytes that divide all of these
    """

    codec: CodecInfo
    whole: Bools
    channel: I64
    at: I64
    shared: I64
    own: bool
    pattern: I64 | None
    unit: int

    @classmethod
    def of(
        cls,
        codec: CodecInfo,
        elements: int,
        pieces: Pieces,
        side: str,
        count: int,
        whole: Bools,
        patterns: bool,
    ) -> Side:
        """Of `count` pieces to a unit, on the side "src" or "dst"; without `patterns` each has its own address."""
        channel, page, start = (
            getattr(pieces, f"{side}_{name}").reshape(-1, count)[whole]
            for name in ("channel", "page", "start")
        )
        at = page + codec.header_bytes(elements) + start * codec.bits // 8
        shared = page + start // codec.group if codec.group > 1 else at[:0]
        pattern = None
        if patterns and len(at) and codec.group == 1 and (channel == channel[:, :1]).all():
            lies = at - at[:, :1]
            width = codec.bits // 8
            if (lies == lies[0]).all() and (lies[0] % width == 0).all() and (np.diff(lies[0]) > 0).all():
                pattern, at, channel = lies[0] // width, at[:, :1], channel[:, :1]
        unit = gcd(_LARGEST_UNIT, int(np.gcd.reduce(at.ravel())), int(np.gcd.reduce(shared.ravel())))
        return cls(codec, whole, channel, at, shared, pattern is None, pattern, unit)

    def words(self, channels: int) -> I64:
        """Words of all units, `int64[units, words]`; of those that are not whole 0."""
        bits = (channels - 1).bit_length()
        each = [self.at, self.shared] if self.codec.group > 1 else [self.at]
        found = np.stack([a // self.unit << bits | self.channel for a in each], axis=-1)
        out = np.zeros((len(self.whole), self.at.shape[1] * len(each)), np.int64)
        out[self.whole] = found.reshape(len(found), out.shape[1])
        return out


def axes_of(src: Side, dst: Side, count: int, within: int) -> tuple[Axis, ...] | None:
    """The pieces of a unit as axes with the steps of the sides that have a pattern; None where they are no axes.

    Those of `within` pieces in a row are axes of their own.
    """
    number = np.arange(count, dtype=np.int64)
    steps = np.stack([number if side.pattern is None else side.pattern for side in (src, dst)], axis=1)
    parts = steps.reshape(-1, within, 2)
    if (parts - parts[:, :1] != parts[:1] - parts[:1, :1]).any():
        return None
    found: list[Axis] = []
    for offsets, first in ((parts[:, 0], within), (parts[0] - parts[0, 0], 1)):
        loops = factor(offsets, first)
        if loops is None:
            return None
        found += [Axis(p.ext, 0 if src.own else p.src, 0 if dst.own else p.dst, piece=p.col) for p in loops]
    return tuple(found)


def alignment(bases: I64, side: Side) -> tuple[int, int]:
    """What divides all addresses of elements, and of what groups share, up to `VECTOR`."""
    base = gcd(VECTOR, int(np.gcd.reduce(bases.ravel())))
    return gcd(base, int(np.gcd.reduce(side.at.ravel()))), gcd(base, int(np.gcd.reduce(side.shared.ravel())))
