import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hawk.control.sidecar import connect_sidecar, sidecar_path
from hawk.errors import (
    ConfigError,
    InvalidArgument,
    PeerLost,
)
from tests.unit.control.sidecars import HELLO, TAG, TOKEN, Agent, _ends, _memfd, _raw


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
