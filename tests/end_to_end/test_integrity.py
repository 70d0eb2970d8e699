"""Checks, scrubbing and TLS between agents as processes, by their configuration alone."""

from __future__ import annotations

from typing import Any

import pytest

from hawk.errors import NotViable
from tests import certificates
from tests.end_to_end import caches as c
from tests.end_to_end.harness import Site, clients, npu
from tests.end_to_end.scene import scene


def tcp(name: str = "") -> dict[str, dict[str, Any] | None]:
    tls = {key: str(path) for key, path in certificates.settings(name).items()} if name else {}
    return {"transport": {"prefer": ["tcp"], "mode": "staged"}, "transport.tcp": tls}


async def test_everything_on(site: Site) -> None:
    """A scene's jobs are compared byte by byte, and its pools and descriptors are as before."""
    prefill = site.start("p0", {**tcp("one"), "integrity": {"scrub": True}}, role="prefill")
    asks = {"verify": "full", "scrub": True, "scrub_targets": True}
    tables = {**tcp("two"), "integrity": asks, "peers": {"p0": prefill.control}, "memory.npu8": npu(8)}
    decode = site.start("d0", tables, role="decode")
    async with scene(prefill, decode) as made:
        fetched = await made.hd.fetch(await made.offer(tokens=256), into=made.device, blocks=[1, 2, 3, 4])
        assert fetched.transport == "tcp"
        assert fetched.phases["verify"] > 0
        c.paint(made.device)
    async with clients(decode) as (hd,):
        device = await hd.allocate(c.target_spec(), memory="npu8")
        length = device.layout.channel_bytes
        for channel in device.channels:
            for base in device.offsets:
                assert not channel[base : base + length].any(), "the last owner's canary"


@pytest.mark.parametrize("side", ["the prefill side", "the decode side"])
async def test_tls_on_one_side_only(side: str, site: Site) -> None:
    ours, theirs = ("one", "") if side == "the prefill side" else ("", "two")
    prefill = site.start("p0", tcp(ours), role="prefill")
    tables = {**tcp(theirs), "peers": {"p0": prefill.control}, "memory.npu8": npu(8)}
    decode = site.start("d0", tables, role="decode")
    async with clients(prefill, decode) as (hp, hd):
        cache = await hp.register(c.filled())
        device = await hd.allocate(c.target_spec(), memory="npu8")
        offer = await hp.offer("r", cache, [0, 1, 2, 3], tokens=64)
        with pytest.raises(NotViable, match=r"transport\.tcp\.tls_cert"):
            await hd.fetch(offer, into=device, blocks=[1], timeout="20s")


async def test_a_key_that_others_can_read_ends_the_start(site: Site) -> None:
    key = site.folder / "loose.key"
    key.write_bytes((certificates.folder() / "one-tls.key").read_bytes())
    key.chmod(0o644)
    tables = tcp("one")
    tables["transport.tcp"] = {**(tables["transport.tcp"] or {}), "tls_key": str(key)}
    agent = site.start("p0", tables, ready=False)
    assert await agent.ended() != 0
    assert "transport.tcp.tls_key: others can read the private key" in agent.log()
