"""Agents that find each other by etcd: none of their configurations names another agent."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest

from hawk.errors import PeerUnreachable, UnknownPeer
from tests.end_to_end import caches as c
from tests.end_to_end.harness import Site, becomes, clients, npu
from tests.end_to_end.test_elastic import move
from tests.etcd import MISSING, etcd

pytestmark = pytest.mark.skipif(MISSING, reason="etcd is not installed (etcd-server)")


async def test_agents_find_each_other_while_the_directory_comes_and_goes(site: Site, tmp_path: Path) -> None:
    with etcd(tmp_path) as server:
        where = {"discovery": {"etcd": [server.url], "etcd_lease": "2s"}}
        device = {"memory.npu0": npu(8), **where}
        prefill = site.start("p0", where, role="prefill")
        decode = site.start("d0", device, role="decode")
        async with clients(prefill, decode) as (hp, hd):
            await becomes(hd.peers, lambda now: [peer.name for peer in now] == ["p0"], "told of p0")
            (peer,) = await hd.peers()
            assert (peer.direction, peer.state, peer.role) == ("registered", "not-tried", "prefill")
            assert peer.address == prefill.control
            with pytest.raises(UnknownPeer, match="no peer of that name"):
                target = await hd.allocate(c.target_spec(), memory="npu0")
                await hd.fetch(request="r", source="p1", into=target, blocks=[3], timeout="10s")
            await move(hp, hd, "first")
            assert (await hd.status()).directory == "etcd, 2 agents"

            # Under way, and begun, without it.
            cache = await hp.register(c.filled())
            early = hd.fetch(request="late", source="p0", into=target, blocks=[3], wait=True, timeout="60s")
            await early.start()
            server.stop()
            await becomes(
                hd.status, lambda now: now.directory.startswith("etcd away for"), "the directory noticed away"
            )
            await hp.offer("late", cache, np.arange(4), tokens=64, consumer="d0")
            assert (await early).tokens == 64
            await move(hp, hd, "without")
            with pytest.raises(PeerUnreachable, match="the directory is away") as told:
                await hd.fetch(request="r", source="p1", into=target, blocks=[4], timeout="300ms")
            assert told.value.field == "discovery.etcd"

            # One that asks for a newcomer waits for the directory, not for the newcomer.
            waiting = hd.fetch(request="new", source="p1", into=target, blocks=[5], timeout="200s")
            await waiting.start()
            await becomes(
                hd.jobs,
                lambda jobs: "connecting" in {job.state for job in jobs if job.request == "new"},
                "waiting for the directory",
            )
            newcomer = site.start("p1", where, role="prefill")
            async with clients(newcomer) as (hn,):
                fresh = await hn.register(c.filled())
                await hn.offer("new", fresh, np.arange(4), tokens=64, consumer="d0")
                server.start()
                try:
                    assert (await waiting).tokens == 64
                except UnknownPeer:  # the directory was back before the newcomer was in it
                    await becomes(hd.peers, lambda now: "p1" in {peer.name for peer in now}, "told of p1")
                    await hd.fetch(request="new", source="p1", into=target, blocks=[5], timeout="20s")
            newcomer.send(15)
            assert await newcomer.ended() == 0
            # It has taken itself out; a peer that was met stays in the list while its session does.
            await becomes(hd.status, lambda now: now.directory == "etcd, 2 agents", "told that p1 has gone")


async def test_an_agent_that_cannot_be_reached_does_not_register(site: Site) -> None:
    where = {"discovery": {"etcd": ["http://127.0.0.1:9"]}}
    for more in ({"control": "tcp://0.0.0.0:0"}, {"control": f"ipc://{site.folder}/control.sock"}):
        agent = site.start("p0", where, ready=False, role="prefill", **more)
        assert await agent.ended() == 2
        assert re.search(r"agent\.advertise, such as", agent.log()), agent.log()
    scoped = {"control": "tcp://127.0.0.1:0", "advertise": "tcp://[fe80::1%eth0]:7400"}
    agent = site.start("p0", where, ready=False, role="prefill", **scoped)
    assert await agent.ended() == 2
    assert re.search(r"agent\.advertise.*fe80::1%eth0", agent.log()), agent.log()


async def test_an_agent_starts_while_the_directory_is_away(site: Site) -> None:
    """Its clients and configured peers need no directory."""
    away = {"discovery": {"etcd": ["http://127.0.0.1:9"]}}
    prefill = site.start("p0", away, role="prefill", advertise="tcp://127.0.0.1:7")
    decode = site.start(
        "d0", {"memory.npu0": npu(8), "peers": {"p0": prefill.control}, **away}, role="decode"
    )
    async with clients(prefill, decode) as (hp, hd):
        await asyncio.wait_for(move(hp, hd, "r"), 30)
        assert "cannot be asked" in (await hd.status()).directory
