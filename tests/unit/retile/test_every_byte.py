"""No byte is left as it was: both cores, every shipped layout, sizes that no tile divides, poisoned memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hawk import convert as c
from hawk.errors import LayoutError
from hawk.layouts import CacheShape, Layout, load
from hawk.layouts.library import names
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Selection
from hawk.retile import cpu, native, rows

CORES = ("numpy", "c") if native.available() else ("numpy",)
OTHERS = {
    "tenstorrent/kv-sharded": "holds whole tiles only",
    "vllm/nhd-fp8": "its scales of the whole cache are made of such scales only",
}
NAMES = [name for name in names() if name not in OTHERS]
DIMS = {1: (24, 80, 96, 576), 3: (80, 24, 96, 576), 15: (40, 96, 80, 576)}
TILES = Layout.from_toml(
    """
name = "t/tiles"
codec = "bf16"
codecs = ["bf16", "fp32"]
buffers = "layer kv"
align = 2048
[placement]
kind = "interleaved"
channels = 6
[[piece]]
where = "kv=0"
rename = "m = (dim%(R/2) dim/(R/2))"
order = "block head slot/4 m/8 | m%8/2 slot%4 m%2"
[[piece]]
where = "kv=1"
order = "block head slot/4 dim/8 | dim%8/2 slot%4 dim%2"
[params]
R = "dim"
"""
)


def poisoned(fill):
    """numpy whose `empty` is full of `fill`."""

    def empty(shape, dtype=float, **kw):
        made = np.empty(shape, dtype, **kw)
        made.view(np.uint8)[...] = fill
        return made

    return SimpleNamespace(**(vars(np) | {"empty": empty}))


def cases(layout, dtype, slots):
    """Values, and the two layouts, for the first head size that the layout can hold."""
    for dim in DIMS[slots]:
        for heads, kvs in ((2, 2), (1, 1)):
            shape = CacheShape(2, heads, dim, slots, 2, kvs)
            src = load("contiguous/bhsd").compile(shape, codec="bf16" if dtype == np.uint16 else "fp32")
            try:
                codec = src.codec.name if src.codec.name in layout.codecs else None
                return src, layout.compile(shape, codec=codec)
            except LayoutError:
                continue
    pytest.fail(f"{layout.name} holds none of these")


def written(dst):
    """Bytes that mean something: what is left are gaps between pages."""
    return sum(t.buffer_count * t.pages * t.page_bytes for t in dst.tensors)


@pytest.mark.parametrize("slots", DIMS)
@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("name", [*NAMES, TILES.name])
async def test_every_byte_is_written_by_both_cores(name, dtype, slots, monkeypatch):
    layout = TILES if name == TILES.name else load(name)
    src, dst = cases(layout, dtype, slots)
    size = c.nbytes(src) // np.dtype(dtype).itemsize
    numbers = (np.arange(size) % 60000 + 1).astype(
        np.uint16
    ) % 0x7F00 + 1  # no zeros, which padding would hide
    values = numbers if dtype == np.uint16 else (numbers.astype(np.uint32) << 16 | numbers).view(np.float32)
    found = []
    for core in CORES:
        for fill in (0xEE, 0x11):
            monkeypatch.setattr(c, "np", poisoned(fill))
            monkeypatch.setattr(rows, "np", poisoned(fill))
            out = np.full(c.nbytes(dst), fill, np.uint8)
            with native.using(core):
                found.append(c.convert(values, src, dst, out=out))
                back = c.convert(out, dst, src)
            if dst.codec == src.codec:
                assert np.array_equal(back.reshape(-1).view(np.uint8), values.view(np.uint8)), core
        assert np.count_nonzero(found[-2] != found[-1]) == len(found[-1]) - written(dst)
    for fill, first in enumerate(found[:2]):
        assert all(np.array_equal(first, other) for other in found[fill::2])


@pytest.mark.parametrize("slots", DIMS)
@pytest.mark.parametrize("name", [*NAMES, TILES.name])
async def test_every_byte_through_the_retiler(name, slots, monkeypatch):
    monkeypatch.setattr(cpu, "INLINE_BYTES", 0)
    layout = TILES if name == TILES.name else load(name)
    src, dst = cases(layout, np.uint16, slots)
    rng = np.random.default_rng(slots)
    source = [rng.integers(1, 0x7F, c.nbytes(src), np.uint8)]
    blocks = np.arange(2)
    target = target_chunk(dst, blocks, Selection(0, 2, 0, 2 * slots), Chunk(0, 2, 0, 2))
    arenas = {}
    for core in CORES:
        with native.using(core), cpu.Retiler(2) as retiler:
            for fill in (0xEE, 0x11):
                arenas[core, fill] = np.full(target.nbytes, fill, np.uint8)
                steps = retile_steps(src, blocks, c.packed(src), target, blocks)
                await retiler.run_steps(steps, source, arenas[core, fill])
    for core in CORES:
        for fill in (0xEE, 0x11):
            assert np.array_equal(arenas[core, fill], arenas[CORES[0], fill])
        left = np.count_nonzero(arenas[core, 0xEE] != arenas[core, 0x11])
        assert left == target.nbytes - written(dst)
