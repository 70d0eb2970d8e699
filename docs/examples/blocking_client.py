"""The same without asyncio, for threads and for engines whose hooks are plain functions.

python docs/examples/blocking_client.py ipc:///FOLDER/p0.sock ipc:///FOLDER/d0.sock
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import hawk
import hawk.blocking

SPEC = hawk.CacheSpec(layers=2, heads=4, dim=64, block_size=16, blocks=64, layout="vllm/nhd")
REQUESTS, BLOCKS, TOKENS = 8, 8, 120


def table(number: int) -> list[int]:
    """The blocks of a request, on either side."""
    return list(range(number * BLOCKS, (number + 1) * BLOCKS))


def main() -> None:
    """Offers some requests, and fetches them in threads of their own."""
    with hawk.blocking.connect(sys.argv[1]) as prefill, hawk.blocking.connect(sys.argv[2]) as decode:
        source, target = hawk.KVCache.alloc(SPEC), hawk.KVCache.alloc(SPEC)
        for layer, buffer in enumerate(source.buffers):
            buffer[:] = layer + 1  # in place of what a model writes
        given, wanted = prefill.register(source), decode.register(target)
        tickets = [str(prefill.offer(f"thread-{i}", given, table(i), tokens=TOKENS)) for i in range(REQUESTS)]

        def fetch(number: int) -> int:
            return decode.fetch(tickets[number], into=wanted, blocks=table(number), timeout="10s").nbytes

        with ThreadPoolExecutor(4) as pool:
            print(sum(pool.map(fetch, range(REQUESTS))), "bytes in", REQUESTS, "fetches")
        # Or without waiting in a thread: `submit` returns a job whose `result` is asked for later.
        again = str(prefill.offer("again", given, table(0), tokens=TOKENS))
        job = decode.submit(again, into=wanted, blocks=table(3))
        print("one more by", job.result(timeout=10).transport)
        decode.release(wanted)
        prefill.release(given)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python {sys.argv[0]} PREFILL_SOCKET DECODE_SOCKET, each ipc:///FOLDER/NAME.sock")
    main()
