"""Who waits for whom, between real agents: early fetches, the line, priorities, `Busy`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest

from hawk.client import Client
from hawk.errors import Aborted, Busy, InvalidArgument
from hawk.handles import Cache, DeviceCache, Fetch
from tests.end_to_end import caches as c
from tests.end_to_end.harness import Site, back_to, clients, counts, npu, until

ONE = {"max_jobs": 1, "max_queued": 2, "max_waiting": 2}


@contextlib.asynccontextmanager
async def sides(
    site: Site, prefill: dict[str, int], decode: dict[str, int]
) -> AsyncIterator[tuple[Client, Client, Cache, DeviceCache]]:
    """Clients of both, a source and a device; both agents hold afterwards what they held before."""
    p = site.start("p0", {"jobs": {"chunk": "64KiB", **prefill}}, role="prefill")
    tables = {
        "jobs": {"chunk": "64KiB", **decode},
        "peers": {"p0": p.control},
        "memory.npu0": npu(8),
    }
    d = site.start("d0", tables, role="decode")
    async with clients(p, d) as (hp, hd):
        cache = await hp.register(c.filled())
        device = await hd.allocate(c.target_spec(), memory="npu0")
        before = await counts(hp), await counts(hd)
        yield hp, hd, cache, device
        await back_to(before[0], hp)
        await back_to(before[1], hd)


async def reached(job: Fetch, state: str) -> None:
    await job.start()
    async for progress in job.progress():
        if progress.state == state:
            return
    raise AssertionError(f"it never was {state}")


@pytest.mark.parametrize("bounded", ["prefill", "decode"])
async def test_fetches_that_wait_for_their_offers_take_nobodys_place(site: Site, bounded: str) -> None:
    limits = {"prefill": {}, "decode": {}, bounded: ONE}
    async with sides(site, **limits) as (hp, hd, cache, device):

        def early(number: int) -> Fetch:
            return hd.fetch(
                request=f"early{number}", source="p0", into=device, blocks=[number], wait=True, timeout="30s"
            )

        waiting = [early(0), early(1)]
        for job in waiting:
            await reached(job, "requested")
        with pytest.raises(Busy, match="wait for their offers") as caught:
            await early(2)
        assert 0 < caught.value.retry_after <= 5
        for number in range(3):
            offer = await hp.offer(f"now{number}", cache, np.arange(4), tokens=64)
            await hd.fetch(offer, into=device, blocks=[5], timeout="30s")
        for number in (1, 0):
            await hp.offer(f"early{number}", cache, np.arange(4), tokens=64, consumer="d0")
        assert [(await job).tokens for job in waiting] == [64, 64]


@pytest.mark.parametrize("bounded", ["prefill", "decode"])
async def test_jobs_stand_in_line_by_their_rank_and_the_rest_are_told_when(site: Site, bounded: str) -> None:
    limits = {"prefill": {}, "decode": {}, bounded: ONE}
    async with sides(site, **limits) as (hp, hd, cache, device):
        held = await hp.offer("held", cache, np.arange(4), tokens=64, layers_ready=0)
        first = hd.fetch(held, into=device, blocks=[0], timeout="30s")
        await reached(first, "receiving")
        ended: list[str] = []

        async def one(name: str, block: int, **rank: object) -> None:
            job = hd.fetch(
                await hp.offer(name, cache, np.arange(4), tokens=64),
                into=device,
                blocks=[block],
                timeout="30s",
                **rank,  # type: ignore[arg-type]
            )
            await reached(job, "queued" if bounded == "decode" else "requested")
            lined.release()
            await job
            ended.append(name)

        lined = asyncio.Semaphore(0)
        low = asyncio.create_task(one("low", 1))
        await lined.acquire()
        high = asyncio.create_task(one("high", 2, priority=1, ttft="10s"))
        await lined.acquire()
        if bounded == "prefill":
            # The decode side says "requested" when it asks; the line is full when the other side knows.
            await until(hp, lambda now: now.serving == 3, "three jobs")
        more = await hp.offer("more", cache, np.arange(4), tokens=64)
        with pytest.raises(Busy, match="2 stand in line") as caught:
            await hd.fetch(more, into=device, blocks=[3], timeout="30s")
        assert 0 < caught.value.retry_after <= 5
        await held.layers_ready(c.LAYERS)
        await asyncio.gather(first, low, high)
        assert ended == ["high", "low"]
        await more.withdraw()


async def test_releasing_a_cache_ends_the_fetches_into_it(site: Site) -> None:
    async with sides(site, {}, {}) as (hp, hd, cache, device):
        other = await hd.allocate(c.target_spec(), memory="npu0")
        held = await hp.offer("held", cache, np.arange(4), tokens=64, layers_ready=0)
        first = hd.fetch(held, into=other, blocks=[0], timeout="30s")
        await reached(first, "receiving")
        early = hd.fetch(request="none", source="p0", into=other, blocks=[1], wait=True, timeout="30s")
        await reached(early, "requested")
        await asyncio.wait_for(other.release(), 20)
        for job in (first, early):
            with pytest.raises(Aborted, match="released the cache"):
                await job
        await held.withdraw()
        for wrong in ({"priority": 101}, {"priority": True}, {"ttft": "-1s"}, {"ttft": "soon"}):
            with pytest.raises(InvalidArgument) as caught:
                hd.fetch(held, into=device, blocks=[0], **wrong)  # type: ignore[arg-type]
            assert caught.value.field == next(iter(wrong))
