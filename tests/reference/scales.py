"""Scales of eight-bit elements, from the rule that the documentation states: loops over groups, Python's own numbers.

A cache is `[layers, kvs, blocks, heads, slots, dims]`; its scales are an array of the same axes, an axis of one scale
for all its indices having length 1 (blocks and slots for a whole cache, slots for a block), dims one for each group.
"""

from itertools import product

import numpy as np

from tests.reference import small_floats, tenstorrent

MOST = {"int8": 127.0, "fp8_e4m3fn": 448.0, "fp8_e5m2": 57344.0}


def spread(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A scale for every element of a cache of this shape."""
    return np.broadcast_to(np.repeat(scales, shape[5] // scales.shape[5], axis=5), shape)


def as_stored(value: float, kind: str) -> np.float32:
    """A scale above 0 as its type holds it."""
    single = np.float32(value)
    if kind == "fp32":
        return single if single > 0 else np.float32(2.0**-149)
    if kind == "bf16":
        word = int(tenstorrent.to_bf16(np.array([single.view(np.uint32)]))[0])
        return np.uint32(max(word, 1) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        half = np.float16(single)
    half = np.clip(half, np.float16(2.0**-24), np.float16(65504))
    return np.float32(half)


def codes(codec: str, values: np.ndarray) -> np.ndarray:
    """The numbers that eight bits hold, nearest to these, ties to even; NaN is 0 in int8."""
    if codec == "int8":
        whole = np.nan_to_num(np.clip(np.rint(values), -127, 127), nan=0.0).astype(np.float32)
        return whole + np.float32(0)  # there is no -0
    found = small_floats.codes(codec, values.astype(np.float64))
    return small_floats.values(codec)[found].astype(np.float32)


def made(
    values: np.ndarray, real: np.ndarray, box: tuple[int, ...], codec: str, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """(numbers of the elements, scales) of values, with scales of the shape `box`.

    real    which rows `[blocks, slots]` hold tokens of the request; others count for no scale and become 0, and a
            scale that covers none of them is 0
    """
    scales = np.zeros(box, np.float32)
    group = values.shape[5] // box[5]
    for index in product(*(range(n) for n in box)):
        window = tuple(
            slice(i, i + 1) if n > 1 else slice(None) for i, n in zip(index[:5], box[:5], strict=True)
        )
        part = values[(*window, slice(index[5] * group, (index[5] + 1) * group))]
        rows = real[window[2], window[4]]
        if not rows.any():
            continue
        sizes = [
            abs(float(x))
            for x in part[:, :, rows.any(axis=1)].transpose(2, 4, 0, 1, 3, 5)[rows[rows.any(axis=1)]].ravel()
        ]
        largest = max((x for x in sizes if np.isfinite(x)), default=0.0)
        scales[index] = as_stored(largest / MOST[codec], kind) if largest > 0 else 1.0
    with np.errstate(all="ignore"):
        found = codes(codec, values / spread(np.where(scales > 0, scales, 1), values.shape))
    return np.where(real[None, None, :, None, :, None], found, np.float32(0)), scales
