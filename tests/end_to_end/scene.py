"""A prefill and a decode side with caches, whose agents must be as before when a test leaves them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np

from hawk.client import Client
from hawk.handles import Cache, DeviceCache, OfferHandle
from tests.end_to_end import caches as c
from tests.end_to_end.harness import AgentProcess, Counts, back_to, clients, descriptors_back_to, until

STREAMS = 2


@dataclass
class Scene:
    """`hp` and `hd` are the clients of both sides; `cache` and `device` what they hold."""

    prefill: AgentProcess
    decode: AgentProcess
    hp: Client
    hd: Client
    source: c.KVCache
    cache: Cache
    spec: c.CacheSpec
    device: DeviceCache
    count: int = 0
    kept: int = 0
    """Descriptors that the decode side may keep: a session with one more peer."""
    offers: list[OfferHandle] = field(default_factory=list)

    async def offer(
        self, name: str = "", *, tokens: int = 256, blocks: object = None, **options: object
    ) -> OfferHandle:
        """An offer of the first blocks; withdrawn at the end of the scene if it is still open."""
        self.count += 1
        table = np.arange(-(-tokens // 16)) if blocks is None else blocks
        made = await self.hp.offer(name or f"s{self.count}", self.cache, table, tokens=tokens, **options)
        self.offers.append(made)
        return made

    async def good_job(self) -> None:
        """A job that has to succeed, every byte of it."""
        offer = await self.offer(tokens=200)
        c.paint(self.device)
        await self.hd.fetch(offer, into=self.device, blocks=[5, 2, 9, 0], timeout="20s")
        moved = c.Moved(self.source, np.arange(13), [5, 2, 9, 0], 0, 200)
        c.check(self.device, self.spec, moved, guards=[self.device])
        c.paint(self.device)


def idle(now: Counts) -> bool:
    """No job is under way; a job that is over for its client may still be on the way out in its agent."""
    return now.serving == now.fetching == 0


@contextlib.asynccontextmanager
async def scene(
    prefill: AgentProcess, decode: AgentProcess, memory: str = "npu8", *, spec: c.CacheSpec | None = None
) -> AsyncIterator[Scene]:
    """At the end a good job succeeds, and both agents hold what they held before, descriptors included."""
    async with clients(prefill, decode) as (hp, hd):
        source, spec = c.filled(), spec or c.target_spec()
        cache = await hp.register(source)
        device = await hd.allocate(spec, memory=memory)
        made = Scene(prefill, decode, hp, hd, source, cache, spec, device)
        await made.good_job()
        before = await until(hp, idle, "no job"), await until(hd, idle, "no job")
        open_before = prefill.descriptors(), decode.descriptors()
        made.offers.clear()
        yield made
        for offer in made.offers:
            await offer.withdraw()
        await back_to(before[0], hp)
        await back_to(before[1], hd)
        await made.good_job()
        await back_to(before[0], hp)
        await back_to(before[1], hd)
        # A stream of tcp that a revoke has cut is made again when it is next wanted, so either may come on top.
        await descriptors_back_to(open_before[0], prefill, more=STREAMS)
        await descriptors_back_to(open_before[1], decode, more=STREAMS + made.kept)
        assert prefill.alive()
        assert decode.alive()
        await cache.release()
        await device.release()
