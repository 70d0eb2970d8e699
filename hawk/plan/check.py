"""Whether a source can be mapped onto a target at all, and whether selections and block tables fit them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument, Unmappable
from hawk.retile.build import build_program

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.types import Selection

    I64 = NDArray[np.int64]


def entries(layout: CompiledLayout, selection: Selection) -> tuple[int, int]:
    """First entry of a block table that the selection touches, and one past the last."""
    size = layout.shape.block_size
    return selection.token // size, -(-(selection.token + selection.tokens) // size)


def check(src: CompiledLayout, dst: CompiledLayout) -> None:
    """Raises `Unmappable` unless every element of `src` has its place in `dst`.

    What may differ: block size, number of blocks, order, codec, channels, alignment.  What must not, and is
    then named by `field`: layers, kvs, heads, dim.  Digits that cannot be refined to a common chain are
    named by axis.
    """
    for name in ("layers", "kvs", "heads", "dim"):
        ours, theirs = getattr(src.shape, name), getattr(dst.shape, name)
        if ours != theirs:
            raise Unmappable(
                f"the caches differ in {name}",
                field=f"shape.{name}",
                got=f"{theirs} in the target {dst.name}",
                expected=f"{ours} as in the source {src.name}",
            )
    for kv in range(src.shape.kvs):
        build_program(src, dst, kv)


def check_selection(layout: CompiledLayout, selection: Selection, field: str = "selection") -> None:
    """Raises `InvalidArgument` if the selection names layers that the cache does not have."""
    if selection.layer + selection.layers > layout.shape.layers:
        raise InvalidArgument(
            "no such layers",
            field=f"{field}.layers",
            got=f"{selection.layer}..{selection.layer + selection.layers - 1}",
            expected=f"within 0..{layout.shape.layers - 1}",
            layout=layout.name,
        )


def check_blocks(
    layout: CompiledLayout, blocks: ArrayLike, selection: Selection, field: str = "blocks"
) -> I64:
    """Checks a block table against a cache and a selection, and returns it as `int64[n]`.

    The table counts from token 0 of the request and may be longer than needed.  Every entry must be a block of
    the cache; those that the selection touches must differ from each other (the others are never read, and
    engines repeat a null block there).

    Raises
    ------
    InvalidArgument
        no flat list of integers; too short (naming `field`); an entry out of range or used twice (naming
        `field[i]`).
    """
    table = np.asarray(blocks)
    if table.ndim != 1 or (table.dtype.kind not in "iu" and table.size):
        raise InvalidArgument(
            "a block table is a flat list of integers",
            field=field,
            got=f"{table.dtype} of shape {table.shape}",
            expected="int64[n]",
        )
    size = layout.shape.block_size
    first, last = entries(layout, selection)
    if len(table) < last:
        raise InvalidArgument(
            "the block table is too short",
            field=field,
            got=f"{len(table)} entries",
            expected=f"{last} or more, for tokens up to {selection.token + selection.tokens} in blocks of {size}",
            layout=layout.name,
        )
    bad = np.flatnonzero((table < 0) | (table >= layout.shape.blocks))
    if len(bad):
        raise InvalidArgument(
            "no such block",
            field=f"{field}[{int(bad[0])}]",
            got=int(table[bad[0]]),
            expected=f"0..{layout.shape.blocks - 1}",
            layout=layout.name,
        )
    table = table.astype(np.int64)
    used = table[first:last]
    order = np.argsort(used, kind="stable")
    twice = np.flatnonzero(used[order][1:] == used[order][:-1])
    if len(twice):
        again = int(order[twice + 1].min())
        before = int(np.flatnonzero(used == used[again])[0])
        raise InvalidArgument(
            "a block is used twice",
            field=f"{field}[{first + again}]",
            got=int(used[again]),
            expected=f"a block other than that of {field}[{first + before}]",
            layout=layout.name,
        )
    return table
