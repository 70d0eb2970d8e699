"""Compiled layouts written by hand, so that these tests rest on nothing but the seam."""

from __future__ import annotations

from hawk.layouts.compiled import CacheShape, CodecInfo, CompiledLayout, CompiledPiece, Digit

BF16 = CodecInfo("bf16", 16)
FP16 = CodecInfo("fp16", 16)
FP32 = CodecInfo("fp32", 32)
BFP8 = CodecInfo("bfp8_b", 8, 16, True)
BFP4 = CodecInfo("bfp4_b", 4, 16, True)
E4M3 = CodecInfo("fp8_e4m3fn", 8, 1, True)
E5M2 = CodecInfo("fp8_e5m2", 8, 1, True)
INT8 = CodecInfo("int8", 8, 1, True)
MXE4M3 = CodecInfo("mxfp8_e4m3", 8, 32, True)
MXE5M2 = CodecInfo("mxfp8_e5m2", 8, 32, True)
MXE2M1 = CodecInfo("mxfp4_e2m1", 4, 32, True)
CODECS = {c.name: c for c in (BF16, FP16, FP32, E4M3, E5M2, INT8, BFP8, BFP4)}
MX = {c.name: c for c in (MXE4M3, MXE5M2, MXE2M1)}
"""Their groups of 32 do not fit the tiles of 16 columns."""


def compiled(name, shape, codec, page, inside, *, buffers=(), channels=1, align=1):
    """`page` and `inside` are (axis, div, ext), most significant first; strides follow from the order."""

    def strides(digits):
        out, stride = [], 1
        for axis, div, ext in reversed(digits):
            out.append(Digit(axis, div, ext, stride))
            stride *= ext
        return tuple(reversed(out)), stride

    page_digits, pages = strides(page)
    inside_digits, elements = strides(inside)
    nbytes = codec.page_bytes(elements)
    piece = CompiledPiece(tuple(range(shape.kvs)), page_digits, inside_digits, elements, True)
    return CompiledLayout(
        name, shape, codec, buffers, (piece,), pages, nbytes, -(-nbytes // align) * align, channels
    )


def nhd(shape, codec=BF16):
    s = shape
    return compiled(
        "nhd",
        s,
        codec,
        [("layer", 1, s.layers), ("kv", 1, s.kvs), ("block", 1, s.blocks)],
        [("slot", 1, s.block_size), ("head", 1, s.heads), ("dim", 1, s.dim)],
    )


def hnd(shape, codec=BF16):
    s = shape
    return compiled(
        "hnd",
        s,
        codec,
        [("layer", 1, s.layers), ("kv", 1, s.kvs), ("block", 1, s.blocks)],
        [("head", 1, s.heads), ("slot", 1, s.block_size), ("dim", 1, s.dim)],
    )


def beside(shape, codec=BF16):
    """K and V of a token side by side in one page: either's rows leave gaps of their own length."""
    s = shape
    inside = [("head", 1, s.heads), ("slot", 1, s.block_size), ("kv", 1, s.kvs), ("dim", 1, s.dim)]
    return compiled("beside", s, codec, [("layer", 1, s.layers), ("block", 1, s.blocks)], inside)


def dim_major(shape, codec=BF16):
    """Dims outside, tokens innermost: rows vary along a contiguous run."""
    s = shape
    return compiled(
        "dim-major",
        s,
        codec,
        [("layer", 1, s.layers), ("kv", 1, s.kvs), ("block", 1, s.blocks)],
        [("head", 1, s.heads), ("dim", 1, s.dim), ("slot", 1, s.block_size)],
    )


def columns(shape, codec=BF16):
    """As `dim_major`, a page for each head: what follows each other in a request comes back to it."""
    s = shape
    page = [("layer", 1, s.layers), ("kv", 1, s.kvs), ("block", 1, s.blocks), ("head", 1, s.heads)]
    return compiled("columns", s, codec, page, [("dim", 1, s.dim), ("slot", 1, s.block_size)])


def head_fraction(shape, codec=BF16, lanes=16):
    """(head dim) cut into lanes: `block (head dim)/16 slot (head dim)%16`, heads and dims in the page."""
    s = shape
    return compiled(
        "nz",
        s,
        codec,
        [("layer", 1, s.layers), ("kv", 1, s.kvs), ("block", 1, s.blocks)],
        [
            ("head", 1, s.heads),
            ("dim", lanes, s.dim // lanes),
            ("slot", 1, s.block_size),
            ("dim", 1, lanes),
        ],
    )


def tiles(shape, codec=BF16, *, channels=1, align=64, tile=32, face=16, interleave=False):
    """`block head slot/32 dim/32 | slot%32/16 dim%32/16 slot%16 dim%16`, K's rotary interleave if asked."""
    s = shape
    up = lambda n, m: -(-n // m)  # noqa: E731
    page = [("block", 1, s.blocks), ("head", 1, s.heads), ("slot", tile, up(s.block_size, tile))]
    inside = [("slot", face, tile // face)]
    if interleave:
        half = s.dim // 2  # m = 2 * (dim % half) + dim // half
        page += [("dim", tile // 2, half // (tile // 2))]
        inside += [("dim", face // 2, tile // face), ("slot", 1, face)]
        inside += [("dim", 1, face // 2), ("dim", half, 2)]
    else:
        page += [("dim", tile, up(s.dim, tile))]
        inside += [("dim", face, tile // face), ("slot", 1, face), ("dim", 1, face)]
    return compiled("tiles", s, codec, page, inside, buffers=("layer", "kv"), channels=channels, align=align)


def shape_of(*, layers=1, heads=2, dim=64, block_size=32, blocks=4, kvs=2):
    return CacheShape(layers, heads, dim, block_size, blocks, kvs)
