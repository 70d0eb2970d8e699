"""Nodes that are not the usual ones: a device of one channel, few descriptors, a core that is not there."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import hawk
from tests.child import child
from tests.end_to_end import caches as c
from tests.end_to_end.harness import COMMAND, Site, becomes, clients, npu


async def test_a_device_of_one_channel_takes_a_cache_as_any(site: Site) -> None:
    prefill = site.start("p0", role="prefill")
    tables = {"peers": {"p0": prefill.control}, "memory.one": npu(1)}
    decode = site.start("d0", tables, role="decode")
    async with clients(prefill, decode) as (hp, hd):
        source, spec = c.filled(), c.target_spec()
        cache = await hp.register(source)
        device = await hd.allocate(spec, memory="one")
        assert len(device.channels) == 1
        c.paint(device)
        offer = await hp.offer("one", cache, np.arange(7), tokens=100)
        await hd.fetch(offer, into=device, blocks=[5, 2], timeout="20s")
        c.check(device, spec, c.Moved(source, np.arange(7), [5, 2], 0, 100), guards=[device])
        plain = await hd.allocate(c.source_spec(), memory="one")
        assert len(plain.channels) == 1


def test_an_agent_may_open_as_many_files_as_the_system_allows(site: Site) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(256, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        agent = site.start("p0", role="prefill")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    limits = Path(f"/proc/{agent.pid}/limits").read_text().splitlines()
    line = next(line for line in limits if line.startswith("Max open files"))
    assert line.split()[3:5] == [str(hard), str(hard)]


def test_a_core_that_hawk_core_names_in_vain_ends_the_start(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAWK_CORE", "quantum")
    config = site.write_config("p0", {}, role="prefill")
    ended = subprocess.run(
        [*COMMAND, "--config", str(config)], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert (
        ended.stderr.strip() == "hawk-agent: HAWK_CORE: no such core; got quantum; expected auto, c or numpy"
    )


@pytest.mark.parametrize("more", [30, 31])
async def test_clients_for_whom_no_descriptor_is_left_are_turned_away(site: Site, more: int) -> None:
    agent = site.start("p0", role="prefill")
    limit = max(map(int, agent.descriptors())) + 1 + more
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (limit, limit))
    turned_away = 0
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(hawk.connect(agent.local))
        for _ in range(more):
            try:
                await stack.enter_async_context(hawk.connect(agent.local, timeout="20s"))
            except hawk.ControlError:
                turned_away += 1
                break
        assert turned_away == 1
        assert (await first.status()).name == "p0"
    await becomes(agent.descriptors, lambda now: len(now) <= limit - 20, "fewer descriptors")
    async with hawk.connect(agent.local) as again:
        assert (await again.status()).name == "p0"


FLOOD = """
import resource, socket, sys, time
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
host, _, port = sys.argv[1].rpartition(":")
made, until = [], time.monotonic() + 3
for _ in range(10000):
    sock = socket.socket()
    sock.settimeout(0.2)
    try:
        sock.connect((host, int(port)))
    except OSError:
        sock.close()
        continue
    made.append(sock)
    if time.monotonic() > until:
        break
print(len(made), flush=True)
sys.stdin.read()
"""
"""Connects ten thousand times, or for three seconds; stays, silent, until it is told to go."""


async def test_a_flood_of_idle_connections_with_a_small_hard_limit(site: Site) -> None:
    """By tcp, which takes all descriptors there are; local clients are kept out meanwhile."""
    agent = site.start("p0", role="prefill")
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (1024, 1024))
    async with hawk.connect(agent.local) as first:
        command = (sys.executable, "-c", FLOOD, agent.control.removeprefix("tcp://"))
        async with child(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as flood:
            assert flood.stdout is not None
            assert int(await flood.stdout.readline()) > 0
            assert (await first.status()).name == "p0"
            assert agent.alive()
    await becomes(agent.descriptors, lambda now: len(now) <= 200, "fewer descriptors")

    async def name() -> str:
        try:
            async with hawk.connect(agent.local) as again:
                return (await again.status()).name
        except hawk.ControlError:  # nobody is let in for a moment after descriptors ran out
            return ""

    await becomes(name, lambda now: now == "p0", "open to local clients again")


async def test_a_flood_of_local_connections_up_to_the_limit(
    site: Site, request: pytest.FixtureRequest
) -> None:
    """Without a bound the last of them would end the agent; so nobody is let in before that, until there is room."""
    limit = 8192
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * limit:
        pytest.skip(f"needs {2 * limit} descriptors, and {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
    agent = site.start("p0", role="prefill")
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (limit, limit))
    path = agent.local.removeprefix("ipc://")

    def flood() -> list[socket.socket]:
        made: list[socket.socket] = []
        deadline = time.monotonic() + 20
        while len(made) < 4 * limit and time.monotonic() < deadline:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.append(sock)
            try:
                sock.connect(path)
            except OSError:
                return made
        return made

    async with hawk.connect(agent.local) as first:
        made = await asyncio.get_running_loop().run_in_executor(None, flood)
        try:
            assert limit // 3 < len(made) < 4 * limit
            assert agent.alive()
            assert len(agent.descriptors()) < limit
            assert (await first.status()).name == "p0"
            with pytest.raises(hawk.ControlError):
                async with hawk.connect(agent.local, timeout="1s"):
                    pass
            assert "descriptors run short" in agent.log()
        finally:
            for sock in made:
                sock.close()
        await becomes(agent.log, lambda log: "let in again" in log, "let in again")
        async with hawk.connect(agent.local) as again:
            assert (await again.status()).name == "p0"
