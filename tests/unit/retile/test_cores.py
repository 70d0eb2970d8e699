"""Both cores, element by element, against slow loops over the documented sums."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.errors import InvalidArgument
from hawk.layouts.compiled import CodecInfo
from hawk.retile import cpu, native
from hawk.retile.build import build_program
from tests.unit.retile import layouts as lay
from tests.unit.retile import slow

CORES = ("numpy", "c") if native.available() else ("numpy",)


def move(core, program, pieces, src, dst, **kw):
    with native.using(core):
        cpu.run(program, pieces, src, dst, **kw)


def check(a, b, *, kv=0, token=0, tokens=None, seed=0, cores=CORES, fill=0xA5, values=None):
    """Random bytes, shuffled block tables; every byte of every target channel is compared."""
    rng = np.random.default_rng(seed)
    program = build_program(a, b, kv)
    if tokens is None:
        tokens = min(a.shape.block_size * a.shape.blocks, b.shape.block_size * b.shape.blocks) - token
    tables = [rng.permutation(x.shape.blocks).tolist() for x in (a, b)]
    layer = int(rng.integers(a.shape.layers))
    pieces = slow.pieces_of(program, a, b, kv, layer, *tables, token, tokens)
    src = slow.buffers(a, rng=rng) if values is None else values
    dst = slow.buffers(b, fill)
    want = slow.expected(program, pieces, src, dst)
    for core in cores:
        got = [d.copy() for d in dst]
        move(core, program, pieces, src, got)
        for c, (x, y) in enumerate(zip(got, want, strict=True)):
            assert np.array_equal(x, y), f"{core}, channel {c}, byte {np.flatnonzero(x != y)[:8]}"
    return program, pieces, src, dst


@pytest.mark.parametrize(("source", "target"), list(product(lay.CODECS.values(), lay.CODECS.values())))
@pytest.mark.parametrize("interleave", [False, True])
def test_every_codec_pair(source, target, interleave):
    shape = lay.shape_of(blocks=2, dim=32, heads=2)
    check(lay.nhd(shape, source), lay.tiles(shape, target, channels=3, interleave=interleave))
    check(lay.tiles(shape, source, channels=2, interleave=interleave), lay.nhd(shape, target))
    check(lay.nhd(shape, source), lay.tiles(shape, target, interleave=interleave), token=5, tokens=40)


@pytest.mark.parametrize("codec", lay.CODECS.values(), ids=lay.CODECS)
@pytest.mark.parametrize(
    "change", [{"dim": 80}, {"block_size": 40}, {"block_size": 16}, {"dim": 48, "block_size": 24}]
)
def test_padding(codec, change):
    shape = lay.shape_of(**change)
    check(lay.nhd(shape), lay.tiles(shape, codec, channels=2))
    check(lay.nhd(shape, lay.FP32), lay.tiles(shape, codec, channels=2), token=3, tokens=30)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shapes_blocks_and_ranges(data):
    pick = data.draw
    source = pick(st.sampled_from((lay.nhd, lay.hnd, lay.dim_major, lay.tiles, lay.head_fraction)))
    target = pick(st.sampled_from((lay.nhd, lay.hnd, lay.dim_major, lay.tiles, lay.head_fraction)))
    names = list(lay.CODECS)
    elementwise = names[:3]
    a = lay.CODECS[pick(st.sampled_from(elementwise if source is lay.dim_major else names))]
    b = lay.CODECS[
        pick(st.sampled_from(elementwise if target is lay.dim_major or source is lay.dim_major else names))
    ]
    heads, dim = pick(st.integers(1, 3)), pick(st.sampled_from((16, 32, 48)))
    size_in, size_out = (pick(st.sampled_from((4, 8, 16, 20, 32))) for _ in range(2))
    shape_in = lay.shape_of(heads=heads, dim=dim, block_size=size_in, blocks=3, layers=2)
    shape_out = lay.shape_of(heads=heads, dim=dim, block_size=size_out, blocks=3, layers=2)
    most = 3 * min(size_in, size_out)
    token = pick(st.integers(0, most - 1))
    tokens = pick(st.integers(1, most - token))
    check(
        source(shape_in, a),
        target(shape_out, b),
        kv=pick(st.integers(0, 1)),
        token=token,
        tokens=tokens,
        seed=pick(st.integers(0, 99)),
    )


def test_canaries_around_every_target_byte():
    """Only bytes that the pieces name change, whatever was there before."""
    shape = lay.shape_of(block_size=40)
    a, b = lay.nhd(shape), lay.tiles(shape, lay.BFP8, align=256, channels=3)
    for fill in (0x00, 0xFF, 0x5A):
        check(a, b, token=7, tokens=50, fill=fill)


def test_odd_addresses():
    """Slices that begin at odd bytes, pages that begin at odd offsets."""
    shape = lay.shape_of(blocks=2)
    for codec in lay.CODECS.values():
        a, b = lay.nhd(shape, lay.FP16), lay.tiles(shape, codec)
        program, pieces, src, dst = check(a, b)
        want = [d.copy() for d in dst]
        move("numpy", program, pieces, src, want)
        for core in CORES:
            odd_src = [np.concatenate((np.zeros(3, np.uint8), s))[1:] for s in src]
            odd_dst = [np.concatenate((np.zeros(1, np.uint8), np.full(5, 0xA5, np.uint8), d)) for d in dst]
            shifted = replace(pieces, src_page=pieces.src_page + 2, dst_page=pieces.dst_page + 5)
            move(core, program, shifted, odd_src, [d[1:] for d in odd_dst])
            assert np.array_equal(odd_dst[0][6:], want[0])


@pytest.mark.parametrize("codec", [lay.BF16, lay.FP32], ids=["bf16", "fp32"])
def test_runs_and_addresses_that_share_no_whole_element(codec):
    """Runs of three elements at multiples of three bytes, or of six: a unit of that size would cut elements."""
    shape = lay.shape_of(heads=3, dim=3, block_size=3, blocks=2, kvs=1)
    for b in (codec, lay.E4M3, lay.FP32):
        for tokens in (6, 4):
            program, pieces, src, dst = check(lay.hnd(shape, codec), lay.nhd(shape, b), tokens=tokens)
            want = [d.copy() for d in dst]
            move("numpy", program, pieces, src, want)
            for by, core in product((3, 6, 9), CORES):
                odd_src, odd_dst = (
                    [np.concatenate((np.full(by, 0xA5, np.uint8), x)) for x in side] for side in (src, dst)
                )
                shifted = replace(pieces, src_page=pieces.src_page + by, dst_page=pieces.dst_page + by)
                move(core, program, shifted, odd_src, odd_dst)
                assert np.array_equal(odd_dst[0][by:], want[0])
                assert (odd_dst[0][:by] == 0xA5).all()


def test_every_bf16_under_several_exponents():
    """All 65,536 values, one to a group, beside a neighbour that sets the exponent."""
    every = np.arange(65536, dtype=np.uint16)
    for neighbour in (0x0000, 0x0080, 0x3F80, 0x4080, 0xC47F, 0x7F80, 0xFFFF):
        block = np.zeros((65536, 16), np.uint16)
        block[:, 5], block[:, 11] = every, neighbour
        shape = lay.shape_of(heads=8, dim=256, block_size=512, blocks=1, kvs=1)
        src = [block.reshape(-1).view(np.uint8)]
        a = lay.compiled(
            "flat",
            shape,
            lay.BF16,
            [("block", 1, 1)],
            [("slot", 1, 512), ("head", 1, 8), ("dim", 1, 256)],
            buffers=("layer", "kv"),
        )
        for codec in (lay.BFP8, lay.BFP4):
            b = lay.compiled(
                "flat",
                shape,
                codec,
                a.pieces[0].page and [("block", 1, 1)],
                [("slot", 1, 512), ("head", 1, 8), ("dim", 1, 256)],
                buffers=("layer", "kv"),
            )
            program = build_program(a, b, 0)
            pieces = slow.pieces_of(program, a, b, 0, 0, [0], [0], 0, 512)
            want = slow.codecs.encode(codec, (block.astype(np.uint32) << 16).reshape(1, -1))[0]
            for core in CORES:
                got = [np.zeros(b.channel_bytes, np.uint8)]
                move(core, program, pieces, src, got)
                assert np.array_equal(got[0], want)


@pytest.mark.parametrize("other", [*lay.CODECS.values(), *lay.MX.values()], ids=lambda c: c.name)
@pytest.mark.parametrize("mx", lay.MX.values(), ids=lambda c: c.name)
def test_blocks_of_thirty_two(mx, other):
    """To and from every codec, through tiles whose rows hold whole blocks, whole and in part, interleaved too."""
    shape = lay.shape_of(blocks=2, dim=64, heads=2)
    check(lay.nhd(shape, other), lay.tiles(shape, mx, channels=3, tile=32, face=32))
    check(lay.tiles(shape, mx, tile=32, face=32), lay.nhd(shape, other))
    check(lay.nhd(shape, other), lay.tiles(shape, mx, tile=64, face=32), token=5, tokens=40)
    padded = lay.shape_of(blocks=2, dim=80, heads=2)
    check(lay.nhd(padded), lay.tiles(padded, mx, tile=32, face=32), token=3, tokens=30)
    wide = lay.shape_of(blocks=2, dim=128, heads=1)
    elementwise = other if other.group == 1 else lay.FP32
    check(lay.nhd(wide, elementwise), lay.tiles(wide, mx, tile=32, face=32, interleave=True))


@pytest.mark.parametrize("target", lay.MX.values(), ids=lambda c: c.name)
def test_every_bf16_in_blocks_of_thirty_two(target):
    """All 65,536 values beside neighbours that set the scale, and every scale and code read back."""
    every = np.arange(65536, dtype=np.uint16)
    shape = lay.shape_of(heads=8, dim=1024, block_size=256, blocks=1, kvs=1)
    axes = [("slot", 1, 256), ("head", 1, 8), ("dim", 1, 1024)]
    a, b = (
        lay.compiled("flat", shape, codec, [("block", 1, 1)], axes, buffers=("layer", "kv"))
        for codec in (lay.BF16, target)
    )
    raw = np.random.default_rng(4).integers(0, 256, b.channel_bytes, np.uint8)
    for neighbour in (0x0000, 0x0001, 0x0080, 0x3F80, 0x4080, 0xC47F, 0x7F00, 0x7F80, 0xFFFF):
        block = np.zeros((65536, 32), np.uint16)
        block[:, 5], block[:, 21] = every, neighbour
        for x, y, src in ((a, b, block.reshape(-1).view(np.uint8)), (b, a, raw)):
            program = build_program(x, y, 0)
            pieces = slow.pieces_of(program, x, y, 0, 0, [0], [0], 0, 256)
            want = slow.codecs.transcode(x.codec, y.codec, src[None, :], shape.heads * shape.dim * 256)[0]
            for core in CORES:
                got = [np.zeros(y.channel_bytes, np.uint8)]
                move(core, program, pieces, [src], got)
                assert np.array_equal(got[0], want)


@pytest.mark.parametrize("target", [lay.E4M3, lay.E5M2, lay.INT8], ids=lambda c: c.name)
@pytest.mark.parametrize("source", [lay.BF16, lay.FP16, lay.FP32], ids=lambda c: c.name)
def test_every_input_to_eight_bits_and_back(source, target):
    """All 16-bit words; of fp32 every exponent with mantissas around every tie of the target."""
    if source is lay.FP32:
        step, near = np.arange(32, dtype=np.uint32) << np.uint32(18), np.array([0, 1, 0x3FFFF], np.uint32)
        words = (np.arange(512, dtype=np.uint32)[:, None, None] << np.uint32(23)) + step[:, None] + near
        data = words.ravel().astype("<u4")
    else:
        data = np.arange(65536, dtype="<u2")
    shape = lay.shape_of(heads=1, dim=256, block_size=len(data) // 256, blocks=1, kvs=1)
    axes = [("slot", 1, shape.block_size), ("head", 1, 1), ("dim", 1, 256)]
    a, b = (
        lay.compiled("flat", shape, codec, [("block", 1, 1)], axes, buffers=("layer", "kv"))
        for codec in (source, target)
    )
    codes = [np.zeros(b.channel_bytes, np.uint8)]
    for x, y, src in ((a, b, [data.view(np.uint8)]), (b, a, codes)):
        program = build_program(x, y, 0)
        pieces = slow.pieces_of(program, x, y, 0, 0, [0], [0], 0, shape.block_size)
        want = slow.codecs.transcode(x.codec, y.codec, src[0][None, :], len(data))[0]
        for core in CORES:
            got = [np.zeros(y.channel_bytes, np.uint8)]
            move(core, program, pieces, src, got)
            assert np.array_equal(got[0], want)
        codes[0][:] = want[: len(codes[0])]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("src_channel", 1), ("src_channel", -1), ("src_page", -1), ("src_page", 1 << 40), ("src_start", -1),
        ("src_start", 1 << 40), ("dst_channel", 3), ("dst_channel", -1), ("dst_page", -1),
        ("dst_page", 1 << 40), ("dst_start", 1), ("dst_start", -16), ("dst_start", 1 << 40),
    ],
)  # fmt: skip
def test_pieces_out_of_bounds_are_refused(core, column, value):
    shape = lay.shape_of()
    a, b = lay.nhd(shape), lay.tiles(shape, lay.BFP8, channels=3)
    program, pieces, src, dst = check(a, b)
    bad = getattr(pieces, column).copy()
    bad[-1] = value
    got = [d.copy() for d in dst]
    with pytest.raises(InvalidArgument, match=rf"pieces\[{len(pieces) - 1}\]\.{column}"):
        move(core, program, replace(pieces, **{column: bad}), src, got)
    assert all(np.array_equal(x, y) for x, y in zip(got, dst, strict=True)), "refused means untouched"


@pytest.mark.parametrize("core", CORES)
def test_short_channels_are_refused(core):
    shape = lay.shape_of()
    program, pieces, src, dst = check(lay.nhd(shape), lay.tiles(shape), kv=1)
    with pytest.raises(InvalidArgument, match="src_page"):
        move(core, program, pieces, [s[:-1] for s in src], [d.copy() for d in dst])
    with pytest.raises(InvalidArgument, match="dst_page"):
        move(core, program, pieces, src, [d[:-1] for d in dst])
    with pytest.raises(InvalidArgument, match="writable"):
        frozen = [d.copy() for d in dst]
        for d in frozen:
            d.flags.writeable = False
        move(core, program, pieces, src, frozen)


@contextmanager
def at_level(name):
    """The C core with the kernels of one instruction set."""
    core = native.core()
    best = core.level()
    assert core.set_level(name) == name
    try:
        yield
    finally:
        core.set_level(best)


def levels():
    every = ["baseline", "avx2", "avx512"]
    return every[: every.index(native.core().level()) + 1] if "c" in CORES else []


def same_bytes(a, b, *, token=0, tokens=None, seed=0, kv=0):
    """The C core at every level against the numpy core, which the tests above hold to the documented sums."""
    rng = np.random.default_rng(seed)
    program = build_program(a, b, kv)
    tokens = tokens or min(a.shape.block_size * a.shape.blocks, b.shape.block_size * b.shape.blocks) - token
    tables = [rng.permutation(x.shape.blocks).tolist() for x in (a, b)]
    pieces = slow.pieces_of(program, a, b, kv, 0, *tables, token, tokens)
    src = slow.buffers(a, rng=rng)
    want = slow.buffers(b, 0xA5)
    move("numpy", program, pieces, src, want)
    for level in levels():
        with at_level(level):
            got = slow.buffers(b, 0xA5)
            move("c", program, pieces, src, got)
            for c, (x, y) in enumerate(zip(got, want, strict=True)):
                assert np.array_equal(x, y), f"{level}, channel {c}, byte {np.flatnonzero(x != y)[:8]}"


@pytest.mark.skipif("c" not in CORES, reason="the C core is not built")
@pytest.mark.parametrize("source", lay.CODECS.values(), ids=lay.CODECS)
def test_every_instruction_set_gives_the_same_bytes(source):
    shape = lay.shape_of(blocks=2, dim=64)
    for target in lay.CODECS.values():
        for interleave in (False, True):
            same_bytes(lay.nhd(shape, source), lay.tiles(shape, target, channels=3, interleave=interleave))
            same_bytes(lay.tiles(shape, source, interleave=interleave), lay.nhd(shape, target), token=3)
    for mx in lay.MX.values():
        same_bytes(lay.nhd(shape, source), lay.tiles(shape, mx, tile=32, face=32))
        same_bytes(lay.tiles(shape, mx, tile=32, face=32), lay.nhd(shape, source))
    with pytest.raises(ValueError, match="no such level"):
        native.core().set_level("mmx")


@pytest.mark.skipif("c" not in CORES, reason="the C core is not built")
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3fn", "fp8_e5m2"])
def test_factors(name):
    """A constant scale on either side, on both, and the same one, which changes no bit."""
    shape = lay.shape_of(blocks=2, dim=64)
    factors = [CodecInfo(name, 8, 1, True, float(np.float32(f))) for f in (0.0123, 3e-20, 700.0)]
    for scaled in factors:
        for other in (*lay.CODECS.values(), *factors):
            same_bytes(lay.nhd(shape, scaled), lay.tiles(shape, other), token=3, tokens=40)
            same_bytes(lay.nhd(shape, other), lay.hnd(shape, scaled), token=3, tokens=40)
    a, b = lay.nhd(shape, factors[0]), lay.nhd(shape, factors[1])
    check(a, lay.tiles(shape, lay.BF16))
    check(lay.nhd(shape, lay.FP32), a)
    program, pieces, src, dst = check(a, a)
    got = [d.copy() for d in dst]
    move("c", program, pieces, src, got)
    move("numpy", build_program(a, b, 0), pieces, src, dst)
    assert not np.array_equal(got[0], dst[0])


DIGITS = (("slot", 1, 4), ("slot", 4, 8), ("head", 1, 4), ("dim", 1, 2), ("dim", 2, 8), ("dim", 16, 4))


@pytest.mark.skipif("c" not in CORES, reason="the C core is not built")
@settings(max_examples=60, deadline=None)
@given(
    st.permutations(DIGITS),
    st.permutations(DIGITS),
    st.sampled_from([lay.BF16, lay.FP32, lay.E4M3]),
    st.sampled_from([lay.BF16, lay.FP32, lay.E4M3]),
    st.sampled_from([(0, 64), (5, 40)]),
)
def test_any_order_of_digits(source, target, a, b, tokens):
    """Runs, woven and picked apart by twos and fours, transposed, or neither: every way through a box."""
    shape = lay.shape_of(heads=4, dim=64, block_size=32, blocks=2, kvs=1)
    page = [("block", 1, 2)]
    sides = [
        lay.compiled("any", shape, codec, page, order, buffers=("layer", "kv"))
        for codec, order in ((a, source), (b, target))
    ]
    same_bytes(*sides, token=tokens[0], tokens=tokens[1])


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("codec", [lay.BF16, lay.E4M3, lay.BFP8], ids=["bf16", "fp8_e4m3fn", "bfp8_b"])
@pytest.mark.parametrize("interleave", [False, True])
def test_large_moves_past_the_caches(core, codec, interleave):
    """Large enough for streaming stores, on aligned and on odd targets, against small moves by numpy."""
    shape = lay.shape_of(heads=8, dim=128, block_size=64, blocks=48, kvs=1)
    a, b = lay.nhd(shape), lay.tiles(shape, codec, channels=2, interleave=interleave)
    program = build_program(a, b, 0)
    pieces = slow.pieces_of(program, a, b, 0, 0, list(range(48)), list(range(48))[::-1], 0, 48 * 64)
    src = slow.buffers(a, rng=np.random.default_rng(1))
    want = slow.buffers(b, 0)
    for i in range(0, len(pieces), 512):
        part = replace(pieces, **{n: getattr(pieces, n)[i : i + 512] for n in slow.COLUMNS})
        move("numpy", program, part, src, want)
    for odd in (0, 16, 24):
        room = [np.full(b.channel_bytes + 128, 0x5A, np.uint8) for _ in want]
        got = [r[(at := -r.ctypes.data % 64 + odd) : at + b.channel_bytes] for r in room]
        move(core, program, pieces, src, got)
        assert all(np.array_equal(x, y) for x, y in zip(got, want, strict=True))
        assert all((r == 0x5A).sum() >= 128 for r in room)


def test_threads_change_nothing():
    shape = lay.shape_of(blocks=16)
    program, pieces, src, dst = check(lay.nhd(shape), lay.tiles(shape, channels=4), cores=("numpy",))
    for core in CORES:
        one, many = [d.copy() for d in dst], [d.copy() for d in dst]
        move(core, program, pieces, src, one)
        move(core, program, pieces, src, many, threads=3)
        assert all(np.array_equal(x, y) for x, y in zip(one, many, strict=True))
