"""A decode loop on a Tenstorrent chip over a cache that HAWK fetched; the prefill side stands in the same process.

    python docs/examples/ttnn_decode.py

It needs Python 3.12, ttnn, a chip, and the compiler for its kernels (docs/ttnn.md says how to come by each).
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

try:
    import ttnn
except ImportError as absent:
    raise SystemExit(
        f"no ttnn here ({absent}): its wheels are for Python 3.12; docs/ttnn.md says how it is installed"
    ) from None

import hawk
from hawk.integrations.ttnn import HostTensors, PagedCache
from hawk.model_caches import load_cache

MODEL = load_cache("tt_transformers/llama-3.1-8b").with_layers(2)  # two layers, to be quick
QUERY_HEADS, HEADS, DIM = 32, MODEL.model.heads, MODEL.model.dim
TOKENS, STEPS = 100, 3
BLOCKS, TABLE = 8, [5, 2]  # blocks of 64 in the paged cache, and those of this request, in its order

AGENT = """
[agent]
name = "{name}"
control = "tcp://127.0.0.1:0"
local = "ipc://{folder}/{name}.sock"
insecure = true        # plain TCP on loopback; elsewhere an agent has keys
[arena]
size = "16MiB"
[peers]
"""


def agent(folder: str, name: str, **peers: str) -> hawk.Agent:
    """An agent in this process."""
    file = Path(folder, f"{name}.toml")
    lines = [f'{peer} = "{address}"\n' for peer, address in peers.items()]
    file.write_text(AGENT.format(name=name, folder=folder) + "".join(lines))
    return hawk.Agent(hawk.load_config(file)[0])


def prompt() -> hawk.KVCache:
    """What prefill on a GPU leaves behind: vLLM's pages of bf16, K as Hugging Face orders it."""
    spec = hawk.CacheSpec(layers=2, heads=HEADS, dim=DIM, block_size=16, blocks=8, layout="vllm/nhd")
    cache = hawk.KVCache.alloc(spec)
    for layer, buffer in enumerate(cache.buffers):
        numbers = np.random.default_rng(layer).standard_normal(buffer.size // 2).astype(np.float32)
        buffer.view(np.uint16)[:] = numbers.view(np.uint32) >> 16
    return cache


async def fetch(held: HostTensors) -> None:
    """Brings the request into host tensors: HAWK reorders K, makes tiles, and packs them as the chip keeps them."""
    with tempfile.TemporaryDirectory() as folder:
        async with agent(folder, "p0") as p0, agent(folder, "d0", p0=p0.control_address) as d0:
            async with hawk.connect(p0) as prefill, hawk.connect(d0) as decode:
                given = await prefill.register(prompt())
                ticket = str(await prefill.offer("req-1", given, list(range(7)), tokens=TOKENS))
                into = await decode.register(held.kv)
                ready = await decode.fetch(ticket, into=into, blocks=held.blocks(TOKENS), timeout="10s")
                print(f"{ready.tokens} tokens, {ready.nbytes} bytes by {ready.transport}")
                await into.release()


def on_device(mesh: Any, numbers: Any, config: Any = ttnn.DRAM_MEMORY_CONFIG) -> Any:
    """An array on the chip: whole numbers in rows, others as bf16 in tiles."""
    whole = numbers.dtype == np.int32
    layout = ttnn.ROW_MAJOR_LAYOUT if whole else ttnn.TILE_LAYOUT
    return ttnn.Tensor(numbers, ttnn.int32 if whole else ttnn.bfloat16, layout=layout).to(mesh, config)


def step(mesh: Any, cache: PagedCache, table: Any, position: int) -> list[Any]:
    """One token of every layer: its K and V into the cache, attention over all before it."""
    rng = np.random.default_rng(position)
    one_user = ttnn.create_sharded_memory_config(
        shape=(32, DIM),
        core_grid=ttnn.CoreGrid(y=1, x=1),
        strategy=ttnn.ShardStrategy.HEIGHT,
        orientation=ttnn.ShardOrientation.ROW_MAJOR,
        use_height_and_width_as_shard_shape=True,
    )
    at = on_device(mesh, np.asarray([position], np.int32))
    found = []
    for k_cache, v_cache in cache.tensors:
        # In place of a model's projections and its rotary embedding; K and the query in the model's order.
        query = rng.standard_normal((1, 1, QUERY_HEADS, DIM)).astype(np.float32)
        k, v = rng.standard_normal((2, 1, 1, HEADS, DIM)).astype(np.float32)
        for held, new in ((k_cache, k), (v_cache, v)):
            ttnn.experimental.paged_update_cache(
                held, on_device(mesh, new, one_user), update_idxs_tensor=at, page_table=table
            )
        found.append(
            ttnn.transformer.paged_scaled_dot_product_attention_decode(
                on_device(mesh, query), k_cache, v_cache, table, cur_pos_tensor=at, scale=DIM**-0.5
            )
        )
    return found


def main() -> None:
    """Fetches a request, fills it into the paged cache, and decodes a few tokens."""
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 1))
    try:
        cache = PagedCache.alloc(mesh, MODEL, BLOCKS)
        table = on_device(mesh, np.asarray([TABLE], np.int32))
        with HostTensors.for_request(MODEL, TOKENS) as held:
            asyncio.run(fetch(held))
            cache.fill(held, table)  # the tiles as they came: nothing is converted
        for position in range(TOKENS, TOKENS + STEPS):
            step(mesh, cache, table, position)
        print(f"{STEPS} tokens decoded over them")
    finally:
        ttnn.close_mesh_device(mesh)


if __name__ == "__main__":
    main()
