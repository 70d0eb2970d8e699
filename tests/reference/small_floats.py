"""Small floats and MX blocks, from the tables of OFP8 and of the OCP MX specification, by looking up the nearest value.

Values are Python floats (binary64), in which every number here and every midpoint between two of them is exact.
"""

import numpy as np

# Exponent bits, mantissa bits, largest finite value, whether the top exponent holds infinity and NaN.
FORMATS = {
    "fp8_e4m3fn": (4, 3, 448.0, False),
    "fp8_e5m2": (5, 2, 57344.0, True),
    "mxfp8_e4m3": (4, 3, 448.0, False),
    "mxfp8_e5m2": (5, 2, 57344.0, True),
    "mxfp4_e2m1": (2, 1, 6.0, False),
}
LARGEST_POWER = {"mxfp8_e4m3": 8, "mxfp8_e5m2": 15, "mxfp4_e2m1": 2}


def magnitudes(name: str) -> np.ndarray:
    """The finite magnitudes in ascending order; the index of each is its code."""
    exponent_bits, mantissa_bits, largest, _ = FORMATS[name]
    bias, found = 2 ** (exponent_bits - 1) - 1, []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            fraction = mantissa / 2**mantissa_bits
            value = (
                fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
            )
            if value <= largest:
                found.append(value)
    return np.array(found)


def nearest(name: str, x: np.ndarray) -> np.ndarray:
    """Codes of finite numbers: the nearest magnitude, of two equally near ones that with the even code."""
    table = magnitudes(name)
    middle = (table[1:] + table[:-1]) / 2
    size = np.abs(x)
    low, high = np.searchsorted(middle, size, side="left"), np.searchsorted(middle, size, side="right")
    # On a midpoint the two differ by one: below it and above it.
    code = np.where(low % 2 == 0, low, high)
    sign = np.signbit(x).astype(np.int64) << (FORMATS[name][0] + FORMATS[name][1])
    return code | sign


def codes(name: str, x: np.ndarray) -> np.ndarray:
    """Codes of any numbers."""
    exponent_bits, mantissa_bits, largest, has_infinity = FORMATS[name]
    finite = np.where(np.isfinite(x), x, np.copysign(largest, x))
    found = nearest(name, finite)
    top = (2**exponent_bits - 1) << mantissa_bits
    if has_infinity:
        sign = np.signbit(x).astype(np.int64) << (exponent_bits + mantissa_bits)
        found = np.where(np.isinf(x), top | sign, found)
        return np.where(np.isnan(x), top | 2, found)
    if name == "mxfp4_e2m1":
        return found
    return np.where(np.isnan(x), top | 7, found)


def block(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scales, codes) of groups `[n, 32]`; codes of a group that is NaN mean nothing."""
    size = np.where(np.isfinite(x), np.abs(x), 0.0)
    _, exponent = np.frexp(size.max(axis=1))  # 2^(exponent - 1) <= max
    scale = np.where(size.max(axis=1) > 0, np.maximum(exponent - 1 - LARGEST_POWER[name], -127), -127)
    found = codes(name, np.ldexp(x, -scale[:, None]))
    if name == "mxfp4_e2m1":
        scale = np.where(np.isnan(x).any(axis=1), 128, scale)
    return scale + 127, found


def values(name: str) -> np.ndarray:
    """What every code means."""
    exponent_bits, mantissa_bits, _, has_infinity = FORMATS[name]
    half = 2 ** (exponent_bits + mantissa_bits)
    found = np.full(half, np.nan)
    table = magnitudes(name)
    found[: len(table)] = table
    if has_infinity:
        found[len(table)] = np.inf
    return np.concatenate([found, -found])
