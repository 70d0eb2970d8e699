"""SIGHUP takes over peers, keys and the log level, or nothing; SIGUSR1 tells what goes on; no secret is ever logged."""

from __future__ import annotations

import base64
import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hawk.control.keys import new_pair
from hawk.control.messages import decode_ticket
from hawk.errors import DeadlineExceeded, PeerLost, PeerUnreachable, UnknownPeer
from tests import certificates
from tests.end_to_end import caches as c
from tests.end_to_end.harness import AgentProcess, Site, becomes, clients, npu


def lines(agent: AgentProcess, event: str) -> list[dict[str, Any]]:
    said = [json.loads(line) for line in agent.log().splitlines() if line.startswith("{")]
    return [line for line in said if line["event"] == event]


async def said(agent: AgentProcess, event: str, count: int = 1) -> list[dict[str, Any]]:
    """Lines of that event, once there are so many."""
    return await becomes(
        lambda: lines(agent, event), lambda found: len(found) >= count, f"{count} of {event!r}"
    )


async def reloaded(agent: AgentProcess) -> dict[str, Any]:
    before = len(lines(agent, "configuration reloaded"))
    agent.send(signal.SIGHUP)
    return (await said(agent, "configuration reloaded", before + 1))[-1]


async def test_a_peer_joins_and_leaves_by_sighup(site: Site) -> None:
    everyone = (site.folder / "peers.toml").read_text()
    without = "".join(line + "\n" for line in everyone.splitlines() if not line.startswith("d0"))
    for name, text in (("some", without), ("all", everyone)):
        (site.folder / f"{name}.toml").write_text(text)
    keys = {"security": {"peers_file": str(site.folder / "some.toml")}}
    prefill = site.start("p0", keys, role="prefill")
    tables: dict[str, Any] = {"memory.npu0": npu(8)}
    decode = site.start("d0", tables, role="decode")
    async with clients(prefill, decode) as (hp, hd):
        cache, device = await hp.register(c.filled()), await hd.allocate(c.target_spec(), memory="npu0")

        async def move(name: str) -> None:
            await hp.offer(name, cache, np.arange(4), tokens=64, consumer="d0")
            fetch = hd.fetch(request=name, source="p0", into=device, blocks=[3], timeout="3s")
            assert (await fetch).tokens == 64

        async def tried() -> tuple[str, str]:
            (peer,) = await hd.peers()
            return peer.state, peer.trouble

        with pytest.raises(UnknownPeer):
            await move("nobody knows p0")
        tables["peers"] = {"p0": prefill.control}
        site.write_config("d0", tables, role="decode", log_level="debug")
        told = await reloaded(decode)
        assert told["changed"] == ["agent.log_level", "peers.p0"]
        assert await tried() == ("not-tried", "")
        with pytest.raises(PeerUnreachable, match="does not accept our key") as refused:
            await move("p0 does not know d0")
        assert "seconds" not in refused.value.facts  # nobody waited for what was known
        assert "public key into the security.peers_file of p0" in str(refused.value)
        assert await tried() == ("failed", str(refused.value))
        (site.folder / "some.toml").write_text(everyone)
        assert (await reloaded(prefill))["keys_added"] == ["d0"]
        await move("both know")
        assert lines(decode, "transport chosen")  # a line of the debug level
        # And away again: the connection stands, is of no more use, and is not told why.
        (site.folder / "some.toml").write_text(without)
        assert (await reloaded(prefill))["keys_removed"] == ["d0"]
        with pytest.raises((PeerUnreachable, PeerLost, DeadlineExceeded)):
            await move("not any more")
        assert [peer.name for peer in await hp.peers()] == []


async def test_a_peer_renamed_by_sighup_is_told_both_names(site: Site) -> None:
    """On the connection that stands: the job under way ends so, so do later ones, until the name is back."""
    own = (site.folder / "peers.toml").read_text()
    (site.folder / "p0-peers.toml").write_text(own)
    keys = {"security": {"peers_file": str(site.folder / "p0-peers.toml")}}
    prefill = site.start("p0", keys, role="prefill")
    decode = site.start("d0", {"peers": {"p0": prefill.control}, "memory.npu0": npu(8)}, role="decode")
    async with clients(prefill, decode) as (hp, hd):
        cache, device = await hp.register(c.filled()), await hd.allocate(c.target_spec(), memory="npu0")

        async def move(name: str) -> None:
            await hp.offer(name, cache, np.arange(4), tokens=64, consumer="d0")
            await hd.fetch(request=name, source="p0", into=device, blocks=[3], timeout="20s")

        def named(name: str) -> None:
            lines = (line for line in own.splitlines(keepends=True) if not line.startswith("d1"))
            text = "".join(name + line[2:] if line.startswith("d0") else line for line in lines)
            (site.folder / "p0-peers.toml").write_text(text)

        def told(error: PeerUnreachable) -> None:
            assert (error.field, error.got, error.expected) == ("agent.name", "d0", "d1")
            assert "the agent p0 knows this agent's key by another name" in str(error)

        await move("before")
        await hp.offer("half", cache, np.arange(16), tokens=256, layers_ready=1, consumer="d0")
        job = hd.fetch(request="half", source="p0", into=device, blocks=[1, 2, 4, 5], timeout="30s")
        await job.start()
        async for progress in job.progress():
            if progress.nbytes:
                break
        named("d1")
        await reloaded(prefill)
        with pytest.raises(PeerUnreachable) as caught:
            await job
        told(caught.value)
        (peer,) = await hd.peers()
        assert (peer.name, peer.state) == ("p0", "refused")
        assert "expected d1" in peer.trouble
        assert await hp.peers() == []
        for name in ("renamed", "still renamed"):
            with pytest.raises(PeerUnreachable) as caught:
                await move(name)
            told(caught.value)
            assert [(peer.state, peer.trouble) for peer in await hd.peers()] == [
                ("failed", str(caught.value))
            ]
        with pytest.raises(PeerUnreachable) as caught:
            await hd.try_peer("p0")
        told(caught.value)
        named("d0")
        await reloaded(prefill)
        await move("after")
        # While nobody fetches, the connection goes on; its peer is told without having asked.
        named("d1")
        await reloaded(prefill)
        await becomes(hd.peers, lambda now: now[0].state == "refused", "refused")
        named("d0")
        await reloaded(prefill)
        await becomes(hd.peers, lambda now: (now[0].state, now[0].trouble) == ("up", ""), "up again")
        await move("back")


async def test_a_bad_configuration_is_refused_whole(site: Site) -> None:
    prefill = site.start("p0", role="prefill")
    tables: dict[str, Any] = {"peers": {"p0": prefill.control}, "memory.npu0": npu(8)}
    decode = site.start("d0", tables, role="decode")
    before = (site.folder / "peers.toml").read_text()
    async with clients(prefill, decode) as (hp, hd):
        cache, device = await hp.register(c.filled()), await hd.allocate(c.target_spec(), memory="npu0")
        new_pair(site.folder, "new")
        # One file is good and changed, the other is not: neither counts.
        site.write_config("d0", {**tables, "peers": {}}, role="decode", log_level="error")
        (site.folder / "peers.toml").write_text(before + '\nmallory2 = "no key"\n')
        decode.send(signal.SIGHUP)
        (refused,) = await said(decode, "the new configuration is refused; the old one goes on")
        assert "no CURVE key" in refused["reason"]
        (site.folder / "peers.toml").write_text(before)
        site.write_config("d0", {**tables, "jobs": {"chunk": "much"}}, role="decode")
        decode.send(signal.SIGHUP)
        refused = (await said(decode, "the new configuration is refused; the old one goes on", 2))[-1]
        assert "jobs.chunk" in refused["reason"]
        offer = await hp.offer("still", cache, np.arange(4), tokens=64)
        assert (await hd.fetch(offer, into=device, blocks=[3], timeout="20s")).tokens == 64
        # What a running agent cannot take over is said, and the rest is taken over.
        site.write_config("d0", {**tables, "arena": {"size": "8MiB"}}, role="decode")
        assert (await reloaded(decode))["changed"] == []
        (left,) = await said(decode, "changed in the configuration, and in effect only after a restart")
        assert left["settings"] == ["arena.size"]
        assert (await hd.status()).pools[0].total == 64 << 10  # for probes; it sends nothing


SECRET = b"KV-bytes-of-someone's-prompt, 32"


async def test_a_dump_tells_what_goes_on_and_no_log_tells_a_secret(site: Site) -> None:
    prefill = site.start("p0", role="prefill", log_level="debug")
    tables = {"peers": {"p0": prefill.control}, "memory.npu0": npu(8)}
    decode = site.start("d0", tables, role="decode", log_level="debug")
    async with clients(prefill, decode) as (hp, hd):
        source = c.filled()
        for buffer in source.buffers:
            buffer[:] = np.frombuffer(SECRET * (len(buffer) // len(SECRET)), np.uint8)
        cache, device = await hp.register(source), await hd.allocate(c.target_spec(), memory="npu0")
        offer = await hp.offer("r", cache, np.arange(16), tokens=256, layers_ready=1, note=b"secret note")
        job = hd.fetch(offer, into=device, blocks=[1, 2, 3, 4], timeout="30s")
        await job.start()
        async for progress in job.progress():
            if progress.nbytes:
                break
        for agent in (prefill, decode):
            agent.send(signal.SIGUSR1)
        (fetched,), (served,) = await said(decode, "dump: job"), await said(prefill, "dump: job")
        assert (fetched["role"], fetched["phase"], fetched["job"]) == ("fetch", "read", job.job)
        assert (served["role"], served["phase"], served["job"]) == ("serve", "layers", fetched["attempt"])
        places = [place for task in await said(prefill, "dump: task") for place in task["at"]]
        assert any("until_layers" in place for place in places)
        await job.abort()
        status = await hp.status()
        tokens = re.findall(r"token=(\w+)", " ".join(status.transports.values()))
        await offer.withdraw()
    ticket = offer.ticket.partition(".")[2]
    forms = [SECRET, b"secret note", *(site.keys[name].secret.encode() for name in ("p0", "d0"))]
    for agent in (prefill, decode):
        log = agent.log()
        assert lines(agent, "dump")
        for secret in forms:
            for shown in (secret.decode(), secret.hex(), base64.b64encode(secret).decode(), repr(secret)):
                assert shown not in log
        # Neither whole nor in part: ids have 32 digits, keys of ranges 64; a ticket is longer than what names it.
        assert not re.search(r"[0-9a-f]{40}", log)
        assert ticket not in log
        assert decode_ticket(offer.ticket).claim not in log
        assert not any(token in log for token in tokens)


async def test_a_renewed_certificate_is_shown_and_known_after_sighup(site: Site) -> None:
    """The decode side goes on fetching over connections that pin the new one; a key that does not fit is refused."""

    def place(which: str) -> None:
        for file, into in ((f"{which}.pem", "p0.pem"), (f"{which}-tls.key", "p0-tls.key")):
            shutil.copy(certificates.folder() / file, site.folder / into)

    def tcp(**files: Path) -> dict[str, Any]:
        return {
            "transport": {"prefer": ["tcp"]},
            "transport.tcp": {name: str(file) for name, file in files.items()},
        }

    place("one")
    own = {"tls_cert": site.folder / "p0.pem", "tls_key": site.folder / "p0-tls.key"}
    prefill = site.start("p0", tcp(**{**certificates.settings(), **own}), role="prefill")
    tables = {**tcp(**certificates.settings("two")), "peers": {"p0": prefill.control}, "memory.npu0": npu(8)}
    decode = site.start("d0", tables, role="decode")
    async with clients(prefill, decode) as (hp, hd):
        cache, device = await hp.register(c.filled()), await hd.allocate(c.target_spec(), memory="npu0")

        async def move(name: str) -> None:
            await hp.offer(name, cache, np.arange(4), tokens=64, consumer="d0")
            await hd.fetch(request=name, source="p0", into=device, blocks=[3], timeout="10s")

        await move("before")
        place("two")
        assert (await reloaded(prefill))["certificates_changed"] == ["tcp"]
        await move("after")
        assert (await reloaded(prefill))["certificates_changed"] == []
        shutil.copy(certificates.folder() / "one.pem", site.folder / "p0.pem")
        prefill.send(signal.SIGHUP)
        (refused,) = await said(prefill, "the new configuration is refused; the old one goes on")
        assert "tls_key" in refused["reason"]
        await move("still")
