"""Two agents and the verbs transport, over devices without hardware: the main job, and agents that are killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import hawk
from tests.end_to_end import caches as c
from tests.end_to_end import fake_verbs
from tests.end_to_end.conftest import DECODERS
from tests.end_to_end.harness import AgentProcess, Site, back_to, clients, counts, npu
from tests.end_to_end.test_deaths import LOST, good, half_done, register
from tests.end_to_end.test_main_job import move
from tests.end_to_end.test_operate import page

COMMAND = (sys.executable, str(Path(fake_verbs.__file__)))
VERBS: dict[str, Any] = {"queue_pairs": 2, "batch": "64KiB", "message": "16KiB", "depth": 32}


def start_prefill(site: Site, verbs: dict[str, Any] | None = None, **agent: Any) -> AgentProcess:
    settings = VERBS if verbs is None else verbs
    tables = {"transport": {"prefer": ["verbs"]}, "transport.verbs": settings, "jobs": {"lease": "2s"}}
    return site.start("p0", tables, role="prefill", command=COMMAND, **agent)


def start_decode(
    site: Site, prefill: AgentProcess, mode: str = "auto", verbs: dict[str, Any] | None = None, **agent: Any
) -> AgentProcess:
    tables = {
        "transport": {"prefer": ["verbs"], "mode": mode},
        "transport.verbs": VERBS if verbs is None else verbs,
        "jobs": {"lease": "2s"},
        "peers": {"p0": prefill.control},
        "memory.npu0": npu(8),
    }
    return site.start(
        DECODERS["tcp", mode] if mode != "auto" else "d0", tables, role="decode", command=COMMAND, **agent
    )


@pytest.mark.parametrize("mode", ["direct", "staged"])
async def test_every_byte_arrives_and_no_other_changes(site: Site, mode: str) -> None:
    prefill = start_prefill(site)
    async with clients(prefill, start_decode(site, prefill, mode)) as (hp, hd):
        for codec in ("bf16", "bfp8_b"):
            ready = await move(
                hp, hd, "npu0", c.target_spec(codec=codec), c.filled(), tokens=500, name=f"r-{codec}"
            )
            assert (ready.transport, ready.mode) == ("verbs", mode)


async def test_agents_that_push_say_so_and_every_byte_arrives(site: Site) -> None:
    """Into staging, which is one stretch of memory for each channel."""
    pushing = {**VERBS, "direction": "push"}
    prefill = start_prefill(site, pushing)
    decode = start_decode(site, prefill, "staged", pushing, observe="127.0.0.1:0")
    async with clients(prefill, decode) as (hp, hd):
        for codec in ("bf16", "bfp8_b"):
            await move(hp, hd, "npu0", c.target_spec(codec=codec), c.filled(), tokens=500, name=f"r-{codec}")
        counted = (await page(decode, "/metrics"))[1]
    events = 'hawk_transport_events_total{event="%s",transport="verbs"}'
    (pushed,) = [line for line in counted.splitlines() if line.startswith(events % "read-pushed")]
    assert float(pushed.split()[1]) >= 2
    for event in ("read-pulled", "queue-pair-broken"):
        assert f"{events % event} 0.0" in counted.splitlines()


async def test_an_agent_whose_port_is_down_goes_on_without(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_VERBS", "down")
    tables = {"transport": {"prefer": ["verbs", "tcp"]}}
    prefill = site.start("p0", tables, role="prefill", command=COMMAND)
    async with clients(prefill) as (hp,):
        assert list((await hp.status()).transports) == ["tcp"]
    (told,) = [line for line in prefill.log().splitlines() if "not viable" in line]
    assert "no port of any RDMA device is active" in told


async def test_several_at_a_time(site: Site) -> None:
    prefill = start_prefill(site)
    async with clients(prefill, start_decode(site, prefill)) as (hp, hd):
        source, cache = await register(hp)
        devices = [await hd.allocate(c.target_spec(), memory="npu0") for _ in range(3)]
        await asyncio.gather(*(good(hp, hd, source, cache, d, f"r{i}") for i, d in enumerate(devices)))


async def test_the_prefill_agent_is_killed_and_comes_back(site: Site) -> None:
    prefill = start_prefill(site)
    decode = start_decode(site, prefill)
    async with clients(decode) as (hd,):
        device = await hd.allocate(c.target_spec(), memory="npu0")
        before = await counts(hd)
        async with hawk.connect(prefill.local) as hp:
            source, cache = await register(hp)
            _, job = await half_done(hp, hd, cache, device)
            prefill.kill()
            with pytest.raises(LOST):
                await job
        await back_to(before, hd)
        again = start_prefill(site, control=prefill.control)
        async with hawk.connect(again.local) as hp:
            source, cache = await register(hp)
            await good(hp, hd, source, cache, device)


async def test_the_decode_agent_is_killed_and_the_arena_comes_back(site: Site) -> None:
    prefill = start_prefill(site)
    decode = start_decode(site, prefill)
    async with clients(prefill) as (hp,):
        before = await counts(hp)
        source, cache = await register(hp)
        async with hawk.connect(decode.local) as hd:
            device = await hd.allocate(c.target_spec(), memory="npu0")
            await half_done(hp, hd, cache, device)
            decode.kill()
        again = start_decode(site, prefill)
        async with hawk.connect(again.local) as hd:
            device = await hd.allocate(c.target_spec(), memory="npu0")
            await good(hp, hd, source, cache, device)
        await cache.release()
        await back_to(before, hp)
