"""Shipped layouts with scales, or parts, of their own, against packing written from public descriptions."""

import numpy as np
import pytest

from hawk import convert
from hawk.errors import LayoutError
from hawk.layouts import CacheShape, Layout, load
from hawk.layouts.describe import describe
from hawk.plan.explain import explain
from hawk.plan.tensors import riding
from hawk.plan.types import Selection
from hawk.plan.ways import ways
from hawk.retile import native
from tests.reference import engines, scales
from tests.unit.layouts import moving

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


MLA = CacheShape(layers=2, heads=1, dim=576, block_size=8, blocks=3, kvs=1)


def test_latents_and_rope_apart():
    x = numbers(MLA)
    rows, apart = load("vllm/mla").compile(MLA), load("flashinfer/mla").compile(MLA)
    assert apart.buffer_bytes == (3 * 8 * 512 * 2,) * 2 + (3 * 8 * 64 * 2,) * 2
    bits = words(x)
    bits[0, 0, 1, 0, 2, 510:514] = 0x7F81, 0xFF83, 0xFFFF, 0x8000  # NaNs keep their payloads
    got = convert.convert(bits, rows, apart)
    want = np.concatenate([t.reshape(-1) for t in engines.flashinfer_mla(bits, 512)])
    assert np.array_equal(got.reshape(-1), want.view(np.uint8))
    assert np.array_equal(convert.convert(got, apart, rows).reshape(-1), bits.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("core", moving.CORES)
def test_rows_of_656_bytes(core):
    x = numbers(MLA, 1)
    rows, packed = load("vllm/mla").compile(MLA), load("vllm/mla-fp8").compile(MLA)
    assert packed.buffer_bytes == (3 * 8 * 656,) * 2
    assert riding(packed) == (None, 0, 0)
    with native.using(core):
        got = convert.convert(words(x), rows, packed)
        apart = convert.convert(got, packed, load("flashinfer/mla").compile(MLA, codec="fp32"))
    every = np.ones((3, 8), bool)
    elements, beside = scales.made(x[..., :512], every, (2, 1, 3, 1, 8, 4), "fp8_e4m3fn", "fp32")
    assert np.array_equal(got.reshape(2, 3, 8, 656), engines.mla_fp8(elements, beside, x[..., 512:]))
    # What it means, and in tensors of their own.
    meant = np.concatenate([elements * np.repeat(beside, 128, axis=-1), x[..., 512:]], axis=-1)
    want = np.concatenate([t.reshape(-1) for t in engines.flashinfer_mla(meant, 512)])
    assert np.array_equal(apart.reshape(-1).view(np.float32), want)


@pytest.mark.parametrize("token", [0, 5])
def test_rows_of_656_bytes_move_as_they_are(token):
    """Other blocks, a part of a request: every row in one stretch with its scales and its rope."""
    wide = CacheShape(layers=2, heads=1, dim=576, block_size=12, blocks=3, kvs=1)
    src, dst = load("vllm/mla-fp8").compile(MLA), load("vllm/mla-fp8").compile(wide)
    assert [(w.sources, w.rows) for w in ways(src, dst, None)] == [
        ((0,), False),
        ((1,), False),
        ((2,), False),
    ]
    rng = np.random.default_rng(2)
    tables = np.array([2, 0, 1]), np.array([1, 2])
    source = [[rng.integers(0, 256, size, np.uint8)] for size in src.buffer_bytes]
    got = moving.move(src, dst, source, "numpy", blocks=tables, token=token, tokens=22 - token, fill=0x5A)
    for layer in range(2):
        rows = source[layer][0].reshape(3, 8, 656)[tables[0]].reshape(24, 656)
        want = np.full((3, 12, 656), 0x5A, np.uint8)
        want[1, token:] = rows[token:12]
        want[2] = 0
        want[2, :10] = rows[12:22]
        assert np.array_equal(got[layer][0].reshape(3, 12, 656), want)
    found = explain(src, dst, Selection(0, 2, token, 22 - token))
    assert found.segments == 2
    assert found.lossy is None


PARTS = """
name = "t"
codec = "bf16"
buffers = "layer kv"
[[part]]
name = "a"
size = 24
order = "block | head slot dim"
[[part]]
name = "b"
order = "block | head slot dim"
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('[[part]]\nname = "b"\norder = "block | head slot dim"\n', "", ["part", "2 to 4"]),
        ("size = 24\n", "", ["part[0].size"]),
        ("size = 24\n", 'size = "X"\n', ["part[0].size", "X"]),
        ("size = 24\n", "size = 64\n", ["part[1].size", "got 0"]),
        ("size = 24\n", "size = 65\n", ["part[0].size", "1..64"]),
        ('name = "b"', 'name = "a"', ["comes twice"]),
        ('name = "b"', 'name = "b"\ncodec = "bf61"', ["part[1].codec", "bf16"]),
        ('name = "b"', 'name = "b"\nplace = "beside"', ["part[1].place"]),
        ('name = "a"', 'name = "a"\nplace = "page"', ["part[0].place"]),
        ('name = "b"\norder = "block | head', 'name = "b"\nplace = "page"\norder = "block head |', ["other pages"]),
        ('name = "b"', 'name = "b"\nwhere = "kv=0"', ["part[1].where: unknown key"]),
        ("[[part]]", '[[piece]]\norder = "block | head slot dim"\n[[part]]', ["piece", "of their own"]),
        ("[[part]]", '[scale]\nplace = "constant"\nvalue = 1\n[[part]]', ["scale", "orders and scales of their own"]),
        (
            'head slot dim"\n[[part]]',
            'head slot dim"\n[part.scale]\nplace = "constant"\nvalue = 1\n[[part]]',
            ["part[0].scale", "eight"],
        ),
    ],
)  # fmt: skip
def test_parts_are_checked(old, new, words):
    with pytest.raises(LayoutError) as caught:
        Layout.from_toml(PARTS.replace(old, new, 1)).compile(CacheShape(1, 2, 64, 8, 3))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_parts_of_several_heads_and_codecs():
    """A head's two parts in other orders and codecs, K and V, over three channels; TP parts of it move too."""
    text = PARTS.replace('name = "b"', 'name = "b"\ncodec = "fp32"').replace("head slot", "slot head", 1)
    text = text.replace("[[part]]", '[placement]\nkind = "interleaved"\nchannels = 3\n[[part]]', 1)
    shape = CacheShape(2, 2, 64, 8, 5)
    x = numbers(shape, 3)
    plain, split = load("vllm/nhd").compile(shape), Layout.from_toml(text).compile(shape)
    got = convert.convert(words(x).transpose(0, 1, 2, 4, 3, 5).copy(), plain, split)
    flat, at = got.reshape(-1), 0
    for part, order in ((words(x[..., :24]), (2, 4, 3, 5)), (x[..., 24:], (2, 3, 4, 5))):
        for layer, kv in np.ndindex(2, 2):
            pages = (
                np.ascontiguousarray(part[layer, kv].transpose(*(a - 2 for a in order)))
                .reshape(5, -1)
                .view(np.uint8)
            )
            for channel in range(3):
                room = np.zeros((2, pages.shape[1]), np.uint8)
                mine = pages[channel::3]
                room[: len(mine)] = mine
                assert np.array_equal(flat[at : at + room.size], room.reshape(-1))
                at += room.size
    assert at == len(flat)
    narrow = CacheShape(2, 1, 64, 8, 5)
    one = Layout.from_toml(text).compile(narrow)
    some = convert.convert(got, split, one, selection=Selection(0, 2, 0, 40, (), 0, 1, 1))
    alone = convert.convert(
        words(x[:, :, :, 1:]).transpose(0, 1, 2, 4, 3, 5).copy(), load("vllm/nhd").compile(narrow), one
    )
    assert np.array_equal(some, alone)


def test_show_names_the_parts():
    text = describe(load("vllm/mla-fp8"))
    for said in ("latent          L dims", "rope", "bf16, behind the part before it", "dims by 128", "656 bytes on",
                 "each 528 bytes into", "dims 512..575"):  # fmt: skip
        assert said in text, text


def test_a_part_lies_in_the_elements_pages_not_in_those_of_scales():
    text = PARTS.replace('name = "a"', 'name = "a"\ncodec = "int8"').replace(
        'name = "b"', 'name = "b"\nplace = "page"'
    )
    scale = '[part.scale]\nplace = "buffer"\ndtype = "fp32"\norder = "block slot"\n[[part]]'
    text = text.replace("block | head slot", "block slot | head").replace("[[part]]", "#", 1)
    text = text.replace("[[part]]", scale).replace("#", "[[part]]")
    shape = CacheShape(1, 2, 64, 8, 3, kvs=1)
    mixed = Layout.from_toml(text).compile(shape)
    assert mixed.places == ((0, 0), (1, 0), (0, 2 * 24))
    assert mixed.buffer_bytes == (3 * 8 * (2 * 24 + 2 * 40 * 2), 3 * 8 * 4)
    x = numbers(shape, 4)
    plain = load("contiguous/bhsd").compile(shape)
    got = convert.convert(words(x), plain, mixed).reshape(-1)
    elements, beside = scales.made(x[..., :24], np.ones((3, 8), bool), (1, 1, 3, 1, 8, 1), "int8", "fp32")
    rows = got[: mixed.buffer_bytes[0]].reshape(3, 8, -1)
    assert np.array_equal(
        rows[..., :48].view(np.int8), elements[0, 0].transpose(0, 2, 1, 3).reshape(3, 8, 48)
    )
    assert np.array_equal(
        np.ascontiguousarray(rows[..., 48:]).view(np.uint16),
        words(x[0, 0, ..., 24:].copy()).transpose(0, 2, 1, 3).reshape(3, 8, 80),
    )
    assert np.array_equal(got[mixed.buffer_bytes[0] :].view(np.float32), beside.reshape(-1))
