"""Whether a layout keeps a cache as ttnn keeps its tensors: tiles of 32 x 32 in four faces, heads inside blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import LayoutError
from hawk.model_caches import k_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts import CompiledLayout

TILE, FACE = 32, 16


def tensor_shape(layout: CompiledLayout, *, request: bool = False) -> tuple[int, int, int, int]:
    """The shape of the tensor of tiles that each (layer, K or V) of `layout` is: `[block, head, slot, dim]`.

    request    as a request by itself, with the blocks of a head in a row: `[1, head, block x slot, dim]`

    Raises `LayoutError` for a layout whose bytes are no such tensor.
    Where an element lies is a sum with a term for each axis, so the terms of every index of every axis prove it.  K's
    head may be in another order than V's (`k_order`): the model reads it so.
    """
    shape = layout.shape
    if layout.buffers != ("layer", "kv") or layout.scale is not None or layout.parts or layout.banks:
        raise _not_so(layout, "buffers", layout.buffers, "one tensor for each layer and for each of K and V")
    down, across = -(-shape.block_size // TILE), -(-shape.dim // TILE)
    slot, dim = (np.arange(n, dtype=np.int64) for n in (shape.block_size, shape.dim))
    rows = down * across  # tiles of a block's head
    block, head = (np.arange(n, dtype=np.int64) for n in (shape.blocks, shape.heads))
    if request and shape.blocks > 1 and shape.block_size % TILE:
        raise _not_so(
            layout, "block_size", shape.block_size, f"a multiple of {TILE}, so that blocks follow each other"
        )
    wanted = {
        "block": (block * rows * (1 if request else shape.heads), None),
        "head": (head * rows * (shape.blocks if request else 1), None),
        "slot": (slot // TILE * across, slot % TILE // FACE * 2 * FACE * FACE + slot % FACE * FACE),
        "dim": (dim // TILE, dim % TILE // FACE * FACE * FACE + dim % FACE),
    }
    for kv in range(shape.kvs):
        piece = layout.piece(kv)
        for axis, (page, inside) in wanted.items():
            if axis == "dim" and kv == 0 and shape.kvs == 2:
                continue  # K's, which is seen from V's below
            index = np.arange(len(page), dtype=np.int64)
            got = piece.page_term(axis, index), piece.inside_term(axis, index)  # type: ignore[arg-type]
            if not _same(got[0], page) or not _same(got[1], inside):
                raise _not_so(
                    layout, f"order of {axis}", "other places", "tiles of 32 x 32, four faces of 16 x 16"
                )
    if shape.kvs == 2 and k_order(layout)[0] == "other":
        raise _not_so(layout, "order of dim in K", "another order", "that of V, or Meta's")
    if layout.page_stride != layout.page_bytes and layout.channels == 1:
        raise _not_so(layout, "align", layout.page_stride, f"pages of {layout.page_bytes} B without gaps")
    if request:
        return 1, shape.heads, shape.blocks * shape.block_size, shape.dim
    return shape.blocks, shape.heads, shape.block_size, shape.dim


def _same(got: NDArray[np.int64], wanted: NDArray[np.int64] | None) -> bool:
    return not got.any() if wanted is None else np.array_equal(got, wanted)


def _not_so(layout: CompiledLayout, field: str, got: object, expected: str) -> LayoutError:
    return LayoutError(
        f"{layout.name} keeps no cache as ttnn keeps a tensor of TILE layout",
        field=f"layout: {field}",
        got=got,
        expected=expected,
        hint="tenstorrent/kv and tenstorrent/contiguous do, and those that end in -hf",
    )
