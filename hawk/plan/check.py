"""Whether a source can be mapped onto a target at all, and whether selections and block tables fit them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument, Unmappable, counted
from hawk.plan.bind import first_outside
from hawk.plan.scales import check_selected
from hawk.plan.ways import program_part, ways

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.types import Placement, Selection

    I64 = NDArray[np.int64]


def entries(layout: CompiledLayout, selection: Selection) -> tuple[int, int]:
    """First entry of a block table that the selection touches, and one past the last."""
    size = layout.shape.block_size
    return selection.token // size, -(-(selection.token + selection.tokens) // size)


def check(src: CompiledLayout, dst: CompiledLayout, selection: Selection | None = None) -> None:
    """Raises `Unmappable` unless every element that is to move has its place in `dst`.

    What may differ: block size, number of blocks, order, codec, channels, alignment; with a `selection` that
    says which belong together, layers and heads too.  What must not, and is then named by `field`: layers, kvs,
    heads, dim.  Digits that cannot be refined to a common chain are named by axis.

    Raises `InvalidArgument` for layers or heads of the selection that a side does not have.
    """
    mapped = set()
    if selection is not None:
        mapped = {"layers"} | ({"heads"} if selection.heads else set())
        check_selection(dst, selection)
        check_source(src, selection)
    for name in ("layers", "kvs", "heads", "dim"):
        ours, theirs = getattr(src.shape, name), getattr(dst.shape, name)
        if ours != theirs and name not in mapped:
            raise Unmappable(
                f"the caches differ in {name}",
                field=f"shape.{name}",
                got=f"{theirs} in the target {dst.name}",
                expected=f"{ours} as in the source {src.name}",
            )
    ways(src, dst, None if selection is None else program_part(src, dst, selection))
    if selection is not None:
        check_selected(dst, selection)


def check_selection(layout: CompiledLayout, selection: Selection, field: str = "selection") -> None:
    """Raises `InvalidArgument` if the selection names layers or heads that the target does not have."""
    _within(layout, f"{field}.layers", selection.layer, selection.layers, layout.shape.layers)
    if selection.heads:
        _within(layout, f"{field}.heads", selection.head, selection.heads, layout.shape.heads)


def check_source(layout: CompiledLayout, selection: Selection, field: str = "selection") -> None:
    """Raises `InvalidArgument` if the selection names layers or heads that the source does not have."""
    layers = selection.source_layers
    if layers:
        _within(
            layout, f"{field}.source_layers", min(layers), max(layers) + 1 - min(layers), layout.shape.layers
        )
    else:
        _within(layout, f"{field}.layers", selection.layer, selection.layers, layout.shape.layers)
    if selection.heads:
        _within(layout, f"{field}.source_head", selection.source_head, selection.heads, layout.shape.heads)


def _within(layout: CompiledLayout, field: str, first: int, count: int, extent: int) -> None:
    if first + count > extent:
        raise InvalidArgument(
            f"no such {'layers' if 'layers' in field else 'heads'}",
            field=field,
            got=f"{first}..{first + count - 1}",
            expected=f"within 0..{extent - 1}",
            layout=layout.name,
        )


@lru_cache(maxsize=256)
def _placed(layout: CompiledLayout) -> tuple[int, int]:
    return len(layout.buffer_bytes), layout.channels


def check_placement_shape(layout: CompiledLayout, placement: Placement, field: str = "placement") -> None:
    """Raises `InvalidArgument` unless the placement has a row for every buffer and a column for every channel."""
    expected = _placed(layout)
    if placement.region.shape == expected and placement.offset.shape == expected:
        return
    for name in ("region", "offset"):
        got = getattr(placement, name).shape
        if got != expected:
            raise InvalidArgument(
                "the placement is not one of this layout",
                field=f"{field}.{name}",
                got=f"shape {got}",
                expected=f"shape {expected} (buffers, channels)",
                layout=layout.name,
            )


def check_placement(
    layout: CompiledLayout, placement: Placement, nbytes: Sequence[int], field: str = "placement"
) -> None:
    """Raises `InvalidArgument` unless every buffer lies, in every channel, inside the region it is placed in.

    nbytes    size of each region that the placement may name
    """
    check_placement_shape(layout, placement, field)
    unknown = (placement.region < 0) | (placement.region >= len(nbytes))
    if unknown.any():
        i, c = (int(k[0]) for k in np.nonzero(unknown))
        raise InvalidArgument(
            "no such region",
            field=f"{field}.region[{i}, {c}]",
            got=int(placement.region[i, c]),
            expected=f"0..{len(nbytes) - 1}",
        )
    size = np.asarray(nbytes, np.int64)[placement.region]
    needed = np.asarray(layout.buffer_bytes, np.int64)[:, None]
    outside = (placement.offset < 0) | (placement.offset + needed > size)
    if outside.any():
        i, c = (int(k[0]) for k in np.nonzero(outside))
        raise InvalidArgument(
            "the buffer reaches out of its region",
            field=f"{field}.offset[{i}, {c}]",
            got=f"{int(needed[i, 0])} bytes at {int(placement.offset[i, c])}",
            expected=f"within {int(size[i, c])} bytes",
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
            got=counted(len(table), "entry", "entries"),
            expected=f"{last} or more, for tokens up to {selection.token + selection.tokens} in blocks of {size}",
            layout=layout.name,
        )
    given, table = table, table.astype(np.int64)
    bad = first_outside(table, layout.shape.blocks)  # what is too large for the type has become negative
    if bad >= 0:
        raise InvalidArgument(
            "no such block",
            field=f"{field}[{bad}]",
            got=int(given[bad]),
            expected=f"0..{layout.shape.blocks - 1}",
            layout=layout.name,
        )
    used = table[first:last]
    if len(set(used.tolist())) == len(used):
        return table
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
