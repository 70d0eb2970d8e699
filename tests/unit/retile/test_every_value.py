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


def in_order(codec):
    """Bytes of pages whose elements go through all codes, under exponents that do so too."""
    if codec.group == 1:
        words = np.arange(ELEMENTS, dtype=np.uint32)
        if codec.bits == 32:  # around what a half of the lower bits is
            return (words << 16 | np.resize([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], ELEMENTS)).astype("<u4")
        return words.astype(f"<u{codec.bits // 8}")
    codes = ELEMENTS // 8 * codec.bits
    exponents = np.arange(ELEMENTS // codec.group) * (codec.group << codec.bits // 8) // 256
    pages = np.arange(codes, dtype=np.uint8).reshape(8, -1)
    return np.concatenate([exponents.astype(np.uint8).reshape(8, -1), pages], axis=1)


def numbers(codec):
    """Ordinary ones, by groups of one size, with zeros and words of any kind strewn in; some groups are zero."""
    rng = np.random.default_rng(7)
    values = rng.standard_normal(ELEMENTS).astype(np.float32).reshape(-1, 16)
    values *= np.exp2(rng.integers(-12, 12, (len(values), 1))).astype(np.float32)
    values[::11] = 0
    bits = values.reshape(-1).view(np.uint32)
    strange = rng.random(ELEMENTS) < np.where(np.arange(ELEMENTS) % 4096 < 1024, 0.05, 0)
    bits[strange] = rng.integers(0, 1 << 32, int(strange.sum()), np.uint32)
    bits[rng.random(ELEMENTS) < 0.02] = 0x80000000
    return codecs.encode(codec, bits.reshape(8, -1))


def same(source, target, values):
    a, b = lay.nhd(SHAPE, source), lay.nhd(SHAPE, target)
    program = build_program(a, b, 0)
    table = list(range(8))
    pieces = slow.pieces_of(program, a, b, 0, 0, table, table, 0, 8 * 64)
    src, want = slow.buffers(a, 0), slow.buffers(b, 0xA5)
    pages = np.ascontiguousarray(values).view(np.uint8).reshape(8, -1)
    src[0].reshape(8, -1)[:, : pages.shape[1]] = pages
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
    scaled = [
        CodecInfo(n, 8, 1, True, float(np.float32(f))) for n in ("int8", "fp8_e4m3fn") for f in (0.0123, 48.0)
    ]
    for values in (in_order(source), numbers(source)):
        for target in (*CODECS.values(), *scaled):
            same(source, target, values)


@pytest.mark.skipif("c" not in CORES, reason="the C core is not built")
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3fn", "fp8_e5m2"])
def test_every_scaled_code(name):
    for factor in (0.0123, 48.0, 2.0**-7, 1e-30):
        source = CodecInfo(name, 8, 1, True, float(np.float32(factor)))
        for target in CODECS.values():
            same(source, target, in_order(source))
