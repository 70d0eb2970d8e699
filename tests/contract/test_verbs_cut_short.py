"""verbs over devices without hardware, cut short: cancelled at every step, closed while something runs."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import Any

import pytest

from hawk.errors import HawkError, PeerUnreachable, TransferFailed
from hawk.memory.region import Segments
from hawk.transports.testing import LIMIT, SharedArena, Targets
from hawk.transports.verbs import VerbsConfig, VerbsTransport
from hawk.transports.verbs.testing import FakeDriver
from hawk.transports.verbs.testing._driver import FakeDevice
from hawk.transports.verbs.testing._queue import FakeQueue

ARENA = 1 << 20
WHOLE = Segments.of([(0, 0, 0, ARENA)])
SMALL: dict[str, Any] = {"batch": 64 << 10, "message": 16 << 10, "depth": 16, "queue_pairs": 2}


def make(**config: Any) -> VerbsTransport:
    return VerbsTransport(VerbsConfig(**{**SMALL, **config}), driver=FakeDriver())


def devices(transport: VerbsTransport) -> list[Any]:
    assert isinstance(transport.driver, FakeDriver)
    return list(transport.driver.opened)


def nothing_left(transport: VerbsTransport) -> None:
    assert all(d.closed and d.left == 0 for d in devices(transport)), [
        (d.closed, d.left) for d in devices(transport)
    ]


@contextlib.asynccontextmanager
async def serving(**config: Any) -> AsyncIterator[VerbsTransport]:
    arena, transport = SharedArena(ARENA), make(**config)
    await transport.start()
    try:
        transport.serve(arena.region)
        yield transport
    finally:
        await transport.close()
        arena.close()
    nothing_left(transport)


async def cancelled_after(turns: int, doing: Awaitable[Any]) -> bool:
    """Cancels after so many turns of the loop; False where it was over before."""
    task = asyncio.ensure_future(doing)
    for _ in range(turns):
        if task.done():
            break
        await asyncio.sleep(0)
    early = not task.done()
    task.cancel()
    await asyncio.wait({task}, timeout=LIMIT)
    assert task.done()
    if not task.cancelled():
        task.exception()
    return early


class Steps:
    """Turns of the loop after which something is cut short: ever more of them, until it was `over` before."""

    def __init__(self) -> None:
        self.over = False

    def __iter__(self) -> Iterator[int]:
        turns = 0
        while not self.over:
            yield turns
            turns += max(turns // 2, 1)


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    steps = Steps()
    for turns in steps:
        transport = make()
        steps.over = not await cancelled_after(turns, transport.start())
        await transport.close()
        nothing_left(transport)


async def test_two_starts_at_once_are_one() -> None:
    transport, there = make(), SharedArena(ARENA)
    await asyncio.gather(*(transport.start() for _ in range(3)))
    assert len(devices(transport)) == 1
    transport.serve(there.region)
    await transport.start()
    link = await transport.connect(transport.endpoint, timeout=LIMIT)
    await link.read(transport.grant(0, ARENA).key, WHOLE, Targets([ARENA]).regions, timeout=LIMIT)
    await transport.close()
    there.close()
    nothing_left(transport)


async def test_a_start_after_one_that_was_cancelled_is_whole() -> None:
    transport = make()
    first = asyncio.ensure_future(transport.start())
    await asyncio.sleep(0)
    second = asyncio.ensure_future(transport.start())
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert first.cancelled()
    assert transport.trouble() is None
    await transport.close()
    nothing_left(transport)


async def test_a_start_that_is_cancelled_while_the_device_opens_leaves_nothing() -> None:
    transport, go, there = make(), threading.Event(), threading.Event()
    assert isinstance(transport.driver, FakeDriver)
    opening = transport.driver.open

    def slow(name: str) -> Any:
        there.set()
        go.wait(LIMIT)
        return opening(name)

    transport.driver.open = slow  # type: ignore[method-assign]
    task = asyncio.ensure_future(transport.start())
    await asyncio.to_thread(there.wait, LIMIT)
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await transport.close()
    assert devices(transport)
    nothing_left(transport)


async def test_a_close_that_is_cancelled_is_finished_by_the_next() -> None:
    steps = Steps()
    for turns in steps:
        arena = SharedArena(ARENA)
        one, other = make(), make()
        for each in (one, other):
            await each.start()
        one.serve(arena.region)
        link = await other.connect(one.endpoint, timeout=LIMIT)
        await link.read(one.grant(0, ARENA).key, WHOLE, Targets([ARENA]).regions, timeout=LIMIT)
        steps.over = True
        for each in (one, other):
            steps.over &= not await cancelled_after(turns, each.close())
            await each.close()
            nothing_left(each)
        arena.close()


async def test_closing_twice_at_once() -> None:
    arena = SharedArena(ARENA)
    one, other = make(), make()
    for each in (one, other):
        await each.start()
    one.serve(arena.region)
    link = await other.connect(one.endpoint, timeout=LIMIT)
    await link.read(one.grant(0, ARENA).key, WHOLE, Targets([ARENA]).regions, timeout=LIMIT)
    for each in (one, other):
        async with asyncio.timeout(LIMIT):
            await asyncio.gather(*(each.close() for _ in range(3)))
        nothing_left(each)
    arena.close()


async def test_connecting_that_is_cancelled_leaves_nothing() -> None:
    async with serving() as one:
        steps = Steps()
        for turns in steps:
            other = make()
            await other.start()
            steps.over = not await cancelled_after(turns, other.connect(one.endpoint, timeout=LIMIT))
            assert not devices(other)[0].queues or other._links
            await other.close()
            nothing_left(other)


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_a_read_that_is_cancelled_leaves_nothing(direction: str) -> None:
    async with serving(direction=direction) as one:
        steps = Steps()
        for turns in steps:
            other = make(direction=direction)
            await other.start()
            link = await other.connect(one.endpoint, timeout=LIMIT)
            grant = one.grant(0, ARENA)
            reading = link.read(grant.key, WHOLE, Targets([ARENA]).regions, timeout=LIMIT)
            steps.over = not await cancelled_after(turns, reading)
            await cancelled_after(turns, one.revoke(grant))
            assert await one.revoke(grant)
            await other.close()
            nothing_left(other)


async def test_closing_while_a_link_opens() -> None:
    """The peer says nothing; the transport closes meanwhile."""
    greeted = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        greeted.set()
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    async with serving() as one:
        other = make()
        await other.start()
        port = listener.sockets[0].getsockname()[1]
        endpoint = {**one.endpoint, "host": "127.0.0.1", "port": str(port)}
        opening = asyncio.ensure_future(other.connect(endpoint, timeout=LIMIT))
        await greeted.wait()
        await other.close()
        with pytest.raises(PeerUnreachable):
            await opening
        nothing_left(other)
    listener.close()
    await listener.wait_closed()


async def test_nobody_waits_for_a_hello_while_queue_pairs_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may take longer than a peer waits for one."""
    async with serving() as one:
        other, go, there = make(), threading.Event(), threading.Event()
        await other.start()
        create = FakeDevice.queue

        def slow(device: FakeDevice, *arguments: Any) -> FakeQueue:
            if device in devices(other):
                there.set()
                go.wait(LIMIT)
            return create(device, *arguments)

        monkeypatch.setattr(FakeDevice, "queue", slow)
        opening = asyncio.ensure_future(other.connect(one.endpoint, timeout=LIMIT))
        await asyncio.to_thread(there.wait, LIMIT)
        for _ in range(20):
            await asyncio.sleep(0)
        assert one._server is not None
        strangers = len(one._server._strangers)
        go.set()
        await opening
        assert strangers == 0
        await other.close()
        nothing_left(other)


async def test_closing_while_what_a_link_opened_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer hangs up; destroying the queue pairs takes a while, and the transport closes meanwhile."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listener, serving() as one:
        other, go, there = make(), threading.Event(), threading.Event()
        await other.start()
        destroy = FakeQueue.close

        def slow(queue: FakeQueue) -> None:
            there.set()
            go.wait(LIMIT)
            destroy(queue)

        monkeypatch.setattr(FakeQueue, "close", slow)
        port = listener.sockets[0].getsockname()[1]
        endpoint = {**one.endpoint, "host": "127.0.0.1", "port": str(port)}
        opening = asyncio.ensure_future(other.connect(endpoint, timeout=LIMIT))
        await asyncio.to_thread(there.wait, LIMIT)
        closing = asyncio.ensure_future(other.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(device.closed for device in devices(other))
        go.set()
        await closing
        with pytest.raises(PeerUnreachable):
            await opening
        nothing_left(other)


async def test_closing_while_a_target_is_registered() -> None:
    async with serving() as one:
        other, go, there = make(), threading.Event(), threading.Event()
        await other.start()
        assert isinstance(other.driver, FakeDriver)

        def slow() -> None:
            there.set()
            go.wait(LIMIT)

        other.driver.faults.on_register = slow
        link = await other.connect(one.endpoint, timeout=LIMIT)
        targets = Targets([ARENA, ARENA])
        segments = Segments.of([(0, 0, 0, 4096), (1, 0, 4096, 4096)])
        reading = asyncio.ensure_future(
            link.read(one.grant(0, ARENA).key, segments, targets.regions, timeout=LIMIT)
        )
        await asyncio.to_thread(there.wait, LIMIT)
        registrations = other._registrations
        assert registrations is not None
        closing = asyncio.ensure_future(other.close())
        async with asyncio.timeout(LIMIT):
            while not registrations._closed:
                await asyncio.sleep(0)
        go.set()
        with pytest.raises(TransferFailed):
            await reading
        await closing
        nothing_left(other)


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_closing_while_reads_run(direction: str) -> None:
    async with serving(direction=direction) as one:
        steps = Steps()
        for turns in steps:
            other = make(direction=direction)
            await other.start()
            link = await other.connect(one.endpoint, timeout=LIMIT)
            reads = [
                asyncio.ensure_future(
                    link.read(one.grant(0, ARENA).key, WHOLE, Targets([ARENA]).regions, timeout=LIMIT)
                )
                for _ in range(3)
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            steps.over = all(each.done() for each in reads)
            await other.close()
            for each in await asyncio.gather(*reads, return_exceptions=True):
                assert each is None or isinstance(each, HawkError), repr(each)
            nothing_left(other)
