"""Every shipped layout, one way, against a reference written from its public description alone."""

import numpy as np
import pytest

from hawk.layouts import CacheShape, CompiledLayout, load, names
from hawk.layouts.codecs import encode
from tests.reference import engines, npus
from tests.unit.layouts import moving
from tests.unit.layouts.test_compile import prove_by_force

KV = CacheShape(layers=2, heads=3, dim=32, block_size=16, blocks=3)
EVEN = CacheShape(layers=2, heads=2, dim=64, block_size=32, blocks=5)
ODD = CacheShape(layers=2, heads=3, dim=80, block_size=20, blocks=2)
LATENT = CacheShape(layers=2, heads=1, dim=576, block_size=16, blocks=3, kvs=1)

PLAIN = {
    "contiguous/bhsd": engines.contiguous,
    "flashinfer/hnd": engines.flashinfer_hnd,
    "flashinfer/hnd-apart": engines.flashinfer_hnd_apart,
    "flashinfer/nhd": engines.flashinfer_nhd,
    "flashinfer/nhd-apart": engines.flashinfer_nhd_apart,
    "sglang/pool": engines.sglang_pool,
    "vllm/bhlnc": engines.vllm_bhlnc,
    "vllm/blhnc": engines.vllm_blhnc,
    "vllm/blnhc": engines.vllm_blnhc,
    "vllm/cpu": engines.vllm_cpu,
    "vllm/hnd": engines.vllm_hnd,
    "vllm/lbhnc": engines.vllm_lbhnc,
    "vllm/lbnhc": engines.vllm_lbnhc,
    "vllm/lhbnc": engines.vllm_lhbnc,
    "vllm/nhd": engines.vllm_nhd,
}
"""Layouts without padding or parameters."""


def values(shape: CacheShape, seed: int = 0) -> np.ndarray:
    """Whole numbers that every codec here keeps, `float32[layers, kvs, blocks, heads, block_size, dim]`."""
    extents = [shape.extent(axis) for axis in ("layer", "kv", "block", "head", "slot", "dim")]
    return np.random.default_rng(seed).integers(-15, 16, extents).astype(np.float32)


def stored(codec: str, array: np.ndarray) -> np.ndarray:
    """The bytes of an array in memory order, each element by an elementwise codec."""
    return encode(codec, np.ascontiguousarray(array).view(np.uint32).reshape(1, -1))[0]


def same(layout: CompiledLayout, x: np.ndarray, expected: list[np.ndarray]) -> None:
    """Whether a linear layout holds exactly these arrays, one a buffer."""
    got = moving.buffers_of(layout, x.view(np.uint32))
    assert len(got) == len(expected)
    for buffer, array in zip(got, expected, strict=True):
        assert np.array_equal(buffer[0], stored(layout.codec.name, array))


@pytest.mark.parametrize("shape", [KV, EVEN, ODD], ids=["kv", "even", "odd"])
@pytest.mark.parametrize("name", PLAIN)
def test_engines(name, shape):
    x = values(shape)
    for codec in load(name).codecs:
        same(load(name).compile(shape, codec=codec), x, PLAIN[name](x))


@pytest.mark.parametrize("shape", [KV, EVEN], ids=["kv", "even"])
def test_cpu_attention_on_tiles(shape):
    x = values(shape)
    same(load("vllm/cpu-amx").compile(shape), x, engines.vllm_cpu_amx(x))


def test_latents():
    x = values(LATENT)
    same(load("vllm/mla").compile(LATENT), x, engines.vllm_mla(x))
    same(load("mla/interleaved").compile(LATENT), x, engines.mla_interleaved(x, 64))
    small = CacheShape(layers=1, heads=1, dim=24, block_size=4, blocks=2, kvs=1)
    x = values(small)
    narrow = load("mla/interleaved").compile(small, params={"L": 16, "R": 8})
    same(narrow, x, engines.mla_interleaved(x, 8))


@pytest.mark.parametrize("shape", [KV, EVEN], ids=["kv", "even"])
def test_ascend(shape):
    x = values(shape)
    for codec in ("fp16", "bf16", "fp32"):
        same(load("ascend/nz").compile(shape, codec=codec), x, npus.ascend_nz(x))
    wide = load("ascend/nz").compile(shape, codec="int8", params={"F": 32})
    same(wide, x, npus.ascend_nz(x, 32))


@pytest.mark.parametrize("shape", [KV, EVEN, ODD], ids=["kv", "even", "odd"])
@pytest.mark.parametrize(
    ("codec", "heads", "packing"), [("bf16", 1, 2), ("fp8_e4m3fn", 2, 4), ("int8", 2, 4)]
)
def test_tpu_pages(shape, codec, heads, packing):
    x = values(shape)
    options = {"codec": codec, "params": {"P": heads}}
    same(load("tpu/vllm").compile(shape, **options), x, npus.tpu_vllm(x, packing))
    same(load("tpu/vllm-packed").compile(shape, **options), x, npus.tpu_vllm_packed(x, packing))


def test_tpu_pages_of_whole_words():
    x = values(KV)
    same(load("tpu/vllm").compile(KV, codec="fp32"), x, npus.tpu_vllm(x, 1))


@pytest.mark.parametrize("shape", [KV, EVEN, ODD], ids=["kv", "even", "odd"])
def test_xla_tiles(shape):
    x = values(shape)
    for codec in ("bf16", "fp16"):
        same(load("xla/tiled-16bit").compile(shape, codec=codec), x, npus.xla_tiled(x, 8, 2))
    for codec in ("fp8_e4m3fn", "fp8_e5m2", "int8"):
        same(load("xla/tiled-8bit").compile(shape, codec=codec), x, npus.xla_tiled(x, 8, 4))
    tall = load("xla/tiled-8bit").compile(shape, params={"T": 32})
    same(tall, x, npus.xla_tiled(x, 32, 4))


@pytest.mark.parametrize("channels", [7, 8, 12])
@pytest.mark.parametrize(("dim", "rotary"), [(128, 128), (128, 64), (80, 80), (100, 100), (96, 32), (64, 0)])
@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_tenstorrent_banks(dim, rotary, channels, codec):
    shape = CacheShape(layers=2, heads=2, dim=dim, block_size=40, blocks=2)
    x = values(shape)
    if rotary:
        layout = load("tenstorrent/kv").compile(shape, codec=codec, channels=channels, params={"R": rotary})
    else:
        layout = load("tenstorrent/kv-hf").compile(shape, codec=codec, channels=channels)
    got = moving.buffers_of(layout, x.view(np.uint32))
    for buffer, tiles in zip(got, npus.tenstorrent_tiles(x, rotary), strict=True):
        for i, tile in enumerate(tiles):
            at = i // channels * layout.page_stride
            page = stored(codec, tile)
            assert np.array_equal(buffer[i % channels][at : at + len(page)], page)


@pytest.mark.parametrize("blocks", [5, 8, 16, 19])
@pytest.mark.parametrize("per_shard", [1, 2])
def test_tenstorrent_shards(blocks, per_shard):
    shape = CacheShape(layers=1, heads=2, dim=64, block_size=64, blocks=blocks)
    x = values(shape)
    layout = load("tenstorrent/kv-sharded").compile(shape, params={"B": per_shard, "R": 32})
    assert (layout.channels, layout.banks) == (8, tuple(range(8)))
    got = moving.buffers_of(layout, x.view(np.uint32))
    for buffer, tiles in zip(got, npus.tenstorrent_tiles(x, 32), strict=True):
        banks = npus.height_sharded(tiles, per_shard * 2 * 2 * 2, 8)
        assert np.array_equal(np.stack(buffer), np.stack([stored("bf16", bank) for bank in banks]))


@pytest.mark.parametrize(("dim", "rotary"), [(128, 128), (80, 32), (64, 0)])
def test_tenstorrent_contiguous(dim, rotary):
    shape = CacheShape(layers=2, heads=3, dim=dim, block_size=32, blocks=3)
    x = values(shape)
    if rotary:
        layout = load("tenstorrent/contiguous").compile(shape, codec="fp32", params={"R": rotary})
    else:
        layout = load("tenstorrent/contiguous-hf").compile(shape, codec="fp32")
    # As one block of all rows: layer, K or V, block, head, slot, dim.
    rows = x.transpose(0, 1, 3, 2, 4, 5).reshape(2, 2, 1, 3, 96, dim)
    got = moving.buffers_of(layout, x.view(np.uint32))
    for buffer, tiles in zip(got, npus.tenstorrent_tiles(rows, rotary), strict=True):
        assert np.array_equal(buffer[0], stored("fp32", tiles))


def test_tenstorrent_in_one_buffer():
    x = values(EVEN)
    layout = load("tenstorrent/kv-one-buffer").compile(EVEN)
    same(layout, x, [np.concatenate(npus.tenstorrent_tiles(x, EVEN.dim))])


SMALL = {
    "vllm/mla": CacheShape(layers=2, heads=1, dim=9, block_size=3, blocks=2, kvs=1),
    "mla/interleaved": CacheShape(layers=1, heads=1, dim=576, block_size=2, blocks=2, kvs=1),
    "ascend/nz": CacheShape(layers=2, heads=2, dim=16, block_size=3, blocks=2),
}
SMALL["tenstorrent/kv-sharded"] = CacheShape(layers=1, heads=2, dim=32, block_size=32, blocks=3)
SMALL["flashinfer/mla"] = SMALL["vllm/mla-fp8"] = CacheShape(
    layers=2, heads=1, dim=516, block_size=3, blocks=2, kvs=1
)
TINY = CacheShape(layers=2, heads=2, dim=6, block_size=5, blocks=3)


@pytest.mark.parametrize("name", names())
def test_by_force(name):
    for tensor in load(name).compile(SMALL.get(name, TINY)).tensors:
        prove_by_force(tensor)


def test_each_has_a_reference():
    """A layout that is added without one fails here."""
    others = {
        "ascend/nz", "mla/interleaved", "tenstorrent/contiguous", "tenstorrent/contiguous-hf",
        "tenstorrent/kv", "tenstorrent/kv-hf", "tenstorrent/kv-one-buffer",
        "tenstorrent/kv-sharded", "tpu/vllm", "tpu/vllm-packed", "vllm/cpu-amx", "vllm/mla", "vllm/mla-indexer",
        "vllm/mla-fp8",
        "vllm/nhd-fp8", "flashinfer/mla",
        "xla/tiled-16bit", "xla/tiled-8bit",
    }  # fmt: skip
    assert set(names()) == {*PLAIN, *others}
    for name in names():
        assert load(name).source
        assert load(name).summary
