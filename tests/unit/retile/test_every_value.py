"""Every codec into every other by the kernels of every instruction set, against the numpy core.

Every word of sixteen bits, every code under every exponent, ties, denormals, what is not finite, and ordinary numbers.
"""

from __future__ import annotations

import numpy as np
import pytest

from hawk.layouts import codecs
from hawk.layouts.compiled import CodecInfo
from hawk.retile import native
from hawk.retile.build import build_program
from tests.unit.retile import layouts as lay
from tests.unit.retile import slow
from tests.unit.retile.test_cores import CORES, at_level, levels, move

SHAPE = lay.shape_of(heads=2, dim=64, block_size=64, blocks=8, kvs=1)
ELEMENTS = 1 << 16
CODECS = {**lay.CODECS, **lay.MX}


def in_order(codec, pages=8):
    """Bytes of pages whose elements go through all codes, under exponents that do so too."""
    if codec.group == 1:
        words = np.arange(ELEMENTS, dtype=np.uint32)
        if codec.bits == 32:  # around what a half of the lower bits is
            return (words << 16 | np.resize([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ELEMENTS)).astype("<u4")
        return words.astype(f"<u{codec.bits // 8}")
    codes = ELEMENTS // 8 * codec.bits // pages
    exponents = np.arange(ELEMENTS // codec.group) * (codec.group << codec.bits // 8) // 256
    codes = np.arange(codes * pages, dtype=np.uint8).reshape(pages, -1)
    return np.concatenate([exponents.astype(np.uint8).reshape(pages, -1), codes], axis=1)


def numbers(codec, pages=8):
    """Ordinary ones, by groups of one size, with zeros and words of any kind strewn in; some groups are zero."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal(ELEMENTS).astype(np.float32).reshape(-1, 16)
    values *= np.exp2(rng.integers(-12, 12, (len(values), 1))).astype(np.float32)
    values[::11] = 0
    bits = values.reshape(-1).view(np.uint32)
    strange = rng.random(ELEMENTS) < np.where(np.arange(ELEMENTS) % 4096 < 1024, 0.05, 0)
    bits[strange] = rng.integers(0, 1 << 32, int(strange.sum()), np.uint32)
    bits[rng.random(ELEMENTS) < 0.02] = 0x80000000
    return codecs.encode(codec, bits.reshape(pages, -1))


def same(source, target, values):
    compare(lay.nhd(SHAPE, source), lay.nhd(SHAPE, target), values(source))


def compare(a, b, values):
    program = build_program(a, b, 0)
    table = list(range(8))
    pieces = slow.pieces_of(program, a, b, 0, 0, table, table, 0, 8 * 64)
    src, want = slow.buffers(a, 0), slow.buffers(b, 0xA5)
    values = np.ascontiguousarray(values).view(np.uint8)
    pages = src[0].reshape(-1, a.page_stride)
    pages[:, : a.page_bytes] = values.reshape(len(pages), -1)
    move("numpy", program, pieces, src, want)
    for level in levels():
        with at_level(level):
            got = slow.buffers(b, 0xA5)
            move("c", program, pieces, src, got)
            assert np.array_equal(got[0], want[0]), f"{level}, byte {np.flatnonzero(got[0] != want[0])[:8]}"


@pytest.mark.skipif("c" not in CORES, reason="the C core is not built")
@pytest.mark.parametrize("source", CODECS.values(), ids=CODECS)
def test_every_value(source):
    assert native.available()
    names = ("int8", "fp8_e4m3fn", "fp8_e5m2")
    scaled = [CodecInfo(n, 8, 1, True, float(np.float32(f))) for n in names for f in (0.0123, 48.0, 2.0**-7)]
    for values in (in_order, numbers):
        for target in (*CODECS.values(), *scaled):
            same(source, target, values)


@pytest.mark.skipif("c" not in CORES, reason="the C core is not built")
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3fn", "fp8_e5m2"])
def test_every_scaled_code(name):
    for factor in (0.0123, 48.0, 2.0**-7, 1e-30):
        source = CodecInfo(name, 8, 1, True, float(np.float32(factor)))
        for target in CODECS.values():
            same(source, target, in_order)


@pytest.mark.skipif("c" not in CORES, reason="the C core is not built")
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("block", [lay.BFP8, lay.BFP4], ids=["bfp8_b", "bfp4_b"])
def test_groups_where_they_lie(block, interleave):
    """Groups that are read from runs of a token, or from two halves of them, and written there."""
    tiles = lay.tiles(SHAPE, block, interleave=interleave)
    for other in lay.CODECS.values():
        rows = lay.nhd(SHAPE, other)
        for values in (in_order, numbers):
            compare(rows, tiles, values(other))
            compare(tiles, rows, values(block, 64))


@pytest.mark.skipif("c" not in CORES, reason="the C core is not built")
@pytest.mark.parametrize("block", [lay.BFP8, lay.BFP4], ids=["bfp8_b", "bfp4_b"])
def test_parts_of_groups(block):
    """Every other element of a group: of two halves of a head that lie in pages of their own."""
    s = SHAPE
    page = [("block", 1, s.blocks), ("head", 1, s.heads), ("dim", 32, 2)]
    halves = lay.compiled(
        "halves", s, lay.BF16, page, [("slot", 1, s.block_size), ("dim", 1, 32)], buffers=("layer", "kv")
    )
    tiles = lay.tiles(s, block, interleave=True)
    for values in (in_order, numbers):
        compare(tiles, halves, values(block, 64))
