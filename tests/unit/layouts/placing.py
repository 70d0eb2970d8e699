"""Puts a whole cache where a compiled layout says, page by page, with nothing but its digits and a codec."""

import numpy as np

from hawk.layouts import CompiledLayout
from hawk.layouts.codecs import encode

AXES = ("block", "head", "slot", "dim")


def positions(layout: CompiledLayout, kv: int, layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(page, position) of every element, both broadcast to `[blocks, heads, block_size, dim]`."""
    piece = layout.piece(kv)
    extents = [layout.shape.extent(axis) for axis in AXES]
    index = np.ix_(*[np.arange(n, dtype=np.int64) for n in extents])
    page = sum(piece.page_term(axis, i) for axis, i in zip(AXES, index, strict=True))
    inside = sum(piece.inside_term(axis, i) for axis, i in zip(AXES, index, strict=True))
    page, inside = page + layout.fixed_term(kv, layer), inside + layout.first_position(kv)
    return np.broadcast_to(page, extents), np.broadcast_to(inside, extents)


def pages(layout: CompiledLayout, kvs: dict[int, np.ndarray]) -> np.ndarray:
    """The pages of one buffer, `uint8[pages, page_bytes]`, for fp32 bits by kv."""
    bits = np.zeros((layout.pages, layout.pieces[0].elements), dtype=np.uint32)
    for kv, values in kvs.items():
        bits[positions(layout, kv)] = values
    return encode(layout.codec, bits)
