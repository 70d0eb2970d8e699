"""Scales of any grain into scales of any other, against loops over groups written from the stated rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from hawk.errors import InvalidArgument, Unmappable
from hawk.layouts import CacheShape, Layout
from hawk.layouts.codecs import CODECS
from hawk.plan.check import check
from hawk.plan.explain import explain
from hawk.plan.types import Selection
from hawk.plan.ways import ways
from hawk.retile import rows as rows_module
from hawk.retile import scaling
from tests.reference import scales as reference
from tests.unit.layouts import moving

HEADS, DIM = 2, 32
NEAR = CacheShape(layers=2, heads=HEADS, dim=DIM, block_size=4, blocks=7)
FAR = CacheShape(layers=2, heads=HEADS, dim=DIM, block_size=6, blocks=5)
TOKENS = 21  # the last block of either side holds fewer

TENSOR = 'place = "buffer"\ndtype = "fp32"'
HEAD = 'place = "buffer"\ndtype = "fp32"\norder = "head"'
BLOCK = 'place = "buffer"\ndtype = "bf16"\norder = "block head"'
PAGE = 'place = "page"\ndtype = "fp32"\norder = "block | head"'
TOKEN = 'place = "buffer"\ndtype = "fp32"\norder = "block slot"'
TOKEN_HEAD = 'place = "page"\ndtype = "fp32"\norder = "block | slot head"'
GROUPS = 'place = "buffer"\ndtype = "bf16"\norder = "block | head dim slot"\ngroup = 8'
HALF = 'place = "buffer"\ndtype = "fp16"\norder = "block | slot head dim"\ngroup = 16'
FIXED = 'place = "constant"\nvalue = 0.03125'
SEVEN = '[placement]\nkind = "interleaved"\nchannels = 3'


def layout(scale: str, codec: str, *, order: str = "block | slot head dim", more: str = "") -> Layout:
    table = f"[scale]\n{scale}\n" if scale else ""
    return Layout.from_toml(
        f'name = "t"\ncodec = "{codec}"\nbuffers = "layer kv"\nalign = 64\n{more}\n'
        f'{table}[[piece]]\norder = "{order}"\n'
    )


def box(compiled) -> tuple[int, ...]:
    s = compiled.shape
    return s.layers, s.kvs, s.blocks, s.heads, s.block_size, s.dim


def buffers_of(compiled, elements: np.ndarray, scales: np.ndarray | None) -> list[list[np.ndarray]]:
    """The bytes of a cache: numbers of elements as they are stored, and scales."""
    plain = moving.buffers_of(
        replace(compiled, codec=replace(compiled.codec, factor=1.0)), elements.view(np.uint32)
    )
    if scales is None:
        return plain
    beside = moving.buffers_of(compiled.scale, scales.view(np.uint32))
    if not compiled.scale.inset:
        return plain + beside
    size, at = compiled.scale.page_bytes, compiled.scale.inset
    for buffer, more in zip(plain, beside, strict=True):
        for channel, extra in zip(buffer, more, strict=True):
            for page in range(0, len(channel), compiled.page_stride):
                channel[page + at : page + at + size] = extra[page : page + size]
    return plain


def cache(compiled, seed: int) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """(stored numbers, scales or None, values) of a random cache of this layout."""
    rng = np.random.default_rng(seed)
    shape, name = box(compiled), compiled.codec.name
    if name == "bf16":
        bits = (
            rng.standard_normal(shape).astype(np.float32) * 2.0 ** rng.integers(-9, 9, shape[:-1])[..., None]
        )
        stored = (bits.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        stored[0, 0, :, 0, 1] = 0
        stored[0, 1, 1, 1, 2, 3:6] = np.inf, -np.inf, np.nan
        return stored, None, stored
    stored = reference.codes(name, rng.standard_normal(shape) * reference.MOST[name] / 3)
    if compiled.scale is None:
        return stored, None, stored * np.float32(compiled.codec.factor)
    beside = (rng.random(box(compiled.scale)) + 0.1).astype(np.float32)
    beside = (beside.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if compiled.scale.codec.name == "fp16":
        beside = beside.astype(np.float16).astype(np.float32)
    return stored, beside, stored * reference.spread(beside, shape)


def request(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The request's tokens in a row, `[layers, kvs, heads, tokens, dims]`."""
    rows = x[:, :, table].transpose(0, 1, 3, 2, 4, 5)
    return rows.reshape(*rows.shape[:3], -1, rows.shape[5])[:, :, :, :TOKENS]


def placed(
    tokens: np.ndarray, table: np.ndarray, shape: tuple[int, ...], first: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """A target cache with these tokens from `first` on, 0 elsewhere, and which of its rows hold one."""
    _layers, _kvs, blocks, _heads, slots, _dim = shape
    out, real = np.zeros(shape, np.float32), np.zeros((blocks, slots), bool)
    for t in range(first, TOKENS):
        out[:, :, table[t // slots], :, t % slots] = tokens[:, :, :, t]
        real[table[t // slots], t % slots] = True
    return out, real


RUNS = [(core, first) for core, first in zip(moving.CORES, (0, 6), strict=False)]
"""The core, and the first token: the start of a block of the target, for some of its scales are of blocks."""

NEW = [
    ("", "bf16", TOKEN, "int8"),
    ("", "bf16", TOKEN_HEAD, "fp8_e4m3fn"),
    ("", "bf16", GROUPS, "fp8_e5m2"),
    ("", "bf16", HALF, "int8"),
    ("", "bf16", BLOCK, "int8"),
    ("", "bf16", PAGE, "fp8_e4m3fn"),
    (TOKEN, "fp8_e4m3fn", GROUPS, "int8"),  # a token's scales into those of blocks of 8 of each head
    (GROUPS, "int8", TOKEN, "int8"),
    (TENSOR, "fp8_e4m3fn", BLOCK, "int8"),
    (HEAD, "int8", TOKEN, "int8"),
    (BLOCK, "int8", BLOCK, "int8"),  # of 4 tokens into those of 6
    (PAGE, "int8", TOKEN_HEAD, "fp8_e5m2"),
    (FIXED, "int8", HALF, "fp8_e4m3fn"),
    ("", "fp8_e5m2", TOKEN, "int8"),
]
"""Scales that have to be computed."""


@pytest.mark.parametrize(("core", "first"), RUNS)
@pytest.mark.parametrize(("before", "a", "after", "b"), NEW)
def test_scales_made_anew(before, a, after, b, core, first, monkeypatch):
    monkeypatch.setattr(rows_module, "BATCH_BYTES", 3000)
    src = layout(before, a, order="block | head slot dim", more=SEVEN).compile(NEAR)
    dst = layout(after, b, more="" if "page" in before else SEVEN).compile(FAR)
    check(src, dst)
    assert [w.rules for w in ways(src, dst, None)] == [("made",)]
    rng = np.random.default_rng(3)
    tables = rng.permutation(7)[:6], rng.permutation(5)[:4]
    stored, beside, values = cache(src, 4)
    into, real = placed(request(values, tables[0]), tables[1], box(dst), first)
    elements, scales = reference.made(into, real, box(dst.scale), b, dst.scale.codec.name)
    source = buffers_of(src, stored, beside)
    got = moving.move(src, dst, source, core, blocks=tables, token=first, tokens=TOKENS - first)
    assert moving.equal(got, buffers_of(dst, elements, scales))


KEPT = [
    (TENSOR, "int8", TENSOR, "moved"),
    (HEAD, "fp8_e4m3fn", HEAD, "moved"),
    (TENSOR, "int8", HEAD, "spread"),
    (TENSOR, "fp8_e5m2", BLOCK, "spread"),
    (HEAD, "int8", GROUPS, "spread"),
    (TOKEN, "int8", TOKEN_HEAD, "spread"),
    (BLOCK, "int8", TOKEN_HEAD, "spread"),
    (FIXED, "int8", TENSOR, "spread"),
    (FIXED, "int8", GROUPS, "spread"),
    (FIXED, "fp8_e4m3fn", BLOCK, "spread"),
]


@pytest.mark.parametrize(("core", "first"), RUNS)
@pytest.mark.parametrize(("before", "codec", "after", "how"), KEPT)
def test_one_scale_for_many_keeps_every_element(before, codec, after, how, core, first, monkeypatch):
    monkeypatch.setattr(rows_module, "BATCH_BYTES", 1500)
    src, dst = layout(before, codec, more=SEVEN).compile(NEAR), layout(after, codec).compile(FAR)
    found = ways(src, dst, None)
    assert {w.rules for w in found} == ({()} if how == "moved" else {("spread",)})
    rng = np.random.default_rng(5)
    tables = rng.permutation(7)[:6], rng.permutation(5)[:4]
    stored, beside, _values = cache(src, 6)
    into, real = placed(request(stored, tables[0]), tables[1], box(dst), first)
    beside = np.full((1,) * 6, src.codec.factor, np.float32) if beside is None else beside
    each = placed(request(reference.spread(beside, box(src)), tables[0]), tables[1], box(dst), first)[0]
    # Of the elements that one scale covers any has it, where one is there.
    scales = np.zeros(box(dst.scale), np.float32)
    for index in np.ndindex(*box(dst)):
        at = [i if n > 1 else 0 for i, n in zip(index[:5], scales.shape[:5], strict=True)]
        if real[index[2], index[4]]:
            scales[(*at, index[5] * scales.shape[5] // DIM)] = each[index]
    source = buffers_of(src, stored, None if before == FIXED else beside)
    got = moving.move(src, dst, source, core, blocks=tables, token=first, tokens=TOKENS - first)
    assert moving.equal(got, buffers_of(dst, into, scales))


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize(
    ("before", "a", "after", "b"),
    [(HEAD, "fp8_e4m3fn", TENSOR, "int8"), (HEAD, "int8", TENSOR, "int8"), (FIXED, "int8", HEAD, "fp8_e5m2"),
     ("", "fp8_e4m3fn", TENSOR, "int8")],
)  # fmt: skip
def test_scales_of_the_whole_cache_keep_the_source_s_range(before, a, after, b, core):
    """No token counts: a later transfer into the same cache comes under the same scales."""
    src, dst = layout(before, a).compile(NEAR), layout(after, b).compile(FAR)
    assert [w.rules for w in ways(src, dst, None)] == [("ranged",)]
    tables = np.arange(6), np.arange(4)
    stored, beside, values = cache(src, 8)
    ours = np.full((2, 2, 1, HEADS, 1, 1), src.codec.factor, np.float32) if beside is None else beside
    scales = np.empty(box(dst.scale), np.float32)
    for layer, kv, head in np.ndindex(2, 2, scales.shape[3]):
        reach = max(
            float(s) * reference.MOST[a]
            for s in (ours[layer, kv, 0, :, 0, 0] if scales.shape[3] == 1 else ours[layer, kv, 0, head, 0])
        )
        scales[layer, kv, 0, head] = np.float32(reach / reference.MOST[b])
    into, _real = placed(request(values, tables[0]), tables[1], box(dst))
    elements = reference.codes(b, into / reference.spread(scales, box(dst)))
    got = moving.move(src, dst, buffers_of(src, stored, beside), core, blocks=tables, tokens=TOKENS)
    assert moving.equal(got, buffers_of(dst, elements, scales))


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize(("before", "a"), [(TOKEN, "fp8_e4m3fn"), (HEAD, "int8"), (BLOCK, "fp8_e5m2")])
def test_values_leave_their_scales(before, a, core):
    """Into binary32, into block floats and under a constant: what the elements mean, not what is stored."""
    src = layout(before, a).compile(NEAR)
    stored, beside, values = cache(src, 9)
    tables = np.arange(6), np.arange(4)
    source = buffers_of(src, stored, beside)
    for scale, codec in (("", "fp32"), ("", "bfp8_b"), (FIXED, "int8")):
        dst = layout(scale, codec).compile(FAR)
        into, _ = placed(request(values, tables[0]), tables[1], box(dst))
        got = moving.move(src, dst, source, core, blocks=tables, tokens=TOKENS)
        if scale:
            into = reference.codes(codec, into / np.float32(0.03125))
        assert moving.equal(got, buffers_of(dst, into, None))


def test_a_later_part_of_a_request_has_scales_of_its_own_tokens():
    src, dst = layout("", "bf16").compile(NEAR), layout(TOKEN, "int8").compile(FAR)
    stored, _, _values = cache(src, 10)
    tables = np.arange(6), np.arange(4)
    got = moving.move(
        src, dst, buffers_of(src, stored, None), "numpy", blocks=tables, token=8, tokens=13, fill=0x5A
    )
    whole = moving.move(src, dst, buffers_of(src, stored, None), "numpy", blocks=tables, tokens=21, fill=0x5A)
    for some, every, size in zip(got, whole, dst.buffer_bytes, strict=True):
        row = HEADS * DIM if size == dst.channel_bytes else 4
        at = [b * dst.page_stride if row > 4 else b * dst.scale.page_stride for b in range(1)]
        assert at == [0]
        if row > 4:  # slots 0 and 1 of block 1 are a neighbour's
            begin = dst.page_stride
            assert (some[0][: begin + 2 * row] == 0x5A).all()
            assert np.array_equal(some[0][begin + 2 * row :], every[0][begin + 2 * row :])


def test_what_one_transfer_cannot_know_is_refused():
    tokens = layout(TOKEN, "int8").compile(NEAR)
    for scale in (TENSOR, HEAD):
        for src in (tokens, layout("", "bf16").compile(NEAR), layout(BLOCK, "int8").compile(NEAR)):
            with pytest.raises(Unmappable, match=r"^scale\.order: scales of a whole cache .*'constant'"):
                check(src, layout(scale, "int8").compile(FAR))
    blocks = layout(BLOCK, "int8").compile(FAR)
    check(tokens, blocks, Selection(0, 2, 6, 9))
    with pytest.raises(InvalidArgument, match=r"^selection\.token: .* got 7; expected a multiple of 6"):
        check(tokens, blocks, Selection(0, 2, 7, 9))
    wide = CacheShape(layers=2, heads=4, dim=DIM, block_size=6, blocks=5)
    of_some = Selection(0, 2, 0, 9, (), 1, 2, 0)
    with pytest.raises(Unmappable, match=r"^scale\.order: a scale covers heads"):
        check(tokens, layout(TOKEN, "int8").compile(wide), of_some)
    check(tokens, layout(TOKEN_HEAD, "int8").compile(wide), of_some)
    with pytest.raises(Unmappable, match=r"^scale: the scales of the caches differ"):
        check(tokens, layout("", "int8").compile(FAR))
    with pytest.raises(Unmappable, match=r"^scale: the scales of the caches differ"):
        check(layout("", "int8").compile(NEAR), layout(TOKEN, "int8").compile(FAR))


def test_explain_says_what_becomes_of_scales():
    whole = Selection(0, 2, 0, TOKENS)
    forms = [
        layout(s, c).compile(NEAR)
        for s, c in ((TENSOR, "int8"), (TOKEN, "int8"), (GROUPS, "int8"), (TOKEN, "int8"))
    ]
    said = [explain(a, b, whole) for a, b in pairwise(forms)]
    assert [e.lossy is None for e in said] == [True, False, False]
    assert said[1].lossy == "lossy: scales of fp32 are kept as bf16"
    assert "1 fp32 for the cache -> 1 fp32 for a token: spread" in str(said[0])
    assert "made anew" in said[2].lossy
    assert "made" in str(said[2])


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_a_scale_is_never_zero_nor_infinite(kind):
    sizes = np.array([1e-45, 1e-38, 3e-7, 1e-4, 0.1, 1.0, 127.0, 1e6, 1e7, 3e38], np.float32)
    for codec, most in reference.MOST.items():
        got = scaling.scales(sizes.astype(np.float64), CODECS[codec], CODECS[kind])
        assert got.tolist() == [reference.as_stored(float(x) / most, kind) for x in sizes]
        assert np.isfinite(got).all()
        assert (got > 0).all()
    assert scaling.scales(np.zeros(2), CODECS["int8"], CODECS[kind]).tolist() == [1, 1]
