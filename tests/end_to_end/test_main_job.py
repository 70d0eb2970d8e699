"""The main job between processes: a paged cache into a device's channels, every byte of the pool looked at."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hawk.client import Client
from hawk.handles import DeviceCache, Ready
from tests.end_to_end import caches as c
from tests.end_to_end.conftest import DECODERS, Decoders
from tests.end_to_end.harness import AgentProcess, back_to, clients, counts

STAGES = {name for (_, mode), name in DECODERS.items() if mode == "staged"}
"""Agents whose pools hold staging, too."""

TRANSPORTS = ["tcp", "shm"]
MODES = ["direct", "staged"]


async def move(
    hp: Client,
    hd: Client,
    memory: str,
    spec: c.CacheSpec,
    source: c.KVCache,
    *,
    tokens: int,
    first: int = 0,
    extra: int = 0,
    name: str = "r",
) -> Ready:
    """One offer, one fetch, and the check of the whole pool."""
    device = await hd.allocate(spec, memory=memory)
    cache = await hp.register(source)
    src, dst = c.tables(first + tokens, 0, extra, first + tokens, src=source.spec, dst=spec)
    guards = []
    if hd.name in STAGES:
        guards = [await hd.allocate(c.target_spec(blocks=1), memory=memory)]
    before_p, before_d = await counts(hp), await counts(hd)
    offer = await hp.offer(name, cache, src, tokens=first + tokens, note=b"token 17")
    c.paint(device)
    ready = await hd.fetch(offer, into=device, blocks=dst, first=first, timeout="20s")
    c.check(device, spec, c.Moved(source, src, dst, first, tokens), guards=guards)
    assert await offer.ended() == "consumed"
    assert (ready.first, ready.tokens, ready.note) == (first, tokens, b"token 17")
    assert sum(ready.channels) > 0
    await back_to(before_p, hp)
    await back_to(before_d, hd)
    for held in (cache, device, *guards):
        await held.release()
    return ready


@pytest.mark.parametrize("codec", ["bf16", "bfp8_b"])
@pytest.mark.parametrize("channels", [7, 8, 12])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_byte_arrives_and_no_other_changes(
    prefill: AgentProcess, decoders: Decoders, transport: str, mode: str, channels: int, codec: str
) -> None:
    async with clients(prefill, decoders.get(transport, mode)) as (hp, hd):
        spec = c.target_spec(codec=codec)
        ready = await move(hp, hd, f"npu{channels}", spec, c.filled(), tokens=500)
        assert (ready.transport, ready.mode) == (transport, mode)


@pytest.mark.parametrize("sizes", [(64, 32), (16, 64), (32, 32)])
@pytest.mark.parametrize("mode", MODES)
async def test_block_sizes_may_differ(
    prefill: AgentProcess, decoders: Decoders, mode: str, sizes: tuple[int, int]
) -> None:
    async with clients(prefill, decoders.get("tcp", mode)) as (hp, hd):
        src = c.source_spec(block_size=sizes[0], blocks=640 // sizes[0])
        spec = c.target_spec(block_size=sizes[1], blocks=896 // sizes[1])
        await move(hp, hd, "npu8", spec, c.filled(src), tokens=450)


@pytest.mark.parametrize("codec", ["bf16", "bfp8_b"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_prefix_that_is_there_stays(
    prefill: AgentProcess, decoders: Decoders, mode: str, codec: str
) -> None:
    async with clients(prefill, decoders.get("shm", mode)) as (hp, hd):
        spec = c.target_spec(codec=codec)
        for first, tokens in ((37, 200), (64, 64), (100, 1), (31, 2)):
            await move(hp, hd, "npu7", spec, c.filled(), first=first, tokens=tokens, name=f"r{first}")


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 512])
async def test_prompts_of_awkward_lengths_leave_the_extra_block_alone(
    prefill: AgentProcess, decoders: Decoders, tokens: int
) -> None:
    async with clients(prefill, decoders.get("tcp", "direct")) as (hp, hd):
        spec = c.target_spec(block_size=64)
        await move(hp, hd, "npu12", spec, c.filled(), tokens=tokens, extra=1)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_layers_are_sent_as_they_become_ready(
    prefill: AgentProcess, decoders: Decoders, transport: str
) -> None:
    async with clients(prefill, decoders.get(transport, "direct")) as (hp, hd):
        spec = c.target_spec()
        device = await hd.allocate(spec, memory="npu8")
        source = c.filled()
        cache = await hp.register(source)
        src, dst = c.tables(1, 0, 0, 600, src=source.spec, dst=spec)
        offer = await hp.offer("progressive", cache, src, tokens=600, layers_ready=0)
        c.paint(device)
        async with hd.fetch(offer, into=device, blocks=dst, timeout="20s") as job:
            for layer in range(c.LAYERS):
                # What was not announced yet may still change, so whoever reads it early reads something else.
                c.fill_layer(source, layer, seed=100 + layer)
                await offer.layers_ready(layer + 1)
                async for progress in job.progress():
                    if progress.total and progress.nbytes * c.LAYERS >= progress.total * (layer + 1):
                        break
            await job
        c.check(device, spec, c.Moved(source, src, dst, 0, 600))
        await device.release()


async def test_a_fetch_may_come_before_its_offer(prefill: AgentProcess, decoders: Decoders) -> None:
    async with clients(prefill, decoders.get("tcp", "direct")) as (hp, hd):
        spec = c.target_spec()
        device = await hd.allocate(spec, memory="npu8")
        source = c.filled()
        cache = await hp.register(source)
        src, dst = c.tables(2, 0, 0, 300, src=source.spec, dst=spec)
        c.paint(device)
        job = hd.fetch(request="early", source="p0", into=device, blocks=dst, wait=True, timeout="20s")
        async with job:
            async for progress in job.progress():
                if progress.state == "requested":
                    break
            offer = await hp.offer("early", cache, src, tokens=300, consumer=hd.name)
            ready = await job
        assert ready.tokens == 300
        c.check(device, spec, c.Moved(source, src, dst, 0, 300))
        assert await offer.ended() == "consumed"
        await device.release()


async def test_two_fetches_at_once_share_a_cache(prefill: AgentProcess, decoders: Decoders) -> None:
    async with clients(prefill, decoders.get("tcp", "staged")) as (hp, hd):
        spec = c.target_spec(blocks=14)
        device = await hd.allocate(spec, memory="npu8")
        sources = [c.filled(seed=i) for i in range(2)]
        moves = []
        c.paint(device)
        async with asyncio.TaskGroup() as group:
            for i, source in enumerate(sources):
                cache = await hp.register(source)
                src = np.random.default_rng(i).permutation(source.spec.blocks)[:25]
                dst = np.arange(7) * 2 + i
                offer = await hp.offer(f"both{i}", cache, src, tokens=400)
                group.create_task(_fetched(hd, offer.ticket, device, dst))
                moves.append(c.Moved(source, src, dst, 0, 400))
        c.check(device, spec, *moves, guards=[device])
        await device.release()


async def _fetched(hd: Client, ticket: str, device: DeviceCache, blocks: np.ndarray) -> Ready:
    return await hd.fetch(ticket, into=device, blocks=blocks, timeout="20s")
