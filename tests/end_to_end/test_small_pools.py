"""Requests larger than what the agents may hold: many chunks, one after another, and nobody waits for ever."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hawk.client import Client
from hawk.errors import OutOfMemory
from hawk.handles import DeviceCache, Ready
from tests.end_to_end import caches as c
from tests.end_to_end.harness import AgentProcess, Site, back_to, clients, counts, npu

SMALL = {"arena": {"size": "128KiB"}, "jobs": {"chunk": "64KiB", "in_flight_per_peer": "64KiB"}}


def start(site: Site, transport: str, **tables: dict[str, object]) -> tuple[AgentProcess, AgentProcess]:
    prefill = site.start("p0", {**SMALL, "transport": {"prefer": [transport]}}, role="prefill")
    decode = site.start(
        "d0",
        {
            **SMALL,
            "transport": {"prefer": [transport]},
            "peers": {"p0": prefill.control},
            "memory.npu0": npu(8),
            **tables,
        },
        role="decode",
    )
    return prefill, decode


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_an_arena_smaller_than_two_requests_at_once(site: Site, transport: str) -> None:
    """Each request is twelve times the arena; four fight for it, two of them for the same peer's credit."""
    async with clients(*start(site, transport)) as (hp, hd):
        spec = c.target_spec(block_size=32, blocks=56)
        device = await hd.allocate(spec, memory="npu0")
        source = c.filled()
        cache = await hp.register(source)
        before_p, before_d = await counts(hp), await counts(hd)
        c.paint(device)
        moves, jobs = [], []
        for i in range(4):
            src = np.random.default_rng(i).permutation(source.spec.blocks)[:26]
            offer = await hp.offer(f"r{i}", cache, src, tokens=416)
            moves.append(c.Moved(source, src, np.arange(13) * 4 + i, 0, 416))
            jobs.append(_fetched(hd, offer.ticket, device, moves[-1].target_blocks))
        await asyncio.gather(*jobs)
        c.check(device, spec, *moves, guards=[device])
        await back_to(before_p, hp)
        await back_to(before_d, hd)


async def _fetched(hd: Client, ticket: str, device: DeviceCache, blocks: np.ndarray) -> Ready:
    return await hd.fetch(ticket, into=device, blocks=blocks, timeout="30s")


async def test_a_chunk_that_cannot_hold_a_block_is_told(site: Site) -> None:
    async with clients(*start(site, "tcp", jobs={"chunk": "8KiB", "in_flight_per_peer": "8KiB"})) as (hp, hd):
        device = await hd.allocate(c.target_spec(), memory="npu0")
        cache = await hp.register(c.filled())
        before_p, before_d = await counts(hp), await counts(hd)
        offer = await hp.offer("big", cache, np.arange(4), tokens=64)
        c.paint(device)
        with pytest.raises(OutOfMemory, match="one block of one layer does not fit"):
            await hd.fetch(offer, into=device, blocks=[1], timeout="10s")
        assert c.untouched(device)
        await offer.withdraw()
        await back_to(before_p, hp)
        await back_to(before_d, hd)


async def test_a_pool_that_is_full_names_the_channel(site: Site) -> None:
    async with clients(*start(site, "tcp")) as (_, hd):
        before = await counts(hd)
        first = await hd.allocate(c.target_spec(), memory="npu0")
        with pytest.raises(OutOfMemory) as caught:
            await hd.allocate(c.target_spec(blocks=60), memory="npu0")
        assert caught.value.field is not None
        assert "npu0/channel" in caught.value.field
        assert {"asked", "free", "largest_piece"} <= set(caught.value.facts)
        # What was taken for the first buffers of the cache that did not fit is back: another one fits.
        second = await hd.allocate(c.target_spec(blocks=20), memory="npu0")
        await first.release()
        await second.release()
        await back_to(before, hd)
