"""Scales made anew: numbers that elements of eight bits are divided by when they are written.

A scale is `largest / Q` as binary32, to nearest even; then as its own type holds it, to nearest even.  What its type
would make infinite is its largest finite number, what it would make 0 its smallest above 0.  A group of zeros has
the scale 1.  `largest` is over finite magnitudes: infinities saturate and NaNs become the codec's own (0 in int8).
Values are divided by the scale as it is stored, as binary32.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from hawk.layouts.codecs import decode, encode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts.compiled import CodecInfo

    F32 = NDArray[np.float32]
    F64 = NDArray[np.float64]


@cache
def most(codec: CodecInfo) -> float:
    """The largest number of a codec of eight bits, its factor aside."""
    if codec.name == "int8":
        return 127.0
    values = decode(codec.name, np.arange(256, dtype=np.uint8)[None, :], 256).view(np.float32)
    return float(values[np.isfinite(values)].max())


def scales(largest: F64, elements: CodecInfo, kind: CodecInfo) -> F32:
    """The scales, as `kind` stores them, of groups whose largest finite magnitudes these are; same shape."""
    exact = np.where(largest > 0, largest / most(elements), 1.0).astype(np.float32)
    bits = encode(kind.name, np.ascontiguousarray(exact).reshape(1, -1).view(np.uint32))
    kept = decode(kind.name, bits, exact.size).view(np.float32).reshape(exact.shape)
    low, high = ends(kind.name)
    found: F32 = np.clip(kept, low, high)
    return found


def stored(kind: CodecInfo, value: float) -> float:
    """The number that `kind` makes of a scale."""
    bits = encode(kind.name, np.full((1, 1), value, np.float32).view(np.uint32))
    return float(decode(kind.name, bits, 1).view(np.float32)[0, 0])


@cache
def ends(name: str) -> tuple[np.float32, np.float32]:
    """The smallest number above 0 of a codec, and its largest finite one."""
    infinity = {"fp32": 0x7F800000, "bf16": 0x7F80, "fp16": 0x7C00}[name]
    width = 4 if name == "fp32" else 2
    raw = np.array([1, infinity - 1], f"<u{width}").view(np.uint8).reshape(1, -1)
    low, high = decode(name, raw, 2).view(np.float32)[0]
    return low, high


def largest(values: F32) -> F64:
    """Magnitudes, 0 for what is not finite; same shape."""
    size = np.abs(values)
    return np.where(np.isfinite(size), size, np.float32(0)).astype(np.float64)
