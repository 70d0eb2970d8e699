"""Small floats, small integers, and blocks of them under one scale, in integer arithmetic; see `codecs` for the table.

OFP8 and MX name the formats, not every choice of a conversion to them.  Ours:

- Values round to nearest, ties to even, denormals of the format included.  The sign is kept, that of zero too.
- What is beyond the largest finite value saturates there.  Infinity stays infinity in `fp8_e5m2` and in
  `mxfp8_e5m2`, which have one, and saturates elsewhere.
- Any NaN becomes the positive NaN of the format (0x7f, 0x7e); of `int8` 0; in `mxfp4_e2m1`, which has none, it makes
  the whole group NaN by a scale of 0xff.  Every NaN of a format is read as 0x7fc00000.
- `int8` holds -127..127, or -128 if another wrote it; both zeros become 0.  Its values are whole numbers: what they
  are multiplied by is the layout's `[scale]`.

MX: 32 neighbouring elements share the scale 2^(S - 127), S the biased exponent of the largest finite magnitude
less the exponent of the format's largest power of two (8, 15, 2), and at least 0.  So that one element may saturate
by an eighth (a quarter in `mxfp4_e2m1`) of the group's largest.  A group of zeros has S = 0.
A value read that is beyond the largest fp32 is infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U32 = NDArray[np.uint32]
    I32 = NDArray[np.int32]

NAN = 0x7FC00000
INFINITY = 0x7F800000


@dataclass(frozen=True, slots=True)
class Format:
    """A float of `1 + exponent + mantissa` bits.

    largest      code of the largest finite value
    infinity     code of infinity, or None
    nan          code of the NaN that is written, or None; magnitudes beyond `largest` but infinity are NaN
    """

    exponent: int
    mantissa: int
    largest: int
    infinity: int | None
    nan: int | None

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """What the exponent field exceeds the exponent by."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def top(self) -> int:
        """Exponent of the largest power of two."""
        return (self.largest >> self.mantissa) - self.bias


E4M3FN = Format(4, 3, largest=0x7E, infinity=None, nan=0x7F)
E5M2 = Format(5, 2, largest=0x7B, infinity=0x7C, nan=0x7E)
E2M1 = Format(2, 1, largest=0x7, infinity=None, nan=None)

FORMATS = {
    "fp8_e4m3fn": E4M3FN,
    "fp8_e5m2": E5M2,
    "mxfp8_e4m3": E4M3FN,
    "mxfp8_e5m2": E5M2,
    "mxfp4_e2m1": E2M1,
}

MX_GROUP = 32


def encode_float(bits: U32, form: Format, lift: I32 | int = 0) -> U8:
    """Codes `uint8` of fp32 bits, each value first multiplied by 2^lift; same shape."""
    size = bits & np.uint32(0x7FFFFFFF)
    exponent, significand = _parts(size)
    exponent = exponent + lift
    least = 1 - form.bias
    # So many of the 24 bits fall away; from 25 on nothing but 0 is left, and 25 keeps the shift in range.
    drop = np.minimum(23 - form.mantissa + np.maximum(least - exponent, 0), 25).astype(np.uint32)
    kept = significand >> drop
    rest = significand & ((np.uint32(1) << drop) - np.uint32(1))
    half = np.uint32(1) << (drop - np.uint32(1))
    kept += ((rest > half) | ((rest == half) & ((kept & np.uint32(1)) == 1))).astype(np.uint32)
    # A normal significand brings its hidden 1 along, which adds one to the exponent's field.
    above = np.clip(exponent - least, 0, 1 << form.exponent).astype(np.uint32)
    code = np.minimum(np.where(kept > 0, (above << np.uint32(form.mantissa)) + kept, 0), form.largest)
    if form.infinity is not None:
        code = np.where(size == INFINITY, form.infinity, code)
    else:
        code = np.where(size == INFINITY, form.largest, code)
    code = code.astype(np.uint8) | ((bits >> np.uint32(31)) << np.uint32(form.bits - 1)).astype(np.uint8)
    if form.nan is None:
        return code
    found: U8 = np.where(size > INFINITY, np.uint8(form.nan), code)
    return found


@cache
def float_values(form: Format) -> U32:
    """fp32 bits by code, `uint32[2**bits]`."""
    values: U32 = mx_values(form)[127]
    return values


@cache
def mx_values(form: Format) -> U32:
    """fp32 bits by scale and code, `uint32[256, 2**bits]`."""
    half = 1 << (form.bits - 1)
    values = np.full((256, 2 * half), NAN, dtype=np.uint32)
    for scale in range(255):
        for code in range(half):
            if code == form.infinity:
                size = INFINITY
            elif code > form.largest:
                continue
            else:
                field, m = code >> form.mantissa, code & ((1 << form.mantissa) - 1)
                m |= (1 << form.mantissa) if field else 0
                size = scaled(m, max(field, 1) - form.bias - form.mantissa + scale - 127)
            values[scale, code] = size
            values[scale, half + code] = 1 << 31 | size
    values.setflags(write=False)
    return values


def encode_mx(bits: U32, form: Format) -> U8:
    """Pages `uint8[n, scales + codes]` of `uint32[n, elements]`."""
    n, elements = bits.shape
    group = bits.reshape(n, elements // MX_GROUP, MX_GROUP)
    size = group & np.uint32(0x7FFFFFFF)
    largest = np.where(size < INFINITY, size, np.uint32(0)).max(axis=2, keepdims=True)
    exponent, significand = _parts(largest)
    scale = np.where(significand > 0, np.maximum(exponent - form.top + 127, 0), 0).astype(np.int32)
    codes = encode_float(group, form, 127 - scale)
    if form.nan is None:
        scale = np.where((size > INFINITY).any(axis=2, keepdims=True), 255, scale)
    return np.concatenate(
        [scale.astype(np.uint8).reshape(n, -1), packed(codes.reshape(n, elements), form.bits)], axis=1
    )


def packed(codes: U8, bits: int) -> U8:
    """Codes as bytes: two to a byte where they have four bits, the even one in the low nibble."""
    return codes if bits == 8 else codes[:, 0::2] | codes[:, 1::2] << np.uint8(4)


def encode_int8(bits: U32) -> U8:
    """Codes of fp32 bits: the nearest whole number, ties to even, within -127..127."""
    size = bits & np.uint32(0x7FFFFFFF)
    exponent, significand = _parts(size)
    drop = np.clip(23 - exponent, 16, 25).astype(np.uint32)  # from 2^7 on it saturates anyway
    kept = significand >> drop
    rest = significand & ((np.uint32(1) << drop) - np.uint32(1))
    half = np.uint32(1) << (drop - np.uint32(1))
    kept += ((rest > half) | ((rest == half) & ((kept & np.uint32(1)) == 1))).astype(np.uint32)
    whole = np.where(exponent > 6, 127, np.minimum(kept, 127)).astype(np.int8)
    whole = np.where(size > INFINITY, np.int8(0), whole)
    return np.where(bits >> np.uint32(31) == 1, -whole, whole).astype(np.int8).view(np.uint8)


@cache
def int8_values() -> U32:
    """fp32 bits by code, `uint32[256]`."""
    values = np.asarray(
        [scaled(abs(c), 0) | (1 << 31 if c < 0 else 0) for c in [*range(128), *range(-128, 0)]]
    )
    found: U32 = values.astype(np.uint32)
    found.setflags(write=False)
    return found


def _parts(size: U32) -> tuple[I32, U32]:
    """(e, s) of finite magnitudes, which are s * 2^(e - 23) with s in [2^23, 2^24), or 0."""
    field = (size >> np.uint32(23)).astype(np.int32)
    significand = size & np.uint32(0x7FFFFF)
    # A denormal's leading 1 is found by converting it: fewer than 24 bits convert exactly.
    lead = (significand.astype(np.float32).view(np.uint32) >> np.uint32(23)).astype(np.int32) - 127
    low = np.where(significand > 0, lead, 23)
    shifted = significand << (23 - low).astype(np.uint32)
    exponent = np.where(field > 0, field - 127, low - 149)
    return exponent.astype(np.int32), np.where(field > 0, significand | np.uint32(0x800000), shifted)


def scaled(m: int, power: int) -> int:
    """fp32 bits of m * 2**power for 0 <= m < 2**24 and power >= -149, where that is exact; infinity beyond."""
    if m == 0:
        return 0
    top = m.bit_length() - 1
    exponent = top + power + 127
    if exponent >= 255:
        return INFINITY
    if exponent >= 1:
        return exponent << 23 | (m << (23 - top)) & 0x7FFFFF
    return m << (power + 149)
