"""`hawk doctor --peer`: a few bytes of another agent, by every transport that either has."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from hawk.cli.doctor import _way
from hawk.control.messages import TransportTry
from hawk.doctor import Level
from hawk.errors import PeerUnreachable, UnknownPeer
from hawk.jobs import probes
from hawk.operator import Operator
from tests.end_to_end.harness import Site, back_to, clients, counts
from tests.end_to_end.test_operate import hawk, pair


async def test_bytes_come_by_every_transport_and_nothing_is_left(site: Site) -> None:
    prefill, decode = pair(site)
    async with clients(prefill, decode) as (hp, hd):
        before = await counts(hp), await counts(hd)
        said = json.loads(await hawk("doctor", "--peer", "p0", "--json", "--local", decode.local))
        ways = {found["name"]: found for found in said if found["name"].startswith("peer ")}
        assert {name: way["level"] for name, way in ways.items()} == {
            "peer p0 by shm": "ok",
            "peer p0 by tcp": "ok",
        }
        shown = await hawk("doctor", "--peer", "p0", "--local", decode.local)
        assert re.search(r"peer p0 by tcp +a few bytes came in [\d.]+ ms", shown)
        for client, held in zip((hp, hd), before, strict=True):
            await back_to(held, client)


async def test_what_one_side_lacks_is_told_and_the_other_way_is_tried(site: Site) -> None:
    prefill = site.start("p0", {"transport": {"prefer": ["tcp"]}}, role="prefill")
    decode = site.start("d0", {"peers": {"p0": prefill.control}}, role="decode")
    async with Operator(decode.local) as operator:
        ways = {way.transport: way for way in await operator.try_peer("p0")}
    assert ways["tcp"].ok
    assert not ways["shm"].ok
    assert "not offered by the peer" in ways["shm"].text
    # On the other side it is a choice, of which nobody has to be warned.
    way = TransportTry(transport="shm", ok=False, text="not in use on this side")
    assert _way("peer d0", way, {"tcp"}).level is Level.OK
    assert _way("peer d0", way, {"tcp", "shm"}).level is Level.WARN


async def test_one_name_of_a_preference_says_nothing_of_what_the_others_are(site: Site) -> None:
    """The preference does name shm; it is only not the one that was just tried."""
    prefill = site.start("p0", {"transport": {"prefer": ["shm"]}}, role="prefill")
    decode = site.start(
        "d0", {"transport": {"prefer": ["shm", "tcp"]}, "peers": {"p0": prefill.control}}, role="decode"
    )
    async with Operator(decode.local) as operator:
        ways = {way.transport: way for way in await operator.try_peer("p0")}
    assert ways["shm"].ok
    assert ways["tcp"].text == "not offered by the peer"


async def test_an_agent_that_is_not_there_is_not_its_peer(tmp_path: Path) -> None:
    socket = tmp_path / "d0.sock"
    said = json.loads(await hawk("doctor", "--peer", "p0", "--json", "--local", f"ipc://{socket}", status=1))
    assert (said[-1]["name"], said[-1]["level"]) == ("own agent", "fail")
    assert f"path={socket}" in said[-1]["text"]
    assert ".fd" not in said[-1]["text"]
    assert "peer p0" in said[-1]["remedy"]


async def test_a_peer_that_is_not_there(site: Site) -> None:
    decode = site.start("d0", {"peers": {"p0": "tcp://127.0.0.1:1"}}, role="decode")
    said = json.loads(
        await hawk(
            "doctor", "--peer", "p0", "--timeout", "500ms", "--json", "--local", decode.local, status=1
        )
    )
    assert (said[-1]["name"], said[-1]["level"]) == ("peer p0", "fail")
    async with Operator(decode.local) as operator:
        with pytest.raises(UnknownPeer):
            await operator.try_peer("p3")
        with pytest.raises(PeerUnreachable):
            await operator.try_peer("p0", timeout="300ms")


async def test_more_probes_than_there_are_places_are_busy(site: Site) -> None:
    prefill, decode = pair(site)
    async with Operator(decode.local) as operator:
        many = await asyncio.gather(*(operator.try_peer("p0") for _ in range(2 * probes.MOST)))
    said = [way.text for ways in many for way in ways if not way.ok]
    assert all("probes at a time" in text for text in said), said
    assert sum(way.ok for ways in many for way in ways) >= probes.MOST
    del prefill
