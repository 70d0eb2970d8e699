"""The observe server: its three pages, and everything that a stranger may send instead."""

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from hawk.errors import ControlError, InvalidArgument
from hawk.observe.http import ObserveServer, split_address
from hawk.observe.metrics import Metrics

Make = Callable[..., Awaitable[ObserveServer]]
WAIT = 20


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    servers: list[ObserveServer] = []

    async def start(
        ready: Callable[[], str | None] = lambda: None, metrics: Metrics | None = None, **options: object
    ) -> ObserveServer:
        server = ObserveServer("127.0.0.1:0", metrics or Metrics(), ready, **options)  # type: ignore[arg-type]
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.close()


async def _connect(server: ObserveServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(*split_address(server.address))


async def _ask(server: ObserveServer, request: bytes) -> tuple[int, str, str]:
    reader, writer = await _connect(server)
    writer.write(request)
    raw = await asyncio.wait_for(reader.read(), WAIT)
    writer.close()
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body.decode()


def _get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def test_metrics_are_served(make: Make) -> None:
    metrics = Metrics()
    metrics.bad_frame("magic")
    status, head, body = await _ask(await make(metrics=metrics), _get("/metrics?x=1"))
    assert status == 200
    assert "text/plain" in head
    assert 'hawk_bad_frames_total{reason="magic"} 1.0' in body


async def test_ready_follows_the_agent(make: Make) -> None:
    reason: list[str | None] = ["draining"]
    server = await make(ready=lambda: reason[0])
    assert (await _ask(server, _get("/readyz")))[::2] == (503, "draining\n")
    assert (await _ask(server, _get("/livez")))[::2] == (200, "ok\n")
    reason[0] = None
    assert (await _ask(server, _get("/readyz")))[::2] == (200, "ok\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (_get("/nothing"), 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"rubbish\r\n\r\n", 400),
        (b"\x16\x03\x01\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nA: " + b"a" * 60_000, 431),
    ],
)
async def test_other_requests_get_a_status(make: Make, request_bytes: bytes, status: int) -> None:
    server = await make()
    assert (await _ask(server, request_bytes))[0] == status
    assert (await _ask(server, _get("/livez")))[0] == 200


async def test_head_has_no_body(make: Make) -> None:
    status, head, body = await _ask(await make(), b"HEAD /livez HTTP/1.0\r\n\r\n")
    assert (status, body) == (200, "")
    assert "Content-Length: 3" in head


async def test_who_never_finishes_asking_is_dropped(make: Make) -> None:
    server = await make(request_seconds=0.05)
    reader, writer = await _connect(server)
    writer.write(b"GET /metrics")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), WAIT)
    writer.close()
    assert (await _ask(await make(), _get("/livez")))[0] == 200


async def test_who_resets_leaves_nothing(make: Make) -> None:
    """What its connection broke on refers to the server's frames, and is told to nobody: neither is kept."""
    server = await make()
    _, writer = await _connect(server)
    writer.write(b"GET /")
    async with asyncio.timeout(WAIT):
        while not server._serving:
            await asyncio.sleep(0)
        (kept,) = map(weakref.ref, server._serving.values())
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        gc.disable()
        try:
            writer.transport.abort()
            while server._serving:
                await asyncio.sleep(0)
            assert kept() is None
        finally:
            gc.enable()


async def test_connections_are_bounded(make: Make) -> None:
    server = await make(connections=2)
    held = [await _connect(server) for _ in range(2)]
    for _, writer in held:
        writer.write(b"GET")
    while len(server._serving) < 2:
        await asyncio.sleep(0)
    reader, writer = await _connect(server)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), WAIT)
    writer.close()
    for _, one in held:
        one.close()
    while server._serving:
        await asyncio.sleep(0)
    assert (await _ask(server, _get("/livez")))[0] == 200


async def test_a_port_in_use_is_named(make: Make) -> None:
    taken = await make()
    second = ObserveServer(taken.address, Metrics(), lambda: None)
    with pytest.raises(ControlError) as caught:
        await second.start()
    assert taken.address in str(caught.value)
    assert caught.value.field == "agent.observe"


async def test_close_ends_what_is_open_and_may_be_repeated(make: Make) -> None:
    server = await make()
    reader, writer = await _connect(server)
    writer.write(b"GET")
    while not server._serving:
        await asyncio.sleep(0)
    await asyncio.wait_for(server.close(), WAIT)
    await server.close()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), WAIT)
    writer.close()


@pytest.mark.parametrize("bad", ["9400", ":9400", "host:", "host:x", "host:70000", "host:-1"])
def test_addresses_are_checked(bad: str) -> None:
    with pytest.raises(InvalidArgument):
        split_address(bad)


def test_ipv6_brackets_come_off() -> None:
    assert split_address("[::1]:9400") == ("::1", 9400)
