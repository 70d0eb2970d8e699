"""Conversion of arrays between layouts in this process: what `hawk layout convert` does, and three lines of Python.

    src = hawk.convert.compile_for(array, "vllm/nhd")
    dst = hawk.convert.retarget(src, "my-npu.toml", codec="bf16", channels=8)
    tiles = hawk.convert.convert(array, src, dst)

An array stands for a whole cache: its bytes are the cache's buffers one after another, and of each buffer its
channels one after another (`uint8[buffers, channels, bytes]`; flat where buffers of scales are smaller than the
others).  Where a layout is made of plain axes that is an ordinary array: `vllm/nhd` over bf16 is
`uint16[layer, kv, block, slot, head, dim]`.  Block tables are the identity.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import InvalidArgument
from hawk.layouts import CacheShape, Layout, load
from hawk.plan.check import check, entries
from hawk.plan.segments import direct
from hawk.plan.source import retile_steps
from hawk.plan.target import chunk_bytes, split, target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from hawk.retile import cpu, native

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout

    Name = str | os.PathLike[str] | Layout
    U8 = NDArray[np.uint8]

ARENA = 64 << 20
"""Bytes converted at a time, where a block of one layer is not larger."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
}
_CODECS: dict[np.dtype[Any], str] = {np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32"}


def _loaded(layout: Name) -> Layout:
    return layout if isinstance(layout, Layout) else load(layout)


def codec_for(dtype: np.dtype[Any], layout: Name) -> str:
    """The codec that an array of this dtype holds: fp16 or fp32 by its dtype, else the layout's own."""
    loaded = _loaded(layout)
    named = _CODECS.get(dtype)
    return named if named in loaded.codecs else loaded.codec


def shape_of(array: NDArray[Any], layout: Name) -> CacheShape:
    """The index box of an array whose axes are the layout's: those of `buffers`, then those of its order.

    Axes that select buffers may be left out where they have one index.  Raises `InvalidArgument` where the
    order is not made of plain axes, or the array has other axes.
    """
    loaded = _loaded(layout)
    names = loaded.plain_axes()
    if names is None:
        raise InvalidArgument(
            "the shape cannot be read from the array, for the layout's order is not made of plain axes",
            field="array.shape",
            got=array.shape,
            hint="Give shape=CacheShape(...), or --layers, --heads, --dim, --blocks and --block-size",
        )
    axes = (*loaded.buffers, *names)
    given = axes if array.ndim == len(axes) else names
    if array.ndim != len(given):
        raise InvalidArgument(
            "the array has other axes than the layout",
            field="array.shape",
            got=array.shape,
            expected=f"[{', '.join(axes)}]",
        )
    extents = dict(zip(given, array.shape, strict=True))
    return CacheShape(
        layers=extents.get("layer", 1),
        heads=extents["head"],
        dim=extents["dim"],
        block_size=extents["slot"],
        blocks=extents["block"],
        kvs=extents.get("kv", 1),
    )


def compile_for(
    array: NDArray[Any], layout: Name, *, shape: CacheShape | None = None, **options: Any
) -> CompiledLayout:
    """The layout of an array that is there.

    shape      needed where `shape_of` cannot read it from the array
    options    `codec`, `channels`, `align`, `params`, as for `Layout.compile`

    Raises `InvalidArgument` where the array is of another size, of the other byte order, or of fp16 or fp32 and
    would be read as something else; `LayoutError` where the layout does not compile.
    """
    loaded = _loaded(layout)
    named = _CODECS.get(array.dtype)
    if not array.dtype.isnative:
        raise InvalidArgument(
            "the elements are in the other byte order",
            field="array.dtype",
            got=str(array.dtype),
            expected=str(array.dtype.newbyteorder("=")),
        )
    if options.get("codec") is None:
        options["codec"] = codec_for(array.dtype, loaded)
    if named is not None and options["codec"] != named:
        raise InvalidArgument(
            f"the array holds {named}, and would be read as another codec",
            field="codec",
            got=options["codec"],
            expected=named if named in loaded.codecs else "one of " + ", ".join(loaded.codecs),
            hint="Bits of another codec come as unsigned integers: array.view(numpy.uint16)",
        )
    compiled = loaded.compile(shape or shape_of(array, loaded), **options)
    _buffer_bytes(array, compiled, "array")
    return compiled


def retarget(
    src: CompiledLayout, layout: Name, *, block_size: int | None = None, **options: Any
) -> CompiledLayout:
    """`layout` for all that `src` holds; blocks of another size are as many as hold its tokens."""
    shape = src.shape
    if block_size is not None:
        blocks = -(-shape.blocks * shape.block_size // block_size)
        shape = dataclasses.replace(shape, block_size=block_size, blocks=blocks)
    return _loaded(layout).compile(shape, **options)


def tensor_shape(shape: Sequence[int]) -> CacheShape:
    """A plain tensor `[..., rows, columns]`, such as weights, as a cache: one layer, one block, its batch as heads.

    With `contiguous/bhsd` on the row-major side the axes of a cache are those of the tensor: `slot` counts rows, `dim`
    columns, `head` the leading axes together.  The layout of the other side must not tell K from V.
    """
    if len(shape) < 2 or min(shape) < 1:
        raise InvalidArgument(
            "a tensor has rows and columns", field="shape", got=tuple(shape), expected="[..., rows, columns]"
        )
    *batch, rows, columns = shape
    return CacheShape(layers=1, kvs=1, heads=math.prod(batch), blocks=1, block_size=rows, dim=columns)


def packed(layout: CompiledLayout) -> Placement:
    """All buffers and their channels one after another in one region, as an array holds them."""
    size = np.repeat(np.asarray(layout.buffer_bytes, np.int64), layout.channels)
    shape = (len(layout.buffer_bytes), layout.channels)
    return Placement(np.zeros(shape, np.int32), (np.cumsum(size) - size).reshape(shape))


def nbytes(layout: CompiledLayout) -> int:
    """Bytes of an array that holds this cache."""
    return layout.channels * sum(layout.buffer_bytes)


def empty(layout: CompiledLayout, declared: Layout | None = None) -> NDArray[Any]:
    """Zeros for this cache: with the axes of `declared` where they are plain, else `uint8[buffers, channels, n]`."""
    dtype, shape = array_form(layout, declared)
    return np.zeros(shape, dtype)


def array_form(
    layout: CompiledLayout, declared: Layout | None = None
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Type and shape of the array that `empty` makes."""
    names = declared.plain_axes() if declared is not None else None
    dtype = _DTYPES.get(layout.codec.name)
    if names is None or dtype is None or layout.channels != 1 or layout.page_stride != layout.page_bytes:
        sizes = set(layout.buffer_bytes)
        if len(sizes) > 1:  # scales in buffers of their own
            return np.dtype(np.uint8), (nbytes(layout),)
        return np.dtype(np.uint8), (len(layout.buffer_bytes), layout.channels, sizes.pop())
    axes: tuple[Any, ...] = (*layout.buffers, *names)
    return dtype, tuple(layout.shape.extent(axis) for axis in axes)


def convert(
    array: NDArray[Any],
    src: CompiledLayout,
    dst: CompiledLayout,
    *,
    selection: Selection | None = None,
    out: NDArray[Any] | None = None,
    threads: int = 1,
) -> NDArray[Any]:
    """The cache that `array` holds, laid out as `dst`.

    Parameters
    ----------
    selection
        what of it; all layers, heads and tokens of the source if not given
    out
        where to put it; fresh zeros if not given.  Outside of the selection it is left as it is.

    Raises
    ------
    InvalidArgument
        an array is of another size than its layout, or the target has no room for all tokens
    Unmappable
        the caches differ in what cannot be bridged
    """
    source = _buffer_bytes(array, src, "array")
    if selection is None:
        selection = Selection(0, src.shape.layers, 0, src.shape.blocks * src.shape.block_size)
    for field, layout in (("src", src), ("dst", dst)):
        room = layout.shape.blocks * layout.shape.block_size
        if selection.token + selection.tokens > room:
            raise InvalidArgument(
                "the cache has no such tokens",
                field=f"{field}.shape.blocks",
                got=f"{room} tokens",
                expected=f"{selection.token + selection.tokens} or more",
            )
    check(src, dst, selection)
    result = empty(dst) if out is None else out
    if not result.flags.writeable:
        raise InvalidArgument("the target must be writable", field="out", got="a read-only array")
    target = _buffer_bytes(result, dst, "out")
    src_blocks = np.arange(entries(src, selection)[1], dtype=np.int64)
    dst_blocks = np.arange(entries(dst, selection)[1], dtype=np.int64)
    here, there = packed(src), packed(dst)
    base = np.asarray([target.ctypes.data], np.int64)
    begin, end = entries(dst, selection)
    least = max(chunk_bytes(dst, selection, Chunk(selection.layer, 1, at, 1)) for at in (begin, end - 1))
    for chunk in split(dst, selection, max_bytes=max(ARENA, least)):
        planned = target_chunk(dst, dst_blocks, selection, chunk)
        arena = np.empty(planned.nbytes, np.uint8)
        for step in retile_steps(src, src_blocks, here, planned, dst_blocks):
            cpu.run_step(step, [source], arena, threads=threads)
        moved = direct(planned, there, 0)
        native.copy_segments(base, moved.region, moved.local, arena.ctypes.data, moved.remote, moved.nbytes)
    return result


def _buffer_bytes(array: NDArray[Any], layout: CompiledLayout, field: str) -> U8:
    """The array's bytes, without a copy."""
    if not array.flags.c_contiguous:
        raise InvalidArgument("an array must be C-contiguous", field=field, got=f"strides {array.strides}")
    if array.nbytes != nbytes(layout):
        raise InvalidArgument(
            f"the array is no cache of {layout.name}",
            field=field,
            got=f"{array.nbytes} bytes, {array.dtype} of shape {array.shape}",
            expected=f"{nbytes(layout)} bytes: {len(layout.buffer_bytes)} buffers of {layout.channels} channels",
        )
    return array.reshape(-1).view(np.uint8)
