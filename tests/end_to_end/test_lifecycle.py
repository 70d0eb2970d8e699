"""How an agent starts, drains and ends; and how it says that it cannot start."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pytest

import hawk
from hawk.client import Client
from hawk.errors import Draining, HawkError, PeerLost, PeerUnreachable, UnknownRequest
from hawk.handles import Fetch, OfferHandle
from tests.end_to_end import caches as c
from tests.end_to_end import harness
from tests.end_to_end.harness import AgentProcess, Site, becomes, clients, npu

if TYPE_CHECKING:
    from pathlib import Path


async def pair(site: Site, drain: str = "20s") -> tuple[AgentProcess, AgentProcess]:
    prefill = site.start("p0", role="prefill", drain=drain)
    tables = {"peers": {"p0": prefill.control}, "memory.npu0": npu(8)}
    return prefill, site.start("d0", tables, role="decode", drain=drain)


async def running(hp: Client, hd: Client) -> tuple[OfferHandle, Fetch, OfferHandle]:
    """A transfer half done, and an offer that nobody has claimed."""
    device = await hd.allocate(c.target_spec(), memory="npu0")
    cache = await hp.register(c.filled())
    offer = await hp.offer("running", cache, np.arange(16), tokens=256, layers_ready=1)
    other = await hp.offer("other", cache, np.arange(16), tokens=256)
    job = hd.fetch(offer, into=device, blocks=[1, 2, 3, 4], timeout="30s")
    await job.start()
    async for progress in job.progress():
        if progress.nbytes:
            break
    hd.kept = device  # type: ignore[attr-defined]
    return offer, job, other


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_draining_prefill_agent_finishes_what_it_serves(site: Site, number: signal.Signals) -> None:
    prefill, decode = await pair(site)
    async with clients(prefill, decode) as (hp, hd):
        offer, job, other = await running(hp, hd)
        early = hd.fetch(request="later", source="p0", into=hd.kept, blocks=[5], wait=True)
        await early.start()
        async for progress in early.progress():
            if progress.state == "requested":
                break
        prefill.send(number)
        cache = await hp.register(c.filled())
        # No offer will come any more, so whoever waits for one is told at once.
        with pytest.raises(Draining):
            await early
        with pytest.raises(Draining):
            await hp.offer("new", cache, np.arange(4), tokens=64)
        with pytest.raises(Draining):
            await hd.fetch(other, into=hd.kept, blocks=[5, 6, 7, 8])
        await offer.layers_ready(c.LAYERS)
        assert (await job).tokens == 256
        assert await prefill.ended() == 0
        with pytest.raises(PeerLost):
            await hp.status()


async def test_a_draining_decode_agent_finishes_what_it_fetches(site: Site) -> None:
    prefill, decode = await pair(site)
    async with clients(prefill, decode) as (hp, hd):
        offer, job, _ = await running(hp, hd)
        decode.send(signal.SIGTERM)
        while True:  # the signal takes a moment to reach it
            try:
                await hd.fetch(request="none", source="p0", into=hd.kept, blocks=[13])
            except Draining:
                break
            except UnknownRequest:
                continue
        await offer.layers_ready(c.LAYERS)
        assert (await job).tokens == 256
        assert await decode.ended() == 0
        assert (await hp.status()).offers <= 1


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_second_signal_does_not_wait(site: Site, side: str) -> None:
    prefill, decode = await pair(site)
    async with clients(prefill, decode) as (hp, hd):
        _, job, _ = await running(hp, hd)
        ending = prefill if side == "prefill" else decode
        ending.send(signal.SIGTERM)
        ending.send(signal.SIGINT)
        with pytest.raises(HawkError):
            await job
        assert await ending.ended() == 0


async def test_jobs_that_outlast_the_drain_are_cut_off_by_name(site: Site) -> None:
    prefill, decode = await pair(site, drain="0.2s")
    async with clients(prefill, decode) as (hp, hd):
        _, job, _ = await running(hp, hd)
        decode.send(signal.SIGTERM)
        with pytest.raises(hawk.Aborted, match="the agent is stopping"):
            await job
        assert await decode.ended() == 0
        assert "jobs cut off" in decode.log()


async def test_nothing_is_left_behind_on_disk(site: Site) -> None:
    prefill, _ = await pair(site)
    assert (site.folder / "p0.sock").is_socket()
    prefill.send(signal.SIGTERM)
    assert await prefill.ended() == 0
    assert not list(site.folder.glob("p0.sock*"))
    with pytest.raises(PeerUnreachable, match="agent\\.local"):
        async with hawk.connect(prefill.local, timeout="1s"):
            pass
    again = site.start("p0", role="prefill")
    async with clients(again) as (hp,):
        assert hp.role == "prefill"


async def test_a_killed_agent_is_replaced(site: Site) -> None:
    """What it left on disk is in nobody's way."""
    prefill = site.start("p0")
    prefill.kill()
    assert (site.folder / "p0.sock").exists()
    site.start("p0")


# -- starts that fail ------------------------------------------------------------------------------------


async def fails(site: Site, status: int, *words: str, **tables: dict[str, object] | None) -> None:
    """The agent ends at once with this status and one line that has these words."""
    agent = tables.pop("agent", {})
    process = site.start("d0", tables, ready=False, **agent)
    assert await process.ended() == status
    said = [line for line in process.log().splitlines() if line.startswith("hawk-agent: ")]
    assert len(said) == 1, process.log()
    assert "Traceback" not in process.log()
    for word in words:
        assert word in process.log(), process.log()


async def test_a_port_in_use(site: Site) -> None:
    other = site.start("p0")
    await fails(site, 1, "agent.control", "in use", other.control, agent={"control": other.control})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        await fails(
            site,
            1,
            "127.0.0.1",
            str(port),
            **{"transport": {"prefer": ["tcp"]}, "transport.tcp": {"port": port}},
        )


async def test_a_local_socket_in_use(site: Site) -> None:
    other = site.start("p0")
    await fails(site, 1, "agent.local", "in use", agent={"local": other.local})
    async with clients(other) as (hp,):
        assert (await hp.status()).name == "p0"


async def test_a_config_with_two_mistakes(site: Site) -> None:
    await fails(
        site, 2, "jobs.leese", "did you mean", "arena.size", jobs={"leese": "1s"}, arena={"size": "x"}
    )


async def test_a_key_file_that_is_missing(site: Site) -> None:
    await fails(
        site, 2, "nowhere.key", "hawk keys new", security={"key_file": str(site.folder / "nowhere.key")}
    )


async def test_a_key_file_that_others_may_read(site: Site) -> None:
    (site.folder / "d0.key").chmod(0o644)
    await fails(site, 2, "mode 0644", "chmod 600")


async def test_tcp_without_keys(site: Site) -> None:
    await fails(site, 2, "security.key_file", "agent.insecure", security=None)


async def test_more_memory_than_there_is(site: Site) -> None:
    await fails(site, 1, "npu0", "memory", **{"memory.npu0": npu(8, "1TiB")})


SLOW = """
import sys, hawk.agent.core as core
real = core.Arena
def slow(*args, **options):
    sys.stderr.write("filling\\n")
    with open({fifo!r}) as gate:
        gate.read()
    return real(*args, **options)
core.Arena = slow
from hawk.cli import agent_main
agent_main()
"""


async def filling(fifo: Path, request: pytest.FixtureRequest) -> BinaryIO:
    """Returns once an agent fills its arena, which it does until what is returned is closed."""

    def gate() -> BinaryIO | None:
        try:
            return os.fdopen(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK), "wb")
        except OSError:  # a fifo opens when its other end does
            return None

    opened = await becomes(gate, lambda found: found is not None, "filling its arena")
    assert opened is not None
    request.addfinalizer(opened.close)
    return opened


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_while_memory_is_filled_ends_the_start(
    site: Site, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, number: signal.Signals
) -> None:
    """Only what is being filled is waited for; the rest is not begun, and nothing stays."""
    fifo = site.folder / "gate"
    os.mkfifo(fifo)
    monkeypatch.setattr(harness, "COMMAND", (sys.executable, "-c", SLOW.format(fifo=str(fifo))))
    process = site.start("d0", {"memory.npu0": npu(8)}, ready=False)
    gate = await filling(fifo, request)
    said = [json.loads(line) for line in process.log().splitlines() if line.startswith("{")]
    # With the numpy core a word about that comes first.
    assert said[-1]["event"].startswith("agent starting:")
    assert (said[-1]["arena"], list(said[-1]["memories"])) == ("16MiB", ["npu0"])
    process.send(number)
    gate.close()
    assert await process.ended() == 0
    assert "agent up" not in process.log()
    assert "agent down" in process.log()
    assert "Traceback" not in process.log()
    assert not list(site.folder.glob("d0.sock*"))
