"""Loops over `dim` where a side stores it in another order than its index: found in tables, not in digits.

The target's stored indices are cut into stretches of equal length.  Stretches whose elements lie alike on both sides,
counted from the first, form a *kind*; each kind is factored into loops and gets a program of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.retile.program import Loop

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledPiece

    I64 = NDArray[np.int64]

MAX_KINDS = 8

MAX_PADDED = 1 << 17
"""Stored indices that tables are made of.  A layout comes from a peer: this keeps a plan cheap."""


@dataclass(frozen=True, slots=True)
class Nest:
    """Loops over a stretch of dims, the first index of each stretch, and how many of its elements exist.

    `col` of a loop counts stored indices of the target: the elements that exist are the first ones in that order.
    """

    loops: tuple[Loop, ...]
    dims: I64
    cols: I64


def find(src: CompiledPiece, dst: CompiledPiece, dim: int, padded: int) -> tuple[Nest, ...]:
    """The nests that fill the target's stored indices `0..padded-1`, as few and as long as possible."""
    stored = np.arange(padded, dtype=np.int64)
    index = dst.unstore(stored)
    real = np.minimum(index, dim - 1)
    table = _Table(
        index=index,
        valid=stored < dim,
        src_page=src.page_term("dim", real),
        src_at=src.inside_term("dim", real),
        dst_page=dst.page_term("dim", index),
        dst_at=dst.inside_term("dim", index),
    )
    for length in range(padded, 1, -1):
        if padded % length == 0:
            found = table.cut(length)
            if found is not None:
                return found
    found = table.cut(1)
    assert found is not None  # single elements lie alike by themselves
    return found


@dataclass(frozen=True, slots=True)
class _Table:
    """Per stored index of the target: the index, whether it exists, and where both sides keep it."""

    index: I64
    valid: NDArray[np.bool_]
    src_page: I64
    src_at: I64
    dst_page: I64
    dst_at: I64

    def cut(self, length: int) -> tuple[Nest, ...] | None:
        """The nests of stretches of `length`, or None where these do not lie in one page each, or in loops."""
        index, valid, src_page, src_at, dst_page, dst_at = (
            column.reshape(-1, length)
            for column in (self.index, self.valid, self.src_page, self.src_at, self.dst_page, self.dst_at)
        )
        if (dst_page != dst_page[:, :1]).any() or ((src_page != src_page[:, :1]) & valid).any():
            return None
        there, here = dst_at - dst_at[:, :1], np.where(valid, src_at - src_at[:, :1], -1)
        if (there < 0).any() or ((here < 0) & valid).any():
            return None
        count = valid.sum(axis=1)
        kinds: list[tuple[I64, I64]] = []
        members: list[list[int]] = []
        # Whole stretches first: what is left of a partial or an empty one agrees with one of them.
        for row in np.argsort(-count, kind="stable").tolist():
            n = int(count[row])
            for i, (d, s) in enumerate(kinds):
                if np.array_equal(d, there[row]) and np.array_equal(s[:n], here[row, :n]):
                    members[i].append(row)
                    break
            else:
                if n < length or len(kinds) == MAX_KINDS:
                    return None
                kinds.append((there[row], here[row]))
                members.append([row])
        nests = []
        for (d, s), rows in zip(kinds, members, strict=True):
            loops = factor(np.stack((s, d), axis=1), 1)
            if loops is None:
                return None
            at = np.sort(rows)
            nests.append(Nest(tuple(loops), index[at, 0], count[at].astype(np.int64)))
        return tuple(nests)


def factor(offsets: I64, col: int) -> list[Loop] | None:
    """Loops, most significant first, that give these (source, target) offsets; `col` is what one step counts."""
    n = len(offsets)
    if n == 1:
        return []
    for ext in range(n, 1, -1):
        if n % ext:
            continue
        inner = offsets[:ext]
        if (inner != np.arange(ext, dtype=np.int64)[:, None] * inner[1]).any():
            continue
        blocks = offsets.reshape(n // ext, ext, 2)
        if (blocks != blocks[:, :1] + inner).any():
            continue
        rest = factor(offsets[::ext], col * ext)
        if rest is not None:
            return [*rest, Loop(ext, int(inner[1, 0]), int(inner[1, 1]), 0, col)]
    return None
