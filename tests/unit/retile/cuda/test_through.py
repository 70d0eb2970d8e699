"""Steps through rows, by kernels: what the processors' batches write, byte for byte, of any bytes whatever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hawk.layouts import CacheShape, load
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Selection
from hawk.plan.ways import ways
from hawk.retile import cpu
from hawk.retile.cuda import through
from hawk.retile.rows import RowsStep
from tests.unit.layouts import moving
from tests.unit.plan import support as s
from tests.unit.plan import test_scaled as scaled
from tests.unit.retile.cuda.on_cpu import Kernels, aligned

MADE = [
    ("", "bf16", scaled.TOKEN, "int8"),
    ("", "bf16", scaled.GROUPS, "fp8_e5m2"),
    ("", "bf16", scaled.HALF, "int8"),
    ("", "bf16", scaled.PAGE, "fp8_e4m3fn"),
    (scaled.GROUPS, "int8", scaled.TOKEN, "int8"),
    (scaled.TENSOR, "fp8_e4m3fn", scaled.BLOCK, "int8"),
    (scaled.BLOCK, "int8", scaled.BLOCK, "int8"),
    (scaled.PAGE, "int8", scaled.TOKEN_HEAD, "fp8_e5m2"),
]
SPREAD = [
    (scaled.FIXED, "int8", scaled.TENSOR),
    (scaled.TENSOR, "fp8_e5m2", scaled.BLOCK),
    (scaled.TOKEN, "int8", scaled.TOKEN_HEAD),
    (scaled.HEAD, "int8", scaled.GROUPS),
]
RANGED = [(scaled.HEAD, "fp8_e4m3fn", scaled.TENSOR, "int8"), ("", "fp8_e4m3fn", scaled.TENSOR, "int8")]
LEFT = [(scaled.TOKEN, "fp8_e4m3fn", "", "fp32"), (scaled.BLOCK, "fp8_e5m2", "", "bfp8_b")]


def ordinary(rng: np.random.Generator, regions: list[np.ndarray]) -> None:
    """Any bytes: infinities, NaNs and denormals of elements and of scales among them."""
    for region in regions:
        region[:] = rng.integers(0, 256, len(region), np.uint8)


def both(kernels, src, dst, *, token=0, tokens=scaled.TOKENS, seed=0, straight=True, fill=ordinary):
    """The arena as processors write it, and as kernels do; without `straight` all goes through rows."""
    rng = np.random.default_rng(seed)
    size = dst.shape.block_size
    first, last = token // size, -(-(token + tokens) // size)
    blocks = rng.permutation(src.shape.blocks), rng.permutation(dst.shape.blocks)
    selection = Selection(layer=0, layers=dst.shape.layers, token=token, tokens=tokens)
    chunk = Chunk(layer=0, layers=dst.shape.layers, block=first, blocks=last - first)
    target = target_chunk(dst, blocks[1], selection, chunk)
    regions = [aligned(nbytes, 0) for nbytes in src.buffer_bytes for _ in range(src.channels)]
    fill(rng, regions)
    steps = list(retile_steps(src, blocks[0], moving.placement(src), target, blocks[1]))
    assert any(isinstance(step, RowsStep) for step in steps)
    if not straight:
        steps = [replace(step, direct=None) if isinstance(step, RowsStep) else step for step in steps]
    want, got = aligned(target.nbytes, 0x5A), aligned(target.nbytes, 0x5A)
    for step in steps:
        cpu.run_step(step, regions, want)
    kernels.run(steps, regions, got)
    return want, got


def check(kernels, src, dst, **request):
    want, got = both(kernels, src, dst, **request)
    assert np.array_equal(got, want), np.flatnonzero(got != want)[:8]


def pair(before, a, after, b):
    src = scaled.layout(before, a, order="block | head slot dim", more=scaled.SEVEN).compile(scaled.NEAR)
    return src, scaled.layout(after, b, more="" if "page" in before else scaled.SEVEN).compile(scaled.FAR)


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize(("before", "a", "after", "b"), MADE)
def test_scales_made_anew(before, a, after, b, straight, kernels):
    src, dst = pair(before, a, after, b)
    assert [w.rules for w in ways(src, dst, None)] == [("made",)]
    check(kernels, src, dst, token=6, tokens=scaled.TOKENS - 6, straight=straight)


@pytest.mark.parametrize(("before", "codec", "after"), SPREAD)
def test_scales_spread(before, codec, after, kernels):
    src, dst = pair(before, codec, after, codec)
    assert [w.rules for w in ways(src, dst, None)] == [("spread",)]
    check(kernels, src, dst)


@pytest.mark.parametrize(("before", "a", "after", "b"), RANGED)
def test_scales_of_a_whole_cache(before, a, after, b, kernels):
    src, dst = pair(before, a, after, b)
    assert [w.rules for w in ways(src, dst, None)] == [("ranged",)]
    check(kernels, src, dst)


@pytest.mark.parametrize("straight", [True, False])
@pytest.mark.parametrize(("before", "a", "after", "b"), LEFT)
def test_values_leave_their_scales(before, a, after, b, straight, kernels):
    check(kernels, *pair(before, a, after, b), straight=straight)


@pytest.mark.parametrize("codec", ["bf16", "fp8_e5m2"])
def test_digits_that_do_not_nest_keep_their_bits(codec, kernels):
    a = s.declare("a", "block head dim/12 slot | dim%12", buffers="layer kv", codec=codec)
    b = s.declare("b", "block head dim/8 | slot dim%8", buffers="layer kv", codec=codec)
    src = a.compile(s.shape(heads=2, dim=48, block_size=8, blocks=20), channels=3)
    dst = b.compile(s.shape(heads=2, dim=48, block_size=12), channels=5)
    check(kernels, src, dst, token=37, tokens=60)


def test_groups_meet_beside_steps_without_rows(kernels):
    shape = CacheShape(layers=2, heads=2, dim=64, block_size=32, blocks=4)
    src = load("tenstorrent/kv-hf").compile(shape, codec="bfp8_b", channels=7)
    dst = load("tenstorrent/kv").compile(shape, codec="bfp4_b", channels=8)
    check(kernels, src, dst, tokens=90)


def test_rows_of_several_steps_share_what_room_there_is(kernels, monkeypatch):
    src, dst = pair(scaled.HEAD, "fp8_e4m3fn", scaled.TENSOR, "int8")
    lent = []

    def counted(steps, regions, arena, room, shelf=None, recipes=None):
        def asked(nbytes):
            lent.append(nbytes)
            return room(nbytes)

        found = through.stages(steps, regions, arena, asked, shelf)
        lent.append(len(found))
        return found

    monkeypatch.setattr("tests.unit.retile.cuda.on_cpu.stages", counted)
    check(kernels, src, dst)
    monkeypatch.setattr(through, "ROOM", 1)
    check(kernels, src, dst)
    (whole, launches), (one, more) = lent[:2], lent[2:]
    assert whole == 4 * one, "two layers of K and V"
    assert more == 4 * launches


@pytest.mark.parametrize("phase", ["decide", "write"])
def test_a_launch_between_needs_its_barriers(phase, kernels):
    """Without the one before it, a scale is made of some threads' numbers, or is not yet there for the others."""
    src, dst = pair("", "bf16", scaled.HALF, "int8")
    broken = Kernels(
        kernels.folder,
        lambda text: text.replace(f"BARRIER\n{{\n    PLACE\n    {phase}", f"{{\n    PLACE\n    {phase}"),
    )
    want, got = both(broken, src, dst, straight=False)
    assert not np.array_equal(got, want)
