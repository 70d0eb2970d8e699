"""Requests that come in parts, with real agents: heads split, merged and replicated, layers in stages."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hawk.blocking import connect as connect_blocking
from hawk.cache import CacheSpec
from tests.end_to_end import caches as c
from tests.end_to_end.conftest import Decoders
from tests.end_to_end.harness import AgentProcess, back_to, clients, counts
from tests.end_to_end.ranks import Model, receivers, senders


@pytest.mark.parametrize(
    ("heads", "source", "target", "mode"),
    [
        (8, (8, 1), (16, 1), "direct"),
        (2, (1, 1), (4, 1), "direct"),
        (8, (4, 1), (2, 1), "staged"),
        (4, (2, 1), (4, 1), "direct"),
        (2, (8, 1), (4, 1), "direct"),
        (2, (1, 2), (1, 1), "direct"),
        (4, (2, 1), (1, 2), "staged"),
        (6, (3, 2), (2, 3), "direct"),
    ],
    ids=["tp8to16", "tp1to4", "tp4to2", "tp2to4", "tp8to4", "pp2to1", "tp2topp2", "tp3pp2totp2pp3"],
)
async def test_every_worker_gets_its_heads_and_layers(
    prefill: AgentProcess,
    decoders: Decoders,
    heads: int,
    source: tuple[int, int],
    target: tuple[int, int],
    mode: str,
) -> None:
    """(TP, PP) -> (TP, PP): each offer has as many consumers as it says, and no byte lies anywhere else."""
    model = Model(layers=6 if source[1] * target[1] > 1 else 2, heads=heads)
    decode = decoders.get("tcp", mode)
    async with clients(prefill, decode) as (hp, hd):
        before = await counts(hp), await counts(hd)
        give = [
            model.spec().shard(tp_rank=r, tp_size=source[0], pp_rank=s, pp_size=source[1])
            for s in range(source[1])
            for r in range(source[0])
        ]
        take = [
            model.target().shard(tp_rank=r, tp_size=target[0], pp_rank=s, pp_size=target[1])
            for s in range(target[1])
            for r in range(target[0])
        ]
        sent = await senders([hp], model, give)
        devices = await receivers(hd, take)
        readers = [spec.part.readers(*target) for spec in give if spec.part is not None]
        # Where there are more senders than heads, some copies have no reader, and need not be offered.
        offers = [await s.offer(model, consumers=n) for s, n in zip(sent, readers, strict=True) if n]
        blocks = [np.random.default_rng(50 + i).permutation(4)[:2].tolist() for i in range(len(take))]
        ready = await asyncio.gather(
            *(
                hd.fetch(offers, into=device, blocks=table, timeout="20s")
                for device, table in zip(devices, blocks, strict=True)
            )
        )
        for device, spec, table, one in zip(devices, take, blocks, ready, strict=True):
            model.check(device, spec, table)
            assert one.parts == len({_held(other) for other in give if _meets(spec, other)})
            assert one.tokens == model.tokens
        assert [await offer.ended() for offer in offers] == ["consumed"] * len(offers)
        for cache in (*[s.cache for s in sent], *devices):
            await cache.release()
        await back_to(before[0], hp)
        await back_to(before[1], hd)


def _meets(one: CacheSpec, other: CacheSpec) -> bool:
    return all(set(a) & set(b) for a, b in zip(_held(one), _held(other), strict=True))


def _held(spec: CacheSpec) -> tuple[range, range]:
    assert spec.part is not None
    return spec.part.heads, spec.part.layers


def test_threads_fetch_parts_too(prefill: AgentProcess, decoders: Decoders) -> None:
    """The blocking client takes a list of offers as well."""
    model = Model(layers=2, heads=2)
    decode = decoders.get("shm", "direct")
    with connect_blocking(prefill.local) as hp, connect_blocking(decode.local) as hd:
        table = list(range(-(-model.tokens // 16)))
        specs = [model.spec().shard(tp_rank=r, tp_size=2) for r in range(2)]
        caches = [hp.register(model.cache(spec, table)) for spec in specs]
        offers = [hp.offer("r", cache, table, tokens=model.tokens) for cache in caches]
        device = hd.allocate(model.target(), memory="npu8")
        c.paint(device)
        ready = hd.fetch(offers, into=device, blocks=[3, 1], timeout="20s")
        assert (ready.parts, ready.transport) == (2, "shm")
        model.check(device, model.target(), [3, 1])
        for cache in caches:
            hp.release(cache)
        hd.release(device)
