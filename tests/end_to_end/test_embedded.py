"""A client on the event loop of an embedded agent: no socket between them, and nothing else different."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import hawk
from hawk import blocking, connection
from hawk.agent import Agent, fetching
from hawk.client import Client
from hawk.control.passage import Passage
from hawk.errors import AlreadyOffered, Draining, InvalidArgument, PeerLost, UnknownCache
from hawk.handles import Cache, DeviceCache
from tests.end_to_end import caches as c
from tests.end_to_end.test_other_clients import embedded

whose = contextvars.ContextVar("whose", default="nobody's")


@pytest.fixture
def folder(short_path: Path) -> Path:
    return short_path


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[Client, Client, Cache, DeviceCache]]:
    """Two agents in this process, a client of each, and their caches."""
    async with embedded(folder, "p0") as p, embedded(folder, "d0", memory=True) as d:
        async with hawk.connect(p) as hp, hawk.connect(d) as hd:
            source = await hp.register(c.filled())
            yield hp, hd, source, await hd.allocate(c.target_spec(), memory="npu0")


async def fetched(hp: Client, hd: Client, source: Cache, device: DeviceCache, name: str) -> hawk.Ready:
    src, dst = c.tables(3, 0, 0, 200, src=c.source_spec(), dst=c.target_spec())
    offer = await hp.offer(name, source, src, tokens=200)
    ready = await hd.fetch(offer, into=device, blocks=dst, timeout="20s")
    assert await offer.ended() == "consumed"
    assert source.local is not None
    c.check(device, c.target_spec(), c.Moved(source.local, src, dst, 0, 200))
    return ready


def no_socket(*_: object) -> None:
    raise AssertionError("a socket was wanted")


async def test_no_socket_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "Sockets", no_socket)
    async with scene(folder) as (hp, hd, source, device):
        c.paint(device)
        ready = await fetched(hp, hd, source, device, "r")
        assert hd.version == Passage.version
        assert 0 <= await hd.round_trip() < 30
        ready.phases.clear()  # the client's own
        (job,) = [job for job in await hd.jobs() if job.role == "fetch"]
        assert job.phases["total"] > 0


async def test_errors_are_those_of_a_socket(folder: Path) -> None:
    async with scene(folder) as (hp, _, source, _):
        offer = await hp.offer("r", source, [0], tokens=16)
        with pytest.raises(AlreadyOffered, match="open"):
            await hp.offer("r", source, [1], tokens=16)
        with pytest.raises(InvalidArgument, match="layers become ready in order"):
            await offer.layers_ready(99)
        with pytest.raises(InvalidArgument):
            await hp.offer("n", source, [0], tokens=1 << 60)
        stranger = Cache(hp, "f" * 32, source.layout)
        with pytest.raises(UnknownCache):
            await hp.offer("s", stranger, [0], tokens=16)
        await offer.withdraw()


async def test_many_fetches_at_once_and_one_that_is_left(folder: Path) -> None:
    async with scene(folder) as (hp, hd, source, device):
        offers = [
            await hp.offer(f"r{i}", source, [i], tokens=16, layers_ready=3 if i else 0) for i in range(12)
        ]
        async with hd.fetch(offers[0], into=device, blocks=[0], timeout="20s") as waiting:
            ready = await asyncio.gather(
                *(hd.fetch(offers[i], into=device, blocks=[i], timeout="20s") for i in range(1, 12))
            )
            assert [r.tokens for r in ready] == [16] * 11
        assert (await hd.status()).fetching == 0
        with pytest.raises(hawk.errors.Aborted):
            await waiting.result()


async def test_the_agent_ends_first(folder: Path) -> None:
    async with embedded(folder, "d0", memory=True) as agent:
        client = await hawk.connect(agent).__aenter__()
        device = await client.allocate(c.target_spec(), memory="npu0")
        waiting = asyncio.ensure_future(
            client.fetch(request="r", source="nobody", into=device, blocks=[0], wait=True)._run()
        )
    assert not agent.service._passages
    with pytest.raises(hawk.errors.HawkError):
        await waiting
    with pytest.raises((PeerLost, Draining)):  # as soon as its socket is seen to be closed
        await client.status()
    await client.close()
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_other_loops_come_by_the_socket(folder: Path) -> None:
    async with embedded(folder, "d0", memory=True) as agent:

        def elsewhere(agent: Agent) -> int:
            with blocking.connect(agent) as client:
                assert not isinstance(client._client._channel, Passage)
                return client.status().caches

        assert await asyncio.to_thread(elsewhere, agent) == 0
        async with hawk.connect(agent.config.agent.local) as client:
            assert not isinstance(client._channel, Passage)


async def test_who_asks_in_a_loop_leaves_others_their_turns(folder: Path) -> None:
    async with embedded(folder, "p0") as p, hawk.connect(p) as hp:
        turned: list[bool] = []
        asyncio.get_running_loop().call_soon(turned.append, True)
        for _ in range(20_000):
            await hp.status()
            if turned:
                return
        pytest.fail("nobody else had a turn")


async def test_the_agents_side_has_none_of_the_clients_context(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    run = fetching._run

    async def watched(*args: Any) -> None:
        seen.append(whose.get())
        await run(*args)

    monkeypatch.setattr(fetching, "_run", watched)
    async with scene(folder) as (hp, hd, source, device):
        c.paint(device)
        token = whose.set("a request's")
        await fetched(hp, hd, source, device, "r")
        whose.reset(token)
    assert seen == ["nobody's"]
