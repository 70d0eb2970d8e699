"""The integration with ttnn against a small stand-in for it; `tests/ttnn` has the library itself."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import hawk
from hawk.convert import compile_for, convert
from hawk.errors import InternalError, InvalidArgument, LayoutError, MissingDependency, OutOfMemory
from hawk.integrations.ttnn import HostTensors, PagedCache, api, reserve
from hawk.integrations.ttnn.tiles import tensor_shape as check_tiles
from hawk.layouts import Layout, load
from hawk.layouts.compiled import CacheShape
from hawk.memory.tenstorrent import Reservation
from hawk.model_caches import load_cache
from tests import fake_ttnn
from tests.reference import tenstorrent as reference

LLAMA = "tt_transformers/llama-3.1-8b"


@pytest.fixture
def ttnn(monkeypatch):
    return fake_ttnn.install(monkeypatch)


def model(layers=2, codec=None):
    return load_cache(LLAMA).choose(codec=codec).with_layers(layers)


def pages(heads, rows, layers=2, seed=1):
    """`uint16[layer, kv, block, slot, head, dim]`, blocks of 32."""
    x = (
        np.random.default_rng(seed)
        .standard_normal((layers, 2, rows // 32, 32, heads, 128))
        .astype(np.float32)
    )
    return reference.to_bf16(x.view(np.uint32))


def wanted(source, layer, kv, codec, heads=slice(None)):
    """The bytes of a tensor `[1, heads, rows, dim]` by the reference."""
    x = source[layer, kv].reshape(1, -1, *source.shape[-2:]).transpose(0, 2, 1, 3)[:, heads]
    return reference.pages(np.ascontiguousarray(x), codec, interleave_dim=kv == 0)


def fill(held, source):
    got = convert(source, compile_for(source, "vllm/nhd"), held.spec.compile())
    for buffer, line in zip(held.kv.buffers, got, strict=True):
        buffer[:] = line.reshape(-1)


# -- what is missing -------------------------------------------------------------------------------------


def test_without_ttnn_what_is_missing_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "ttnn", None)
    with pytest.raises(MissingDependency, match=r"CLONE\[ttnn\]"):
        HostTensors.for_request(model(), 32)
    monkeypatch.setitem(sys.modules, "ttnn", sys)
    with pytest.raises(MissingDependency, match="no Tensor"):
        api.library()


def test_a_ttnn_of_another_form_is_refused(ttnn, monkeypatch):
    whole = ttnn.dump_tensor

    def longer(path, tensor):
        whole(path, tensor)
        with open(path, "ab") as file:
            file.write(b"x")

    monkeypatch.setattr(ttnn, "dump_tensor", longer)
    with pytest.raises(MissingDependency, match="another form"):
        HostTensors.for_request(model(), 32)


def test_a_ttnn_that_copies_is_seen(ttnn, monkeypatch):
    def copied(path):
        made = fake_ttnn.load(path)
        made.shards = [shard.copy() for shard in made.shards]
        return made

    monkeypatch.setattr(ttnn, "load_tensor", copied)
    with pytest.raises(InternalError, match="copied"):
        HostTensors.for_request(model(), 32)


# -- host tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["bfp8_b", "bf16"])
def test_host_tensors_show_what_is_written(ttnn, codec):
    known = replace(model(), codecs=(codec,))
    source = pages(8, 128)
    with HostTensors.for_request(known, 70) as held:
        assert (held.spec.blocks, held.spec.block_size) == (2, 64)
        assert list(held.blocks(64)) == [0]
        assert list(held.blocks(65)) == [0, 1]
        for tokens in (0, 129):
            with pytest.raises(InvalidArgument, match="tokens"):
                held.blocks(tokens)
        fill(held, source)
        for layer in range(2):
            for kv in range(2):
                tensor = held.tensor(layer, kv)
                assert list(tensor.shape) == [1, 8, 128, 128]
                assert np.array_equal(api.shard_bytes(tensor), wanted(source, layer, kv, codec).reshape(-1))
        kept = held.tensor(1, 1)
        held.zero()
        assert not api.shard_bytes(kept).any()
        with pytest.raises(InvalidArgument, match="layer"):
            held.tensor(2)
        with pytest.raises(InvalidArgument, match="kv"):
            held.tensor(0, 2)
    with pytest.raises(InvalidArgument, match="closed"):
        held.tensor(0)
    assert not api.shard_bytes(kept).any()  # and still readable


def test_heads_are_split_over_a_mesh(ttnn):
    source = pages(8, 128)
    with HostTensors.for_request(model(), 100, mesh=fake_ttnn.Mesh(chips=4)) as held:
        fill(held, source)
        for chip in range(4):
            share = wanted(source, 1, 0, "bfp8_b", slice(2 * chip, 2 * chip + 2))
            assert np.array_equal(api.shard_bytes(held.tensor(1, 0), chip), share.reshape(-1))
    spec = model().spec(blocks=1)
    for changes, chips, field in (({"heads": 6}, 4, "heads"), ({"blocks": 2}, 4, "blocks"), ({}, 3, "heads")):
        with pytest.raises(InvalidArgument) as caught:
            HostTensors.alloc(spec.replace(**changes), mesh=fake_ttnn.Mesh(chips=chips))
        assert caught.value.field == field


def test_memory_is_given_back_where_something_fails(ttnn, monkeypatch):
    made = []
    plain = fake_ttnn.load

    def fails(path):
        made.append(path)
        if len(made) == 3:
            raise RuntimeError("no")
        return plain(path)

    monkeypatch.setattr(ttnn, "load_tensor", fails)
    buffers = []
    alloc = hawk.alloc
    monkeypatch.setattr(
        "hawk.memory.shared.alloc", lambda *a, **k: buffers.append(alloc(*a, **k)) or buffers[-1]
    )
    with pytest.raises(RuntimeError, match="no"):
        HostTensors.for_request(model(), 32)
    assert len(buffers) == 3
    assert all(buffer.closed for buffer in buffers)


@pytest.mark.parametrize("name", ["vllm/nhd", "contiguous/bhsd", "tenstorrent/kv-one-buffer", "ascend/nz"])
def test_a_layout_that_is_no_tensor_is_refused(name):
    shape = CacheShape(layers=1, heads=2, dim=128, block_size=64, blocks=2)
    with pytest.raises(LayoutError, match="no cache as ttnn keeps a tensor"):
        check_tiles(load(name).compile(shape))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('dim/32 | slot%32/16 dim%32/16 slot%16 dim%16"', 'dim/32 | dim%32/16 slot%32/16 slot%16 dim%16"'),
        ("block head slot/32 dim/32", "block slot/32 head dim/32"),
        ("(rotary%(R/2) rotary/(R/2))", "(rotary/2%4 rotary/8 rotary%2)"),
        ("align = 64", "align = 4096"),
    ],
)
def test_tiles_of_another_order_are_refused(text, wrong):
    shape = CacheShape(layers=1, heads=2, dim=128, block_size=64, blocks=2)
    shipped = load("tenstorrent/kv").text
    assert text in shipped
    check_tiles(load("tenstorrent/kv").compile(shape, channels=7))
    check_tiles(load("tenstorrent/kv-hf").compile(shape, channels=1))
    with pytest.raises(LayoutError):
        check_tiles(Layout.from_toml(shipped.replace(text, wrong), "wrong").compile(shape, channels=1))


# -- memory of the chips ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("chips", "banks", "blocks"), [(1, 8, 4), (1, 7, 7), (4, 8, 4), (1, 12, 6)])
def test_a_request_is_filled_into_a_paged_cache(ttnn, chips, banks, blocks):
    mesh = fake_ttnn.Mesh(chips=chips, banks=banks)
    cache = PagedCache.alloc(mesh, LLAMA_CUT, blocks)
    source = pages(8, 192)
    with HostTensors.for_request(LLAMA_CUT, 140, mesh=mesh if chips > 1 else None) as held:
        fill(held, source)
        cache.fill(held, table(mesh, [9, 9, 9], [3, 0, 2]), user=1)
        first = cache._staging[0].address
        cache.fill(held, table(mesh, [3, 0, 2]))
        assert cache._staging[0].address == first
        with pytest.raises(InvalidArgument) as caught:
            cache.fill(held, table(mesh, [3, 0]))
        assert (caught.value.field, caught.value.got) == ("page_table", "128 rows")
    for chip, spec in enumerate(cache.specs):
        heads = slice(chip * spec.heads, (chip + 1) * spec.heads)
        for layer in range(2):
            for kv in range(2):
                x = source[layer, kv].reshape(3, 64, 8, 128).transpose(0, 2, 1, 3)[:, heads]
                by_block = reference.pages(np.ascontiguousarray(x), "bfp8_b", kv == 0).reshape(3, -1, 1088)
                tensor, per = cache.tensors[layer][kv], by_block.shape[1]
                for j, block in enumerate([3, 0, 2]):
                    got = np.stack([tensor.held(chip, block * per + i) for i in range(per)])
                    assert np.array_equal(got, by_block[j])


def table(mesh, *rows):
    """A page table on the chips."""
    return fake_ttnn.Tensor(np.asarray(rows, np.int32), "int32", "rows").to(mesh, None)


LLAMA_CUT = load_cache(LLAMA).with_layers(2)


def test_a_reservation_is_where_the_tensors_are(ttnn):
    mesh = fake_ttnn.Mesh()
    cache = PagedCache.alloc(mesh, LLAMA_CUT, 4)
    held = cache.reservation()
    each = 4 * 8 * 8 // 8 * 1088
    assert (held.address, held.nbytes, held.banks, held.chips) == (fake_ttnn.FIRST, 4 * each, 8, (0,))
    assert (held.lowest, held.highest) == (fake_ttnn.FIRST, fake_ttnn.FIRST + mesh.bank_bytes)
    assert [a for pair in cache.addresses for a in pair] == [held.address + i * each for i in range(4)]

    layout = cache.specs[0].compile()
    there = [0, each, 2 * each, 3 * each]
    cache.check_place(SimpleNamespace(layout=layout, offsets=there), held)
    other = cache.specs[0].replace(layout="tenstorrent/kv-hf").compile()
    fewer = cache.specs[0].replace(layers=1).compile()
    for found, offsets, field in (
        (layout, [0, each, 3 * each, 2 * each], "kv[1].k"),
        (other, there, "cache.k_order"),
        (cache.specs[0].replace(block_size=32).compile(), there, "cache.block_size"),
        (cache.specs[0].replace(channels=7).compile(), there, "cache.channels"),
        (fewer, there[:2], "cache.layers"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            cache.check_place(SimpleNamespace(layout=found, offsets=offsets), held)
        assert caught.value.field == field
    apart = [
        fake_ttnn.allocate([4, 8, 64, 128], "bfloat8_b", "tile", mesh, ttnn.DRAM_MEMORY_CONFIG)
        for _ in range(4)
    ]
    assert PagedCache([apart[:2], apart[2:]], LLAMA_CUT).reservation().address == apart[0].address
    with pytest.raises(InvalidArgument) as caught:
        PagedCache([apart[:2], apart[:1:-1]], LLAMA_CUT).reservation()
    assert caught.value.field == "kv[1].k"


def test_blocks_that_end_in_the_midst_of_a_round_are_refused(ttnn):
    with pytest.raises(InvalidArgument) as caught:
        PagedCache.alloc(fake_ttnn.Mesh(banks=7), LLAMA_CUT, 8)
    assert (caught.value.field, caught.value.expected) == ("blocks", "a multiple of 7")


@pytest.mark.parametrize(
    ("shape", "dtype", "more", "field"),
    [
        ([4, 4, 64, 128], "bfloat8_b", {}, "kv[0].k.heads"),
        ([4, 8, 16, 128], "bfloat8_b", {}, "kv[0].k.block_size"),
        ([4, 8, 64, 64], "bfloat8_b", {}, "kv[0].k.dim"),
        ([4, 8, 64, 128], "bfloat16", {}, "kv[0].k.codec"),
        ([4, 8, 64, 128], "uint32", {}, "kv[0].k.codec"),
        ([4, 8, 64, 128], "bfloat8_b", {"k_order": "hf"}, "k_order"),
        ([4, 8, 64], "bfloat8_b", {}, "kv[0].k.shape"),
    ],
)
def test_a_cache_that_the_model_would_misread_is_refused(ttnn, shape, dtype, more, field):
    made = fake_ttnn.Tensor(None, dtype, device=fake_ttnn.Mesh())
    made.shape, made._config = shape, ttnn.DRAM_MEMORY_CONFIG
    with pytest.raises(InvalidArgument) as caught:
        PagedCache([[made, made]], load_cache(LLAMA).with_layers(1), **more)
    assert caught.value.field == field


def test_layers_layout_and_memory_are_looked_at(ttnn):
    mesh = fake_ttnn.Mesh()
    known = load_cache(LLAMA).with_layers(1)
    good = PagedCache.alloc(mesh, known, 4).tensors[0]
    for tensors, field in (([good, good], "kv"), ([good[:1]], "kv[0]")):
        with pytest.raises(InvalidArgument) as caught:
            PagedCache(tensors, known)
        assert caught.value.field == field
    good[1].layout = "rows"
    with pytest.raises(InvalidArgument, match=r"kv\[0\]\.v\.layout"):
        PagedCache([good], known)
    good[1].layout = "tile"
    good[1]._config = type("Config", (), {"memory_layout": "sharded", "buffer_type": "dram"})
    with pytest.raises(InvalidArgument, match=r"kv\[0\]\.v\.memory_config"):
        PagedCache([good], known)
    with pytest.raises(InvalidArgument, match="tp_size"):
        PagedCache.alloc(fake_ttnn.Mesh(chips=3), known, 4)


def test_what_is_no_cache_is_refused(ttnn):
    known = load_cache(LLAMA).with_layers(1)
    host = fake_ttnn.Tensor(np.zeros((1, 1, 32, 32), np.float32), "bfloat16")
    for tensors, field in (
        (None, "kv"),
        ([None], "kv[0]"),
        ([[1, 2]], "kv[0].k"),
        ([[host, host]], "kv[0].k"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            PagedCache(tensors, known)
        assert caught.value.field == field
    for model_of in (None, 3):
        with pytest.raises(InvalidArgument, match="model"):
            PagedCache.alloc(fake_ttnn.Mesh(), model_of, 4)


def test_tensors_of_another_model_are_not_filled_in(ttnn):
    mesh = fake_ttnn.Mesh()
    cache = PagedCache.alloc(mesh, LLAMA_CUT, 4)
    other = load_cache("tt_transformers/qwen2.5-14b").with_layers(3)
    with HostTensors.for_request(other, 32) as held, pytest.raises(InvalidArgument, match="layers"):
        cache.fill(held, table(mesh, [0]))
    with HostTensors.for_request(LLAMA_CUT, 32, mesh=fake_ttnn.Mesh(chips=2)) as held:
        with pytest.raises(InvalidArgument, match=r"held\.chips"):
            cache.fill(held, table(mesh, [0]))


def test_a_reservation_of_nothing_but_memory(ttnn):
    mesh = fake_ttnn.Mesh(banks=7)
    first = reserve(mesh, 5000)
    bounds = {"lowest": fake_ttnn.FIRST, "highest": fake_ttnn.FIRST + mesh.bank_bytes}
    assert first == Reservation((0,), fake_ttnn.FIRST, 6144, 7, 64, **bounds)
    assert reserve(mesh, 1).address == first.end
    with pytest.raises(OutOfMemory) as caught:
        reserve(mesh, mesh.bank_bytes)
    assert caught.value.facts["banks"] == "7"
    with pytest.raises(InvalidArgument, match="nbytes"):
        reserve(mesh, -1)
    taken = PagedCache.alloc
    with pytest.raises(OutOfMemory, match="not enough space"):
        taken(fake_ttnn.Mesh(bank_bytes=4096), LLAMA_CUT, 4)
