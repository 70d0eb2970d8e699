"""Segments past the caches: four alike at a time, long ones four pages at a time, and whatever is neither."""

import numpy as np
import pytest

from hawk.retile import native

CORES = ["c", "numpy"] if native.available() else ["numpy"]
CANARY = 0xC3


def aligned(nbytes: int) -> np.ndarray:
    """`uint8[nbytes]` that begins on a line, with room before and behind that a test can look at."""
    raw = np.full(nbytes + 256, CANARY, np.uint8)
    start = -raw.ctypes.data % 64 + 64
    return raw[start : start + nbytes]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "lengths",
    [
        [2048] * 4099,
        [2048, 2048, 2048, 2048, 4096, 2048, 2048, 2112, 2048, 320, 320, 320, 320, 100] * 400,
        [65536] * 83,
        [(5 << 20) + 4097, 16384, 200_001, 262_144, 64, (1 << 20)],
        [(16 << 20) - 64],
    ],
    ids=["alike", "mixed", "largest short", "long", "one"],
)
def test_every_byte_arrives_and_no_other_changes(core: str, lengths: list[int], shift: int) -> None:
    rng = np.random.default_rng(len(lengths))
    nbytes = np.asarray(lengths, np.int64)
    step = -(-nbytes // 64) * 64 + 64
    local = np.cumsum(step) - step + shift
    source = rng.integers(0, 256, int(nbytes.sum()), np.uint8)
    remote = np.cumsum(nbytes) - nbytes
    regions = [aligned(int(step.sum()) + 64) for _ in range(3)]
    region = (np.arange(len(lengths)) % 3).astype(np.int32)
    want = [r.copy() for r in regions]
    for r, at, s, n in zip(region, local, remote, nbytes, strict=True):
        want[r][at : at + n] = source[s : s + n]
    bases = np.array([r.ctypes.data for r in regions], np.int64)
    with native.using(core):
        native.copy_segments(bases, region, local, source.ctypes.data, remote, nbytes)
    assert all(np.array_equal(got, right) for got, right in zip(regions, want, strict=True))
