"""Agents that are killed, stopped or started anew in the middle of a transfer."""

from __future__ import annotations

import asyncio
import gc
import signal

import numpy as np
import pytest

import hawk
from hawk.client import Client
from hawk.errors import LeaseExpired, PeerLost, PeerUnreachable, TransferFailed, UnknownRequest
from hawk.handles import Cache, DeviceCache, Fetch, OfferHandle
from tests.end_to_end import caches as c
from tests.end_to_end.harness import AgentProcess, Site, back_to, clients, counts, npu, until

TRANSPORTS = ["tcp", "shm"]
LOST = (PeerLost, PeerUnreachable, TransferFailed, LeaseExpired)
"""The names of "the other side is gone"; which one it is depends on what shows it first."""


def start_prefill(site: Site, transport: str, lease: str = "2s", **agent: object) -> AgentProcess:
    tables = {"transport": {"prefer": [transport]}, "jobs": {"lease": lease}}
    return site.start("p0", tables, role="prefill", **agent)


def start_decode(
    site: Site, prefill: AgentProcess, transport: str, name: str = "d0", lease: str = "2s"
) -> AgentProcess:
    tables = {
        "transport": {"prefer": [transport]},
        "jobs": {"lease": lease},
        "peers": {"p0": prefill.control},
        "memory.npu0": npu(8),
    }
    return site.start(name, tables, role="decode")


async def register(hp: Client) -> tuple[c.KVCache, Cache]:
    source = c.filled()
    return source, await hp.register(source)


async def half_done(
    hp: Client, hd: Client, cache: Cache, device: DeviceCache, name: str = "half"
) -> tuple[OfferHandle, Fetch]:
    """A transfer that stands in the middle: one of three layers has arrived, the next is not announced."""
    c.paint(device)
    offer = await hp.offer(name, cache, np.arange(16), tokens=256, layers_ready=1)
    job = hd.fetch(offer, into=device, blocks=[5, 6, 7, 8], timeout="30s")
    await job.start()
    async for progress in job.progress():
        if progress.total and progress.nbytes * c.LAYERS >= progress.total:
            break
    return offer, job


async def good(
    hp: Client, hd: Client, source: c.KVCache, cache: Cache, device: DeviceCache, name: str = "good"
) -> None:
    offer = await hp.offer(name, cache, np.arange(16), tokens=256)
    c.paint(device)
    await hd.fetch(offer, into=device, blocks=[5, 6, 7, 8], timeout="20s")
    moved = c.Moved(source, np.arange(16), [5, 6, 7, 8], 0, 256)
    c.check(device, c.target_spec(), moved, guards=[device])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_prefill_agent_is_killed_and_comes_back(site: Site, transport: str) -> None:
    prefill = start_prefill(site, transport)
    decode = start_decode(site, prefill, transport)
    async with clients(decode) as (hd,):
        device = await hd.allocate(c.target_spec(), memory="npu0")
        before = await counts(hd)
        async with hawk.connect(prefill.local) as hp:
            source, cache = await register(hp)
            offer, job = await half_done(hp, hd, cache, device)
            prefill.kill()
            with pytest.raises(LOST):
                await job
            with pytest.raises(PeerLost):
                await cache.release()
        await back_to(before, hd)
        # The same name at the same address, but another generation: it knows nothing of the old tickets.
        again = start_prefill(site, transport, control=prefill.control)
        assert again.control == prefill.control
        async with hawk.connect(again.local) as hp:
            for wait in (False, True):
                with pytest.raises(UnknownRequest, match="restarted since the ticket was made"):
                    await hd.fetch(offer.ticket, into=device, blocks=[5, 6, 7, 8], timeout="20s", wait=wait)
            source, cache = await register(hp)
            await good(hp, hd, source, cache, device)
        await back_to(before, hd)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prefill_agent_that_restarts_unseen(site: Site, transport: str) -> None:
    """Nothing runs while it is away, so the decode side learns of the new generation from its first frame."""
    prefill = start_prefill(site, transport)
    decode = start_decode(site, prefill, transport)
    async with clients(decode) as (hd,):
        device = await hd.allocate(c.target_spec(), memory="npu0")
        before = await counts(hd)
        for _ in range(3):
            async with hawk.connect(prefill.local) as hp:
                source, cache = await register(hp)
                await good(hp, hd, source, cache, device)
            prefill.kill()
            prefill = start_prefill(site, transport, control=prefill.control)
        await back_to(before, hd)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_decode_agent_is_killed_and_another_fetches(site: Site, transport: str) -> None:
    prefill = start_prefill(site, transport)
    first = start_decode(site, prefill, transport, "d0")
    second = start_decode(site, prefill, transport, "d1")
    async with clients(prefill, second) as (hp, hd):
        source, cache = await register(hp)
        device = await hd.allocate(c.target_spec(), memory="npu0")
        before = await counts(hp)
        async with hawk.connect(first.local) as dying:
            doomed = await dying.allocate(c.target_spec(), memory="npu0")
            offer, job = await half_done(hp, dying, cache, doomed)
            first.kill()
            with pytest.raises(PeerLost):
                await job
        # Its lease runs out, or its silence is noticed; nothing of it stays, and the offer can be had again.
        await until(hp, lambda now: now.serving == 0 and now.pools == before.pools, "no job and a free arena")
        await offer.layers_ready(c.LAYERS)
        c.paint(device)
        await hd.fetch(offer, into=device, blocks=[5, 6, 7, 8], timeout="20s")
        moved = c.Moved(source, np.arange(16), [5, 6, 7, 8], 0, 256)
        c.check(device, c.target_spec(), moved, guards=[device])
        await back_to(before, hp)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prefill_agent_that_stands_still_past_the_lease(site: Site, transport: str) -> None:
    prefill = start_prefill(site, transport, lease="0.5s")
    decode = start_decode(site, prefill, transport)
    async with clients(prefill, decode) as (hp, hd):
        source, cache = await register(hp)
        device = await hd.allocate(c.target_spec(), memory="npu0")
        before = await counts(hp), await counts(hd)
        offer, job = await half_done(hp, hd, cache, device)
        prefill.stopped()
        with pytest.raises(LOST):
            await job
        await back_to(before[1], hd)
        prefill.send(signal.SIGCONT)
        # It wakes to a lease that ran out while it slept.
        await until(hp, lambda now: now.serving == 0, "no job")
        await offer.withdraw()
        await back_to(before[0], hp)
        await good(hp, hd, source, cache, device)
        await back_to(before[1], hd)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("lease", ["0.1s", "0.3s"])
async def test_a_consumer_that_falls_silent_loses_its_lease(site: Site, transport: str, lease: str) -> None:
    prefill = start_prefill(site, transport, lease=lease)
    decode = start_decode(site, prefill, transport)
    async with clients(prefill, decode) as (hp, hd):
        _, cache = await register(hp)
        device = await hd.allocate(c.target_spec(), memory="npu0")
        before = await counts(hp), await counts(hd)
        offer = await hp.offer("silent", cache, np.arange(16), tokens=256, layers_ready=1)
        job = hd.fetch(offer, into=device, blocks=[5, 6, 7, 8], timeout="30s")
        await job.start()
        await until(hp, lambda now: now.serving == 1, "a job")
        decode.stopped()
        await until(hp, lambda now: now.serving == 0, "no job")
        # Free again, or kept from everybody where the reader was stopped in the midst of a chunk and may read on.
        await until(hp, lambda now: all(owned == 0 for _, _, owned, _ in now.pools), "an arena nobody owns")
        decode.send(signal.SIGCONT)
        with pytest.raises(LOST):
            await job
        await back_to(before[1], hd)
        await offer.withdraw()
        await back_to(before[0], hp)


async def test_heartbeats_keep_a_short_lease(site: Site) -> None:
    """Nothing but beats passes between the layers, for several times the lease."""
    prefill = start_prefill(site, "tcp", lease="1s")
    decode = start_decode(site, prefill, "tcp")
    async with clients(prefill, decode) as (hp, hd):
        source, cache = await register(hp)
        device = await hd.allocate(c.target_spec(), memory="npu0")
        offer, job = await half_done(hp, hd, cache, device)
        clock = await hp.offer("clock", cache, np.arange(16), tokens=256, ttl="3s")
        assert await clock.ended() == "expired"
        await offer.layers_ready(c.LAYERS)
        assert (await job).tokens == 256
        moved = c.Moved(source, np.arange(16), [5, 6, 7, 8], 0, 256)
        c.check(device, c.target_spec(), moved, guards=[device])


async def test_a_client_that_is_closed_as_its_agent_dies_leaves_no_error_behind(site: Site) -> None:
    """What a call would have raised is nobody's to ask for once the call has ended otherwise."""
    decode = site.start("d0", {"memory.npu0": npu(8), "peers": {"p0": "tcp://127.0.0.1:9"}}, role="decode")
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    client = hawk.connect(decode.local)
    await client.open()
    device = await client.allocate(c.target_spec(), memory="npu0")
    fetches = [
        client.fetch(request=f"r{n}", source="p0", into=device, blocks=[n], wait=True, timeout="60s")
        for n in range(4)
    ]
    for fetch in fetches:
        await fetch.start()
    decode.kill()
    await client.close()
    for fetch in fetches:
        with pytest.raises(hawk.PeerLost):
            await fetch
    del client, device, fetches, fetch
    gc.collect()
    assert told == []
