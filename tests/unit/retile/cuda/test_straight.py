"""Elements whose scales are found, made and used on the way, in one launch: every byte is that of processors' rows."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest

from hawk.bench.retile_cases import Planned, cases
from hawk.layouts import CacheShape, Layout
from hawk.layouts.codecs import encode
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Selection
from hawk.retile import cpu
from hawk.retile.cuda import scaled, through
from hawk.retile.cuda.box import box_of
from hawk.retile.cuda.source import header
from tests.unit.layouts import moving
from tests.unit.retile.cuda import test_through as rows
from tests.unit.retile.cuda.on_cpu import HEADER, Kernels, aligned
from tests.unit.retile.cuda.test_pairs import planned

CASES = {case.pair: case for case in cases(1, "scales made and spread")}

TILES = "block head slot/8 dim/16 | slot%8 dim%16"


class Told(Kernels):
    """Kernels that remember what they were asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.launches = []

    def launch(self, bound, regions, written, seed=1):
        self.launches.append(bound)
        return super().launch(bound, regions, written, seed)

    @property
    def between(self):
        return sum(isinstance(bound, through.Between) for bound in self.launches)

    @property
    def specs(self):
        found = [spec for bound in self.launches for spec in getattr(bound, "specs", ())]
        return [spec for spec in found if spec.scales is not None]


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    return Told(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def told(known):
    known.launches = []
    return known


def layout(scale, codec="int8", order="block | slot head dim", **more):
    text = f'name = "t"\ncodec = "{codec}"\nbuffers = "layer kv"\n'
    text += "".join(f'{key} = "{value}"\n' for key, value in more.items())
    text += f"[scale]\n{scale}\n" if scale else ""
    return Layout.from_toml(f'{text}[[piece]]\norder = "{order}"\n')


def numbers(rng, regions):
    """What caches hold: bf16 of all sizes that occur, no infinities, some zeros."""
    for region in regions:
        values = rng.standard_normal(len(region) // 2).astype(np.float32) * np.float32(2.0) ** rng.integers(
            -8, 8, len(region) // 2
        ).astype(np.float32)
        values[rng.random(len(values)) < 0.05] = 0
        region[: 2 * len(values)] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


@pytest.mark.parametrize("pair", CASES)
def test_pairs_that_are_measured(pair, told):
    case = CASES[pair]
    for token, tokens in ((64, 123), (0, case.tokens)):
        steps, regions, nbytes = planned(case, token, tokens)
        if token:
            Planned(case).fill(regions)  # else any bytes
        want, got = aligned(nbytes, 0xA5), aligned(nbytes, 0xA5)
        for step in steps:
            cpu.run_step(step, regions, want)
        told.run(steps, regions, got)
        assert np.array_equal(got, want), (token, np.flatnonzero(got != want)[:8])
    assert not told.between
    assert all(box_of(spec).fast for spec in told.specs), "vectors, not elements one by one"
    assert all(spec.elements <= 8192 for spec in told.specs), "many blocks of threads share a processor"


SIDES = [
    # a unit of several pages of the target, of the source, of both; scales of rows of heads, of blocks, of groups
    ("", "bf16", "block | slot head dim", 'order = "block slot head"', "int8", TILES),
    ("", "fp16", TILES, 'order = "block slot"', "fp8_e4m3fn", "block | slot head dim"),
    ("", "fp32", "block | head dim slot", 'order = "block slot"', "int8", "block | head slot dim"),
    ("", "bf16", "block | dim slot head", 'order = "block slot"', "int8", "block head | slot dim"),
    ("", "bf16", "block | slot head dim", 'order = "block"', "fp8_e5m2", TILES),
    ("", "bf16", "block | slot head dim", 'order = "block slot head dim"\ngroup = 16', "int8", TILES),
    ('order = "block slot head"', "int8", TILES, 'order = "block head"', "int8", "block | dim slot head"),
    ('order = "block head"', "fp8_e5m2", TILES, 'order = "block slot head dim"\ngroup = 8', "int8", TILES),
    ('order = "block slot head dim"\ngroup = 8', "int8", TILES, "", "bf16", "block | head dim slot"),
    ('order = "block slot"', "fp8_e4m3fn", TILES, "", "fp16", "block | head slot dim"),
    ('order = "head"', "int8", "block | slot head dim", "", "bfp4_b", TILES),
]


@pytest.mark.parametrize(("before", "a", "one", "after", "b", "other"), SIDES)
@pytest.mark.parametrize("fill", [rows.ordinary, numbers])
def test_scales_of_any_grain_between_any_orders(before, a, one, after, b, other, fill, told):
    buffer = 'place = "buffer"\ndtype = "fp32"\n'
    src = layout(before and buffer + before, a, one).compile(CacheShape(2, 3, 32, 8, 9))
    dst = layout(after and buffer.replace("fp32", "bf16") + after, b, other).compile(
        CacheShape(2, 3, 32, 16, 5)
    )
    want, got = rows.both(told, src, dst, token=16, tokens=45, fill=fill)
    assert np.array_equal(got, want), np.flatnonzero(got != want)[:8]
    assert told.specs
    assert not told.between


def sparse(nbytes):
    """Memory of which only what is written takes room."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)


@pytest.mark.parametrize("scale", ["", 'place = "buffer"\ndtype = "fp32"\norder = "block slot"'])
def test_a_unit_reaches_over_more_than_four_gibibytes(scale, told):
    """Heads of one token, each so far from the next that only 64 bits count all of them."""
    every = 1_300_000
    src = layout("", "bf16", "head block | slot dim").compile(CacheShape(1, 8, 16, 16, every, 1))
    dst = layout(scale, "int8" if scale else "bf16").compile(CacheShape(1, 8, 16, 16, 4, 1))
    blocks, into = np.array([5, 70_000]), np.array([1, 0])
    (nbytes,) = src.buffer_bytes
    assert nbytes > 1 << 32
    region = sparse(nbytes)
    for page in (blocks[:, None] + np.arange(8) * every).ravel() * 512:
        numbers(np.random.default_rng(page), [region[page : page + 512]])
    chunk = target_chunk(dst, into, Selection(0, 1, 0, 32), Chunk(0, 1, 0, 2))
    steps = list(retile_steps(src, blocks, moving.placement(src), chunk, into))
    want, got = aligned(chunk.nbytes, 0x5A), aligned(chunk.nbytes, 0x5A)
    for step in steps:
        cpu.run_step(step, [region], want)
    told.run(steps, [region], got)
    assert np.array_equal(got, want), np.flatnonzero(got != want)[:8]


@pytest.mark.parametrize(
    ("pair", "which"),
    # In the second each thread looks at what it has taken itself, so that the first barrier is not missed there.
    [
        *(("nhd > by-token:int8", i) for i in range(3)),
        *(("by-token:int8 > by-block:int8", i) for i in (1, 2)),
    ],
)
def test_every_barrier_counts(pair, which, tmp_path):
    def without(text):
        if "look_0" not in text:
            return text
        parts = text.split("\nBARRIER\n")
        assert len(parts) == 4
        parts[which : which + 2] = ["\n".join(parts[which : which + 2])]
        return "\nBARRIER\n".join(parts)

    case = CASES[pair]
    steps, regions, nbytes = planned(case, 0, case.tokens)
    Planned(case).fill(regions)
    want, got = aligned(nbytes, 0xA5), aligned(nbytes, 0xA5)
    for step in steps:
        cpu.run_step(step, regions, want)
    broken = Kernels(tmp_path, without)
    faults = [broken.launch(*one) for one in broken.bound(steps, regions, got)]
    assert any(faults) or not np.array_equal(got, want)


def test_scales_of_too_many_elements_go_through_rows(told, monkeypatch):
    monkeypatch.setattr(scaled, "MOST_BYTES", 512)
    src, dst = rows.pair("", "bf16", rows.scaled.BLOCK, "int8")
    rows.check(told, src, dst, token=6, tokens=rows.scaled.TOKENS - 6)
    assert told.between
    assert not told.specs


@pytest.mark.parametrize(("group", "through_rows"), [(1, True), (2, False)])
def test_more_shared_memory_than_every_gpu_has_is_not_asked_for(group, through_rows, told):
    scale = f'place = "buffer"\ndtype = "fp32"\norder = "block slot head dim"\ngroup = {group}'
    src = layout("", "fp8_e5m2").compile(CacheShape(1, 4, 128, 16, 1, 1))
    rows.check(told, src, layout(scale).compile(src.shape), tokens=16)
    assert all(bound.shared_bytes <= 64 << 10 for bound in told.launches)
    assert bool(told.between) == through_rows


def test_layers_share_what_was_worked_out(told):
    src, dst = rows.pair(rows.scaled.TOKEN, "fp8_e4m3fn", rows.scaled.TOKEN_HEAD, "int8")
    rows.check(told, src, dst)
    assert len(told.launches) == 3, "scales in, elements of two layers' K and V, scales out"


FUNCTIONS = """
u32 quotients(const u32 *x, const u32 *y, u32 n)
{
    u32 wrong = 0;
    for (u32 i = 0; i < n; i++)
        wrong += quick_quotient(x[i], y[i], TO_BITS(1.0f / TO_FLOAT(y[i]))) != quotient(x[i], y[i]);
    return wrong;
}
void groups(const u32 *x, u32 *out, u32 *shared, u32 n, u32 bits)
{
    for (u32 i = 0; i < n; i++) {
        u32 *to = out + bits / 2 * i;
        shared[i] = bits == 8 ? group_bfp8_b(x + 16 * i, to) : group_bfp4_b(x + 16 * i, to);
    }
}
void used(u32 *order) { shuffle(order, 1); }
"""


@pytest.fixture(scope="module")
def functions(known):
    head = ("#define THREADS 64", HEADER, header("codecs.h"), header("scales.h"), FUNCTIONS)
    return known.library("\n".join(head))


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def test_quick_quotients_are_those_to_nearest(functions):
    """Of values near the middle between two codes most of all."""
    rng, n = np.random.default_rng(5), 400_000
    y = rng.integers(0, 1 << 23, n, np.uint32) | rng.integers(67, 187, n, np.uint32) << np.uint32(23)
    codes = np.where(
        rng.random(n) < 0.5, rng.integers(1, 256, n) / 2, rng.random(n) * 2.0 ** rng.integers(-18, 8, n)
    )
    x = (y.view(np.float32) * codes.astype(np.float32)).view(np.uint32) + rng.integers(-2, 3, n).astype(
        np.uint32
    )
    quotients = x.view(np.float32) / y.view(np.float32)
    kept = (quotients > 2.0**-18) & (x.view(np.float32) <= 2.0**60)
    x, y = np.ascontiguousarray(x[kept]), np.ascontiguousarray(y[kept])
    assert len(x) > n // 2
    assert functions.quotients(pointer(x), pointer(y), ctypes.c_uint32(len(x))) == 0


def test_the_hardest_quotients_are_those_to_nearest(functions):
    """As near to the middle between two numbers as can be: A 2^24 = B M +- 1 for an M of 25 bits."""
    b = np.random.default_rng(6).integers(1 << 22, 1 << 23, 200_000) * 2 + 1
    inverse = b.copy()
    for _ in range(5):  # each step doubles the bits that are right
        inverse = inverse * (2 - b * inverse % (1 << 24)) % (1 << 24)
    assert (b * inverse % (1 << 24) == 1).all()
    for one in (1, -1):
        middle = (one * inverse) % (1 << 24) + (1 << 24)
        a = (b * middle - one) >> 24
        assert (a * (1 << 24) == b * middle - one).all()
        kept = a < 1 << 24
        x, y = (n[kept].astype(np.float32).view(np.uint32) for n in (a, b))
        assert len(x) > 10_000
        assert functions.quotients(pointer(x), pointer(y), ctypes.c_uint32(len(x))) == 0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("spread", [4, 40, 255])
def test_groups_of_any_values(spread, bits, functions):
    """What 24 bits lose when they are shifted is lost here too, before anything is rounded."""
    rng, n = np.random.default_rng(spread), 20_000
    top = rng.integers(0, 256, (n, 1))
    exponent = (top - rng.integers(0, spread + 1, (n, 16))).clip(0, 255).astype(np.uint32)
    few = rng.integers(0, 1 << 24, (n, 16), np.uint32) & np.uint32(0xFFFE0003)  # near ties, mostly
    x = (
        few & np.uint32(0x7FFFFF)
        | exponent << np.uint32(23)
        | rng.integers(0, 2, (n, 16), np.uint32) << np.uint32(31)
    )
    out, shared = np.zeros((n, bits // 2), np.uint32), np.zeros(n, np.uint32)
    functions.groups(pointer(x), pointer(out), pointer(shared), ctypes.c_uint32(n), ctypes.c_uint32(bits))
    got = np.concatenate([shared.astype(np.uint8)[:, None], out.view(np.uint8)], axis=1)
    assert np.array_equal(got, encode(f"bfp{bits}_b", x))
