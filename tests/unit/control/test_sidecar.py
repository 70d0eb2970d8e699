import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from hawk.control.descriptors import DescriptorLink
from hawk.control.sidecar import Sidecar, connect_sidecar, sidecar_path
from hawk.errors import (
    AccessDenied,
    Busy,
    ConfigError,
    ControlError,
    DeadlineExceeded,
    InvalidArgument,
    PeerLost,
    PeerUnreachable,
)

TOKEN = bytes(range(16))
TAG = b"t" * 16
HELLO = b"HWFD\x01"


class Agent:
    """A sidecar and what it said."""

    def __init__(self, path: Path, **kw: Any) -> None:
        self.links: asyncio.Queue[tuple[bytes, DescriptorLink]] = asyncio.Queue()
        self.ended: asyncio.Queue[bytes] = asyncio.Queue()
        self.refuse = False
        self.sidecar = Sidecar(path, on_session=self._session, on_closed=self.ended.put_nowait, **kw)
        self.sidecar.start()

    def _session(self, token: bytes, link: DescriptorLink) -> None:
        if self.refuse:
            raise AccessDenied("no such session")
        self.links.put_nowait((token, link))

    async def link(self) -> DescriptorLink:
        async with asyncio.timeout(30):
            return (await self.links.get())[1]

    async def end(self) -> bytes:
        async with asyncio.timeout(30):
            return await self.ended.get()


@pytest.fixture
async def make_agent(tmp_path: Path) -> AsyncIterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def make(**kw: Any) -> Agent:
        made.append(Agent(tmp_path / "d0.sock.fd", **kw))
        return made[-1]

    yield make
    for agent in made:
        agent.sidecar.close()
        agent.sidecar.close()
    assert not os.listdir(tmp_path)


def _memfd(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def _raw(agent: Agent) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    sock.connect(str(agent.sidecar.path))
    return sock


async def _ends(sock: socket.socket) -> bytes:
    """What comes on a raw socket until the far side closes it."""
    loop = asyncio.get_running_loop()
    data = b""
    while True:
        readable = loop.create_future()
        loop.add_reader(sock, readable.set_result, None)
        async with asyncio.timeout(30):
            await readable
        loop.remove_reader(sock)
        try:
            part = sock.recv(100)
        except ConnectionError:
            return data
        if not part:
            return data
        data += part


def test_where_the_socket_is() -> None:
    assert sidecar_path("ipc:///run/hawk/d0.sock") == Path("/run/hawk/d0.sock.fd")
    with pytest.raises(ConfigError):
        sidecar_path("tcp://127.0.0.1:1")


async def test_descriptors_pass_both_ways_and_map(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent()
    client = await connect_sidecar(agent.sidecar.path, TOKEN)
    token, server = await agent.links.get()
    assert token == TOKEN
    assert server.pid == client.pid == os.getpid()
    for sender, receiver in ((client, server), (server, client)):
        fd = _memfd(b"hello" * 1000)
        await sender.send_fd(TAG, fd)
        os.close(fd)
        got = await receiver.receive_fd(TAG, 30)
        assert not os.get_inheritable(got)
        with mmap.mmap(got, 5000) as mapped:
            assert mapped[:5] == b"hello"
        os.close(got)
    client.close()
    assert await agent.end() == TOKEN


async def test_a_descriptor_may_come_after_its_wait_and_in_any_order(
    make_agent: Callable[..., Agent],
) -> None:
    agent = make_agent()
    client = await connect_sidecar(agent.sidecar.path, TOKEN)
    server = await agent.link()
    tags = [bytes([number]) * 16 for number in range(100)]
    waits = [asyncio.create_task(server.receive_fd(tag, 30)) for tag in reversed(tags)]
    await asyncio.sleep(0)
    with pytest.raises(InvalidArgument, match="somebody waits"):
        await server.receive_fd(tags[0], 1)
    for number, tag in enumerate(tags):
        fd = _memfd(b"%d" % number)
        await client.send_fd(tag, fd)
        os.close(fd)
    for number, fd in enumerate(reversed(await asyncio.gather(*waits))):
        assert os.pread(fd, 10, 0) == b"%d" % number
        os.close(fd)
    client.close()


CHILD = """
import asyncio, os, pathlib, sys
from hawk.control.sidecar import connect_sidecar
async def main():
    link = await connect_sidecar(pathlib.Path(sys.argv[1]), bytes(range(16)))
    fd = os.memfd_create("child")
    os.write(fd, b"from another process")
    await link.send_fd(b"t" * 16, fd)
    if "fork" in sys.argv:
        child = os.fork()
        if child == 0:
            sys.stdin.read()  # outlives its parent, and must not keep the session alive
            os._exit(0)
    print("up", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


@pytest.mark.parametrize("extra", [[], ["fork"]])
async def test_a_killed_client_is_seen_at_once(make_agent: Callable[..., Agent], extra: list[str]) -> None:
    agent = make_agent()
    with subprocess.Popen(  # noqa: ASYNC220 - it starts at once
        [sys.executable, "-W", "ignore", "-c", CHILD, str(agent.sidecar.path), *extra],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        server = await agent.link()
        assert server.pid == child.pid
        fd = await server.receive_fd(TAG, 30)
        assert child.stdout is not None
        line = await asyncio.get_running_loop().run_in_executor(None, child.stdout.readline)
        assert line == b"up\n"
        child.send_signal(signal.SIGKILL)
        assert await agent.end() == TOKEN
        # What it shared stays readable until we close it.
        with mmap.mmap(fd, 20, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == b"from another process"
        os.close(fd)
    assert server.closed
    assert not agent.sidecar.sessions
    with pytest.raises(PeerLost):
        await server.send_fd(TAG, 0)


@pytest.mark.parametrize(
    "hello",
    [b"", b"junk", HELLO, HELLO + TOKEN[:-1], HELLO + TOKEN + b"x", b"HWFD\x02" + TOKEN, b"x" * 1000],
)
async def test_junk_instead_of_a_hello_is_dropped(make_agent: Callable[..., Agent], hello: bytes) -> None:
    agent = make_agent()
    with _raw(agent) as sock:
        sock.send(hello)
        assert await _ends(sock) == b""
    assert agent.sidecar.refused == 1
    assert agent.links.empty()
    # The agent goes on.
    client = await connect_sidecar(agent.sidecar.path, TOKEN)
    client.close()
    assert await agent.end() == TOKEN


async def test_a_hello_with_a_descriptor_is_dropped_and_the_descriptor_closed(
    make_agent: Callable[..., Agent],
) -> None:
    agent = make_agent()
    read, write = os.pipe()
    with _raw(agent) as sock:
        socket.send_fds(sock, [HELLO + TOKEN], [write])
        os.close(write)
        assert await _ends(sock) == b""
    assert os.read(read, 1) == b""  # the last writer is gone
    os.close(read)


async def test_a_silent_connection_is_dropped_in_time(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent(hello=0.05)
    with _raw(agent) as sock:
        assert await _ends(sock) == b""
    assert agent.sidecar.refused == 1


@pytest.mark.parametrize("packet", [b"short", TAG + b"x", b""])
async def test_junk_after_the_hello_ends_the_session_only(
    make_agent: Callable[..., Agent], packet: bytes
) -> None:
    agent = make_agent()
    other = await connect_sidecar(agent.sidecar.path, b"o" * 16)
    with _raw(agent) as sock:
        sock.send(HELLO + TOKEN)
        sock.send(packet)
        assert await _ends(sock) in (b"\x01", b"")
    assert await agent.end() == TOKEN
    assert not other.closed
    other.close()


async def test_a_tag_without_or_with_two_descriptors_ends_the_session(
    make_agent: Callable[..., Agent],
) -> None:
    agent = make_agent()
    for count in (0, 2, 3):
        pipes = [os.pipe() for _ in range(count)]
        with _raw(agent) as sock:
            sock.send(HELLO + TOKEN)
            socket.send_fds(sock, [TAG], [write for _, write in pipes]) if pipes else sock.send(TAG)
            await _ends(sock)
        assert await agent.end() == TOKEN
        for read, write in pipes:
            os.close(write)
            assert os.read(read, 1) == b""
            os.close(read)


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
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        asyncio.run(once())
    assert len(os.listdir("/proc/self/fd")) == before


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
