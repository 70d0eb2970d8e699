"""A request from vLLM's pages through agents into a simulated chip's DRAM, and from there as ttnn's tensors.

Runs in a process that sees a mock chip of the same kind: ttnn allocates the paged cache and says what its bytes are,
the driver's description beside the simulator's library says where a bank is.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import hawk
from hawk.integrations.ttnn import HostTensors, PagedCache, api
from hawk.memory.tenstorrent import umd
from hawk.model_caches import load_cache
from tests.ttnn import checks, simulated

TOKENS, SOURCE, TARGET = 150, 16, 64
CANARY = 0xC5

NODE = """
[agent]
name = "{name}"
local = "ipc://{folder}/{name}.sock"
control = "tcp://127.0.0.1:0"
insecure = true
[arena]
size = "16MiB"
"""

MEMORY = """
[memory.tt0]
kind = "tenstorrent"
address = {address}
nbytes = {nbytes}
banks = {banks}
way = "host"
simulator = "{library}"
[peers]
p0 = "{peer}"
"""


def into_dram(library: str, codec: str, swap: bool = False) -> dict[str, Any]:
    """What is wrong with a request that went into a paged cache in simulated DRAM; `swap` reads two banks exchanged."""
    views, _ = simulated.views(library)
    device = umd.open_simulator(library)
    kept = simulated.Kept(device)
    # The one chip of this process: the agent's memory and this function look at the same.
    umd.open_simulator = lambda *_, **__: kept
    model = load_cache("tt_transformers/qwen2.5-14b").choose(codec=codec).with_layers(2)
    blocks = 12 if len(views) == 12 else 8
    cache = PagedCache.alloc(checks.device(), model, blocks)
    if len(views) != cache.banks:
        return {"faults": [f"{len(views)} banks of the driver's, {cache.banks} of ttnn's"]}
    cores = [device.chip.channels[channel][port] for channel, port, _ in views]
    offsets = [offset for _, _, offset in views]
    if swap:
        cores[0], cores[1], offsets[0], offsets[1] = cores[1], cores[0], offsets[1], offsets[0]
    reservation = cache.reservation()
    canary = np.full(reservation.nbytes, CANARY, np.uint8)
    for core, offset in zip(cores, offsets, strict=True):
        device.write(core, offset + reservation.address, canary)
    pages = checks.source(model.model.heads, SOURCE, 128, blocks=16, seed=5, layers=2)
    table = np.random.default_rng(1).permutation(blocks)[: -(-TOKENS // TARGET)]
    order = np.random.default_rng(2).permutation(16)[: -(-TOKENS // SOURCE)]
    writes = asyncio.run(_moved(library, cache, pages, order, table))
    # In the order of tokens, in blocks of the target's size; what lies behind the last token is zero.
    rows = np.zeros((2, 2, len(table) * TARGET, model.model.heads, 128), np.uint16)
    rows[:, :, :TOKENS] = pages[:, :, order].reshape(2, 2, -1, model.model.heads, 128)[:, :, :TOKENS]
    by_block = rows.reshape(2, 2, len(table), TARGET, model.model.heads, 128)
    faults = []
    compiled = cache.specs[0].compile()
    with HostTensors.alloc(cache.specs[0]) as held:
        for layer, pair in enumerate(cache.addresses):
            for kv, address in enumerate(pair):
                raw = held.kv.array(layer, kv)
                for number, page in enumerate(raw.reshape(-1, compiled.page_bytes)):
                    bank, at = number % cache.banks, number // cache.banks * compiled.page_stride
                    device.read(cores[bank], offsets[bank] + address + at, page)
                theirs = checks.tensor(checks.numbers(by_block, layer, kv), codec)
                mine = held.tensor(layer, kv)
                name = f"layer {layer} kv {kv}"
                each = api.shard_bytes(mine).reshape(blocks, -1)
                if not np.array_equal(each[table], api.shard_bytes(theirs).reshape(len(table), -1)):
                    faults.append(f"{name}: bytes")
                if not np.array_equal(checks.read(mine)[table], checks.read(theirs)):
                    faults.append(f"{name}: numbers")
                if (np.delete(each, table, axis=0) != CANARY).any():
                    faults.append(f"{name}: blocks of others")
    return {"faults": faults, "writes": writes, "banks": cache.banks, "bytes": reservation.nbytes}


async def _moved(
    library: str, cache: PagedCache, pages: np.ndarray, order: np.ndarray, table: np.ndarray
) -> dict[str, int]:
    """Agents bring the request into the chip's memory; what was written to the chip for it."""
    reservation = cache.reservation()
    with tempfile.TemporaryDirectory(prefix="hk-", dir="/tmp") as folder:

        def node(name: str, more: str = "") -> hawk.Agent:
            path = Path(folder, f"{name}.toml")
            path.write_text(NODE.format(name=name, folder=folder) + more)
            return hawk.Agent(hawk.load_config(path, {})[0])

        async with node("p0") as p:
            more = MEMORY.format(
                address=reservation.address,
                nbytes=reservation.nbytes,
                banks=reservation.banks,
                library=library,
                peer=p.control_address,
            )
            async with node("d0", more) as d, hawk.connect(p) as hp, hawk.connect(d) as hd:
                layers, _, blocks, size, heads, dim = pages.shape
                spec = hawk.CacheSpec(layers=layers, heads=heads, dim=dim, block_size=size, blocks=blocks)
                given = await hp.register(hawk.KVCache.from_numpy([layer.copy() for layer in pages], spec))
                into = await hd.allocate(cache.specs[0], memory="tt0")
                cache.check_place(into, reservation)
                offer = await hp.offer("req-1", given, order, tokens=TOKENS)
                ready = await hd.fetch(offer, into=into, blocks=table, timeout="60s")
                counts = dict(d.memory("tt0").counts)
                return {**counts, "moved": ready.nbytes}
