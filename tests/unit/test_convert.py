"""Arrays from one layout into another, against numpy's own reshaping, with both cores."""

from __future__ import annotations

import numpy as np
import pytest

from hawk import convert as c
from hawk.errors import InvalidArgument, LayoutError, Unmappable
from hawk.layouts import Layout, load
from hawk.plan.check import check
from hawk.plan.types import Selection
from hawk.retile import native

CORES = ["numpy", *(["c"] if native.available() else [])]
RNG = np.random.default_rng(3)


def halves(*shape):
    """bf16 of ordinary numbers, as bits."""
    return (RNG.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.fixture(params=CORES, autouse=True)
def _core(request):
    with native.using(request.param):
        yield


def test_one_gpu_layout_into_another():
    array = halves(3, 2, 5, 16, 4, 24)
    src = c.compile_for(array, "vllm/nhd")
    assert (src.shape.layers, src.shape.blocks, src.shape.block_size, src.shape.heads) == (3, 5, 16, 4)
    dst = c.retarget(src, "vllm/hnd")
    out = c.convert(array, src, dst, out=c.empty(dst, load("vllm/hnd")))
    np.testing.assert_array_equal(out, array.transpose(0, 1, 2, 4, 3, 5))


def tiles(matrix):
    """32 x 32 tiles of four 16 x 16 faces, row-major throughout."""
    rows, columns = matrix.shape
    cut = matrix.reshape(rows // 32, 2, 16, columns // 32, 2, 16)
    return cut.transpose(0, 3, 1, 4, 2, 5).reshape(-1, 1024)


def test_a_plain_tensor_there_and_back_over_seven_banks():
    weights = halves(96, 160)
    shape = c.tensor_shape(weights.shape)
    src = load("contiguous/bhsd").compile(shape)
    dst = load("tenstorrent/kv-hf").compile(shape, channels=7)
    out = c.convert(weights, src, dst)
    assert out.shape == (1, 7, dst.channel_bytes)
    for number, tile in enumerate(tiles(weights)):
        at = number // 7 * 2048
        np.testing.assert_array_equal(out[0, number % 7, at : at + 2048].view(np.uint16), tile)
    back = c.convert(out, dst, src)
    np.testing.assert_array_equal(back.view(np.uint16).reshape(96, 160), weights)


def test_a_batch_is_heads():
    x = RNG.standard_normal((2, 3, 40, 33)).astype(np.float32)
    shape = c.tensor_shape(x.shape)
    src = load("contiguous/bhsd").compile(shape, codec=c.codec_for(x.dtype, "contiguous/bhsd"))
    dst = load("tenstorrent/kv-hf").compile(shape, codec="fp32", channels=1)
    out = c.convert(x, src, dst)
    padded = np.zeros((6, 64, 64), np.float32)
    padded[:, :40, :33] = x.reshape(6, 40, 33)
    want = np.concatenate([tiles(m) for m in padded])
    np.testing.assert_array_equal(out.view(np.float32).reshape(-1, 1024), want)
    np.testing.assert_array_equal(c.convert(out, dst, src).view(np.float32).reshape(x.shape), x)


def test_blocks_of_another_size_and_a_part():
    array = halves(1, 2, 6, 16, 2, 32)
    src = c.compile_for(array, "vllm/nhd")
    dst = c.retarget(src, "vllm/nhd", block_size=40)
    assert dst.shape.blocks == 3
    whole = c.convert(array, src, dst, out=c.empty(dst, load("vllm/nhd")))
    tokens = array.reshape(1, 2, 96, 2, 32)
    np.testing.assert_array_equal(whole.reshape(1, 2, 120, 2, 32)[:, :, :96], tokens)
    assert not whole.reshape(1, 2, 120, 2, 32)[:, :, 96:].any()
    some = np.full_like(whole, 0x7FC1)
    c.convert(array, src, dst, selection=Selection(0, 1, 50, 10, (), 1, 1, 0), out=some)
    got = some.reshape(1, 2, 120, 2, 32)
    np.testing.assert_array_equal(got[:, :, 50:60, 1], tokens[:, :, 50:60, 0])
    assert not got[:, :, 60:80, 1].any()
    assert (got[:, :, :50] == 0x7FC1).all()
    assert (got[:, :, :, 0] == 0x7FC1).all()


@pytest.mark.parametrize(
    ("size", "other", "rows"), [(48, 36, 32), (36, 48, 32), (6, 6, 5), (12, 18, 8), (6, 4, 5)]
)
def test_tiles_inside_a_page_that_blocks_do_not_divide(size, other, rows):
    """Tiles of `rows` tokens in pages of `size`, which end inside a tile, from and to plain blocks of other sizes."""
    text = f'name = "t/x"\ncodec = "bf16"\n[[piece]]\norder = "layer kv block slot/{rows} head slot%{rows} dim"\n'
    tiled, blocks = Layout.from_toml(text, "x.toml"), 144 // other
    array = halves(1, 2, blocks, 2, other, 8)
    src = c.compile_for(array, "contiguous/bhsd")
    dst = c.retarget(src, tiled, block_size=size)
    got = c.convert(array, src, dst)
    tokens = (
        array.transpose(0, 1, 2, 4, 3, 5).reshape(2, -1, 2, 8)[:, :144].reshape(2, 144 // size, size, 2, 8)
    )
    pad = np.pad(tokens, [(0, 0), (0, 0), (0, -size % rows), (0, 0), (0, 0)])
    want = pad.reshape(2, 144 // size, -1, rows, 2, 8).transpose(0, 1, 2, 4, 3, 5)
    np.testing.assert_array_equal(got.reshape(-1).view(np.uint16), want.reshape(-1))
    back = c.convert(got, dst, src)
    np.testing.assert_array_equal(back.reshape(-1).view(np.uint16), array.reshape(-1))


def test_codecs_follow_the_dtype():
    x = RNG.standard_normal((1, 2, 2, 16, 2, 32)).astype(np.float16)
    src = c.compile_for(x, "vllm/nhd")
    assert src.codec.name == "fp16"
    dst = c.retarget(src, "vllm/nhd", codec="fp32")
    out = c.convert(x, src, dst, out=c.empty(dst, load("vllm/nhd")))
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, x.astype(np.float32))


def test_numbers_are_never_read_as_others():
    x = RNG.standard_normal((1, 2, 2, 16, 2, 32)).astype(np.float32)
    for array, said, field in (
        (x.astype(">f4"), {"codec": "fp32"}, r"array\.dtype: .*other byte order.*float32"),
        (x.astype(">f2"), {}, r"array\.dtype"),
        (x.astype(np.float16), {"codec": "bf16"}, r"codec: .*holds fp16.*got bf16"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            c.compile_for(array, "vllm/nhd", **said)
    shape = c.shape_of(x, "vllm/nhd")
    with pytest.raises(InvalidArgument, match=r"codec: .*holds fp16.*expected one of .*fp32"):
        c.compile_for(x.astype(np.float16), "tenstorrent/kv", shape=shape)  # this has no fp16
    bits = x.astype(np.float16).view(np.uint16)
    assert c.compile_for(bits, "vllm/nhd", codec="fp16").codec.name == "fp16"


@pytest.mark.parametrize("codec", ["bfp8_b", "bfp4_b"])
def test_groups_that_lie_in_different_pages_meet_in_rows(codec):
    array = halves(1, 2, 2, 32, 2, 64)
    rows = c.compile_for(array, "vllm/nhd")
    plain = c.retarget(rows, "tenstorrent/kv-hf", codec=codec, channels=7)
    woven = c.retarget(rows, "tenstorrent/kv", codec=codec, channels=8)
    check(plain, woven)
    tiles = c.convert(array, rows, plain)
    # What the plain tiles hold, grouped anew: the same as through rows by hand.
    wide = c.retarget(rows, "vllm/nhd", codec="fp32")
    want = c.convert(c.convert(tiles, plain, wide), wide, woven)
    np.testing.assert_array_equal(c.convert(tiles, plain, woven), want)


def test_what_does_not_fit_is_refused():
    array = halves(1, 2, 6, 16, 2, 32)
    src = c.compile_for(array, "vllm/nhd")
    with pytest.raises(InvalidArgument, match=r"array\.shape"):
        c.compile_for(array[0, 0], "vllm/nhd")
    with pytest.raises(InvalidArgument, match="plain axes"):
        c.compile_for(array, "tenstorrent/kv")
    with pytest.raises(InvalidArgument, match="contiguous"):
        c.compile_for(array.transpose(0, 1, 3, 2, 4, 5), "vllm/nhd")
    with pytest.raises(InvalidArgument, match=r"array: .* no cache"):
        c.convert(array[:, :, :5].copy(), src, src)
    with pytest.raises(InvalidArgument, match=r"dst\.shape\.blocks"):
        few = load("vllm/nhd").compile(c.shape_of(array[:, :, :5], "vllm/nhd"))
        c.convert(array, src, few)
    with pytest.raises(Unmappable, match="dim"):
        c.convert(array, src, load("vllm/nhd").compile(c.shape_of(halves(1, 2, 6, 16, 2, 16), "vllm/nhd")))
    with pytest.raises(InvalidArgument, match="rows and columns"):
        c.tensor_shape((5,))
    with pytest.raises(LayoutError):
        c.compile_for(array, "vllm/nothing")
