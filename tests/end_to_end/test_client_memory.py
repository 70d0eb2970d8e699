"""Memory of a client: its agent lets go of it when the client has left, and not when a collector comes by."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import hawk
from hawk.client import connect
from hawk.errors import Aborted
from tests.end_to_end import caches as c
from tests.end_to_end import harness
from tests.end_to_end.harness import AgentProcess, Site, becomes, clients, until

UNCOLLECTED = (sys.executable, "-c", "import gc; gc.disable(); from hawk.cli import agent_main; agent_main()")
"""An agent in which only the last reference to a thing frees it."""


@pytest.fixture
def uncollected(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(harness, "COMMAND", UNCOLLECTED)
    return site


def mapped(agent: AgentProcess) -> list[str]:
    """What the agent has mapped of caches of clients."""
    lines = Path(f"/proc/{agent.pid}/maps").read_text().splitlines()
    return [line for line in lines if "hawk-cache" in line]


async def unmapped(agent: AgentProcess) -> None:
    """Returns once nothing of a client is mapped; what the agent held as one is unmapped as its caches go."""
    await becomes(lambda: mapped(agent), lambda left: not left, f"nothing mapped by {agent.name}")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("ending", ["ready", "aborted", "cut off"])
async def test_a_client_that_left_leaves_no_memory(uncollected: Site, ending: str, transport: str) -> None:
    prefer = {"transport": {"prefer": [transport]}}
    prefill = uncollected.start("p0", prefer, role="prefill")
    decode = uncollected.start("d0", {**prefer, "peers": {"p0": prefill.control}}, role="decode")
    async with clients(prefill, decode) as (watching_p, watching_d):
        source, target = c.filled(), c.filled(seed=1)
        hp, hd = connect(prefill.local), connect(decode.local)
        await hp.open()
        await hd.open()
        cache, into = await hp.register(source), await hd.register(target)
        assert mapped(prefill)
        assert mapped(decode)
        ready = c.LAYERS if ending == "ready" else 1
        offer = await hp.offer("r", cache, np.arange(16), tokens=256, layers_ready=ready)
        job = hd.fetch(offer, into=into, blocks=list(range(16)), timeout="20s")
        await job.start()
        if ending == "ready":
            assert (await job).tokens == 256
        else:
            async for progress in job.progress():
                if progress.nbytes:
                    break
        if ending == "aborted":
            await job.abort()
            with pytest.raises(Aborted):
                await job
        await hp.close()
        await until(watching_p, lambda now: now.caches == 0, "no cache")
        await unmapped(prefill)
        await hd.close()
        await until(watching_d, lambda now: now.caches == 0, "no cache")
        await unmapped(decode)
        source.close()
        target.close()


async def test_arrays_of_hawk_alloc_can_be_registered_though_nobody_keeps_their_buffers(site: Site) -> None:
    agent = site.start("p0", role="prefill")
    spec = c.source_spec()
    sizes = spec.compile().buffer_bytes
    async with clients(agent) as (client,):
        arrays = [hawk.alloc(size).array for size in sizes]
        cache = await client.register(
            hawk.KVCache.from_numpy([array.view(np.uint16) for array in arrays], spec)
        )
        await cache.release()
