"""Elements that only change place, in whole lines: one piece's, and those that several pieces fill together.

On lines and beside them, past the caches and through them, at every level: byte for byte as the numpy core moves them,
and what lies around the target stays as it was.
"""

from __future__ import annotations

import numpy as np
import pytest

from hawk.retile import cpu, native
from hawk.retile.build import build_program
from tests.unit.retile import layouts as lay
from tests.unit.retile import slow
from tests.unit.retile.test_cores import at_level, levels

MARGIN = 128

SIDES = {
    "nhd": lay.nhd,
    "hnd": lay.hnd,
    "beside": lay.beside,
    "columns": lay.columns,
    "tiles": lay.tiles,
    "woven": lambda shape, codec: lay.tiles(shape, codec, channels=3, interleave=True),
    "lanes": lay.head_fraction,
    "lanes32": lambda shape, codec: lay.head_fraction(shape, codec, lanes=32),
}


def room(nbytes: int, off: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that begin `off` behind a line, and all around them; 0xA5 everywhere."""
    memory = np.full(nbytes + 2 * MARGIN + 64, 0xA5, np.uint8)
    at = -memory.ctypes.data % 64 + 64 + off
    return memory[at : at + nbytes], memory


def compare(a, b, off, *, token=0, tokens=None, seed=0):
    rng = np.random.default_rng(seed)
    program = build_program(a, b, 0)
    tokens = tokens or min(a.shape.block_size * a.shape.blocks, b.shape.block_size * b.shape.blocks) - token
    tables = [rng.permutation(x.shape.blocks).tolist() for x in (a, b)]
    pieces = slow.pieces_of(program, a, b, 0, 0, *tables, token, tokens)
    src = []
    for _ in range(a.channels):
        part, _ = room(a.channel_bytes, off)
        part[:] = rng.integers(0, 256, len(part), np.uint8)
        src.append(part)

    def moved(core):
        parts = [room(b.channel_bytes, off) for _ in range(b.channels)]
        with native.using(core):
            cpu.run(program, pieces, src, [part for part, _ in parts])
        return [np.roll(memory, -(-memory.ctypes.data % 64)) for _, memory in parts]

    want = moved("numpy")
    for level in levels():
        with at_level(level):
            for c, (x, y) in enumerate(zip(moved("c"), want, strict=True)):
                assert np.array_equal(x, y), f"{level}, channel {c}, byte {np.flatnonzero(x != y)[:8]}"


@pytest.mark.skipif(not native.available(), reason="the C core is not built")
@pytest.mark.parametrize("past", [False, True], ids=["through", "past"])
@pytest.mark.parametrize(
    "pair",
    [
        ("nhd", "tiles"),
        ("nhd", "woven"),
        ("hnd", "woven"),
        ("tiles", "nhd"),
        ("woven", "nhd"),
        ("woven", "hnd"),
        ("tiles", "woven"),
        ("nhd", "lanes"),
        ("lanes", "nhd"),
        ("lanes32", "lanes"),
        ("lanes", "woven"),
        ("beside", "tiles"),
        ("beside", "woven"),
        ("beside", "nhd"),
        ("nhd", "hnd"),
    ],
    ids="-".join,
)
def test_lines(pair, past, monkeypatch):
    if past:
        monkeypatch.setattr(cpu, "STREAM_BYTES", 0)
    for codec in (lay.BF16, lay.FP32, lay.INT8):
        for shape in (
            lay.shape_of(blocks=3, dim=128, heads=2),
            lay.shape_of(blocks=4, dim=192, heads=3, block_size=16),
        ):
            a, b = (SIDES[name](shape, codec) for name in pair)
            compare(a, b, 0)
            compare(a, b, 0, token=3, tokens=40)
            compare(a, b, 32, token=16)
            compare(a, b, 4)


@pytest.mark.skipif(not native.available(), reason="the C core is not built")
def test_blocks_of_different_sizes(monkeypatch):
    monkeypatch.setattr(cpu, "STREAM_BYTES", 0)
    small, large = (
        lay.shape_of(blocks=n, dim=128, heads=4, block_size=size) for n, size in ((8, 16), (2, 64))
    )
    for codec in (lay.BF16, lay.INT8):
        for a, b in (("nhd", "woven"), ("woven", "nhd"), ("lanes", "nhd"), ("nhd", "lanes")):
            compare(SIDES[a](small, codec), SIDES[b](large, codec), 0, token=5)
            compare(SIDES[a](large, codec), SIDES[b](small, codec), 0, token=5, tokens=90)


@pytest.mark.skipif(not native.available(), reason="the C core is not built")
@pytest.mark.parametrize(
    "pair",
    [
        (("nhd", 16), ("columns", 32)),
        (("nhd", 16), ("columns", 128)),
        (("columns", 128), ("nhd", 16)),
        (("columns", 64), ("tiles", 64)),
        (("columns", 128), ("woven", 64)),
        (("woven", 64), ("columns", 128)),
        (("columns", 16), ("columns", 64)),
    ],
    ids=lambda pair: f"{pair[0][0]}{pair[0][1]}-{pair[1][0]}{pair[1][1]}",
)
def test_columns(pair, monkeypatch):
    """Tokens side by side; pieces that fill lines together, or read one page, do not follow each other."""
    monkeypatch.setattr(cpu, "STREAM_BYTES", 0)
    for codec, dim, heads in ((lay.BF16, 128, 3), (lay.BF16, 64, 2), (lay.INT8, 64, 2)):
        a, b = (
            SIDES[name](lay.shape_of(blocks=256 // size, dim=dim, heads=heads, block_size=size), codec)
            for name, size in pair
        )
        compare(a, b, 0)
        compare(a, b, 0, token=13, tokens=150)
        compare(a, b, 16, token=32)
