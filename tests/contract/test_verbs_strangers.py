"""Who talks nonsense to the handshake port of verbs costs its own connection, and keeps nobody else out."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from hawk.errors import PeerUnreachable
from hawk.memory.region import Segments
from hawk.transports.testing import LIMIT, SharedArena, Targets
from hawk.transports.verbs import VerbsConfig, VerbsTransport, _wire
from hawk.transports.verbs.testing import FakeDriver

ARENA = 1 << 20
SEGMENTS = Segments.of([(0, 0, 100, 5000)])


@contextlib.asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[tuple[VerbsTransport, bytes]]:
    arena, transport = SharedArena(ARENA), VerbsTransport(VerbsConfig(**config), driver=FakeDriver())
    await transport.start()
    try:
        transport.serve(arena.region)
        yield transport, transport.grant(0, ARENA).key
    finally:
        await transport.close()
        arena.close()
    assert isinstance(transport.driver, FakeDriver)
    assert all(d.closed and d.left == 0 for d in transport.driver.opened)


@contextlib.asynccontextmanager
async def honest() -> AsyncIterator[VerbsTransport]:
    reading = VerbsTransport(VerbsConfig(queue_pairs=1), driver=FakeDriver())
    await reading.start()
    try:
        yield reading
    finally:
        await reading.close()


async def reads(reading: VerbsTransport, transport: VerbsTransport, key: bytes) -> None:
    link = await reading.connect(transport.endpoint, timeout=LIMIT)
    await link.read(key, SEGMENTS, Targets([5000]).regions, timeout=LIMIT)
    await link.close()


async def dial(transport: VerbsTransport) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(transport.endpoint["host"], int(transport.endpoint["port"]))


async def cut_off(reader: asyncio.StreamReader) -> bytes:
    """What the server said before it ended the connection."""
    async with asyncio.timeout(LIMIT):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def queue(**changes: Any) -> _wire.QueueFacts:
    facts = {
        "port": 0,
        "number": 5,
        "psn": 7,
        "gid": bytes(15) + b"\1",
        "lid": 0,
        "link": "Ethernet",
        "mtu": 5,
        "message": 1 << 20,
        "reads_out": 4,
        "reads_in": 4,
    }
    return _wire.QueueFacts(**{**facts, **changes})


def hello(transport: VerbsTransport, queues: list[_wire.QueueFacts] | None = None, **changes: Any) -> bytes:
    facts = {
        "version": _wire.VERSION,
        "token": bytes.fromhex(transport.endpoint["token"]),
        "queues": [queue()] if queues is None else queues,
    }
    return frame(_wire.Hello(**{**facts, **changes}))


async def test_junk_is_cut_off_and_peers_come_in_meanwhile() -> None:
    async with serving(handshake_timeout=1.0) as (transport, key), honest() as reading:
        junk = [
            b"GET / HTTP/1.1\r\n\r\n",
            struct.pack("<I", 0),
            struct.pack("<I", 1 << 30),
            struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
            frame({"type": "hello"}),
            frame(_wire.Enter(1, bytes(32))),
            hello(transport, token=bytes(16)),
            hello(transport, token=b""),
            hello(transport, version=2),
            hello(transport)[:-3],
            b"",
        ]
        streams = [await dial(transport) for _ in junk]
        for (_, writer), data in zip(streams, junk, strict=True):
            writer.write(data)
        await reads(reading, transport, key)
        assert [await cut_off(reader) for reader, _ in streams] == [b""] * len(junk)
        for _, writer in streams:
            writer.close()
        assert not transport._server.sessions  # type: ignore[union-attr]
        await reads(reading, transport, key)


@pytest.mark.parametrize(
    "queues",
    [
        [],
        [queue()] * 65,
        [queue(port=1)],
        [queue(port=-1)],
        [queue(number=0)],
        [queue(number=1 << 24)],
        [queue(psn=-1)],
        [queue(gid=b"short")],
        [queue(lid=1 << 16)],
        [queue(mtu=0)],
        [queue(mtu=9)],
        [queue(message=0)],
        [queue(reads_in=0)],
        [queue(reads_out=256)],
    ],
)
async def test_impossible_queue_pairs_are_cut_off(queues: list[_wire.QueueFacts]) -> None:
    async with serving() as (transport, key), honest() as reading:
        reader, writer = await dial(transport)
        writer.write(hello(transport, queues))
        assert await cut_off(reader) == b""
        writer.close()
        await reads(reading, transport, key)


async def test_a_peer_that_was_let_in_and_breaks_the_rules_loses_its_link_only() -> None:
    bad = [
        frame(_wire.Renew(1, 7, queue())),
        frame(_wire.Renew(1, -1, queue())),
        frame(_wire.Renew(1, 0, queue(number=0))),
        struct.pack("<I", _wire.MOST_BYTES + 1),
        frame(_wire.Welcome([])),
    ]
    async with serving() as (transport, key), honest() as reading:
        for data in bad:
            reader, writer = await dial(transport)
            writer.write(hello(transport) + data)
            said = await cut_off(reader)
            assert len(said) > 4, "it was let in first"
            assert msgspec.msgpack.decode(said[4 : 4 + struct.unpack("<I", said[:4])[0]])["type"] == "welcome"
            writer.close()
            await reads(reading, transport, key)


async def test_of_too_many_strangers_the_oldest_goes() -> None:
    async with serving(max_strangers=3) as (transport, key), honest() as reading:
        streams = [await dial(transport) for _ in range(8)]
        gone = [await cut_off(reader) for reader, _ in streams[:5]]
        assert gone == [b""] * 5
        await reads(reading, transport, key)
        for _, writer in streams:
            writer.close()


async def test_no_more_links_than_are_allowed() -> None:
    async with serving(max_connections=1) as (transport, key), honest() as reading:
        link = await reading.connect(transport.endpoint, timeout=LIMIT)
        with pytest.raises(PeerUnreachable, match="max_connections"):
            await reading.connect(transport.endpoint, timeout=LIMIT)
        await link.close()
        async with asyncio.timeout(LIMIT):
            while transport._server.sessions:  # type: ignore[union-attr]
                await asyncio.sleep(0)
        await reads(reading, transport, key)


async def test_a_server_that_talks_nonsense_is_no_peer() -> None:
    async with serving() as (transport, _), honest() as reading:
        answers = [
            b"\x00\x00\x00\x00",
            frame(_wire.Welcome([])),
            frame(_wire.Welcome([queue(port=3)])),
            frame(_wire.Entered(1, 0, 1, 0, [0], [[1]], [1])),
            frame(_wire.Refused(0, _wire.FAILED, "no room")),
            struct.pack("<I", 1 << 31),
        ]
        said: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(4)
            writer.write(said[-1])
            await writer.drain()
            writer.close()

        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        endpoint = {**transport.endpoint, "host": "127.0.0.1", "port": str(port)}
        for each in answers:
            said.append(each)
            with pytest.raises(PeerUnreachable):
                await reading.connect(endpoint, timeout=LIMIT)
        listener.close()
        await listener.wait_closed()
        assert isinstance(reading.driver, FakeDriver)
        assert not reading.driver.opened[0].queues
