"""A model's cache shared out among workers: what each holds, and what each has to have afterwards, in numpy alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hawk.cache import CacheSpec, KVCache
from hawk.client import Client
from hawk.handles import Cache, DeviceCache, OfferHandle
from tests.end_to_end import caches as c

DIM = 64


@dataclass
class Model:
    """The rows of one request in a whole model, `uint16[layers, 2, tokens, heads, dim]`: any bits at all."""

    layers: int
    heads: int
    tokens: int = 100
    seed: int = 0
    rows: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.layers, 2, self.tokens, self.heads, DIM)
        self.rows = np.random.default_rng(self.seed).integers(0, 1 << 16, shape, dtype=np.uint16)

    def spec(self, block_size: int = 16, blocks: int = 12, **changes: object) -> CacheSpec:
        made = CacheSpec(layers=self.layers, heads=self.heads, dim=DIM, block_size=block_size, blocks=blocks)
        return made.replace(**changes)

    def target(self, blocks: int = 4) -> CacheSpec:
        """The whole model's cache as the decode side lays it out."""
        return self.spec(64, blocks, layout="tenstorrent/kv")

    def cache(self, spec: CacheSpec, table: Sequence[int], *, noise: int = 1) -> KVCache:
        """The cache of a worker: the rows it holds, in the blocks of `table`, and noise around them."""
        made = KVCache.alloc(spec)
        c.fill(made, noise)
        layers, heads = _held(spec)
        size = spec.block_size
        for i, layer in enumerate(layers):
            tensor = made.buffers[i].view(np.uint16).reshape(2, spec.blocks, size, spec.heads, DIM)
            for token in range(self.tokens):
                tensor[:, table[token // size], token % size] = self.rows[layer, :, token][:, list(heads)]
        return made

    def check(self, device: DeviceCache, spec: CacheSpec, blocks: Sequence[int], *, first: int = 0) -> None:
        """Asserts that a worker's cache holds its heads and layers of the rows, and the canary everywhere else."""
        layers, heads = _held(spec)
        count = -(-self.tokens // 16)
        source = KVCache.alloc(
            CacheSpec(layers=len(layers), heads=len(heads), dim=DIM, block_size=16, blocks=count)
        )
        for i, layer in enumerate(layers):
            tensor = source.buffers[i].view(np.uint16).reshape(2, count * 16, len(heads), DIM)
            tensor[:, : self.tokens] = self.rows[layer][:, :, list(heads)]
        moved = c.Moved(source, range(count), blocks, first, self.tokens - first)
        c.check(device, spec, moved, guards=[device])
        source.close()


def _held(spec: CacheSpec) -> tuple[range, range]:
    part = spec.part
    return (range(spec.layers), range(spec.heads)) if part is None else (part.layers, part.heads)


@dataclass
class Sender:
    """One worker of the prefill side."""

    client: Client
    spec: CacheSpec
    table: list[int]
    source: KVCache
    cache: Cache

    async def offer(self, model: Model, request: str = "r", **options: object) -> OfferHandle:
        return await self.client.offer(request, self.cache, self.table, tokens=model.tokens, **options)


async def senders(clients: Sequence[Client], model: Model, specs: Sequence[CacheSpec]) -> list[Sender]:
    """Workers of the prefill side, dealt over the clients, each with blocks of its own."""
    made = []
    for rank, spec in enumerate(specs):
        client = clients[rank % len(clients)]
        table = np.random.default_rng(rank).permutation(spec.blocks)[: -(-model.tokens // spec.block_size)]
        source = model.cache(spec, table.tolist(), noise=100 + rank)
        made.append(Sender(client, spec, table.tolist(), source, await client.register(source)))
    return made


async def receivers(client: Client, specs: Sequence[CacheSpec], memory: str = "npu8") -> list[DeviceCache]:
    """Workers of the decode side on one agent; their whole pool is the canary."""
    made = [await client.allocate(spec, memory=memory) for spec in specs]
    c.paint(made[0])
    return made
