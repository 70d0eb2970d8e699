"""Kernels for every codec to every other, run on the CPU: all words, partial rows, groups kept and formed anew."""

from __future__ import annotations

import numpy as np
import pytest

from hawk.errors import Unmappable
from hawk.layouts.compiled import CodecInfo
from hawk.plan.types import RetileStep
from hawk.retile import cpu
from hawk.retile.build import build_program
from tests.unit.retile import layouts as lay
from tests.unit.retile import slow
from tests.unit.retile.cuda.on_cpu import aligned

EVERY = {**lay.CODECS, **lay.MX}
FACTORS = [
    CodecInfo(n, 8, 1, True, float(np.float32(f))) for n, f in (("int8", 0.0123), ("fp8_e4m3fn", 3e-20))
]


def step_of(a, b, *, kv=0, token=0, tokens=None, seed=0):
    """One step between buffers that begin at each region's first byte, the target's one after another in the arena."""
    rng = np.random.default_rng(seed)
    program = build_program(a, b, kv)
    tokens = tokens or min(a.shape.block_size * a.shape.blocks, b.shape.block_size * b.shape.blocks) - token
    tables = [rng.permutation(x.shape.blocks).tolist() for x in (a, b)]
    pieces = slow.pieces_of(program, a, b, kv, 0, *tables, token, tokens)
    channels = tuple(range(a.channels))
    into = tuple(c * b.channel_bytes for c in range(b.channels))
    return RetileStep(0, kv, program, pieces, channels, (0,) * a.channels, into)


def both(kernels, a, b, *, values=None, at=0, seed=0, **kw):
    """The step by a kernel, and on the CPU; `at` is how far behind a multiple of 256 memory begins."""
    step, rng = step_of(a, b, **kw), np.random.default_rng(seed)
    regions = [aligned(a.channel_bytes, rng=rng, at=at) for _ in range(a.channels)]
    if values is not None:
        regions[0][:] = values.view(np.uint8)
    want, got = (aligned(b.channel_bytes * b.channels, 0xA5, at=at) for _ in range(2))
    cpu.run_step(step, regions, want)
    kernels.run([step], regions, got, seed + 1)
    return got, want


def same(kernels, a, b, **kw):
    """Runs the step both ways; every byte counts."""
    got, want = both(kernels, a, b, **kw)
    assert np.array_equal(got, want), np.flatnonzero(got != want)[:8]


def layouts_for(codec, shape, **kw):
    mx = codec.group == 32
    return lay.tiles(shape, codec, tile=32, face=32 if mx else 16, **kw)


@pytest.mark.parametrize("target", EVERY)
@pytest.mark.parametrize("source", EVERY)
def test_every_codec_to_every_other(source, target, kernels):
    shape = lay.shape_of(blocks=3, dim=64)
    a, b = EVERY[source], EVERY[target]
    try:
        same(kernels, lay.nhd(shape, a), layouts_for(b, shape, channels=3), token=3, tokens=71)
    except Unmappable:
        assert a.group > 1


@pytest.mark.parametrize("target", EVERY)
def test_out_of_tiles(target, kernels):
    shape = lay.shape_of(blocks=2, dim=64)
    for source in (lay.BFP8, lay.BFP4, lay.MXE2M1):
        if EVERY[target].group <= 1:
            same(kernels, layouts_for(source, shape, channels=3), lay.nhd(shape, EVERY[target]))
    same(kernels, layouts_for(EVERY[target], shape), layouts_for(EVERY[target], shape, channels=2), token=3)


@pytest.mark.parametrize("scaled", FACTORS, ids=lambda c: c.name)
def test_factors(scaled, kernels):
    shape = lay.shape_of(blocks=2, dim=64)
    for other in (lay.BF16, lay.FP32, lay.BFP8, *FACTORS):
        same(kernels, lay.nhd(shape, scaled), lay.tiles(shape, other), tokens=60)
        same(kernels, lay.nhd(shape, other), lay.hnd(shape, scaled), tokens=60)


@pytest.mark.parametrize("target", EVERY)
@pytest.mark.parametrize("source", [lay.BF16, lay.FP16], ids=["bf16", "fp16"])
def test_all_words_of_sixteen_bits(source, target, kernels):
    """Each among neighbours of its own size, and beside one that sets what a group shares."""
    shape = lay.shape_of(heads=1, dim=256, block_size=512, blocks=1, kvs=1)
    axes = [("slot", 1, 512), ("head", 1, 1), ("dim", 1, 256)]
    a, b = (
        lay.compiled("flat", shape, codec, [("block", 1, 1)], axes, buffers=("layer", "kv"))
        for codec in (source, EVERY[target])
    )
    words = np.arange(65536, dtype=np.uint16)
    for neighbour in (0x0000, 0x3F80, 0x7F00) if EVERY[target].group > 1 else (0x0000,):
        beside = words.reshape(-1, 16).copy()
        beside[:, 5] = neighbour
        same(kernels, a, b, values=np.concatenate([words, beside.ravel()]))
