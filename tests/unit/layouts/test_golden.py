"""Bytes that others wrote: ttnn's tiles, and the references in `tests/reference`."""

from pathlib import Path

import numpy as np
import pytest

from hawk.layouts import CacheShape, load
from hawk.layouts.codecs import decode
from tests.reference import tenstorrent, vllm_hnd, vllm_nhd
from tests.unit.layouts import placing

GOLDEN = Path(__file__).parents[2] / "data" / "ttnn_tiles.npz"


def golden_cases() -> list[tuple[str, str]]:
    with np.load(GOLDEN) as file:
        keys = [key.rsplit("|", 1) for key in file.files]
    return [(case, codec) for case, codec in keys if codec != "input"]


def test_the_golden_file_is_whole():
    cases = golden_cases()
    assert len({case for case, _ in cases}) == 28
    assert {codec for _, codec in cases} == {"fp32", "bf16", "bfp8_b", "bfp4_b"}


@pytest.mark.parametrize(("case", "codec"), golden_cases())
def test_tiles_equal_those_of_ttnn(case, codec):
    with np.load(GOLDEN) as file:
        values, expected = file[f"{case}|input"], file[f"{case}|{codec}"]
    blocks, heads, block_size, dim = values.shape
    shape = CacheShape(layers=1, heads=heads, dim=dim, block_size=block_size, blocks=blocks)
    layout = load("tenstorrent/kv-hf").compile(shape, codec=codec)
    got = placing.pages(layout, {0: values.view(np.uint32)})
    assert got.shape == (layout.pages, layout.page_bytes)
    assert np.array_equal(got.ravel(), expected)


@pytest.mark.parametrize(("case", "codec"), golden_cases())
def test_the_reference_equals_ttnn_too(case, codec):
    with np.load(GOLDEN) as file:
        values, expected = file[f"{case}|input"], file[f"{case}|{codec}"]
    pages = tenstorrent.pages(values.view(np.uint32), codec, False)
    assert np.array_equal(pages.ravel(), expected)
    again = tenstorrent.unpages(pages, codec, values.shape, False)
    assert np.array_equal(tenstorrent.tilise(again), decode(codec, pages, 1024))


def words(shape: CacheShape, seed: int) -> np.ndarray:
    """Every kind of bf16 word, infinities, NaNs, denormals and both zeros among them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 65536, (shape.blocks, shape.heads, shape.block_size, shape.dim), dtype=np.uint16)


def widened(bf16: np.ndarray) -> np.ndarray:
    return bf16.astype(np.uint32) << np.uint32(16)


@pytest.mark.parametrize("codec", ["bf16", "bfp8_b", "bfp4_b", "fp32"])
@pytest.mark.parametrize(
    ("block_size", "dim", "channels"),
    [(32, 128, 8), (64, 128, 8), (64, 64, 7), (40, 128, 12), (16, 64, 1), (32, 96, 3), (128, 256, 8)],
)
def test_tenstorrent_kv_equals_the_reference(block_size, dim, channels, codec):
    shape = CacheShape(layers=2, heads=2, dim=dim, block_size=block_size, blocks=3)
    layout = load("tenstorrent/kv").compile(shape, codec=codec, channels=channels)
    assert layout.buffer_count == 4
    for kv, interleave in ((0, True), (1, False)):
        k = words(shape, seed=kv)
        # A bf16 NaN that passes through fp32 becomes the canonical one: moving bits is not the codec's business.
        expected = tenstorrent.pages(widened(k), codec, interleave)
        got = placing.pages(layout, {kv: widened(k)})
        assert np.array_equal(got, expected)
        banks = tenstorrent.to_channels(expected, channels, layout.page_stride)
        assert [len(bank) for bank in banks] == [layout.channel_bytes] * channels
        page, inside = placing.positions(layout, kv)
        for block, head, slot, d in (
            (0, 0, 0, 0),
            (2, 1, block_size - 1, dim - 1),
            (1, 0, 7, dim // 2),
            (1, 1, 3, 5),
        ):
            buffer, channel, at, position = layout.locate(1, kv, head, block, slot, d)
            assert buffer == 2 + kv
            assert (channel, at) == tenstorrent.bank(
                int(page[block, head, slot, d]), channels, layout.page_stride
            )
            assert position == inside[block, head, slot, d]
            lies = decode(codec, banks[channel][None, at : at + layout.page_bytes], 1024)[0, position]
            assert lies == tenstorrent.unpages(expected, codec, k.shape, interleave)[block, head, slot, d]


def test_key_and_value_are_laid_differently():
    shape = CacheShape(layers=1, heads=1, dim=128, block_size=32, blocks=1)
    layout = load("tenstorrent/kv").compile(shape)
    x = widened(words(shape, seed=3))
    assert not np.array_equal(placing.pages(layout, {0: x}), placing.pages(layout, {1: x}))


@pytest.mark.parametrize(("name", "reference"), [("vllm/nhd", vllm_nhd), ("vllm/hnd", vllm_hnd)])
@pytest.mark.parametrize("block_size", [16, 40])
def test_vllm_equals_the_reference(name, reference, block_size):
    shape = CacheShape(layers=3, heads=4, dim=24, block_size=block_size, blocks=5)
    layout = load(name).compile(shape, codec="fp32")
    k, v = (
        np.random.default_rng(i).integers(0, 2**32, (5, 4, block_size, 24), dtype=np.uint32) for i in (0, 1)
    )
    assert (layout.buffer_count, layout.pages, layout.channels) == (3, 10, 1)
    assert layout.page_stride == layout.page_bytes
    got = placing.pages(layout, {0: k, 1: v}).ravel()
    assert np.array_equal(got, reference.buffer(k, v))
    again = reference.tensors(got, 5, 4, block_size, 24, np.uint32)
    assert np.array_equal(again[0], k)
    assert np.array_equal(again[1], v)


def test_contiguous_is_c_order():
    shape = CacheShape(layers=1, heads=3, dim=10, block_size=7, blocks=2)
    layout = load("contiguous/bhsd").compile(shape, codec="fp32")
    x = np.arange(2 * 3 * 7 * 10, dtype=np.uint32).reshape(2, 3, 7, 10)
    assert np.array_equal(placing.pages(layout, {1: x}).ravel(), x.ravel().view(np.uint8))
