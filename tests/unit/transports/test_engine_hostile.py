"""What a peer of a transport on a foreign engine may say or do without harm, and what a failed transfer leaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hawk.errors import HawkError, PeerUnreachable
from hawk.memory.region import Region, Segments
from hawk.transports._engine import _wire
from hawk.transports._engine._kept import Kept
from hawk.transports._engine._seam import EngineFailed
from hawk.transports.mooncake import MooncakeConfig
from hawk.transports.mooncake._te import MooncakeEngine
from hawk.transports.nixl import NixlConfig, NixlTransport
from hawk.transports.nixl._agent import NixlAgent
from hawk.transports.testing import SharedArena
from tests import fake_engines
from tests.fake_engines import FakeMooncake

SMALL: dict[str, Any] = {"chunk": 64 << 10, "piece": 1 << 20, "grace": 0.2, "drain_timeout": 0.05}


def agent() -> NixlAgent:
    return NixlAgent("tcp", package=fake_engines)


def nixl(direction: str = "push", make: Any = agent) -> NixlTransport:
    return NixlTransport(NixlConfig(direction=direction, tls="tcp", **SMALL), opener=make)  # type: ignore[arg-type]


def rows(*values: int) -> Any:
    return np.asarray(values, np.int64)


@contextlib.contextmanager
def registered(engine: NixlAgent, nbytes: int) -> Iterator[Any]:
    memory = np.zeros(nbytes, np.uint8)
    engine.register(memory.ctypes.data, nbytes)
    yield memory
    engine.close()


@pytest.mark.parametrize("order", ["fails, then parts", "parts, then fails"])
def test_a_transfer_that_failed_leaves_nothing_at_the_side_that_goes_on(order: str) -> None:
    serving = agent()
    with registered(serving, 2 * fake_engines.STEP) as source:
        for _ in range(3):
            reading = agent()
            with registered(reading, 2 * fake_engines.STEP) as target:
                peer = serving.meet(reading.description)
                half = fake_engines.STEP
                handle = serving.post(
                    peer,
                    True,
                    rows(source.ctypes.data, source.ctypes.data + half),
                    rows(target.ctypes.data, target.ctypes.data + half),
                    rows(half, half),
                )
                assert not serving.poll(handle)
                if order == "parts, then fails":
                    serving.part(peer)
            del reading
            with pytest.raises(EngineFailed):
                serving.poll(handle)
            serving.part(peer)
            assert handle._released  # type: ignore[attr-defined]
            assert not serving._under_way
            assert not serving._failed


def test_a_transfer_that_does_not_begin_leaves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    serving, reading = agent(), agent()
    with registered(serving, 64) as source, registered(reading, 64) as target:
        peer = serving.meet(reading.description)
        monkeypatch.setattr(fake_engines.nixl_agent, "transfer", lambda self, handle: "ERR")
        with pytest.raises(EngineFailed):
            serving.post(peer, True, rows(source.ctypes.data), rows(target.ctypes.data), rows(64))
        serving.part(peer)
        assert not serving._under_way
        assert not serving._failed


def test_two_arrays_over_the_same_bytes_are_one_registration_until_both_are_gone() -> None:
    engine, kept = agent(), Kept()
    memory = np.zeros(8192, np.uint8)
    first, second, other = memory[:4096], memory[:4096], memory[4096:]
    assert kept.knows(engine, first)
    assert kept.knows(engine, second)
    known = set(engine._registered)
    del first
    assert kept.knows(engine, other)
    assert known < set(engine._registered)
    del second
    assert kept.knows(engine, memory[:])
    assert not known & set(engine._registered)
    engine.close()


def test_what_an_engine_does_not_take_is_remembered_for_as_long_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, kept, asked = agent(), Kept(), []

    def refuse(address: int, nbytes: int, gpu: int) -> None:
        asked.append(address)
        raise EngineFailed("not this one")

    monkeypatch.setattr(engine, "register", refuse)
    memory = np.zeros(4096, np.uint8)
    held = memory[:]
    for _ in range(3):
        assert not kept.knows(engine, held)
    assert len(asked) == 1
    del held
    # What lies there now is asked for anew, and nothing is kept of what was there.
    for start in range(100):
        assert not kept.knows(engine, memory[start:])
    assert len(asked) == 101
    assert len(kept._refused) <= 1
    engine.close()


@pytest.mark.parametrize(
    "description",
    [
        *(b"", b"x", b":", b"127.0.0.1", b"127.0.0.1:-1", b"a:0", b"a" * 60_000 + b":1", b"a:1\n", b"a:1:"),
        *(b"http://a:1/", b"a b:1", b"\xff:1"),
    ],
    ids=lambda text: str(text[:12]),
)
def test_a_description_that_is_no_host_and_port_reaches_no_engine(description: bytes) -> None:
    engine = MooncakeEngine(MooncakeConfig(), module=FakeMooncake())
    with pytest.raises(EngineFailed):
        engine.meet(description)
    assert engine.meet(engine.description)
    engine.close()


@contextlib.contextmanager
def door(welcome: bytes, *then: bytes) -> Iterator[dict[str, str]]:
    """The endpoint of a server that is made up: one connection, one welcome, and words that nobody asked for."""
    serving = nixl()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):  # who is turned away hangs up
                sock.recv(_wire.HELLO.size)
                sock.sendall(welcome)
                for words in then:
                    sock.recv(1 << 16)
                    sock.sendall(words)
                while sock.recv(1 << 16):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield serving.endpoint | {"port": str(listener.getsockname()[1])}
        thread.join()


@pytest.mark.parametrize(("address", "nbytes"), [(1 << 63, 4096), ((1 << 64) - 1, 1), (4096, (1 << 64) - 1)])
async def test_memory_where_no_process_has_any_is_no_welcome(address: int, nbytes: int) -> None:
    theirs = agent()
    ours = theirs.description
    welcome = _wire.WELCOME.pack(_wire.WELCOME_MAGIC, _wire.OK, address, nbytes, 0, len(ours)) + ours
    reading = nixl("pull")
    with door(welcome) as endpoint, pytest.raises(PeerUnreachable, match="another protocol"):
        await reading.connect(endpoint, timeout=30.0)
    await reading.close()
    theirs.close()


async def test_pushes_that_nobody_asked_for_are_not_waited_for() -> None:
    """The reader pulls, whatever the welcome promises."""
    theirs = agent()
    ours = theirs.description
    head = _wire.WELCOME.pack(_wire.WELCOME_MAGIC, _wire.OK, 4096, 4096, _wire.PUSHES, len(ours))
    refused = _wire.VERDICT.pack(_wire.DENIED, 0)
    reading = nixl("pull")
    with door(head + ours, refused) as endpoint:
        link = await reading.connect(endpoint, timeout=30.0)
        region = Region("target", np.zeros(64, np.uint8))
        with pytest.raises(HawkError, match="the key is unknown"):
            await link.read(bytes(32), Segments.of([(0, 0, 0, 64)]), [region], timeout=30.0)
        await link.close()
    await reading.close()
    theirs.close()


class Talk:
    """A reader that is made up, by hand."""

    def __init__(self, endpoint: dict[str, str], engine: NixlAgent) -> None:
        self._endpoint, self._engine = endpoint, engine

    async def __aenter__(self) -> Talk:
        where = self._endpoint["host"], int(self._endpoint["port"])
        self.reader, self.writer = await asyncio.open_connection(*where)
        ours, token = self._engine.description, bytes.fromhex(self._endpoint["token"])
        hello = _wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, token, _wire.PUSHES, len(ours))
        self.writer.write(hello + ours)
        *_, length = _wire.WELCOME.unpack(await self.heard(_wire.WELCOME.size))
        await self.heard(length)
        return self

    async def heard(self, nbytes: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(nbytes), 30.0)

    async def push(self, key: bytes, target: int) -> int:
        row = np.asarray([[0, target, 64]], _wire.ROW).tobytes()
        self.writer.write(_wire.REQUEST.pack(_wire.PUSH, 1, 1, 0, 64, key) + row)
        return int(_wire.VERDICT.unpack(await self.heard(_wire.VERDICT.size))[0])

    async def tell(self, description: bytes) -> None:
        head = _wire.REQUEST.pack(_wire.TELL, len(description), 0, 0, 0, bytes(32))
        self.writer.write(head + description)

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()


async def test_a_reader_that_connects_anew_is_not_parted_with_when_its_old_connection_ends() -> None:
    serving, arena, reading = nixl(), SharedArena(1 << 16), agent()
    await serving.start()
    serving.serve(arena.region)
    key = serving.grant(0, 4096).key
    with registered(reading, 64) as target:
        async with Talk(serving.endpoint, reading) as fresh:
            async with Talk(serving.endpoint, reading) as old:
                assert await old.push(key, target.ctypes.data) == _wire.OK
                old.writer.write_eof()
                assert await old.reader.read() == b""  # the server has parted with it
            assert await fresh.push(key, target.ctypes.data) == _wire.OK
            assert (target == arena.region.array[:64]).all()
    await serving.close()
    arena.close()


async def test_a_reader_speaks_for_no_other() -> None:
    serving, arena, reading, other = nixl(), SharedArena(1 << 16), agent(), agent()
    await serving.start()
    serving.serve(arena.region)
    key = serving.grant(0, 4096).key
    with registered(reading, 64), registered(other, 64) as target:
        async with Talk(serving.endpoint, other) as honest, Talk(serving.endpoint, reading) as liar:
            await liar.tell(other.description)
            assert await asyncio.wait_for(liar.reader.read(), 30.0) == b""
            assert await honest.push(key, target.ctypes.data) == _wire.OK
    await serving.close()
    arena.close()


async def test_answers_that_a_reader_leaves_unread_are_bounded() -> None:
    serving, arena, reading = nixl(), SharedArena(1 << 16), agent()
    await serving.start()
    serving.serve(arena.region)
    key = serving.grant(0, 4096).key
    pair = b"".join(_wire.REQUEST.pack(op, 0, 0, 0, 64, key) for op in (_wire.ENTER, _wire.LEAVE))
    async with Talk(serving.endpoint, reading) as greedy:
        greedy.reader._transport.pause_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(60.0):
                while True:
                    greedy.writer.write(pair * 2000)
                    await greedy.writer.drain()
    reading.close()
    await serving.close()
    arena.close()
