"""What an operator asks of live agents: `hawk status`, `peers`, `jobs`, `job` and `drain`, as commands."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hawk import cli
from hawk.client import Client
from hawk.errors import Draining, InvalidArgument, UnknownRequest
from hawk.handles import DeviceCache, Fetch, OfferHandle
from hawk.observe.http import split_address
from tests.child import child
from tests.end_to_end import caches as c
from tests.end_to_end import harness
from tests.end_to_end.harness import LIMIT, AgentProcess, Site, becomes, clients, npu
from tests.end_to_end.test_lifecycle import SLOW, filling

HAWK = (sys.executable, "-c", "import hawk.cli; hawk.cli.main()")


async def hawk(*arguments: str, status: int = 0) -> str:
    """What `hawk ARGUMENTS` prints (on stderr where it fails), once it has ended as expected; in this process."""
    out, err = io.StringIO(), io.StringIO()

    def run() -> int:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return cli._status(cli.cli, "hawk", arguments)

    got = await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, run), LIMIT)
    assert got == status, out.getvalue() + err.getvalue()
    return out.getvalue() or err.getvalue()


async def process(*arguments: str) -> str:
    """The same as a process of its own."""
    async with child(
        *HAWK, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    ) as process:
        out, err = await asyncio.wait_for(process.communicate(), LIMIT)
    assert process.returncode == 0, (out + err).decode()
    return out.decode()


async def ask(agent: AgentProcess, *arguments: str) -> Any:
    """The JSON that a command prints."""
    return json.loads(await hawk(*arguments, "--json", "--local", agent.local))


def pair(site: Site) -> tuple[AgentProcess, AgentProcess]:
    prefill = site.start("p0", role="prefill")
    peers = {"p0": prefill.control, "d3": "tcp://127.0.0.1:1"}
    decode = site.start("d0", {"peers": peers, "memory.npu0": npu(8)}, role="decode")
    return prefill, decode


async def half_done(hp: Client, hd: Client) -> tuple[OfferHandle, Fetch, DeviceCache]:
    """A transfer of which one layer has come, and the others are not written yet."""
    device = await hd.allocate(c.target_spec(), memory="npu0")
    cache = await hp.register(c.filled())
    offer = await hp.offer("[bold]half", cache, np.arange(16), tokens=256, layers_ready=1)
    job = hd.fetch(offer, into=device, blocks=[1, 2, 3, 4], timeout="30s")
    await job.start()
    async for progress in job.progress():
        if progress.nbytes:
            break
    return offer, job, device


async def test_a_job_is_seen_from_both_sides_while_it_runs_and_after(site: Site) -> None:
    prefill, decode = pair(site)
    async with clients(prefill, decode) as (hp, hd):
        offer, job, device = await half_done(hp, hd)
        (fetched,) = await ask(decode, "jobs", "--live")
        (served,) = await ask(prefill, "jobs", "--live")
        assert (fetched["role"], fetched["state"], fetched["phase"]) == ("fetch", "receiving", "read")
        assert (served["role"], served["state"], served["phase"]) == ("serve", "preparing", "layers")
        assert fetched["attempt"] == served["job"]
        assert [(side["request"], side["peer"]) for side in (fetched, served)] == [
            ("[bold]half", "p0"),
            ("[bold]half", "d0"),
        ]
        assert 0 < fetched["nbytes"] < fetched["total"]
        assert 0 < fetched["deadline"] < 30
        assert fetched["ended"] is None
        # What others chose to be called is shown, not obeyed.
        shown = await hawk("jobs", "--local", decode.local)
        assert "[bold]half" in shown
        assert fetched["job"][:12] in shown
        # The id on the wire finds the decode side's job, too, and so does how it begins.
        assert (await ask(decode, "job", served["job"][:20]))["job"] == fetched["job"]
        assert served["job"] in await hawk("job", served["job"], "--local", decode.local)
        await offer.layers_ready(c.LAYERS)
        await job
        with pytest.raises(UnknownRequest):
            await hd.fetch(request="none", source="p0", into=device, blocks=[9], timeout="20s")
        bad, good = await ask(decode, "jobs")
        assert (good["ending"], good["state"], good["deadline"]) == ("ready", "ready", None)
        assert good["nbytes"] == good["total"]
        assert {"connect", "accept", "read", "release", "total"} <= set(good["phases"])
        assert (bad["ending"], bad["request"]) == ("unknown-request", "none")
        assert "nothing to fetch" in bad["reason"]
        assert await ask(decode, "jobs", "--live") == []
        assert "unknown-request" in await hawk("jobs", "--local", decode.local)
        said = await hawk("job", "00000000", "--local", decode.local, status=1)
        assert "no such job" in said
        said = await hawk("job", "nothing", "--local", decode.local, status=1)
        assert "nor a request of that name" in said


async def test_status_and_peers(site: Site) -> None:
    prefill, decode = pair(site)
    async with clients(prefill, decode) as (hp, hd):
        offer, job, _ = await half_done(hp, hd)
        status = await ask(decode, "status")
        assert (status["name"], status["role"], status["fetching"], status["clients"]) == (
            "d0",
            "decode",
            1,
            2,
        )
        assert (status["pid"], status["draining"], status["not_ready"]) == (decode.pid, False, "")
        shown = await hawk("status", "--local", decode.local)
        assert "1 fetches" in shown
        assert "arena" in shown
        token = status["transports"]["tcp"].split("token=")[1].split(",")[0]
        assert token not in shown
        known, other = await ask(decode, "peers")
        assert (other["name"], other["direction"], other["state"]) == ("p0", "reads-from", "up")
        assert (other["jobs"], other["version"], other["role"]) == (1, 2, "prefill")
        assert (known["name"], known["direction"], known["state"]) == ("d3", "configured", "not-tried")
        (served,) = await ask(prefill, "peers")
        assert (served["name"], served["direction"], served["jobs"]) == ("d0", "serves", 1)
        assert "reads-from" in await hawk("peers", "--config", str(site.folder / "d0.toml"))
        await offer.layers_ready(c.LAYERS)
        await job


async def test_no_agent_is_said_in_a_line(site: Site) -> None:
    for command in (["status"], ["peers"], ["jobs"], ["job", "ab"], ["drain"]):
        said = await hawk(*command, "--local", f"{site.folder}/nobody.sock", status=1)
        assert len(said.splitlines()) == 1
        assert "Is an agent running" in said
        assert "nobody.sock" in said


async def test_a_drain_keeps_what_was_promised_and_tells_the_peers(site: Site) -> None:
    prefill, decode = pair(site)
    async with clients(prefill, decode) as (hp, hd):
        offer, job, device = await half_done(hp, hd)
        cache = await hp.register(c.filled())
        promised = await hp.offer("promised", cache, np.arange(4), tokens=64)
        early = hd.fetch(request="later", source="p0", into=device, blocks=[13], wait=True, timeout="30s")
        await early.start()
        async for progress in early.progress():
            if progress.state == "requested":
                break
        answer = await ask(prefill, "drain")
        assert (answer["done"], answer["draining"], answer["offers"]) == (False, True, 2)
        with pytest.raises(Draining, match="elsewhere") as refused:
            await early
        assert refused.value.facts == {"agent": "p0", "retry": "elsewhere"}
        with pytest.raises(Draining):
            await hp.offer("new", cache, np.arange(4), tokens=64)
        with pytest.raises(Draining):
            await hd.fetch(request="none", source="p0", into=device, blocks=[13], timeout="30s")
        assert [p["draining"] for p in await ask(decode, "peers") if p["name"] == "p0"] == [True]
        assert "draining" in await hawk("peers", "--local", decode.local)
        said = await hawk("drain", "--wait", "--timeout", "10ms", "--local", prefill.local, status=1)
        assert "2 open offers" in said
        waiting = asyncio.create_task(process("drain", "--wait", "--local", prefill.local))
        await offer.layers_ready(c.LAYERS)
        await job
        # The ticket was a promise.
        assert (await hd.fetch(promised, into=device, blocks=[9], timeout="20s")).tokens == 64
        assert "nothing that was promised is left" in await waiting
        assert "drained" in prefill.log()
        assert (await ask(prefill, "status"))["not_ready"] == "draining"
        # And back again.
        assert "takes new work" in await hawk("drain", "--resume", "--local", prefill.local)
        again = await hp.offer("again", cache, np.arange(4), tokens=64)
        assert (await hd.fetch(again, into=device, blocks=[9], timeout="20s")).tokens == 64
        assert [p["draining"] for p in await ask(decode, "peers") if p["name"] == "p0"] == [False]


async def test_a_draining_decode_agent_tells_whom_it_reads_from(site: Site) -> None:
    prefill, decode = pair(site)
    async with clients(prefill, decode) as (hp, hd):
        offer, job, device = await half_done(hp, hd)
        assert not (await hd.drain()).done
        with pytest.raises(Draining):
            await hd.fetch(request="none", source="p0", into=device, blocks=[13], timeout="30s")
        await offer.layers_ready(c.LAYERS)
        await job
        assert (await hd.drain(timeout="20s")).done
        assert [peer.draining for peer in await hp.peers()] == [True]
        # The word to stop is the last: nothing takes that back.
        decode.send(15)
        assert await decode.ended() == 0


async def test_questions_that_make_no_sense(site: Site) -> None:
    prefill = site.start("p0", role="prefill")
    async with clients(prefill) as (hp,):
        with pytest.raises(InvalidArgument, match="job: not such a text"):
            await hp.job("")
        with pytest.raises(InvalidArgument):
            await hp.jobs(most=0)
    await hawk("drain", "--resume", "--wait", "--local", prefill.local, status=2)
    await hawk("drain", "--timeout", "1s", "--local", prefill.local, status=2)
    await hawk("drain", "--wait", "--timeout", "soon", "--local", prefill.local, status=2)
    assert not Path(prefill.local.removeprefix("ipc://")).with_name("nobody.sock").exists()


async def page(agent: AgentProcess, path: str) -> tuple[int, str]:
    """What the agent serves at that path; where it listens stands in its log."""
    where = next(json.loads(line)["address"] for line in agent.log().splitlines() if '"observe"' in line)
    reader, writer = await asyncio.open_connection(*split_address(where))
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    raw = (await asyncio.wait_for(reader.read(), LIMIT)).decode()
    writer.close()
    head, _, body = raw.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def test_health_and_metrics_of_a_running_agent(site: Site) -> None:
    prefill = site.start("p0", role="prefill", observe="127.0.0.1:0")
    tables = {"peers": {"p0": prefill.control}, "memory.npu0": npu(8)}
    decode = site.start("d0", tables, role="decode", observe="127.0.0.1:0")
    async with clients(prefill, decode) as (hp, hd):
        assert await page(prefill, "/livez") == (200, "ok\n")
        assert await page(prefill, "/readyz") == (200, "ok\n")
        offer, job, device = await half_done(hp, hd)
        for agent in (prefill, decode):
            assert "hawk_leases 1.0" in (await page(agent, "/metrics"))[1]
        assert 'hawk_peer_up{peer="p0"} 1.0' in (await page(decode, "/metrics"))[1]
        assert 'hawk_peer_up{peer="d0"} 1.0' in (await page(prefill, "/metrics"))[1]
        await offer.layers_ready(c.LAYERS)
        ready = await job
        with pytest.raises(UnknownRequest):
            await hd.fetch(request="secret-request", source="p0", into=device, blocks=[9], timeout="20s")
        counted = (await page(decode, "/metrics"))[1]
        for line in (
            f'hawk_jobs_total{{ending="ready",role="fetch",transport="{ready.transport}"}} 1.0',
            f'hawk_jobs_total{{ending="unknown-request",role="fetch",transport="{ready.transport}"}} 1.0',
            f'hawk_bytes_total{{direction="in",transport="{ready.transport}"}} {float(ready.nbytes)}',
            'hawk_phase_seconds_count{phase="total"} 1.0',
            "hawk_leases 0.0",
            "hawk_queue_jobs 0.0",
        ):
            assert line in counted.splitlines(), counted
        # Ids are for the log.
        assert "secret-request" not in counted
        assert job.job not in counted
        await hp.drain()
        assert await page(prefill, "/readyz") == (503, "draining\n")
        prefill.kill()
        down = 'hawk_peer_up{peer="p0"} 0.0'
        await becomes(lambda: page(decode, "/metrics"), lambda got: down in got[1], down)


async def test_an_agent_that_fills_its_memory_lives_and_is_not_ready(
    site: Site, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A probe must not end an agent for starting slowly."""
    fifo = site.folder / "gate"
    os.mkfifo(fifo)
    monkeypatch.setattr(harness, "COMMAND", (sys.executable, "-c", SLOW.format(fifo=str(fifo))))
    loop = asyncio.get_running_loop()
    starting = loop.run_in_executor(None, lambda: site.start("p0", observe="127.0.0.1:0"))
    gate = await filling(fifo, request)
    (agent,) = site.agents
    assert await page(agent, "/livez") == (200, "ok\n")
    assert await page(agent, "/readyz") == (503, "starting\n")
    assert (await page(agent, "/metrics"))[0] == 200
    gate.close()
    await starting
    assert await page(agent, "/readyz") == (200, "ok\n")
