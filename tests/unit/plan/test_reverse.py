"""From a device with many channels back to a GPU's rows, by both cores, against the reference's own tiles."""

from __future__ import annotations

import numpy as np
import pytest

from hawk.errors import InvalidArgument
from hawk.layouts import load
from hawk.plan.check import check_placement
from hawk.plan.types import Placement, Selection
from hawk.retile import native
from tests.reference import tenstorrent
from tests.unit.plan import support as s

CORES = ["numpy", *(["c"] if native.available() else [])]
HEADS, DIM = 3, 64


@pytest.fixture(params=CORES, autouse=True)
def _core(request):
    with native.using(request.param):
        yield


def device(rng, *, codec, channels, block_size, blocks):
    """A device's cache, numbers in every block, and those numbers: bf16 `[layer, kv, block, head, slot, dim]`."""
    layout = load("tenstorrent/kv").compile(
        s.shape(layers=2, heads=HEADS, dim=DIM, block_size=block_size, blocks=blocks),
        codec=codec,
        channels=channels,
    )
    cache = s.Cache(layout, rng)
    values = np.empty((2, 2, blocks, HEADS, block_size, DIM), np.uint16)
    for layer in (0, 1):
        for kv in (0, 1):
            x = rng.standard_normal(values.shape[2:], np.float32)
            raw = tenstorrent.pages((x.view(np.uint32) >> 16).astype(np.uint16), codec, kv == 0)
            values[layer, kv] = (tenstorrent.unpages(raw, codec, values.shape[2:], kv == 0) >> 16).astype(
                np.uint16
            )
            buffer = layout.buffer(layer, kv)
            for number, page in enumerate(raw):
                c, at = number % channels, number // channels * layout.page_stride
                at += int(cache.placement.offset[buffer, c])
                cache.regions[int(cache.placement.region[buffer, c])][at : at + len(page)] = page
    return cache, values


@pytest.mark.parametrize("codec", ["bf16", "bfp8_b", "bfp4_b"])
@pytest.mark.parametrize(
    ("channels", "there", "here", "name", "token", "tokens"),
    [
        (7, 64, 16, "vllm/nhd", 0, 100),
        (8, 32, 48, "vllm/hnd", 37, 60),
        (12, 40, 16, "vllm/nhd", 3, 33),
        (7, 16, 64, "contiguous/bhsd", 64, 64),
        (8, 64, 64, "vllm/nhd", 31, 1),
    ],
)
@pytest.mark.parametrize("mode", ["direct", "staged"])
def test_tiles_become_rows(codec, channels, there, here, name, token, tokens, mode):
    rng = np.random.default_rng(token + channels)
    end = token + tokens
    source, values = device(
        rng, codec=codec, channels=channels, block_size=there, blocks=-(-end // there) + 2
    )
    layout = load(name).compile(
        s.shape(layers=2, heads=HEADS, dim=DIM, block_size=here, blocks=-(-end // here) + 3)
    )
    target = s.Cache(layout, rng, staging=1 << 20)
    src_blocks = rng.permutation(source.layout.shape.blocks)[: -(-end // there)]
    dst_blocks = rng.permutation(layout.shape.blocks)[: -(-end // here) + 1]
    before = [r.copy() for r in target.regions]
    s.carry_out(source, target, Selection(0, 2, token, tokens), src_blocks, dst_blocks, rng=rng, mode=mode)
    want = s.Cache.__new__(s.Cache)
    want.layout, want.placement, want.regions = layout, target.placement, before
    by_token = values[:, :, src_blocks].swapaxes(3, 4).reshape(2, 2, -1, HEADS, DIM)
    rows = np.zeros((2, 2, -(-end // here) * here, HEADS, DIM), np.uint16)
    rows[:, :, token:end] = by_token[:, :, token:end]
    for kv in (0, 1):
        new = rows[:, kv, token:].swapaxes(1, 2)
        s.store(want, kv, [0, 1], range(HEADS), dst_blocks, range(token, rows.shape[2]), new)
    for r, memory in enumerate(target.regions):
        np.testing.assert_array_equal(memory[: target.cache_bytes], before[r][: target.cache_bytes])


def test_a_prefix_that_is_there_stays():
    """Prefix reuse: the first 37 tokens are the target's own, down to the rows inside a tile."""
    rng = np.random.default_rng(5)
    there = s.shape(layers=1, heads=2, dim=64, block_size=32, blocks=6)
    src, dst = load("vllm/nhd").compile(there), load("tenstorrent/kv").compile(there, channels=7)
    source, target = s.Cache(src, rng), s.Cache(dst, rng)
    table, back = rng.permutation(6)[:4], rng.permutation(6)[:4]
    old = [s.fetch(target, kv, [0], [0, 1], back, range(128)) for kv in (0, 1)]
    s.carry_out(source, target, Selection(0, 1, 37, 70), table, back, rng=rng)
    for kv in (0, 1):
        got = s.fetch(target, kv, [0], [0, 1], back, range(128))
        np.testing.assert_array_equal(got[:, :, :37], old[kv][:, :, :37])
        np.testing.assert_array_equal(
            got[:, :, 37:107], s.fetch(source, kv, [0], [0, 1], table, range(37, 107))
        )
        assert not got[:, :, 107:].any()


@pytest.mark.parametrize("forth", [True, False])
def test_one_base_and_two_lengths_of_blocks(forth):
    """F2: caches whose blocks are 19,008 and 32,768 bytes begin at one address; each moves its own bytes."""
    rng = np.random.default_rng(2)
    small = load("contiguous/bhsd").compile(
        s.shape(layers=1, heads=1, dim=594, block_size=16, blocks=40, kvs=1)
    )
    large = load("contiguous/bhsd").compile(
        s.shape(layers=1, heads=1, dim=1024, block_size=16, blocks=30, kvs=1)
    )
    assert (small.page_bytes, large.page_bytes) == (19008, 32768)
    pool = rng.integers(0, 256, 1 << 20, np.uint8)
    here = Placement(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.int64))
    moved = np.zeros(len(pool), bool)
    want = pool.copy()
    for layout, table in ((small, [3, 1, 0]), (large, [5, 29, 3])):
        other = s.Cache(layout, rng)
        shared = s.Cache.__new__(s.Cache)
        shared.layout, shared.placement, shared.regions = layout, here, [pool]
        apart = np.asarray([7, 2, 11])
        a, b, x, y = (other, shared, apart, table) if forth else (shared, other, table, apart)
        outside = other.placement
        s.carry_out(a, b, Selection(0, 1, 0, 48), np.asarray(x), np.asarray(y), rng=rng)
        for i, block in enumerate(table):
            n = layout.page_bytes
            at, far = block * n, int(outside.offset[0, 0]) + int(apart[i]) * n
            assert not moved[at : at + n].any(), "the tables of this test overlap"
            moved[at : at + n] = True
            theirs = other.regions[0][far : far + n]
            if forth:
                want[at : at + n] = theirs
            else:
                np.testing.assert_array_equal(theirs, pool[at : at + n])
    np.testing.assert_array_equal(pool, want)


def test_a_buffer_that_reaches_out_of_its_region_is_refused():
    """F2, F3: no plan is made for bytes that are not in the region."""
    layout = load("vllm/nhd").compile(s.shape())
    n = layout.channel_bytes
    zero = np.zeros((2, 1), np.int32)
    check_placement(layout, Placement(zero, np.asarray([[0], [n]])), [2 * n])
    for offsets, sizes, field in (
        ([[0], [n + 1]], [2 * n], r"placement\.offset\[1, 0\]"),
        ([[-1], [n]], [2 * n], r"placement\.offset\[0, 0\]"),
        ([[0], [0]], [n - 1], r"placement\.offset\[0, 0\]"),
        ([[0], [0]], [], r"placement\.region\[0, 0\]"),
        ([[0], [0], [0]], [n], r"placement\.offset"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            check_placement(layout, Placement(zero, np.asarray(offsets)), sizes)
