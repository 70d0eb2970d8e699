"""OFP8, int8 and MX codecs against tables of their values, over all 16-bit inputs and every block exponent."""

import numpy as np
import pytest

from hawk.layouts.codecs import CODECS, decode, encode
from tests.reference import small_floats, tenstorrent

FP8 = ["fp8_e4m3fn", "fp8_e5m2"]
MX = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1"]
NAN = 0x7FC00000

BF16 = np.arange(65536, dtype=np.uint32) << np.uint32(16)
FP16 = decode("fp16", np.arange(65536, dtype="<u2").view(np.uint8)[None, :], 65536)[0]


def corners() -> np.ndarray:
    """fp32 bits: all bf16 words with low halves around every tie, denormals, and random ones."""
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    rng = np.random.default_rng(2)
    return np.concatenate(
        [(BF16[:, None] | low).ravel(), FP16, rng.integers(0, 2**32, 200_000, dtype=np.uint32)]
    )


def numbers(bits: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return np.ascontiguousarray(bits).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("codec", FP8)
def test_fp8_is_the_nearest_value(codec):
    bits = corners()
    got = encode(codec, bits[None, :])[0]
    assert np.array_equal(got, small_floats.codes(codec, numbers(bits)).astype(np.uint8))


@pytest.mark.parametrize("codec", FP8)
def test_every_fp8_code_reads_as_its_value_and_is_written_again(codec):
    codes = np.arange(256, dtype=np.uint8)[None, :]
    got, expected = decode(codec, codes, 256)[0], small_floats.values(codec)
    nan = np.isnan(expected)
    assert (got[nan] == NAN).all()
    assert np.array_equal(got[~nan], expected[~nan].astype(np.float32).view(np.uint32))
    assert np.array_equal(encode(codec, got[None, :])[0][~nan], codes[0][~nan])


@pytest.mark.parametrize(
    ("codec", "bits", "code"),
    [
        ("fp8_e4m3fn", 0x7F800000, 0x7E),
        ("fp8_e4m3fn", 0xFF800000, 0xFE),
        ("fp8_e4m3fn", 0xFFC00001, 0x7F),
        ("fp8_e4m3fn", 0x43E80000, 0x7E),  # 464, a tie that would be 512
        ("fp8_e4m3fn", 0x80000000, 0x80),
        ("fp8_e4m3fn", 0x3A800000, 0x00),  # 2^-10: a tie between 0 and the least denormal
        ("fp8_e4m3fn", 0x3A800001, 0x01),
        ("fp8_e4m3fn", 0xBA800000, 0x80),
        ("fp8_e5m2", 0x7F800000, 0x7C),
        ("fp8_e5m2", 0xFF800000, 0xFC),
        ("fp8_e5m2", 0x7F7FFFFF, 0x7B),
        ("fp8_e5m2", 0x7F800001, 0x7E),
        ("int8", 0x7F800000, 127),
        ("int8", 0xFF800000, 256 - 127),
        ("int8", 0x7FC00000, 0),
        ("int8", 0x3F000000, 0),  # 0.5
        ("int8", 0x3FC00000, 2),  # 1.5
        ("int8", 0xBFC00000, 256 - 2),
        ("int8", 0x42FE8000, 127),  # 127.25
        ("int8", 0xC3000000, 256 - 127),  # -128
        ("int8", 0x80000000, 0),
        ("int8", 0x00000001, 0),
    ],
)
def test_ends_ties_and_signs(codec, bits, code):
    assert encode(codec, np.array([[bits]], dtype=np.uint32))[0, 0] == code


def test_int8_is_the_nearest_whole_number():
    bits = corners()
    x = numbers(bits)
    expected = np.rint(np.clip(np.nan_to_num(x, nan=0.0, posinf=127, neginf=-127), -127, 127))
    assert np.array_equal(encode("int8", bits[None, :])[0].view(np.int8), expected.astype(np.int8))
    codes = np.arange(256, dtype=np.uint8)[None, :]
    values = decode("int8", codes, 256).view(np.float32)[0]
    assert values.tolist() == [*range(128), *range(-128, 0)]
    assert not np.signbit(values[0])


def blocks(exponent: int, size: int, inputs: np.ndarray) -> np.ndarray:
    """Groups of `size`: half of each are inputs of like exponents, half have this biased exponent."""
    tests = inputs.reshape(-1, size // 2)
    setter = np.full_like(tests, max(exponent << 23, 1 if exponent == 0 else 0))
    return np.stack([tests, setter], axis=2).reshape(len(tests), size).astype(np.uint32)


@pytest.mark.parametrize("inputs", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("codec", MX)
def test_every_input_in_blocks_of_every_exponent(codec, inputs):
    info = CODECS[codec]
    for exponent in range(255):
        groups = blocks(exponent, 32, inputs)
        scale, codes = small_floats.block(codec, numbers(groups))
        raw = encode(codec, groups)
        assert np.array_equal(raw[:, 0], scale), exponent
        body = raw[:, 1:]
        if info.bits == 4:
            body = np.stack([body & 15, body >> 4], axis=2).reshape(len(body), 32)
        known = scale != 255
        assert np.array_equal(body[known], codes[known]), exponent


@pytest.mark.parametrize("inputs", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("codec", ["bfp8_b", "bfp4_b"])
def test_every_input_under_every_shared_exponent(codec, inputs):
    """Against another account of block floating point, in floats."""
    for exponent in range(256):
        groups = blocks(exponent, 16, inputs).reshape(-1, 1024)
        assert np.array_equal(encode(codec, groups), tenstorrent.pack(groups, codec)), exponent


@pytest.mark.parametrize("codec", MX)
def test_every_code_under_every_scale_reads_as_its_value(codec):
    info, table = CODECS[codec], small_floats.values(codec)
    codes = np.arange(max(32, len(table)), dtype=np.int64) % len(table)
    packed = (codes if info.bits == 8 else codes[0::2] | codes[1::2] << 4).astype(np.uint8)
    for scale in range(256):
        raw = np.concatenate([np.full(len(codes) // 32, scale, np.uint8), packed])[None, :]
        got = decode(codec, raw, len(codes))[0]
        value = table[codes]
        nan = np.isnan(value) | (scale == 255)
        assert (got[nan] == NAN).all()
        with np.errstate(over="ignore"):
            expected = np.ldexp(value, scale - 127).astype(np.float32).view(np.uint32)
        assert np.array_equal(got[~nan], expected[~nan]), scale


def test_a_block_with_nan_and_infinity():
    values = np.zeros((1, 32), np.float32)
    values[0, :4] = [np.nan, np.inf, -np.inf, 3.0]
    bits = values.view(np.uint32)
    e4m3 = decode("mxfp8_e4m3", encode("mxfp8_e4m3", bits), 32).view(np.float32)[0]
    assert np.isnan(e4m3[0])
    assert e4m3[1:5].tolist() == [3.5, -3.5, 3.0, 0.0]  # 448 under the scale that 3 asks for
    e5m2 = decode("mxfp8_e5m2", encode("mxfp8_e5m2", bits), 32).view(np.float32)[0]
    assert e5m2[1:4].tolist() == [np.inf, -np.inf, 3.0]
    assert np.isnan(decode("mxfp4_e2m1", encode("mxfp4_e2m1", bits), 32).view(np.float32)).all()
    bits[0, 0] = 0
    e2m1 = decode("mxfp4_e2m1", encode("mxfp4_e2m1", bits), 32).view(np.float32)[0]
    assert e2m1[1:4].tolist() == [3.0, -3.0, 3.0]


def test_a_block_of_zeros_keeps_their_signs():
    bits = np.array([[0, 0x80000000] * 16], dtype=np.uint32)
    for codec in MX:
        raw = encode(codec, bits)
        assert raw[0, 0] == 0
        assert np.array_equal(decode(codec, raw, 32), bits)


@pytest.mark.parametrize("codec", MX)
def test_blocks_of_any_fp32(codec):
    """Random bits, NaN and infinity among them, denormals alone, and values around every tie of the format."""
    rng = np.random.default_rng(6)
    any_bits = rng.integers(0, 2**32, (4000, 32), dtype=np.uint32)
    signs = any_bits & np.uint32(0x80000000)
    low = signs | (any_bits & np.uint32(0x7FFFFF))
    near = signs | (rng.integers(100, 128, any_bits.shape).astype(np.uint32) << np.uint32(23))
    ties = near | (rng.integers(0, 64, any_bits.shape).astype(np.uint32) << np.uint32(17))
    ties += rng.integers(0, 3, any_bits.shape).astype(np.uint32) - np.uint32(1)
    high = any_bits | np.uint32(0x7F000000)
    for groups in (any_bits, low, low >> np.uint32(12), ties, high):
        scale, codes = small_floats.block(codec, numbers(groups))
        raw = encode(codec, groups)
        assert np.array_equal(raw[:, 0], scale)
        body = raw[:, 1:]
        if CODECS[codec].bits == 4:
            body = np.stack([body & 15, body >> 4], axis=2).reshape(len(body), 32)
        known = scale != 255
        assert np.array_equal(body[known], codes[known])
