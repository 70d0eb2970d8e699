"""F2: two caches registered over one address, with blocks of 19,008 and of 32,768 bytes."""

from __future__ import annotations

import numpy as np
import pytest

from hawk.cache import CacheSpec, KVCache
from tests.end_to_end.conftest import Decoders
from tests.end_to_end.harness import AgentProcess, back_to, clients, counts

SMALL = CacheSpec(layers=1, heads=1, dim=594, block_size=16, blocks=40, kvs=1, layout="contiguous/bhsd")
LARGE = CacheSpec(layers=1, heads=1, dim=1024, block_size=16, blocks=30, kvs=1, layout="contiguous/bhsd")
TOKENS = 48


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("forth", [True, False], ids=["read", "written"])
async def test_each_moves_its_own_bytes(
    prefill: AgentProcess, decoders: Decoders, forth: bool, transport: str
) -> None:
    """Whether both are sources or both are targets: no byte of the one is taken for the other's."""
    rng, decode = np.random.default_rng(forth), decoders.get(transport, "direct")
    async with clients(prefill, decode) as (hp, hd):
        before = await counts(hp), await counts(hd)
        pool = KVCache.alloc(LARGE)
        base = pool.buffers[0]
        base[:] = rng.integers(0, 256, len(base), np.uint8)
        shared = KVCache.from_numpy([base[: 40 * 19008]], SMALL), KVCache.from_numpy([base], LARGE)
        want = base.copy()
        ours, theirs = (hp, hd) if forth else (hd, hp)
        # Blocks of the two that do not overlap, in either's own length.
        for number, (spec, cache, table) in enumerate(
            zip((SMALL, LARGE), shared, ([3, 1, 0], [5, 29, 3]), strict=True)
        ):
            nbytes = spec.compile().page_bytes
            assert nbytes == (19008, 32768)[number]
            other, apart = KVCache.alloc(spec), [7, 2, 11]
            far = other.buffers[0]
            far[:] = rng.integers(0, 256, len(far), np.uint8)
            kept = far.copy()
            one, two = await ours.register(cache), await theirs.register(other)
            a, b, x, y = (one, two, table, apart) if forth else (two, one, apart, table)
            offer = await hp.offer(f"one-base-{transport}-{forth}-{number}", a, x, tokens=TOKENS)
            await hd.fetch(offer, into=b, blocks=y, timeout="20s")
            for block, place in zip(table, apart, strict=True):
                here, there = (
                    slice(block * nbytes, (block + 1) * nbytes),
                    slice(place * nbytes, (place + 1) * nbytes),
                )
                if forth:
                    kept[there] = base[here]
                else:
                    want[here] = far[there]
            np.testing.assert_array_equal(far, kept)
            np.testing.assert_array_equal(base, want)
            for handle in (one, two):
                await handle.release()
            other.close()
        for cache in (*shared, pool):
            cache.close()
        for client, now in zip((hp, hd), before, strict=True):
            await back_to(now, client)
