"""A client of two agents that run: what an engine's prefill and decode processes do, here in one.

    python docs/examples/two_agents.py ipc:///FOLDER/p0.sock ipc:///FOLDER/d0.sock

The second agent has a device: `[memory.npu0]`.  README.md says how such a pair is set up and started.
"""

from __future__ import annotations

import asyncio
import sys

import hawk

SOURCE = hawk.CacheSpec(layers=4, heads=4, dim=64, block_size=16, blocks=32, layout="vllm/nhd")
DEVICE = SOURCE.replace(layout="tenstorrent/kv", block_size=64, blocks=8)
TOKENS = 200


async def prefill(address: str, request: str, tickets: asyncio.Queue[str]) -> None:
    """The side that has the cache: offers it, and keeps its blocks until they were fetched."""
    async with hawk.connect(address) as hk:
        kv = hawk.KVCache.alloc(SOURCE)
        for layer, buffer in enumerate(kv.buffers):
            buffer[:] = layer + 1  # in place of what a model writes
        cache = await hk.register(kv)
        blocks = list(range(-(-TOKENS // SOURCE.block_size)))
        offer = await hk.offer(request, cache, blocks, tokens=TOKENS, ttl="30s", note=b"first token")
        tickets.put_nowait(
            str(offer)
        )  # over your own way from the prefill to the decode process; it holds a secret
        print("prefill: the offer was", await offer.ended())
        await cache.release()


async def decode(address: str, tickets: asyncio.Queue[str]) -> None:
    """The side that wants it: fetches into blocks of the device."""
    async with hawk.connect(address) as hk:
        cache = await hk.allocate(DEVICE, memory="npu0")
        ready = await hk.fetch(await tickets.get(), into=cache, blocks=[6, 1, 4, 3], timeout="10s")
        print(
            f"decode: {ready.tokens} tokens by {ready.transport}, {ready.nbytes} bytes, note {ready.note!r}"
        )
        await cache.release()


async def main() -> None:
    """Both at once; where one fails the other is ended."""
    tickets: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.TaskGroup() as both:
        both.create_task(prefill(sys.argv[1], "req-1", tickets))
        both.create_task(decode(sys.argv[2], tickets))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} PREFILL_SOCKET DECODE_SOCKET, each ipc:///FOLDER/NAME.sock")
    asyncio.run(main())
