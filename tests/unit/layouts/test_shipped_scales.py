"""Shipped layouts with scales, or parts, of their own, against packing written from public descriptions."""

import numpy as np

from hawk import convert
from hawk.layouts import CacheShape, load
from tests.reference import engines, scales

LATENT = CacheShape(layers=2, heads=1, dim=128, block_size=16, blocks=3, kvs=1)


def numbers(shape: CacheShape, seed: int = 0) -> np.ndarray:
    """Ordinary numbers that bf16 holds, `float32[layers, kvs, blocks, heads, block_size, dim]`."""
    extents = [shape.extent(axis) for axis in ("layer", "kv", "block", "head", "slot", "dim")]
    x = np.random.default_rng(seed).standard_normal(extents).astype(np.float32)
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def words(x: np.ndarray) -> np.ndarray:
    """The bf16 form of such numbers."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def test_keys_of_the_indexer():
    x = numbers(LATENT)
    rows = load("vllm/mla").compile(LATENT)
    packed = load("vllm/mla-indexer").compile(LATENT)
    got = convert.convert(words(x), rows, packed)
    every = np.ones((3, 16), bool)
    elements, beside = scales.made(x, every, (2, 1, 3, 1, 16, 1), "fp8_e4m3fn", "fp32")
    assert np.array_equal(got.reshape(2, 3, -1), engines.indexer(elements, beside))
    # And back: what the elements mean.
    wide = load("contiguous/bhsd").compile(LATENT, codec="fp32")
    back = convert.convert(got, packed, wide).view(np.float32).reshape(x.shape)
    assert np.array_equal(back, elements * beside)


def test_scales_of_a_layer():
    shape = CacheShape(layers=3, heads=2, dim=32, block_size=8, blocks=4)
    mine = load("vllm/nhd-fp8").compile(shape)
    assert mine.buffer_bytes == (2 * 4 * 8 * 2 * 32,) * 3 + (4,) * 6
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 0x7F, (3, 2, 4, 8, 2, 32)).astype(np.uint8)
    held = rng.random((3, 2)).astype(np.float32)
    array = np.concatenate([codes.reshape(-1), held.reshape(-1).view(np.uint8)])
    wide = load("vllm/nhd").compile(shape, codec="fp32")
    got = convert.convert(array, mine, wide).view(np.float32).reshape(codes.shape)
    want = (
        scales.small_floats.values("fp8_e4m3fn").astype(np.float32)[codes]
        * held[:, :, None, None, None, None]
    )
    assert np.array_equal(got, want)
    # Between two such caches nothing changes.
    hnd = load("vllm/nhd-fp8").compile(shape)
    assert np.array_equal(convert.convert(array, mine, hnd).reshape(-1), array)
