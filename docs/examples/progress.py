"""Layers are fetched while prefill still writes the next ones, and the decode side watches them come.

    python docs/examples/progress.py ipc:///FOLDER/p0.sock ipc:///FOLDER/d0.sock

The fetch comes before the offer: it names the request and the agent `p0`, and the offer names its consumer `d0`.
"""

from __future__ import annotations

import asyncio
import sys

import hawk

SOURCE = hawk.CacheSpec(layers=8, heads=8, dim=128, block_size=16, blocks=32, layout="vllm/nhd")
TARGET = SOURCE.replace(layout="vllm/hnd")
TOKENS = 500
BLOCKS = list(range(32))


async def prefill(address: str) -> None:
    """Says of each layer when it is written."""
    async with hawk.connect(address) as hk:
        kv = hawk.KVCache.alloc(SOURCE)
        cache = await hk.register(kv)
        offer = await hk.offer("early-1", cache, BLOCKS, tokens=TOKENS, layers_ready=0, consumer="d0")
        for layer, buffer in enumerate(kv.buffers):
            buffer[:] = layer + 1  # in place of what a model writes
            await offer.layers_ready(layer + 1)
        await offer.ended()


async def decode(address: str) -> None:
    """Shows what has arrived; the latest state only, where this loop is the slower one."""
    async with hawk.connect(address) as hk:
        kv = hawk.KVCache.alloc(TARGET)
        cache = await hk.register(kv)
        async with hk.fetch(
            request="early-1",
            source="p0",
            wait=True,
            into=cache,
            blocks=BLOCKS,
            tokens=TOKENS,
            ttft="200ms",
            timeout="10s",
        ) as job:
            async for progress in job.progress():
                print(f"{progress.state:>10}  {progress.nbytes:>8} of {progress.total} bytes")
            ready = await job
        # Leaving the block early, by an error or a cancellation, ends the job and waits until no byte can land.
        print("seconds of each phase:", {name: round(seconds, 4) for name, seconds in ready.phases.items()})
        assert [int(buffer[0]) for buffer in kv.buffers] == list(range(1, SOURCE.layers + 1))


async def main() -> None:
    """Both at once."""
    async with asyncio.TaskGroup() as both:
        both.create_task(decode(sys.argv[2]))
        both.create_task(prefill(sys.argv[1]))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} PREFILL_SOCKET DECODE_SOCKET, each ipc:///FOLDER/NAME.sock")
    asyncio.run(main())
