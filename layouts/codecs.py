"""The codecs, defined in integer arithmetic: what the bytes of a page mean, and which bytes a value becomes.

Elements are exchanged as the bits of fp32 numbers (`uint32`), in page order.  The fast paths in `hawk.retile` are
tested against this module.  Moving elements between two pages of the same elementwise codec copies their bits
and does not pass through here, so NaN payloads live on there.

============  =========================================  =====================================================
codec       a page of `n` elements                       what becomes of an fp32 value
============  =========================================  =====================================================
`fp32`      n x 4 bytes, little-endian                   its bits
`bf16`      n x 2 bytes, little-endian                   nearest, ties to even; any NaN becomes 0x7fc0;
                                                         beyond the largest finite value: infinity
`fp16`      n x 2 bytes, little-endian (binary16)        nearest, ties to even, denormals included; any NaN
                                                         becomes 0x7e00; beyond the largest: infinity
`bfp8_b`    n/16 exponents, then n bytes sign|7 bits     see below
`bfp4_b`    n/16 exponents, then n/2 bytes of nibbles    see below; the even element is the low nibble
            sign|3 bits
`fp8_e4m3fn`  n bytes, OFP8 E4M3                         nearest even, beyond 448: 448; see `small`
`fp8_e5m2`    n bytes, OFP8 E5M2                         nearest even, beyond 57344: that; infinity stays
`int8`        n bytes, two's complement                  nearest whole number, even, within -127..127
`mxfp8_e4m3`  n/32 scales (E8M0), then n bytes           see `small`; the element is OFP8 E4M3
`mxfp8_e5m2`  n/32 scales (E8M0), then n bytes           see `small`; the element is OFP8 E5M2
`mxfp4_e2m1`  n/32 scales (E8M0), then n/2 bytes         see `small`; the even element is the low nibble
============  =========================================  =====================================================

A codec of 8 bits an element may have a `factor`, which is not stored: a value read is the product of the
element's and the factor, and a value is divided by it before it is written, each rounded to binary32 as IEEE 754 does.

Where the scales of an MX layout lie is not part of the MX specification: ours lie at the start of the page.

Block floating point, with M = 7 or 3 bits of magnitude: 16 neighbouring elements share E, the largest of their
biased exponents e (infinity and NaN count with 255).  The 24-bit significand with its hidden 1 is shifted right
by E - e, which truncates, then rounded to nearest, ties to even, to its M upper bits, and saturates at 2^M - 1.
e = 0 (zeros, denormals) gives 0.  The sign is cleared where the magnitude m is 0.  The value read back is
+-m * 2^(E - 127 - (M - 1)), exact in fp32, fp32 denormals included; where that is beyond the largest fp32
(E = 255 and m >= 2^(M-1)) it is infinity.  So infinity survives, NaN becomes infinity, and finite neighbours of
either keep their value on the coarse scale.  A magnitude of 0 with the sign set, which `encode` never writes but
other packers do, reads as -0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from hawk.errors import InvalidArgument, LayoutError
from hawk.layouts.compiled import CodecInfo
from hawk.layouts.small import (
    FORMATS,
    MX_GROUP,
    encode_float,
    encode_int8,
    encode_mx,
    float_values,
    int8_values,
    mx_values,
    packed,
    scaled,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U32 = NDArray[np.uint32]

CODECS: dict[str, CodecInfo] = {
    info.name: info
    for info in (
        CodecInfo("bf16", bits=16),
        CodecInfo("fp16", bits=16, lossy=True),
        CodecInfo("fp32", bits=32),
        CodecInfo("bfp8_b", bits=8, group=16, lossy=True),
        CodecInfo("bfp4_b", bits=4, group=16, lossy=True),
        CodecInfo("fp8_e4m3fn", bits=8, lossy=True),
        CodecInfo("fp8_e5m2", bits=8, lossy=True),
        CodecInfo("int8", bits=8, lossy=True),
        CodecInfo("mxfp8_e4m3", bits=8, group=MX_GROUP, lossy=True),
        CodecInfo("mxfp8_e5m2", bits=8, group=MX_GROUP, lossy=True),
        CodecInfo("mxfp4_e2m1", bits=4, group=MX_GROUP, lossy=True),
    )
}


@dataclass(frozen=True, slots=True)
class Bound:
    """`|decode(encode(x)) - x| <= max(relative * reference, absolute)` for every finite x that does not overflow.

    The reference is |x| where `of` is "element", the largest |x| of the group where it is "group".
    """

    relative: float
    absolute: float
    of: Literal["element", "group"]


def bound(codec: str) -> Bound:
    """The error bound of a round trip through `codec`.

    bf16 keeps 8 significant bits, fp16 11: half a unit in the last place, and half the spacing of their
    denormals.  Block floating point: a step is 2^(E-127-(M-1)) and the group's maximum is at least 2^(M-1) steps.
    Rounding costs half a step and the truncation before it less than 2^(M-24); saturation turns up to
    2^M steps into 2^M - 1, one part in 2^M.  Denormal fp32 values become 0: less than 2^-126.  MX: saturation costs
    less than the distance from the format's largest value to the next power of two, which is more than rounding does.
    """
    bounds = {
        "fp32": Bound(0.0, 0.0, "element"),
        "bf16": Bound(2.0**-8, 2.0**-134, "element"),
        "fp16": Bound(2.0**-11, 2.0**-25, "element"),
        "bfp8_b": Bound(2.0**-7 * (1 + 2.0**-16), 2.0**-126, "group"),
        "bfp4_b": Bound(2.0**-3 * (1 + 2.0**-20), 2.0**-126, "group"),
        "fp8_e4m3fn": Bound(2.0**-4, 2.0**-10, "element"),
        "fp8_e5m2": Bound(2.0**-3, 2.0**-17, "element"),
        "int8": Bound(0.0, 0.5, "element"),
        "mxfp8_e4m3": Bound(2.0**-3, 2.0**-137, "group"),
        "mxfp8_e5m2": Bound(2.0**-3, 2.0**-144, "group"),
        "mxfp4_e2m1": Bound(2.0**-2, 2.0**-129, "group"),
    }
    return bounds[_info(codec).name]


def encode(codec: str | CodecInfo, bits: U32) -> U8:
    """Pages `uint8[n, page_bytes]` for fp32 bits `uint32[n, elements]` in page order."""
    info = _info(codec)
    if bits.ndim != 2 or bits.dtype != np.uint32:
        raise InvalidArgument(
            "elements come as fp32 bits",
            field="bits",
            got=f"{bits.dtype}{list(bits.shape)}",
            expected="uint32[n, elements]",
        )
    n, elements = bits.shape
    _check(info, elements)
    if info.name == "fp32":
        return bits.astype("<u4").view(np.uint8).reshape(n, -1)
    if info.bits == 8 and info.group == 1:
        bits = _times(bits, info.factor, divide=True)
        return encode_int8(bits) if info.name == "int8" else encode_float(bits, FORMATS[info.name])
    if info.group == 1:
        words = _to_bf16(bits) if info.name == "bf16" else _to_fp16(bits)
        return words.astype("<u2").view(np.uint8).reshape(n, -1)
    return encode_mx(bits, FORMATS[info.name]) if info.name in FORMATS else _to_bfp(bits, info)


def decode(codec: str | CodecInfo, raw: U8, elements: int) -> U32:
    """The fp32 bits `uint32[n, elements]` of pages `uint8[n, page_bytes]`."""
    info = _info(codec)
    _check(info, elements)
    if raw.ndim != 2 or raw.dtype != np.uint8 or raw.shape[1] != info.page_bytes(elements):
        expected = f"uint8[n, {info.page_bytes(elements)}]"
        raise InvalidArgument(
            "pages of another size", field="raw", got=f"{raw.dtype}{list(raw.shape)}", expected=expected
        )
    raw = np.ascontiguousarray(raw)
    if info.name == "fp32":
        return raw.view("<u4").astype(np.uint32)
    if info.name == "bf16":
        return raw.view("<u2").astype(np.uint32) << np.uint32(16)
    if info.name == "fp16":
        table: U32 = _fp16_values()[raw.view("<u2")]
        return table
    if info.bits == 8 and info.group == 1:
        table = int8_values() if info.name == "int8" else float_values(FORMATS[info.name])
        return _times(table[raw], info.factor)
    header = info.header_bytes(elements)
    codes = raw[:, header:]
    if info.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(raw), elements)
    exponents = np.repeat(raw[:, :header], info.group, axis=1)
    tables = mx_values(FORMATS[info.name]) if info.name in FORMATS else _bfp_values(info.bits)
    values: U32 = tables[exponents, codes]
    return values


def transcode(source: str | CodecInfo, target: str | CodecInfo, raw: U8, elements: int) -> U8:
    """Pages of one codec as pages of another, elements in the same places; the same codec keeps its bytes."""
    if _info(source) == _info(target):
        return raw.copy()
    return encode(target, decode(source, raw, elements))


def _info(codec: str | CodecInfo) -> CodecInfo:
    name = codec if isinstance(codec, str) else codec.name
    if name not in CODECS:
        raise LayoutError("unknown codec", field="codec", got=name[:64], expected=", ".join(CODECS))
    return CODECS[name] if isinstance(codec, str) else codec


def _check(info: CodecInfo, elements: int) -> None:
    if elements < 1 or elements % info.group:
        raise InvalidArgument(
            "a page holds whole groups",
            field="elements",
            got=elements,
            expected=f"a multiple of {info.group}",
        )


def _times(bits: U32, factor: float, *, divide: bool = False) -> U32:
    if factor == 1.0:
        return bits
    by = np.float32(factor)
    with np.errstate(all="ignore"):
        values = np.ascontiguousarray(bits).view(np.float32)
        return (values / by if divide else values * by).view(np.uint32)


def _to_bf16(bits: U32) -> U32:
    # Adding half a unit less one, and one more where the last kept bit is odd, carries into the kept bits exactly
    # when the rest is above half, or half and odd; a carry out of the mantissa is the next exponent, up to infinity.
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, np.uint32(0x7FC0), rounded)


def _to_fp16(bits: U32) -> U32:
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    size = bits & np.uint32(0x7FFFFFFF)
    exponent = (size >> np.uint32(23)).astype(np.int32)
    significand = (size & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    # fp16 counts in units of 2^(e-10), of 2^-24 below 2^-14: so many bits of the significand fall away (the hidden
    # 1 is bit 23 of 2^(exponent-127)).  From 25 on nothing but 0 is left; 25 keeps the shift in range.
    drop = np.clip(126 - exponent, 13, 25).astype(np.uint32)
    kept = significand >> drop
    rest = significand & ((np.uint32(1) << drop) - np.uint32(1))
    half = np.uint32(1) << (drop - np.uint32(1))
    kept += ((rest > half) | ((rest == half) & ((kept & np.uint32(1)) == 1))).astype(np.uint32)
    # A normal significand brings its hidden 1 along, which adds one to the exponent field: hence 113, not 112.
    normal = exponent >= 113
    field = np.where(normal, (exponent - 113).astype(np.uint32) << np.uint32(10), np.uint32(0)) + kept
    field = np.where(exponent >= 143, np.uint32(0x7C00), np.minimum(field, np.uint32(0x7C00)))
    return np.where(size > np.uint32(0x7F800000), np.uint32(0x7E00), sign | field)


@cache
def _fp16_values() -> U32:
    values = np.empty(65536, dtype=np.uint32)
    for word in range(65536):
        exponent, mantissa = (word >> 10) & 31, word & 0x3FF
        if exponent == 31:
            size = 0x7F800000 | mantissa << 13
        else:
            # The value is m * 2^k with an integer m; denormals lack the hidden 1 and share the exponent of 1.
            size = scaled(mantissa | (0x400 if exponent else 0), max(exponent, 1) - 25)
        values[word] = (word >> 15) << 31 | size
    values.setflags(write=False)
    return values


def _to_bfp(bits: U32, info: CodecInfo) -> U8:
    n, elements = bits.shape
    magnitude_bits = info.bits - 1
    group = bits.reshape(n, elements // info.group, info.group)
    exponent = (group >> np.uint32(23)) & np.uint32(0xFF)
    shared = exponent.max(axis=2, keepdims=True)
    significand = np.where(exponent == 0, np.uint32(0), (group & np.uint32(0x7FFFFF)) | np.uint32(0x800000))
    # A shift of 24 or more leaves nothing; numpy does not define shifts of 32 and more.
    significand = significand >> np.minimum(shared - exponent, np.uint32(31))
    drop = np.uint32(24 - magnitude_bits)
    kept = significand >> drop
    rest = significand & ((np.uint32(1) << drop) - np.uint32(1))
    half = np.uint32(1) << (drop - np.uint32(1))
    kept += ((rest > half) | ((rest == half) & ((kept & np.uint32(1)) == 1))).astype(np.uint32)
    kept = np.minimum(kept, np.uint32((1 << magnitude_bits) - 1))
    sign = np.where(kept == 0, np.uint32(0), group >> np.uint32(31))
    codes = (sign << np.uint32(magnitude_bits) | kept).astype(np.uint8).reshape(n, elements)
    return np.concatenate([shared.astype(np.uint8).reshape(n, -1), packed(codes, info.bits)], axis=1)


@cache
def _bfp_values(bits: int) -> U32:
    """fp32 bits by shared exponent and code, `uint32[256, 2**bits]`."""
    magnitudes = 1 << (bits - 1)
    values = np.empty((256, 2 * magnitudes), dtype=np.uint32)
    for exponent in range(256):
        for m in range(magnitudes):
            size = scaled(m, exponent - 127 - (bits - 2))
            values[exponent, m] = size
            values[exponent, m + magnitudes] = 1 << 31 | size
    values.setflags(write=False)
    return values
