"""The codecs against scalar arithmetic on whole numbers and fractions, and against Python's own floats."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from hawk.errors import InvalidArgument, LayoutError
from hawk.layouts.codecs import CODECS, bound, decode, encode, transcode

LARGEST = {"fp8_e4m3fn": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
"""What saturates is beyond the bounds; blocks have no such number."""

MAGNITUDE = {"bfp8_b": 7, "bfp4_b": 3}
ALL_BF16 = np.arange(65536, dtype=np.uint32) << np.uint32(16)


def oracle_bfp(bits: int, shared: int, m: int) -> int:
    """sign|magnitude of one element of a group with this shared exponent."""
    sign, e, mantissa = bits >> 31, bits >> 23 & 255, bits & 0x7FFFFF
    if e == 0:
        return 0
    units = (mantissa + 2**23) // 2 ** (shared - e)  # truncated to units of 2^(shared - 150)
    magnitude = min(round(Fraction(units, 2 ** (24 - m))), 2**m - 1)  # Fraction rounds halves to even
    return magnitude + (sign << m if magnitude else 0)


def oracle_value(code: int, shared: int, m: int) -> int:
    """fp32 bits of an element read back."""
    exact = Fraction(code % 2**m) * Fraction(2) ** (shared - 127 - (m - 1))
    bits = (
        struct.unpack("<I", struct.pack("<f", float(exact)))[0] if exact < Fraction(2) ** 128 else 0x7F800000
    )
    return bits | code >> m << 31


@pytest.mark.parametrize("shared", [0, 1, 2, 24, 100, 127, 128, 200, 253, 254, 255])
@pytest.mark.parametrize("codec", ["bfp8_b", "bfp4_b"])
def test_every_bf16_value_in_blocks_of_this_exponent(codec, shared):
    m = MAGNITUDE[codec]
    groups = np.full((65536, 16), shared << 23, dtype=np.uint32)
    at = np.arange(65536) % 16
    groups[np.arange(65536), at] = ALL_BF16
    raw = encode(codec, groups)
    exponents = np.maximum((ALL_BF16 >> 23) & 255, shared)
    assert np.array_equal(raw[:, 0], exponents)
    codes = (
        raw[:, 1:]
        if codec == "bfp8_b"
        else np.stack([raw[:, 1:] & 15, raw[:, 1:] >> 4], axis=2).reshape(-1, 16)
    )
    got = codes[np.arange(65536), at].tolist()
    expected = [oracle_bfp(int(b), int(e), m) for b, e in zip(ALL_BF16, exponents, strict=True)]
    assert got == expected


@pytest.mark.parametrize("codec", ["bfp8_b", "bfp4_b"])
def test_every_code_under_every_exponent_reads_as_its_value(codec):
    m = MAGNITUDE[codec]
    codes = np.arange(2 ** (m + 1), dtype=np.uint8).reshape(-1, 16)
    for shared in range(256):
        packed = codes if codec == "bfp8_b" else codes[:, 0::2] | codes[:, 1::2] << 4
        raw = np.concatenate([np.full((len(codes), 1), shared, dtype=np.uint8), packed], axis=1)
        got = decode(codec, raw, 16).ravel().tolist()
        assert got == [oracle_value(code, shared, m) for code in range(2 ** (m + 1))]


def fp32_corners() -> np.ndarray:
    """All bf16 words with low halves around every tie, and numbers around what fp16 can hold."""
    low = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return (ALL_BF16[:, None] | low).ravel()


def test_bf16_rounds_to_nearest_even():
    bits = fp32_corners()
    got = encode("bf16", bits[None, :]).view("<u2").ravel()
    size = bits & np.uint32(0x7FFFFFFF)
    nan = size > 0x7F800000
    assert (got[nan] == 0x7FC0).all()
    quotient, rest = np.divmod(size[~nan].astype(np.int64), 65536)
    expected = (
        quotient + ((rest > 32768) | ((rest == 32768) & (quotient % 2 == 1))) + (bits[~nan] >> 31 << 15)
    )
    assert np.array_equal(got[~nan], expected)
    assert encode("bf16", np.array([[0x7F7FFFFF]], dtype=np.uint32)).view("<u2")[0, 0] == 0x7F80


def test_fp16_equals_pythons_half():
    bits = np.concatenate(
        [fp32_corners()[::3], np.random.default_rng(1).integers(0, 2**32, 50000, dtype=np.uint32)]
    )
    # Where fp16 has denormals and its largest values, densely.
    for e in (*range(100, 116), 141, 142, 143):
        dense = (
            np.uint32(e << 23)
            + (np.arange(4096, dtype=np.uint32) << np.uint32(11))
            + np.array([[0], [1], [2047]], dtype=np.uint32)
        ).ravel()
        bits = np.concatenate([bits, dense, dense | np.uint32(1 << 31)])
    got = encode("fp16", bits[None, :]).view("<u2").ravel().tolist()
    for b, word in zip(bits.tolist(), got, strict=True):
        value = struct.unpack("<f", struct.pack("<I", b))[0]
        if math.isnan(value):
            expected = 0x7E00
        else:
            try:
                expected = struct.unpack("<H", struct.pack("<e", value))[0]
            except OverflowError:
                expected = 0xFC00 if value < 0 else 0x7C00
        assert word == expected, hex(b)


def test_fp16_and_bf16_read_exactly():
    words = np.arange(65536, dtype=np.uint16)
    raw = words.astype("<u2").view(np.uint8)[None, :]
    assert np.array_equal(decode("bf16", raw, 65536)[0], ALL_BF16)
    got = decode("fp16", raw, 65536)[0]
    for word, bits in zip(words.tolist(), got.tolist(), strict=True):
        value = struct.unpack("<e", struct.pack("<H", word))[0]
        if math.isnan(value):
            assert bits == (word >> 15) << 31 | 0x7F800000 | (word & 0x3FF) << 13
        else:
            assert bits == struct.unpack("<I", struct.pack("<f", value))[0]


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
def test_a_round_trip_keeps_every_word_but_nans(codec):
    raw = np.arange(65536, dtype="<u2").view(np.uint8)[None, :]
    again = encode(codec, decode(codec, raw, 65536)).view("<u2")[0]
    exponent = 0x7F80 if codec == "bf16" else 0x7C00
    words = np.arange(65536)
    nan = (words & 0x7FFF) > exponent
    assert np.array_equal(again[~nan], words[~nan])
    assert (again[nan] == (0x7FC0 if codec == "bf16" else 0x7E00)).all()
    assert np.array_equal(transcode(codec, codec, raw, 65536), raw)


def test_fp32_keeps_every_bit():
    bits = np.array([[0, 1, 0x80000000, 0x7F800001, 0xFFFFFFFF, 0x12345678]], dtype=np.uint32)
    raw = encode("fp32", bits)
    assert raw[0, -4:].tolist() == [0x78, 0x56, 0x34, 0x12]
    assert np.array_equal(decode("fp32", raw, 6), bits)


@pytest.mark.parametrize("codec", list(CODECS))
def test_errors_stay_within_the_bound_and_come_near_it(codec):
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 2**32, (4000, 64), dtype=np.uint32)
    near = (rng.integers(118, 129, (4000, 64)) << 23).astype(np.uint32) | (bits & np.uint32(0x807FFFFF))
    low = (rng.integers(0, 3, (1000, 64)) << 23).astype(np.uint32) | (bits[:1000] & np.uint32(0x807FFFFF))
    worst = 0.0
    limit = bound(codec)
    for sample in (bits, near, low):
        with np.errstate(invalid="ignore"):  # signalling NaNs
            x = sample.view(np.float32).astype(np.float64)
            y = decode(codec, encode(codec, sample), 64).view(np.float32).astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(y) & (np.abs(x) <= LARGEST.get(codec, np.inf))
        x, y = np.where(finite, x, 0), np.where(finite, y, 0)
        size = np.abs(x)
        if limit.of == "group":
            # A group with an infinity or a NaN has no finite maximum to measure by.
            n = CODECS[codec].group
            group = finite.reshape(-1, n).all(axis=1).repeat(n).reshape(x.shape)
            x, y = np.where(group, x, 0), np.where(group, y, 0)
            size = np.abs(x).reshape(-1, n).max(axis=1).repeat(n).reshape(x.shape)
        error = np.abs(x - y)
        allowed = np.maximum(limit.relative * size, limit.absolute)
        assert (error <= allowed).all()
        worst = max(worst, float((error / np.where(allowed > 0, allowed, 1)).max()))
    assert worst > 0.9 or codec == "fp32"


def test_infinity_survives_and_nan_becomes_infinity_in_a_block():
    values = np.array([[np.inf, -np.inf, np.nan, 3e38, -1.0, 0.0, *[1.0] * 10]], dtype=np.float32)
    got = decode("bfp8_b", encode("bfp8_b", values.view(np.uint32)), 16).view(np.float32)[0]
    assert got[:3].tolist() == [np.inf, -np.inf, np.inf]
    assert abs(got[3] - 3e38) < 3e38 / 32
    assert got[4:].tolist() == [0.0] * 12
    assert not np.signbit(got[4])


def test_sizes_are_checked():
    with pytest.raises(LayoutError, match="unknown codec"):
        encode("bfp2", np.zeros((1, 16), dtype=np.uint32))
    with pytest.raises(InvalidArgument, match="multiple of 16"):
        encode("bfp8_b", np.zeros((1, 24), dtype=np.uint32))
    with pytest.raises(InvalidArgument, match="fp32 bits"):
        encode("bf16", np.zeros((1, 16), dtype=np.float32))
    with pytest.raises(InvalidArgument, match="another size"):
        decode("bfp8_b", np.zeros((1, 16), dtype=np.uint8), 16)
    with pytest.raises(InvalidArgument, match="multiple of 16"):
        decode("bfp8_b", np.zeros((1, 9), dtype=np.uint8), 8)
