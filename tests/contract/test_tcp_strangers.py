"""Whoever reaches the data port without being invited gets nothing, and costs little."""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from hawk.errors import AccessDenied, DeadlineExceeded, PeerUnreachable, TransferFailed, TransportError
from hawk.memory.region import Segments
from hawk.transports.base import Grant, Link
from hawk.transports.tcp import TcpConfig, TcpTransport, _wire
from hawk.transports.testing import FRESH, SharedArena, Targets

ARENA = 32 << 20
SEGMENTS = Segments.of([(0, 0, 100, 5000)])


class Raw:
    """A bare connection that says what it likes."""

    def __init__(self, transport: TcpTransport) -> None:
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.loop = asyncio.get_running_loop()
        self.transport = transport

    async def __aenter__(self) -> "Raw":
        endpoint = self.transport.endpoint
        await self.loop.sock_connect(self.sock, (endpoint["host"], int(endpoint["port"])))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.sock.close()

    async def send(self, data: bytes) -> None:
        await self.loop.sock_sendall(self.sock, data)

    async def receive(self, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes:
            data = await asyncio.wait_for(self.loop.sock_recv(self.sock, nbytes - len(got)), 20)
            if not data:
                break
            got += data
        return got

    async def hello(self) -> None:
        token = bytes.fromhex(self.transport.endpoint["token"])
        await self.send(_wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, token))
        assert await self.receive(16) == _wire.ANSWER.pack(_wire.ANSWER_MAGIC, _wire.OK, 0)

    async def is_dropped(self) -> bool:
        """Waits until the server hangs up; nothing may come before."""
        try:
            return await self.receive(1) == b""
        except ConnectionResetError:
            return True


def request(
    key: bytes, ranges: list[tuple[int, int]], *, count: int | None = None, total: int | None = None
) -> bytes:
    head = _wire.REQUEST.pack(
        _wire.REQUEST_MAGIC,
        len(ranges) if count is None else count,
        sum(n for _, n in ranges) if total is None else total,
        key,
    )
    return head + b"".join(struct.pack("<qq", *r) for r in ranges)


@contextlib.asynccontextmanager
async def serving(config: TcpConfig) -> AsyncIterator[tuple[TcpTransport, Grant, SharedArena]]:
    arena, transport = SharedArena(ARENA), TcpTransport(config)
    await transport.start()
    try:
        transport.serve(arena.region)
        yield transport, transport.grant(0, ARENA), arena
    finally:
        await transport.close()
        arena.close()


async def still_serves(transport: TcpTransport, grant: Grant, link: Link | None = None) -> None:
    reader = TcpTransport(TcpConfig(streams=1))
    try:
        own = link or await reader.connect(transport.endpoint, timeout=20)
        targets = Targets([5000])
        await own.read(grant.key, SEGMENTS, targets.regions, timeout=20)
        region = transport._grants.region
        assert region is not None
        targets.check(SEGMENTS, region.array)
    finally:
        await reader.close()


async def no_threads_but(before: set[threading.Thread]) -> None:
    """A connection that was closed takes its thread along, though not in the moment in which it is closed."""
    async with asyncio.timeout(20):
        while not set(threading.enumerate()) <= before:
            await asyncio.sleep(0)


PATIENT = TcpConfig(handshake_timeout=60)
HASTY = TcpConfig(handshake_timeout=0.2)
WRONG_TOKEN = _wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, b"\x5a" * 16)


@pytest.mark.parametrize(
    "junk",
    [
        b"\x00" * 4096,
        b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(300),
        WRONG_TOKEN,
        _wire.HELLO.pack(_wire.HELLO_MAGIC, 99, b"\x00" * 16),
        b"H",
        b"x",
    ],
    ids=["zeros", "http", "tls", "wrong token", "wrong version", "one right byte", "one wrong byte"],
)
async def test_junk_is_dropped(junk: bytes) -> None:
    async with serving(HASTY) as (transport, grant, arena):
        before = arena.region.array.copy()
        async with Raw(transport) as raw:
            await raw.send(junk)
            assert await raw.is_dropped()
        await still_serves(transport, grant)
        assert np.array_equal(arena.region.array, before)


async def test_who_says_nothing_is_dropped() -> None:
    async with serving(HASTY) as (transport, grant, _):
        async with Raw(transport) as raw:
            assert await raw.is_dropped()
        await still_serves(transport, grant)


async def test_half_a_request_is_dropped() -> None:
    async with serving(HASTY) as (transport, grant, _):
        whole = request(grant.key, [(0, 10), (20, 10)])
        for part in (1, 47, len(whole) - 1):
            async with Raw(transport) as raw:
                await raw.hello()
                await raw.send(whole[:part])
                assert await raw.is_dropped()
        await still_serves(transport, grant)


async def test_an_admitted_peer_may_idle() -> None:
    async with serving(HASTY) as (transport, grant, _):
        reader = TcpTransport(TcpConfig(streams=1))
        link = await reader.connect(transport.endpoint, timeout=20)
        async with Raw(transport) as raw:
            assert await raw.is_dropped()  # by now the deadline of a stranger is over for the link, too
        connection = link._lanes._lanes[0]._sock  # type: ignore[attr-defined]
        await still_serves(transport, grant, link)
        assert link._lanes._lanes[0]._sock is connection  # type: ignore[attr-defined]
        await reader.close()


async def test_a_wrong_key_reads_nothing_and_may_ask_again() -> None:
    async with serving(PATIENT) as (transport, grant, _):
        async with Raw(transport) as raw:
            await raw.hello()
            denied = _wire.ANSWER.pack(_wire.ANSWER_MAGIC, _wire.DENIED, 0)
            for key in (bytes(32), grant.key[::-1]):
                await raw.send(request(key, [(0, 4096)]))
                assert await raw.receive(16) == denied
            await raw.send(request(grant.key, [(ARENA - 1, 2)]))
            assert await raw.receive(16) == denied
            await raw.send(request(grant.key, [(7, 3)]))
            assert await raw.receive(16) == _wire.ANSWER.pack(_wire.ANSWER_MAGIC, _wire.OK, 3)
            assert await raw.receive(3) == bytes(transport._grants.region.array[7:10])  # type: ignore[union-attr]


HUGE = 1 << 62


@pytest.mark.parametrize(
    ("ranges", "lies"),
    [
        ([(0, 1)], {"count": 0xFFFFFFFF}),
        ([(0, 1)], {"count": _wire.MAX_RANGES + 1}),
        ([], {"count": 0}),
        ([(0, 1)], {"total": 2}),
        ([(0, 1)], {"total": 1 << 63}),
        ([(-1, 2)], {}),
        ([(0, 0)], {}),
        ([(0, -1), (0, 2)], {"total": 1}),
        ([(HUGE, 1)], {}),
        ([(HUGE - 1, HUGE - 1)], {}),
        ([(0, HUGE - 1)] * 5, {"total": (5 * (HUGE - 1)) % (1 << 64)}),
    ],
)
async def test_impossible_requests_are_dropped(ranges: list[tuple[int, int]], lies: dict[str, int]) -> None:
    async with serving(PATIENT) as (transport, grant, _):
        async with Raw(transport) as raw:
            await raw.hello()
            await raw.send(request(grant.key, ranges, **lies))
            # A sum that happens to be right is denied, every other one is dropped; no byte comes either way.
            with contextlib.suppress(ConnectionResetError):
                assert await raw.receive(17) in (b"", _wire.ANSWER.pack(_wire.ANSWER_MAGIC, _wire.DENIED, 0))
        await still_serves(transport, grant)


async def test_strangers_cannot_crowd_out_a_peer() -> None:
    async with serving(TcpConfig(handshake_timeout=60, max_strangers=8, max_connections=4)) as (
        transport,
        grant,
        _,
    ):
        await still_serves(transport, grant)
        before = set(threading.enumerate())
        async with contextlib.AsyncExitStack() as stack:
            crowd = [await stack.enter_async_context(Raw(transport)) for _ in range(100)]
            await still_serves(transport, grant)
            # All but the newest few are gone: what they cost is bounded, and no thread is among it.
            for raw in crowd[: 100 - 8]:
                assert await raw.is_dropped()
            await no_threads_but(before)
            await still_serves(transport, grant)


async def test_more_peers_than_allowed_are_told_so() -> None:
    async with serving(TcpConfig(max_connections=2)) as (transport, grant, _):
        one, two = TcpTransport(TcpConfig(streams=2)), TcpTransport(TcpConfig(streams=1))
        link = await one.connect(transport.endpoint, timeout=20)
        with pytest.raises(PeerUnreachable, match="as many connections as it may"):
            await two.connect(transport.endpoint, timeout=20)
        await still_serves(transport, grant, link)
        await one.close()
        await two.close()


async def test_a_peer_that_takes_nothing_cannot_hold_a_range() -> None:
    async with serving(PATIENT) as (transport, grant, arena):
        other = transport.grant(0, ARENA)
        async with Raw(transport) as raw:
            await raw.hello()
            await raw.send(request(grant.key, [(0, ARENA)]))
            assert len(await raw.receive(16 + 100)) == 116  # the sender is under way and stuck
            await still_serves(transport, other)
            assert await transport.revoke(grant)
            arena.region.array[:] = FRESH
            rest = await raw.receive(ARENA)
            assert len(rest) < ARENA - 100
            assert FRESH not in rest


async def test_a_peer_that_stalls_is_dropped() -> None:
    async with serving(TcpConfig(stall_timeout=0.2, socket_buffer=64 << 10)) as (transport, grant, _):
        async with Raw(transport) as raw:
            await raw.hello()
            await raw.send(request(grant.key, [(0, ARENA)]))
            server = transport._server
            assert server is not None
            while server._connections:
                await asyncio.sleep(0.01)
        await still_serves(transport, grant)


async def test_a_port_in_use_is_named_at_start() -> None:
    async with serving(TcpConfig()) as (transport, _, _):
        port = transport.endpoint["port"]
        second = TcpTransport(TcpConfig(port=int(port)))
        with pytest.raises(TransportError, match=f"127.0.0.1:{port}") as caught:
            await second.start()
        assert "in use" in str(caught.value)
        assert caught.value.field == "transport.tcp.port"
        await second.close()


async def test_a_peer_that_restarted_at_the_same_port_is_another_one() -> None:
    reader = TcpTransport(TcpConfig(streams=1))
    async with serving(TcpConfig()) as (transport, grant, _):
        port = int(transport.endpoint["port"])
        link = await reader.connect(transport.endpoint, timeout=20)
        stale = transport.endpoint
    async with serving(TcpConfig(port=port)) as (transport, _, _):
        with pytest.raises(TransferFailed):
            await link.read(grant.key, SEGMENTS, Targets([5000]).regions, timeout=20)
        assert link.broken
        with pytest.raises(PeerUnreachable):
            await reader.connect(stale, timeout=20)
        fresh = await reader.connect(transport.endpoint, timeout=20)
        with pytest.raises(AccessDenied):
            await fresh.read(grant.key, SEGMENTS, Targets([5000]).regions, timeout=20)
    await reader.close()


async def test_a_listener_that_never_answers() -> None:
    reader = TcpTransport(TcpConfig(streams=2))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = {**TcpTransport().endpoint, "port": str(deaf.getsockname()[1])}
        before = set(threading.enumerate())
        with pytest.raises(DeadlineExceeded):
            await reader.connect(endpoint, timeout=0.1)
        task = asyncio.get_running_loop().create_task(reader.connect(endpoint, timeout=60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await no_threads_but(before)


async def test_a_server_that_answers_nonsense() -> None:
    reader = TcpTransport(TcpConfig(streams=1))

    async def chatter(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.here ESMTP\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(chatter, "127.0.0.1", 0)
    endpoint = {**TcpTransport().endpoint, "port": str(server.sockets[0].getsockname()[1])}
    with pytest.raises(PeerUnreachable):
        await reader.connect(endpoint, timeout=20)
    server.close()
    await server.wait_closed()


def test_a_loopback_address_of_another_host_is_not_reachable() -> None:
    transport = TcpTransport()
    endpoint = {**transport.endpoint, "port": "4000"}
    assert transport.reachable(endpoint).ok
    verdict = transport.reachable({**endpoint, "net": "elsewhere"})
    assert not verdict.ok
    assert "another host" in verdict.reason
    assert transport.reachable({**endpoint, "net": "elsewhere", "host": "10.0.0.7"}).ok


@pytest.mark.parametrize(
    "changes",
    [{"port": "1" * 5000}, {"host": "a" * 300}, {"host": "a..b"}, {"host": "x\0y"}, {"host": "\ud800"}],
)
async def test_an_endpoint_that_is_none_is_no_peer(changes: dict[str, str]) -> None:
    transport = TcpTransport()
    endpoint = {**transport.endpoint, "port": "4000", **changes}
    transport.reachable(endpoint)
    with pytest.raises(PeerUnreachable):
        await transport.connect(endpoint, timeout=20)
    await transport.close()
