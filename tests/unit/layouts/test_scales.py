"""Scales that lie beside the elements are planned with them; scales that lie nowhere are numbers of the layout."""

import numpy as np
import pytest

from hawk.cache import CacheSpec, KVCache
from hawk.errors import InvalidArgument, LayoutError, Unmappable
from hawk.layouts import CacheShape, Layout, load
from hawk.layouts.codecs import decode, encode
from hawk.layouts.describe import describe
from hawk.plan.check import check
from hawk.plan.explain import explain
from hawk.plan.types import Selection
from tests.unit.layouts import moving

SHAPE = CacheShape(layers=2, heads=4, dim=64, block_size=16, blocks=6)
WIDE = CacheShape(layers=2, heads=4, dim=64, block_size=32, blocks=3)


def layout(
    order: str, scale: str, *, buffers: str = "layer kv", more: str = "", codec: str = "int8"
) -> Layout:
    return Layout.from_toml(
        f'name = "t"\ncodec = "{codec}"\ncodecs = ["int8", "fp8_e4m3fn", "bf16"]\nbuffers = "{buffers}"\nalign = 64\n'
        f'{more}\n[scale]\n{scale}\n[[piece]]\norder = "{order}"\n'
    )


TOKEN_HEAD = 'place = "buffer"\ndtype = "fp32"\norder = "block | slot head"'
GROUPS = 'place = "buffer"\ndtype = "bf16"\norder = "block | head slot dim"\ngroup = 16'
FOUR = '[placement]\nkind = "interleaved"\nchannels = 4'


def random_cache(compiled, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[layers, kvs, blocks, heads, slots, dims]`, and scales of the same axes."""
    rng = np.random.default_rng(seed)
    box, fine = compiled.shape, compiled.scale.shape
    codes = rng.integers(0, 256, (box.layers, box.kvs, box.blocks, box.heads, box.block_size, box.dim))
    scales = rng.random((fine.layers, fine.kvs, fine.blocks, fine.heads, fine.block_size, fine.dim))
    return decode("int8", codes.astype(np.uint8).reshape(1, -1), codes.size).reshape(codes.shape), (
        scales.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    )


def buffers_of(compiled, codes: np.ndarray, scales: np.ndarray) -> list[list[np.ndarray]]:
    elements, beside = moving.buffers_of(compiled, codes), moving.buffers_of(compiled.scale, scales)
    if not compiled.scale.inset:
        return elements + beside
    for buffer, more in zip(elements, beside, strict=True):
        for channel, extra in zip(buffer, more, strict=True):
            for at in range(0, len(channel), compiled.page_stride):
                end = at + compiled.page_bytes
                channel[end : end + compiled.scale.page_bytes] = extra[at : at + compiled.scale.page_bytes]
    return elements


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize(
    ("scale", "inside"),
    [
        (TOKEN_HEAD, 'place = "page"\ndtype = "fp32"\norder = "block | head slot"'),
        (GROUPS, 'place = "buffer"\ndtype = "fp32"\norder = "block | dim slot head"\ngroup = 16'),
        (TOKEN_HEAD.replace(" head", ""), 'place = "page"\ndtype = "fp32"\norder = "block slot/4 | slot%4"'),
    ],
)
def test_scales_move_with_their_elements(scale, inside, core):
    """Other orders, other blocks, other channels; in buffers of their own and behind each page."""
    order = "block | head slot dim" if "slot/4" not in inside else "block slot/4 | slot%4 head dim"
    a = layout("block | slot head dim", scale).compile(SHAPE)
    b = layout(order, inside, more=FOUR).compile(WIDE)
    assert a.scale is not None
    assert b.scale is not None
    assert len(a.buffer_bytes) == 8
    assert len(b.buffer_bytes) == (4 if b.scale.inset else 8)
    codes, scales = random_cache(a, 1)
    rng = np.random.default_rng(2)
    tables = rng.permutation(6), rng.permutation(3)

    def request(x: np.ndarray, table: np.ndarray) -> np.ndarray:
        """Tokens in a row: `[layers, kvs, heads, tokens, dims]`."""
        found = x[:, :, table].transpose(0, 1, 3, 2, 4, 5)
        return found.reshape(*found.shape[:3], -1, found.shape[5])

    def into(tokens: np.ndarray, table: np.ndarray, size: int) -> np.ndarray:
        parts = tokens.reshape(*tokens.shape[:3], -1, size, tokens.shape[4]).transpose(0, 1, 3, 2, 4, 5)
        out = np.empty_like(parts)
        out[:, :, table] = parts
        return out

    check(a, b)
    got = moving.move(a, b, buffers_of(a, codes, scales), core, blocks=tables)
    want = [into(request(x, tables[0]), tables[1], 32) for x in (codes, scales)]
    assert moving.equal(got, buffers_of(b, *want))
    again = moving.move(b, a, got, core, blocks=tables[::-1])
    assert moving.equal(again, buffers_of(a, codes, scales))


def test_without_its_scales_a_cache_is_not_registered():
    spec = CacheSpec(
        layers=2, heads=4, dim=64, block_size=16, blocks=6, layout=layout("block | slot head dim", TOKEN_HEAD)
    )
    compiled = spec.compile()
    elements = [np.zeros(compiled.channel_bytes, np.uint8) for _ in range(compiled.buffer_count)]
    with pytest.raises(InvalidArgument, match="got 4; expected 4 and 4 of scales"):
        KVCache.from_numpy(elements, spec)
    short = [np.zeros(8, np.uint8) for _ in range(4)]
    with pytest.raises(InvalidArgument, match=r"buffers\[4\].*got 8 bytes"):
        KVCache.from_numpy([*elements, *short], spec)
    whole = KVCache.from_numpy([*elements, *(np.zeros(n, np.uint8) for n in compiled.buffer_bytes[4:])], spec)
    assert len(whole.buffers) == 8
    assert [len(b) for b in KVCache.alloc(spec).buffers] == list(compiled.buffer_bytes)


def test_scales_are_not_lost_on_the_way():
    with_scales = layout("block | slot head dim", TOKEN_HEAD)
    scaled, plain = with_scales.compile(SHAPE), load("sglang/pool").compile(SHAPE, codec="int8")
    for a, b in ((scaled, plain), (plain, scaled)):
        with pytest.raises(Unmappable, match=r"^scale: the scales of the caches differ"):
            check(a, b)
    # What has no scales needs none: the bf16 form of the same layout.
    assert with_scales.compile(SHAPE, codec="bf16").scale is None
    check(with_scales.compile(SHAPE, codec="bf16"), load("sglang/pool").compile(SHAPE))


def test_some_heads_take_the_scales_of_these_or_of_all():
    a = layout("block | slot head dim", TOKEN_HEAD).compile(SHAPE)
    narrow = CacheShape(layers=2, heads=2, dim=64, block_size=16, blocks=6)
    b = layout("block | slot head dim", TOKEN_HEAD).compile(narrow)
    heads = Selection(layer=0, layers=2, token=0, tokens=96, head=0, heads=2, source_head=2)
    check(a, b, heads)
    c = layout("block | slot head dim", TOKEN_HEAD.replace(" head", "")).compile(narrow)
    check(layout("block | slot head dim", TOKEN_HEAD.replace(" head", "")).compile(SHAPE), c, heads)


def test_a_constant_is_a_number_of_the_layout():
    scaled = layout("block | slot head dim", 'place = "constant"\nvalue = 0.125')
    compiled = scaled.compile(SHAPE)
    assert (compiled.codec.factor, compiled.scale) == (0.125, None)
    assert scaled.compile(SHAPE, codec="bf16").codec.factor == 1.0
    assert "constant 0.125" in describe(scaled)
    rng = np.random.default_rng(5)
    x = (rng.integers(-127, 128, (2, 2, 6, 4, 16, 64)) / 8).astype(np.float32).view(np.uint32)
    rows = load("vllm/nhd").compile(SHAPE)
    other = layout("block | slot head dim", 'place = "constant"\nvalue = 0.25').compile(SHAPE)
    for core in moving.CORES:
        there = moving.move(rows, compiled, moving.buffers_of(rows, x), core)
        assert moving.equal(there, moving.buffers_of(compiled, x))
        assert moving.equal(moving.move(compiled, rows, there, core), moving.buffers_of(rows, x))
        halved = moving.move(compiled, other, there, core)  # other scales: the codes change
        assert moving.equal(halved, moving.buffers_of(other, x))


def test_a_factor_rounds_as_binary32_does():
    info = (
        layout("block | slot head dim", 'place = "constant"\nvalue = 0.10000000149011612')
        .compile(SHAPE)
        .codec
    )
    values = np.array([[0.05, 0.15, -0.25, 12.7, 100.0, np.nan]], np.float32)
    codes = encode(info, values.view(np.uint32)).view(np.int8)[0]
    exact = [float(v) / 0.10000000149011612 for v in values[0][:4].astype(np.float64)]
    assert codes[:4].tolist() == [round(e) for e in np.array(exact, np.float32)]
    assert codes[4:].tolist() == [127, 0]
    back = decode(info, codes.view(np.uint8)[None, :], 6).view(np.float32)[0]
    assert back.tolist() == [np.float32(c) * np.float32(0.1) for c in codes]


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ("", ["scale.place", "buffer, page, constant, header"]),
        ('place = "bufer"', ["scale.place", "Did you mean 'buffer'?"]),
        ('place = "constant"\nvalue = 0', ["scale.value"]),
        ('place = "constant"\nvalue = 0.1', ["scale.value", "such as 0.10000000149"]),
        ('place = "constant"\norder = "block"', ["scale.order: unknown key"]),
        ('place = "header"', ["scale.place", "int8"]),
        ('place = "buffer"\ndtype = "int8"\norder = "block slot"', ["scale.dtype"]),
        ('place = "page"\ndtype = "fp32"', ["scale.order"]),
        ('place = "buffer"\ndtype = "fp32"\nbuffers = "layer"', ["kv"]),
        (
            'place = "page"\ndtype = "fp32"\norder = "block"\nbuffers = "layer"',
            ["scale.buffers: unknown key"],
        ),
        ('place = "buffer"\ndtype = "fp32"\norder = "block slot)"', ["scale.order", "column"]),
        ('place = "buffer"\ndtype = "fp32"\norder = "slot head"', ["scale.order", "block in it"]),
        ('place = "buffer"\ndtype = "fp32"\norder = "block slot dim"\ngroup = 48', ["scale.group", "64"]),
        ('place = "buffer"\ndtype = "fp32"\norder = "block slot slot"', ["scale.order", "twice"]),
        ('place = "page"\ndtype = "fp32"\norder = "block slot | head"', ["scales lie behind other pages"]),
    ],
)
def test_tables_of_scales_are_checked(scale, words):
    with pytest.raises(LayoutError) as caught:
        layout("block | slot head dim", scale).compile(SHAPE)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_scales_of_what_has_none():
    text = (
        'name = "t"\ncodec = "{}"\n[scale]\nplace = "{}"\n[[piece]]\norder = "layer kv block slot head dim"\n'
    )
    with pytest.raises(LayoutError, match="no codec here has scales"):
        Layout.from_toml(text.format("bf16", "buffer"))
    kept = Layout.from_toml(text.format("mxfp8_e4m3", "header")).compile(SHAPE)
    assert (kept.scale, kept.page_bytes) == (None, 16 * 4 * 64 * 33 // 32)


def test_explain_says_what_eight_bits_lose():
    rows = load("sglang/pool")
    whole = Selection(layer=0, layers=2, token=0, tokens=96)
    scaled = layout("block | slot head dim", 'place = "constant"\nvalue = 0.125').compile(SHAPE)
    finer = layout("block | slot head dim", 'place = "constant"\nvalue = 0.0625').compile(SHAPE)
    for a, b, said in (
        (rows.compile(SHAPE, codec="fp8_e4m3fn"), rows.compile(SHAPE), None),
        (rows.compile(SHAPE), rows.compile(SHAPE, codec="fp8_e5m2"), "bf16 to fp8_e5m2 may round"),
        (scaled, scaled, None),
        (scaled, finer, "under a scale of 0.125 to int8 under 0.0625 may round"),
        (scaled, rows.compile(SHAPE), "int8 under a scale of 0.125"),
    ):
        found = explain(a, b, whole).lossy
        assert (found is None) if said is None else (found is not None and said in found)
    beside = layout("block | slot head dim", TOKEN_HEAD).compile(SHAPE)
    found = explain(beside, beside, whole)
    assert found.nbytes == 2 * 2 * 96 * 4 * (64 + 4)
