"""Agents start in any order, join, leave, drain, and come back as new generations; by address and by host name."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
import pytest

from hawk.client import Client
from hawk.errors import PeerUnreachable, UnknownPeer, UnknownRequest
from tests.end_to_end import caches as c
from tests.end_to_end import harness
from tests.end_to_end.harness import AgentProcess, Site, becomes, clients, npu

DEVICE = {"memory.npu0": npu(8)}


def address_of(site: Site) -> str:
    """Where p0 will be: where it once was."""
    first = site.start("p0", role="prefill")
    first.kill()
    return first.control


def decoder(site: Site, name: str, where: dict[str, Any]) -> AgentProcess:
    return site.start(name, {**DEVICE, **where}, role="decode")


async def move(hp: Client, hd: Client, request: str) -> None:
    """One transfer, by name."""
    cache, device = await hp.register(c.filled()), await hd.allocate(c.target_spec(), memory="npu0")
    await hp.offer(request, cache, np.arange(4), tokens=64, consumer=hd.name)
    ready = await hd.fetch(request=request, source="p0", into=device, blocks=[3], timeout="20s")
    assert ready.tokens == 64
    await cache.release()
    await device.release()


async def until_peers(client: Client, wanted: dict[str, str]) -> None:
    """Returns when the agent's peers are in these states."""
    await becomes(
        client.peers, lambda now: {peer.name: peer.state for peer in now} == wanted, f"peers {wanted}"
    )


@pytest.mark.parametrize("how", ["address", "host"])
async def test_the_decode_side_may_start_first(site: Site, how: str) -> None:
    where = address_of(site)
    named = where if how == "address" else where.replace("127.0.0.1", "localhost")
    decode = decoder(site, "d0", {"peers": {"p0": named}})
    async with clients(decode) as (hd,):
        device = await hd.allocate(c.target_spec(), memory="npu0")
        with pytest.raises(PeerUnreachable):
            await hd.fetch(request="r", source="p0", into=device, blocks=[3], timeout="200ms")
        early = hd.fetch(request="early", source="p0", into=device, blocks=[3], wait=True, timeout="25s")
        await early.start()
        prefill = site.start("p0", role="prefill", control=where)
        async with clients(prefill) as (hp,):
            cache = await hp.register(c.filled())
            await hp.offer("early", cache, np.arange(4), tokens=64, consumer="d0")
            assert (await early).tokens == 64
            (peer,) = await hd.peers()
            assert (peer.address, peer.state) == (where, "up")


async def test_agents_join_leave_drain_and_come_back(site: Site) -> None:
    prefill = site.start("p0", role="prefill")
    where = {"peers": {"p0": prefill.control}}
    first = decoder(site, "d0", where)
    async with clients(prefill, first) as (hp, h0):
        await move(hp, h0, "alone")
        second = decoder(site, "d1", where)
        async with clients(second) as (h1,):
            await asyncio.gather(move(hp, h0, "one"), move(hp, h1, "another"))
            await until_peers(hp, {"d0": "up", "d1": "up"})
        second.send(15)
        assert await second.ended() == 0
        await until_peers(hp, {"d0": "up"})
        await move(hp, h0, "after it left")
        cache = await hp.register(c.filled())
        offer = await hp.offer("promised", cache, np.arange(4), tokens=64)
        await hp.drain()
        device = await h0.allocate(c.target_spec(), memory="npu0")
        assert (await h0.fetch(offer, into=device, blocks=[3], timeout="20s")).tokens == 64
        assert (await hp.drain(timeout="20s")).done
        (before,) = await h0.peers()
    prefill.send(15)
    assert await prefill.ended() == 0
    again = site.start("p0", role="prefill", control=prefill.control)
    async with clients(again, first) as (hp, h0):
        device = await h0.allocate(c.target_spec(), memory="npu0")
        with pytest.raises(UnknownRequest):
            await h0.fetch(offer.ticket, into=device, blocks=[3], timeout="20s")
        await device.release()
        await move(hp, h0, "again")
        (after,) = await h0.peers()
        assert (after.name, after.state, after.draining) == ("p0", "up", False)
        assert after.generation != before.generation


DNS = """
import socket
from hawk.control.dns import DnsPeers
async def lookup(host, port):
    if host == "p0.pods.test":
        return ["127.0.0.1"]
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
DnsPeers.__init__.__kwdefaults__["lookup"] = lookup
from hawk.cli import agent_main
agent_main()
"""


async def test_a_peer_is_found_by_the_pattern_of_its_name(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a DNS that knows one name, and is not the machine's."""
    prefill = site.start("p0", role="prefill")
    port = prefill.control.rpartition(":")[2]
    monkeypatch.setattr(harness, "COMMAND", (sys.executable, "-c", DNS))
    decode = decoder(site, "d0", {"discovery": {"dns": f"tcp://{{name}}.pods.test:{port}"}})
    async with clients(prefill, decode) as (hp, hd):
        await move(hp, hd, "found")
        device = await hd.allocate(c.target_spec(), memory="npu0")
        with pytest.raises(UnknownPeer, match="none is in DNS"):
            await hd.fetch(request="r", source="p1", into=device, blocks=[3], timeout="10s")


async def test_a_key_under_another_name_is_told_so(site: Site) -> None:
    prefill = site.start("p0", role="prefill")
    called = {"agent": {"name": "other"}, "peers": {"p0": prefill.control}}
    decode = site.start("d0", {**DEVICE, **called}, role="decode")
    async with clients(prefill, decode) as (hp, hd):
        device = await hd.allocate(c.target_spec(), memory="npu0")
        with pytest.raises(PeerUnreachable, match="by another name") as caught:
            await hd.fetch(request="r", source="p0", into=device, blocks=[3], timeout="10s")
        assert (caught.value.field, caught.value.got, caught.value.expected) == ("agent.name", "other", "d0")
        assert await hp.peers() == []
