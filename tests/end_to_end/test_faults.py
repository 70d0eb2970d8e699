"""Faults that users of other systems reported, against agents as processes; docs/testing.md says where each is.

What F1 names is never ready, has a name of its own, is counted once, and writes no byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from hawk.client import Client
from hawk.errors import AlreadyClaimed, HawkError, InvalidArgument, LeaseExpired, UnknownRequest
from hawk.handles import Cache, DeviceCache, OfferHandle
from tests.end_to_end import caches as c
from tests.end_to_end.conftest import Decoders
from tests.end_to_end.harness import AgentProcess, Site, back_to, clients, counts, npu
from tests.end_to_end.scene import Scene, scene


@pytest.fixture
async def s(prefill: AgentProcess, decoders: Decoders) -> AsyncIterator[Scene]:
    async with scene(prefill, decoders.get("tcp", "direct")) as made:
        yield made


async def fails(
    client: Client, device: DeviceCache, error: type[HawkError], fetch: Awaitable[object]
) -> None:
    """The fetch ends by that name; of all endings only this one was counted, once; no byte was written."""
    c.paint(device)
    before = (await client.status()).endings
    with pytest.raises(error) as caught:
        await fetch
    assert type(caught.value) is error
    assert c.untouched(device)
    after = (await client.status()).endings
    assert after == {**before, error.code: before.get(error.code, 0) + 1}


async def _unknown(s: Scene) -> tuple[type[HawkError], Awaitable[object]]:
    return UnknownRequest, s.hd.fetch(request="nobody's", source="p0", into=s.device, blocks=[1, 2, 3, 4])


async def _out_of_range(s: Scene) -> tuple[type[HawkError], Awaitable[object]]:
    return InvalidArgument, s.hd.fetch(await s.offer(), into=s.device, blocks=[1, 2, 3, s.spec.blocks])


async def _consumed(s: Scene) -> tuple[type[HawkError], Awaitable[object]]:
    offer = await s.offer()
    await s.hd.fetch(offer, into=s.device, blocks=[5, 6, 7, 8])
    return AlreadyClaimed, s.hd.fetch(offer, into=s.device, blocks=[1, 2, 3, 4])


async def _reused(s: Scene) -> tuple[type[HawkError], Awaitable[object]]:
    """Its blocks hold another request by now."""
    old = await s.offer()
    await old.withdraw()
    await s.offer()
    return UnknownRequest, s.hd.fetch(old, into=s.device, blocks=[1, 2, 3, 4])


async def _reused_by_name(s: Scene) -> tuple[type[HawkError], Awaitable[object]]:
    """The same name and blocks were offered anew, by another claim."""
    old = await s.offer("again")
    await old.withdraw()
    await s.offer("again")
    return UnknownRequest, s.hd.fetch(old, into=s.device, blocks=[1, 2, 3, 4])


@pytest.mark.parametrize("case", [_unknown, _out_of_range, _consumed, _reused, _reused_by_name])
async def test_f1_what_cannot_be_had(
    s: Scene, case: Callable[[Scene], Awaitable[tuple[type[HawkError], Awaitable[object]]]]
) -> None:
    error, fetch = await case(s)
    await fails(s.hd, s.device, error, fetch)


async def test_f1_a_ticket_of_an_earlier_run_of_the_agent(site: Site) -> None:
    """Its blocks, its name and its address are used again by an agent that was started anew."""
    prefill = site.start("p0", role="prefill")
    decode = site.start("d0", {"peers": {"p0": prefill.control}, "memory.npu0": npu(8)}, role="decode")
    async with clients(decode) as (hd,):
        device = await hd.allocate(c.target_spec(), memory="npu0")
        async with clients(prefill) as (hp,):
            old = (await _offer(hp)).ticket
            prefill.kill()
        again = site.start("p0", role="prefill", control=prefill.control)
        async with clients(again) as (hp,):
            offer = await _offer(hp)
            stale = hd.fetch(old, into=device, blocks=[1, 2, 3, 4], timeout="20s")
            await fails(hd, device, UnknownRequest, stale)
            await hd.fetch(offer, into=device, blocks=[1, 2, 3, 4], timeout="20s")


async def _offer(client: Client) -> OfferHandle:
    cache = await client.register(c.filled())
    return await client.offer("same", cache, np.arange(16), tokens=256)


async def test_f6_an_offer_that_ran_out_is_not_read(s: Scene) -> None:
    """Offered for 100 ms; what comes after that reads nothing."""
    offer = await s.offer(ttl="0.1s")
    assert await offer.ended() == "expired"
    await fails(s.hd, s.device, LeaseExpired, s.hd.fetch(offer, into=s.device, blocks=[1, 2, 3, 4]))


@pytest.mark.parametrize("mode", ["direct", "staged"])
async def test_f8_a_pool_of_four_chunks_and_requests_of_more(site: Site, mode: str) -> None:
    """One request needs more chunks than there are, two more come at once: all arrive, none waits for ever."""
    small = {
        "arena": {"size": "256KiB"},
        "staging": {"size": "256KiB"},
        "jobs": {"chunk": "64KiB"},
        "transport": {"prefer": ["tcp"], "mode": mode},
    }
    prefill = site.start("p0", small, role="prefill")
    decode = site.start(
        "d0", {**small, "peers": {"p0": prefill.control}, "memory.npu0": npu(8)}, role="decode"
    )
    async with clients(prefill, decode) as (hp, hd):
        spec = c.target_spec(block_size=32, blocks=28)
        device: DeviceCache = await hd.allocate(spec, memory="npu0")
        source = c.filled()
        cache: Cache = await hp.register(source)
        before = await counts(hp), await counts(hd)
        c.paint(device)
        moves, jobs = [], []
        for i, tokens in enumerate((224, 160, 128)):
            table = np.random.default_rng(i).permutation(source.spec.blocks)[: tokens // 16]
            offer = await hp.offer(f"r{i}", cache, table, tokens=tokens)
            blocks = np.arange(tokens // 32) * 3 + i
            moves.append(c.Moved(source, table, blocks, 0, tokens))
            jobs.append(hd.fetch(offer, into=device, blocks=blocks, timeout="30s"))
        for ready in await asyncio.gather(*(_await(job) for job in jobs)):
            assert ready
        c.check(device, spec, *moves, guards=[device])
        await back_to(before[0], hp)
        await back_to(before[1], hd)


async def _await(job: Awaitable[object]) -> object:
    return await job
