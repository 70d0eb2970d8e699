"""The sidecar: bounds, refusals and what is left afterwards."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hawk.control.descriptors import DescriptorLink
from hawk.control.sidecar import connect_sidecar
from hawk.errors import (
    Busy,
    ControlError,
    DeadlineExceeded,
    InvalidArgument,
    PeerLost,
    PeerUnreachable,
)
from tests.descriptors import fds
from tests.unit.control.sidecars import TAG, TOKEN, Agent, _memfd, _raw


async def test_descriptors_that_nobody_claims_are_closed(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(keep=0.05)
    client = await connect_sidecar(agent.sidecar.path, TOKEN)
    server = await agent.link()
    read, write = os.pipe()
    await client.send_fd(TAG, write)
    os.close(write)
    readable = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(read, readable.set_result, None)
    async with asyncio.timeout(30):
        await readable
    asyncio.get_running_loop().remove_reader(read)
    assert os.read(read, 1) == b""
    os.close(read)
    assert server.pending == 0
    assert not server.closed
    client.close()


async def test_too_many_unclaimed_descriptors_end_the_session(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(max_pending=3)
    client = await connect_sidecar(agent.sidecar.path, TOKEN)
    server = await agent.link()
    read, write = os.pipe()
    for number in range(4):
        await client.send_fd(bytes([number]) * 16, write)
    os.close(write)
    assert await agent.end() == TOKEN
    assert "more than 3" in server.reason
    assert os.read(read, 1) == b""
    os.close(read)


async def test_a_tag_used_twice_ends_the_session(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent()
    client = await connect_sidecar(agent.sidecar.path, TOKEN)
    for _ in range(2):
        await client.send_fd(TAG, 0)
    assert await agent.end() == TOKEN


async def test_a_second_session_with_the_token_of_a_live_one(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent()
    first = await connect_sidecar(agent.sidecar.path, TOKEN)
    with pytest.raises(ControlError, match="refused"):
        await connect_sidecar(agent.sidecar.path, TOKEN)
    assert not first.closed
    first.close()
    await agent.end()
    (await connect_sidecar(agent.sidecar.path, TOKEN)).close()


async def test_a_session_that_the_owner_refuses(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent()
    agent.refuse = True
    with pytest.raises(ControlError, match="refused"):
        await connect_sidecar(agent.sidecar.path, TOKEN)
    assert agent.sidecar.refused == 1
    assert agent.ended.empty()
    assert not agent.sidecar.sessions


async def test_connections_are_bounded(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(max_links=2)
    with _raw(agent):
        client = await connect_sidecar(agent.sidecar.path, TOKEN)
        with pytest.raises((ControlError, PeerUnreachable)):
            await connect_sidecar(agent.sidecar.path, b"x" * 16)
    client.close()


async def test_every_wait_ends(make_agent: Callable[..., Agent], tmp_path: Path) -> None:
    with pytest.raises(PeerUnreachable):
        await connect_sidecar(tmp_path / "none", TOKEN)
    agent = make_agent()
    client = await connect_sidecar(agent.sidecar.path, TOKEN)
    server = await agent.link()
    with pytest.raises(DeadlineExceeded, match=TAG.hex()):
        await server.receive_fd(TAG, 0.01)
    waiting = asyncio.create_task(server.receive_fd(TAG, 60))
    await asyncio.sleep(0)
    client.close()
    with pytest.raises(PeerLost):
        await waiting
    with pytest.raises(PeerLost):
        await server.receive_fd(TAG, 1)


async def test_an_agent_that_never_answers(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        deaf.listen()
        with pytest.raises(PeerUnreachable, match="in time"):
            await connect_sidecar(tmp_path / "deaf", TOKEN, timeout=0.05)


async def test_a_peer_that_does_not_read_makes_the_sender_busy() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    link = DescriptorLink(ours, pid=0)

    async def flood() -> None:
        for number in range(100_000):
            await link.send_fd(number.to_bytes(16, "big"), 0, timeout=0.2)

    with pytest.raises(Busy):
        await flood()
    assert not link.closed
    theirs.close()
    with pytest.raises(PeerLost):
        await flood()
    link.close()


async def test_a_cancelled_wait_loses_no_descriptor(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent()
    client = await connect_sidecar(agent.sidecar.path, TOKEN)
    server = await agent.link()
    waiting = asyncio.create_task(server.receive_fd(TAG, 60))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await client.send_fd(TAG, 0)
    os.close(await server.receive_fd(TAG, 30))
    client.close()


async def test_arguments_are_checked(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent()
    with pytest.raises(InvalidArgument, match="token"):
        await connect_sidecar(agent.sidecar.path, b"short")
    client = await connect_sidecar(agent.sidecar.path, TOKEN)
    with pytest.raises(InvalidArgument, match="tag"):
        await client.send_fd(b"short", 0)
    with pytest.raises(InvalidArgument, match="tag"):
        await client.receive_fd(b"short", 1)
    with pytest.raises(InvalidArgument, match="fd"):
        await client.send_fd(TAG, 9999)
    client.close()


def test_a_path_in_use_and_descriptors_afterwards(tmp_path: Path) -> None:
    async def once() -> None:
        agent = Agent(tmp_path / "s")
        with pytest.raises(ControlError, match="in use"):
            Agent(tmp_path / "s")
        client = await connect_sidecar(agent.sidecar.path, TOKEN)
        await agent.link()
        fd = _memfd(b"x")
        await client.send_fd(TAG, fd)
        os.close(fd)
        agent.sidecar.close()
        assert await agent.end() == TOKEN
        client.close()

    asyncio.run(once())
    before = fds()
    for _ in range(3):
        asyncio.run(once())
    assert fds() == before


def test_both_kinds_of_loop(runner: asyncio.Runner, tmp_path: Path) -> None:
    async def run() -> None:
        agent = Agent(tmp_path / "s")
        client = await connect_sidecar(agent.sidecar.path, TOKEN)
        server = await agent.link()
        await client.send_fd(TAG, 0)
        os.close(await server.receive_fd(TAG, 30))
        client.close()
        assert await agent.end() == TOKEN
        agent.sidecar.close()

    runner.run(run())
