"""Byte for byte what the vendor's own host library stores, for every shape, kind of data and codec in its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hawk import layouts
from hawk.layouts.compiled import CacheShape
from hawk.retile import cpu, native
from hawk.retile.build import build_program
from tests.reference import tenstorrent
from tests.unit.retile import slow

CORES = ("numpy", "c") if native.available() else ("numpy",)
GOLDEN = np.load(Path(__file__).parents[2] / "data" / "ttnn_tiles.npz")
CASES = sorted(key.rsplit("|", 1)[0] for key in GOLDEN.files if key.endswith("|input"))


def move(core, a, b, kv, src, shape):
    program = build_program(a, b, kv)
    blocks = list(range(shape.blocks))
    pieces = slow.pieces_of(program, a, b, kv, 0, blocks, blocks, 0, shape.blocks * shape.block_size)
    got = slow.buffers(b, 0xEE)
    with native.using(core):
        cpu.run(program, pieces, [src], got)
    return got


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("core", CORES)
def test_golden(case, core):
    x = GOLDEN[f"{case}|input"]
    blocks, heads, block_size, dim = x.shape
    shape = CacheShape(1, heads, dim, block_size, blocks, 2)
    inputs = {"fp32": x.view(np.uint32)}
    if case.endswith("bf16exact"):
        inputs["bf16"] = (x.view(np.uint32) >> 16).astype(np.uint16)
    for name, values in inputs.items():
        source = layouts.load("vllm/nhd").compile(shape, codec=name)
        cache = np.zeros((2, blocks, block_size, heads, dim), values.dtype)
        cache[1] = values.transpose(0, 2, 1, 3)
        for codec in ("fp32", "bf16", "bfp8_b", "bfp4_b"):
            if f"{case}|{codec}" not in GOLDEN:
                continue
            target = layouts.load("tenstorrent/kv").compile(shape, codec=codec, channels=1, align=1)
            got = move(core, source, target, 1, cache.view(np.uint8).reshape(-1), shape)
            assert np.array_equal(got[0], GOLDEN[f"{case}|{codec}"].view(np.uint8).ravel()), (name, codec)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("codec", ["bf16", "bfp8_b", "bfp4_b"])
@pytest.mark.parametrize(("channels", "align"), [(7, 64), (8, 64), (12, 32)])
def test_channels_against_the_reference(core, codec, channels, align):
    shape = CacheShape(1, 2, 128, 64, 3, 2)
    rng = np.random.default_rng(5)
    cache = rng.integers(0, 65536, (2, 3, 64, 2, 128), np.uint16)
    for kv in (0, 1):
        source = layouts.load("vllm/nhd").compile(shape)
        target = layouts.load("tenstorrent/kv").compile(shape, codec=codec, channels=channels, align=align)
        got = move(core, source, target, kv, cache.view(np.uint8).reshape(-1), shape)
        pages = tenstorrent.pages(cache[kv].transpose(0, 2, 1, 3), codec, kv == 0)
        want = tenstorrent.to_channels(pages, channels, target.page_stride)
        for channel, (x, y) in enumerate(zip(got, want, strict=True)):
            written = np.zeros(len(x), np.bool_)
            for i in range(channel, len(pages), channels):
                at = i // channels * target.page_stride
                written[at : at + pages.shape[1]] = True
            assert np.array_equal(x[written], y[: len(x)][written]), channel
            assert (x[~written] == 0xEE).all(), "gaps between pages are nobody's"
