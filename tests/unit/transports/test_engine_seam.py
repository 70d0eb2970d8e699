"""What transports on foreign engines do with an engine that fails, stalls or takes too little."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from hawk.errors import (
    AccessDenied,
    DeadlineExceeded,
    TransferFailed,
    TransportError,
)
from hawk.memory.region import Region, Segments
from hawk.transports._engine import _link, _wire
from hawk.transports._engine._seam import EngineFailed
from hawk.transports.mooncake import MooncakeConfig, MooncakeTransport
from hawk.transports.mooncake._te import MooncakeEngine
from hawk.transports.nixl import NixlConfig, NixlTransport, _vram
from hawk.transports.nixl._agent import NixlAgent
from hawk.transports.testing import Rig, SharedArena, Targets, refused, scatter
from tests import fake_engines
from tests.fake_engines import FakeMooncake

SMALL: dict[str, Any] = {
    "chunk": 64 << 10,
    "piece": 1 << 20,
    "grace": 0.2,
    "drain_timeout": 0.05,
    "connect_timeout": 5.0,
}


def nixl(
    direction: str = "pull", make: Callable[[], NixlAgent] | None = None, **settings: Any
) -> NixlTransport:
    config = NixlConfig(direction=direction, tls="tcp", **{**SMALL, **settings})  # type: ignore[arg-type]
    return NixlTransport(config, opener=make or (lambda: NixlAgent("tcp", package=fake_engines)))


def mooncake(module: FakeMooncake, **settings: Any) -> MooncakeTransport:
    config = MooncakeConfig(**{**SMALL, **settings})
    return MooncakeTransport(config, opener=lambda: MooncakeEngine(config, module=module))


@asynccontextmanager
async def rig(serving: Any, reading: Any, nbytes: int = 1 << 20) -> AsyncIterator[Rig]:
    arena = SharedArena(nbytes)
    try:
        await serving.start()
        await reading.start()
        serving.serve(arena.region)
        link = await reading.connect(serving.endpoint, timeout=30.0)
        try:
            yield Rig(serving, reading, link, arena.region, arena.region.array.copy())
        finally:
            await link.close()
    finally:
        await reading.close()
        await serving.close()
        arena.close()


class Counting(NixlAgent):
    """Counts transfers and their rows; stalls while `stalled` is set."""

    made: list[Counting]
    stalled: threading.Event

    def __init__(self) -> None:
        super().__init__("tcp", package=fake_engines)
        self.rows: list[int] = []
        self.closed = False
        self.forgotten = 0
        self.made.append(self)

    def forget(self, address: int, nbytes: int) -> None:
        self.forgotten += 1
        super().forget(address, nbytes)

    def post(
        self, peer: object, write: bool, local: Any, remote: Any, nbytes: Any, *more: Any, **gpus: int
    ) -> Any:
        self.rows.append(len(nbytes))
        return super().post(peer, write, local, remote, nbytes, *more, **gpus)

    def poll(self, handle: Any) -> bool:
        return not self.stalled.is_set() and super().poll(handle)

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture
def counting() -> type[Counting]:
    return type("CountingHere", (Counting,), {"made": [], "stalled": threading.Event()})


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_short_rows_go_as_the_long_ranges_that_they_are_at_the_sender(
    counting: type[Counting], direction: str
) -> None:
    async with rig(nixl(direction, counting), nixl(direction, counting)) as r:
        grant = r.serving.grant(0, 1 << 20)
        segments, sizes = scatter([2048] * 300, 3, gap=0)
        targets = Targets(sizes)
        await r.read(grant, segments, targets)
        targets.check(segments, r.source)
        rows = [n for agent in counting.made for n in agent.rows]
        assert rows
        assert max(rows) == 1, "neighbours at the sender are one range"


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_long_rows_go_straight_to_their_places(counting: type[Counting], direction: str) -> None:
    async with rig(nixl(direction, counting, gather=4096), nixl(direction, counting, gather=4096)) as r:
        grant = r.serving.grant(0, 1 << 20)
        segments, sizes = scatter([8192] * 40, 3, gap=64)
        targets = Targets(sizes)
        await r.read(grant, segments, targets)
        targets.check(segments, r.source)
        assert max(n for agent in counting.made for n in agent.rows) > 1
        known = [memory for agent in counting.made for memory in agent._registered]
        assert (targets.regions[0].address, targets.regions[0].nbytes) in known
        assert r.serving.counts()["chunk-pushed" if direction == "push" else "piece-entered"] > 0


async def test_memory_that_the_engine_does_not_take_is_filled_by_way_of_a_buffer() -> None:
    class Picky(NixlAgent):
        def register(self, address: int, nbytes: int, gpu: int = -1) -> None:
            if nbytes == 8192 * 3:
                raise EngineFailed("no such memory")
            super().register(address, nbytes, gpu)

    def make() -> NixlAgent:
        return Picky("tcp", package=fake_engines)

    async with rig(nixl(make=make, gather=0), nixl(make=make, gather=0)) as r:
        targets = Targets([8192 * 3])
        segments = Segments.of([(0, 0, 77, 8192 * 3)])
        await r.read(r.serving.grant(0, 1 << 20), segments, targets)
        targets.check(segments, r.source)


async def test_a_read_that_stalls_ends_by_closing_its_engine(counting: type[Counting]) -> None:
    async with rig(nixl(make=counting), nixl(make=counting)) as r:
        grant = r.serving.grant(0, 1 << 20)
        targets, segments = Targets([1 << 20]), Segments.of([(0, 0, 0, 1 << 20)])
        counting.stalled.set()
        await refused(DeadlineExceeded, r.link.read(grant.key, segments, targets.regions, timeout=0.05))
        assert counting.made[2].closed
        counting.stalled.clear()
        targets.fill(0x5A)
        others = Targets([1 << 20])
        await r.read(grant, segments, others)
        others.check(segments, r.source)
        assert targets.only(0x5A)
        assert not counting.made[0].closed, "the serving side's engine is nobody's to end"


async def test_memory_that_is_gone_is_forgotten_before_its_address_is_used_again(
    counting: type[Counting],
) -> None:
    async with rig(nixl(make=counting, gather=0), nixl(make=counting, gather=0)) as r:
        grant = r.serving.grant(0, 1 << 20)
        segments = Segments.of([(0, 0, 0, 4096)])
        base = np.zeros(8192, np.uint8)
        for _ in range(3):
            await r.link.read(grant.key, segments, [Region("once", base[:4096])], timeout=30.0)
        assert counting.made[2].forgotten == 2
        assert len([n for _, n in counting.made[2]._registered if n == 4096]) == 1
        assert len(counting.made[2]._agent.memory) == len(counting.made[2]._registered)


async def test_an_engine_that_fails_on_large_batches_is_made_anew_and_gets_smaller_ones() -> None:
    there, here = FakeMooncake(), FakeMooncake()
    here.faults.refuse = lambda rows: rows > 4
    settings = {"gather": 0, "batch": 16}
    async with rig(mooncake(there, **settings), mooncake(here, **settings)) as r:
        segments, sizes = scatter([3000] * 30, 2, gap=9)
        targets = Targets(sizes)
        await r.read(r.serving.grant(0, 1 << 20), segments, targets)
        targets.check(segments, r.source)
    assert here.faults.made > 2, "the one of the reading side's server, the link's, and a fresh one"
    assert there.faults.made == 1
    assert min(here.faults.asked) <= 4


async def test_an_engine_is_never_handed_more_rows_than_it_takes() -> None:
    here = FakeMooncake()
    settings = {"gather": 0, "chunk": 1 << 20}
    async with rig(mooncake(FakeMooncake(), **settings), mooncake(here, **settings)) as r:
        segments, sizes = scatter([64] * 6000, 2, gap=9)
        targets = Targets(sizes)
        await r.read(r.serving.grant(0, 1 << 20), segments, targets)
        targets.check(segments, r.source)
    assert max(here.faults.asked) <= 1024
    assert here.faults.made == 2, "none was made anew"


async def test_an_engine_that_always_fails_ends_the_read_and_no_more() -> None:
    here = FakeMooncake()
    async with rig(mooncake(FakeMooncake()), mooncake(here, retries=1)) as r:
        grant = r.serving.grant(0, 1 << 20)
        targets, segments = Targets([4096]), Segments.of([(0, 0, 0, 4096)])
        here.faults.refuse = lambda rows: True
        await refused(TransferFailed, r.read(grant, segments, targets))
        here.faults.refuse = lambda rows: False
        await r.read(grant, segments, targets, link=await r.usable_link())
        targets.check(segments, r.source)


async def test_pushes_outside_the_key_or_without_being_agreed_on() -> None:
    async with rig(nixl("push"), nixl("push")) as r:
        targets, segments = Targets([64]), Segments.of([(0, 0, 8000, 64)])
        for key in (bytes(32), r.serving.grant(0, 4096).key):
            reading = r.link.read(key, segments, targets.regions, timeout=30.0)
            await refused(AccessDenied, reading)
        assert targets.only(0xA5)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(4096, 64), (4095, 2), (-1, 2), (0, 0), (0, -1), (0, 4097), (1 << 62, 64), (64, (1 << 63) - 1)],
)
async def test_rows_of_a_push_that_the_key_does_not_cover(offset: int, nbytes: int) -> None:
    ours = NixlAgent("tcp", package=fake_engines)
    target = np.full(8192, 0xA5, np.uint8)
    ours.register(int(target.ctypes.data), target.nbytes)
    async with rig(nixl("push"), nixl("push")) as r:
        endpoint, key = r.serving.endpoint, r.serving.grant(0, 4096).key
        reader, writer = await asyncio.open_connection(endpoint["host"], int(endpoint["port"]))
        told = ours.description
        writer.write(_hello(bytes.fromhex(endpoint["token"]), _wire.PUSHES, len(told), told))
        welcome = _wire.WELCOME.unpack(await reader.readexactly(_wire.WELCOME.size))
        await reader.readexactly(welcome[5])
        assert welcome[4] & _wire.PUSHES
        rows = np.asarray(
            [[0, int(target.ctypes.data), 64], [offset, int(target.ctypes.data), nbytes]], _wire.ROW
        )
        writer.write(_wire.REQUEST.pack(_wire.PUSH, 2, 7, 0, 4096, key) + rows.tobytes())
        assert _wire.VERDICT.unpack(await reader.readexactly(_wire.VERDICT.size)) == (_wire.DENIED, 7)
        assert (target == 0xA5).all()
        writer.write(_wire.REQUEST.pack(_wire.PUSH, 1, 8, 0, 4096, key) + rows[:1].tobytes())
        assert _wire.VERDICT.unpack(await reader.readexactly(_wire.VERDICT.size)) == (_wire.OK, 8)
        assert (target[:64] == r.source[:64]).all()
        writer.close()
    ours.close()


async def test_who_asks_for_two_pushes_hears_of_the_first_before_the_second_is_begun() -> None:
    heard = threading.Event()

    class Waits(NixlAgent):
        posts = 0

        def post(self, *rows: Any, **gpus: int) -> Any:
            self.posts += 1
            if self.posts == 2 and not heard.wait(30.0):
                raise EngineFailed("nobody heard of the first one")
            return super().post(*rows, **gpus)

    ours = NixlAgent("tcp", package=fake_engines)
    target = np.zeros(8192, np.uint8)
    ours.register(int(target.ctypes.data), target.nbytes)
    async with rig(nixl("push", lambda: Waits("tcp", package=fake_engines)), nixl("push")) as r:
        endpoint, key = r.serving.endpoint, r.serving.grant(0, 8192).key
        reader, writer = await asyncio.open_connection(endpoint["host"], int(endpoint["port"]))
        told = ours.description
        writer.write(_hello(bytes.fromhex(endpoint["token"]), _wire.PUSHES, len(told), told))
        welcome = _wire.WELCOME.unpack(await reader.readexactly(_wire.WELCOME.size))
        await reader.readexactly(welcome[5])
        writer.write(
            b"".join(
                _wire.REQUEST.pack(_wire.PUSH, 1, number, 0, 8192, key)
                + np.asarray([[at, int(target.ctypes.data) + at, 4096]], _wire.ROW).tobytes()
                for number, at in ((1, 0), (2, 4096))
            )
        )
        assert _wire.VERDICT.unpack(await reader.readexactly(_wire.VERDICT.size)) == (_wire.OK, 1)
        heard.set()
        assert _wire.VERDICT.unpack(await reader.readexactly(_wire.VERDICT.size)) == (_wire.OK, 2)
        assert np.array_equal(target, r.source[:8192])
        writer.close()
    ours.close()


@pytest.mark.parametrize("processors", [2, 64])
async def test_where_the_reader_copies_several_agents_do(
    counting: type[Counting], processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_link.os, "sched_getaffinity", lambda pid: set(range(processors)))

    def reads(tls: str) -> NixlTransport:
        return NixlTransport(NixlConfig(tls=tls, copiers=2, **SMALL), opener=counting)

    for tls, agents, gpus in (("", 2, "no driver"), ("tcp", 1, "no driver"), ("", 1, "")):
        counting.made.clear()
        monkeypatch.setattr(_vram, "foreseen", lambda tls, why=gpus: why)
        async with rig(nixl("pull"), reads(tls)) as r:
            grant = r.serving.grant(0, 1 << 20)
            segments, sizes = scatter([2048] * 300, 3, gap=0)
            targets = Targets(sizes)
            await r.read(grant, segments, targets)
            targets.check(segments, r.source)
            assert sum(bool(agent.rows) for agent in counting.made) == agents


async def _talk(endpoint: dict[str, str], *messages: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(endpoint["host"], int(endpoint["port"]))
    try:
        for message in messages:
            writer.write(message)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 30.0)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def _hello(token: bytes, flags: int = 0, length: int = 0, body: bytes = b"") -> bytes:
    return _wire.HELLO.pack(_wire.HELLO_MAGIC, _wire.VERSION, token, flags, length) + body


async def test_strangers_and_nonsense_cost_their_connection_and_no_more() -> None:
    async with rig(nixl("push"), nixl("push")) as r:
        endpoint = r.serving.endpoint
        token = bytes.fromhex(endpoint["token"])
        push = _wire.REQUEST.pack(_wire.PUSH, _wire.MAX_ROWS + 1, 1, 0, 1, bytes(32))
        for message in (
            b"GET / HTTP/1.1\r\n\r\n",
            _hello(bytes(16)),
            _hello(token, 0, _wire.MAX_DESCRIPTION + 1),
            _hello(token, _wire.PUSHES, 5, b"junk!"),
        ):
            assert await _talk(endpoint, message) == b""
        for message in (
            push,
            _wire.REQUEST.pack(_wire.LEAVE, 0, 0, 0, 0, bytes(32)),
            _wire.REQUEST.pack(99, 0, 0, 0, 0, bytes(32)),
        ):
            answer = await _talk(endpoint, _hello(token) + message)
            assert answer[:4] in (b"", _wire.WELCOME_MAGIC), "at most the welcome that it had a right to"
        targets, segments = Targets([64]), Segments.of([(0, 0, 0, 64)])
        await r.read(r.serving.grant(0, 4096), segments, targets)
        targets.check(segments, r.source)


async def test_a_full_house_says_so_unless_strangers_can_make_room() -> None:
    serving, reading = nixl(max_connections=1), nixl()
    async with rig(serving, reading) as r:
        error = None
        try:
            await reading.connect(serving.endpoint, timeout=30.0)
        except Exception as caught:  # noqa: BLE001
            error = caught
        assert "as many connections as it may" in str(error)
        await r.link.close()
        with socket.create_connection((serving.endpoint["host"], int(serving.endpoint["port"]))):
            link = await reading.connect(serving.endpoint, timeout=30.0)
            await link.close()


async def test_a_port_in_use_is_named_with_its_setting() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        transport = nixl(port=taken.getsockname()[1])
        with pytest.raises(TransportError) as caught:
            await transport.start()
        assert caught.value.field == "transport.nixl.port"
        await transport.close()
