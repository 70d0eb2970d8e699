"""What is compared with ttnn, run in a process that sees one kind of chip.

ttnn gets the numbers by its own door (`ttnn.Tensor` of an array); HAWK by its own (pages as vLLM keeps them,
converted).  K is brought into Meta's order by the reference, which is no code of HAWK's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from hawk.convert import compile_for, convert, retarget
from hawk.integrations.ttnn import HostTensors, PagedCache, api, reserve
from hawk.integrations.ttnn.reserving import banks, chips
from hawk.layouts import Layout, load
from hawk.model_caches import ModelCache, load_cache
from hawk.plan.shards import Grid, Model
from hawk.plan.shards import parts as plan_parts
from tests.reference import tenstorrent as reference

HF = "vllm/nhd"


@cache
def library() -> Any:
    import ttnn

    return ttnn


@cache
def device() -> Any:
    """All chips that are here, as a mesh of one row."""
    ttnn = library()
    return ttnn.open_mesh_device(ttnn.MeshShape(1, ttnn.GetNumAvailableDevices()))


def source(
    heads: int, block_size: int, dim: int, blocks: int, seed: int, kind: str = "normal", layers: int = 1
) -> np.ndarray:
    """Pages of vLLM's, `uint16[layer, kv, block, slot, head, dim]`, bf16 bits."""
    r = np.random.default_rng(seed)
    x = r.standard_normal((layers, 2, blocks, block_size, heads, dim)).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(r.integers(-40, 40, x.shape)).astype(np.float32)
    elif kind == "ties":
        x = (r.integers(-4096, 4096, x.shape) / 16).astype(np.float32)
    elif kind == "zeros":
        x[r.random(x.shape) < 0.5] = 0
        x[r.random(x.shape) < 0.1] = -0.0
    return reference.to_bf16(x.view(np.uint32))


def numbers(pages: np.ndarray, layer: int, kv: int, meta: bool = True) -> np.ndarray:
    """What the model has in its tensor: `float32[block, head, slot, dim]`, K in Meta's order."""
    x = (pages[layer, kv].astype(np.uint32) << 16).view(np.float32).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(reference.interleave(x) if meta and kv == 0 else x)


def by_itself(pages: np.ndarray, layer: int, kv: int) -> np.ndarray:
    """The same as one request, `float32[1, head, token, dim]`."""
    x = numbers(pages, layer, kv)
    return np.ascontiguousarray(x.transpose(1, 0, 2, 3).reshape(1, x.shape[1], -1, x.shape[3]))


def tensor(x: np.ndarray, codec: str, **more: Any) -> Any:
    """ttnn's own, on the host."""
    return library().Tensor(x, api.dtype(codec), layout=library().TILE_LAYOUT, **more)


def dealt(raw: np.ndarray, page: int, stride: int, channels: int) -> np.ndarray:
    """A tensor's bytes as they lie in the banks, `uint8[channels, bytes]`."""
    return np.stack(reference.to_channels(raw.reshape(-1, page), channels, stride))


# -- bytes -----------------------------------------------------------------------------------------------


def tiles(
    heads: int,
    block_size: int,
    dim: int,
    codec: str,
    layout: str | Layout,
    channels: int,
    kind: str = "normal",
) -> tuple[int, int]:
    """How many bytes of K and of V differ between HAWK's banks and ttnn's pages dealt over this chip's."""
    pages = source(heads, block_size, dim, blocks=3, seed=heads * block_size + dim, kind=kind)
    src = compile_for(pages, HF)
    declared = layout if isinstance(layout, Layout) else load(layout)
    meta = isinstance(layout, Layout) or "hf" not in layout
    here = banks(device())
    dst = retarget(src, declared, codec=codec, channels=channels)
    got = convert(pages, src, dst)
    found = []
    for kv in range(2):
        theirs = tensor(numbers(pages, 0, kv, meta), codec)
        raw = api.shard_bytes(theirs)
        wanted = dealt(raw, len(raw) // dst.pages, _stride(theirs.shape, codec), here)
        mine = got[dst.buffer(0, kv)]
        same = mine.shape == wanted.shape
        found.append(int((mine != wanted).sum()) if same else abs(mine.size - wanted.size) or mine.size)
    return found[0], found[1]


def shares(name: str, tp: int, codec: str) -> list[str]:
    """Chips of a mesh of `tp` whose share of a model's paged cache is not what `ShardTensorToMesh(mesh, dim=1)` makes.

    HAWK's is what a job moves for that worker's part; the mesh needs no chips, for its tensors stay on the host.
    """
    ttnn = library()
    model = load_cache(name).with_layers(1)
    model = replace(model, codecs=(codec,))
    pages = source(model.model.heads, 64, model.model.dim, blocks=4, seed=tp)
    src = compile_for(pages, HF)
    shape = ttnn.MeshShape(1, tp)
    placed = ttnn.MeshMapperConfig([ttnn.PlacementReplicate(), ttnn.PlacementShard(1)], shape)
    mapper = ttnn.create_mesh_mapper(shape, placed)
    wrong = []
    parts = plan_parts(model.model, Grid(), Grid(tp=tp))
    for rank in range(tp):
        dst = model.spec(blocks=4, tp_rank=rank, tp_size=tp, channels=banks(device())).compile()
        (part,) = [p for p in parts if p.target == rank]
        got = convert(pages, src, dst, selection=part.selection(4 * 64))
        for kv in range(2):
            theirs = api.shard_bytes(tensor(numbers(pages, 0, kv), codec, mesh_mapper=mapper), rank)
            wanted = dealt(theirs, dst.page_bytes, dst.page_stride, dst.channels)
            if not np.array_equal(got[dst.buffer(0, kv)], wanted):
                wrong.append(f"chip {rank} kv {kv}")
    return wrong


@cache
def _stride_of(shape: tuple[int, ...], codec: str) -> int:
    ttnn = library()
    held = ttnn.allocate_tensor_on_device(
        ttnn.Shape(list(shape)), api.dtype(codec), ttnn.TILE_LAYOUT, device(), ttnn.DRAM_MEMORY_CONFIG
    )
    return int(held.buffer_aligned_page_size())


def _stride(shape: Any, codec: str) -> int:
    """Bytes from page to page of one bank, by ttnn's own allocation."""
    return _stride_of(tuple(int(n) for n in shape), codec)


def places(heads: int, block_size: int, dim: int, codec: str, blocks: int) -> tuple[Any, Any]:
    """(pages, page stride, banks, bytes of a bank) of a paged tensor: HAWK's and this chip's allocator's."""
    ttnn = library()
    count = banks(device())
    shape = (blocks, heads, block_size, dim)
    held = [
        ttnn.allocate_tensor_on_device(
            ttnn.Shape(list(shape)), api.dtype(codec), ttnn.TILE_LAYOUT, device(), ttnn.DRAM_MEMORY_CONFIG
        )
        for _ in range(2)
    ]
    apart = held[1].buffer_address() - held[0].buffer_address()
    theirs = held[0].buffer_num_pages(), held[0].buffer_aligned_page_size(), count, apart
    model = _model(heads, dim, block_size, codec, layers=1)
    mine = model.spec(blocks=blocks, channels=count).compile()
    return (mine.pages, mine.page_stride, mine.channels, mine.channel_bytes), theirs


def _model(heads: int, dim: int, block_size: int, codec: str, layers: int, tp: int = 1) -> ModelCache:
    """A cache of these extents, kept as tt_transformers keeps Llama's."""
    known = load_cache("tt_transformers/llama-3.1-8b")
    made = Model("made", layers, heads, dim)
    return replace(
        known, model=made, rotary=dim, codecs=(codec,), block_sizes=(block_size,), tp=tuple({1, tp})
    )


# -- tensors over HAWK's bytes ---------------------------------------------------------------------------


def mapped(heads: int, tokens: int, dim: int, codec: str, layers: int, over_mesh: bool) -> list[str]:
    """What is wrong with the host tensors of a request: bytes, numbers, and a change that they must show."""
    group = len(chips(device())) if over_mesh else 1
    model = _model(heads, dim, 64, codec, layers, tp=group)
    wrong = []
    with HostTensors.for_request(model, tokens, mesh=device() if over_mesh else None) as held:
        pages = source(heads, 64, dim, blocks=held.spec.blocks, seed=tokens, layers=layers)
        pages.reshape(layers, 2, -1, heads, dim)[:, :, tokens:] = 0
        src = compile_for(pages, HF)
        got = convert(pages, src, held.spec.compile())
        for i, buffer in enumerate(held.kv.buffers):
            buffer[:] = got[i].reshape(-1)
        for layer in range(layers):
            for kv in range(2):
                mine = held.tensor(layer, kv)
                x = by_itself(pages, layer, kv)
                more = (
                    {"mesh_mapper": library().shard_tensor_to_mesh_mapper(device(), 1)} if over_mesh else {}
                )
                theirs = tensor(x, codec, **more)
                name = f"layer {layer} kv {kv}"
                if (mine.dtype, mine.layout, list(mine.shape)) != (
                    theirs.dtype,
                    theirs.layout,
                    list(theirs.shape),
                ):
                    wrong.append(f"{name}: {mine.dtype} {mine.layout} {mine.shape}")
                for chip in range(group):
                    if not np.array_equal(api.shard_bytes(mine, chip), api.shard_bytes(theirs, chip)):
                        wrong.append(f"{name}: bytes of chip {chip}")
                    alone = np.array_split(x, group, axis=1)[chip]
                    if not np.array_equal(
                        api.shard_bytes(mine, chip),
                        api.shard_bytes(tensor(np.ascontiguousarray(alone), codec)),
                    ):
                        wrong.append(f"{name}: chip {chip} alone")
                if group == 1 and not np.array_equal(read(mine), read(theirs)):
                    wrong.append(f"{name}: numbers")
        on_chip = library().allocate_tensor_on_device(
            held.tensor(0, 0).shape,
            api.dtype(codec),
            library().TILE_LAYOUT,
            device(),
            library().DRAM_MEMORY_CONFIG,
        )
        before = on_chip.buffer_address()
        if group == len(chips(device())):
            library().copy_host_to_device_tensor(held.tensor(0, 0), on_chip)
        if on_chip.buffer_address() != before:
            wrong.append("the copy moved the device's tensor")
        held.kv.buffers[0][:] = 0
        if api.shard_bytes(held.tensor(0, 0)).any():
            wrong.append("a copy, not a view")
    return wrong


def read(held: Any) -> np.ndarray:
    """The numbers of a host tensor, as ttnn reads them."""
    ttnn = library()
    return np.asarray(ttnn.to_dtype(held, ttnn.float32).to_numpy())


# -- memory of the chips ---------------------------------------------------------------------------------


def paged(name: str, layers: int, blocks: int, codec: str | None = None) -> dict[str, Any]:
    """A paged cache of a model in one tensor: its addresses, its reservation, and what HAWK would make of it."""
    model = load_cache(name).choose(codec=codec).with_layers(layers)
    held = PagedCache.alloc(device(), model, blocks)
    again = PagedCache(held.tensors, model)
    reservation = held.reservation()
    compiled = held.specs[0].compile()
    return {
        "addresses": [a for pair in held.addresses for a in pair],
        "again": again.addresses == held.addresses,
        "reservation": (reservation.chips, reservation.address, reservation.nbytes, reservation.banks),
        "alignment": reservation.alignment,
        "wanted": [reservation.address + i * compiled.channel_bytes for i in range(compiled.buffer_count)],
        "bytes": compiled.channel_bytes * compiled.buffer_count,
        "heads": [s.heads for s in held.specs],
        "parts": [None if s.part is None else s.part.heads for s in held.specs],
        "chips": held.chips,
    }


def apart(name: str) -> str:
    """What is said of an engine's own tensors that do not follow each other; nothing where they do."""
    ttnn = library()
    model = load_cache(name).with_layers(2)
    spec = model.spec(blocks=8, tp_size=len(chips(device())))
    made = []
    for i in range(4):
        if i == 3:
            made.append(reserve(device(), 4096))
        made.append(
            ttnn.allocate_tensor_on_device(
                ttnn.Shape([8, spec.heads, spec.block_size, spec.dim]),
                api.dtype(model.codec),
                ttnn.TILE_LAYOUT,
                device(),
                ttnn.DRAM_MEMORY_CONFIG,
            )
        )
    cache_of = PagedCache([made[:2], [made[2], made[4]]], model)
    try:
        cache_of.reservation()
    except ValueError as refusal:
        return str(refusal)
    return ""


def refused(name: str, changes: dict[str, Any]) -> str:
    """What is said of a paged tensor that is not as the model has it."""
    ttnn = library()
    model = load_cache(name).with_layers(1)
    given = {
        "heads": 0,
        "block_size": 64,
        "dim": 128,
        "codec": "bfp8_b",
        "k_order": None,
        "layers": 1,
        **changes,
    }
    heads = given["heads"] or model.model.heads // len(chips(device()))
    made = [
        ttnn.allocate_tensor_on_device(
            ttnn.Shape([8, heads, given["block_size"], given["dim"]]),
            api.dtype(given["codec"]),
            ttnn.TILE_LAYOUT,
            device(),
            ttnn.L1_MEMORY_CONFIG if given.get("l1") else ttnn.DRAM_MEMORY_CONFIG,
        )
        for _ in range(2)
    ]
    try:
        PagedCache([made] * given["layers"], model, k_order=given["k_order"])
    except ValueError as refusal:
        return str(refusal)
    return ""


def reserved(nbytes: int) -> dict[str, Any]:
    """A reservation, and the tensors that ttnn allocates around it."""
    ttnn = library()

    def small() -> Any:
        return ttnn.allocate_tensor_on_device(
            ttnn.Shape([1, 1, 32 * 64, 32]),
            ttnn.bfloat16,
            ttnn.TILE_LAYOUT,
            device(),
            ttnn.DRAM_MEMORY_CONFIG,
        )

    before = small()
    held = reserve(device(), nbytes)
    after = small()
    found = {
        "address": held.address,
        "end": held.end,
        "nbytes": held.nbytes,
        "banks": held.banks,
        "alignment": held.alignment,
        "chips": held.chips,
        "others": [before.buffer_address(), after.buffer_address()],
    }
    try:
        reserve(device(), 1 << 36)
    except MemoryError as refusal:
        found["too much"] = str(refusal)
    return found


def broken(text_from: str, text_to: str, codec: str = "bf16") -> tuple[int, int]:
    """`tiles` of the shipped layout with a mistake in it."""
    text = load("tenstorrent/kv").text
    assert text_from in text
    wrong = Layout.from_toml(text.replace(text_from, text_to), "a mistake")
    return tiles(2, 64, 128, codec, wrong, banks(device()))
