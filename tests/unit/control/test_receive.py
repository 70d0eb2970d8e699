"""The receive loop on inproc sockets: what is sent there waits in the receiver's queue at once."""

import asyncio
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from hawk.control.receive import TURN_MESSAGES, ReceiveLoop
from hawk.errors import BadFrame

Make = Callable[[int], zmq.Socket[bytes]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Sockets of one context, all closed afterwards."""
    context: zmq.Context[Any] = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def one(kind: int) -> zmq.Socket[bytes]:
        made.append(context.socket(kind))
        return made[-1]

    yield one
    context.destroy(linger=0)  # with every socket: `term` alone would wait for one that a test left open


def _router(make: Make) -> zmq.Socket[bytes]:
    router = make(zmq.ROUTER)
    router.rcvhwm = 0
    router.bind("inproc://here")
    return router


def _dealer(make: Make, name: bytes) -> zmq.Socket[bytes]:
    dealer = make(zmq.DEALER)
    dealer.routing_id = name
    dealer.sndhwm = 0
    dealer.connect("inproc://here")
    return dealer


def test_a_full_queue_leaves_other_tasks_their_turn(runner: asyncio.Runner, make: Make) -> None:
    count = 50_000
    router, dealer = _router(make), _dealer(make, b"a")
    for _ in range(count):
        dealer.send(b"x", zmq.NOBLOCK)

    async def run() -> None:
        done = asyncio.Event()
        seen = 0
        gaps: list[int] = []

        def handle(identity: bytes, frames: list[bytes]) -> None:
            nonlocal seen
            assert (identity, frames) == (b"a", [b"x"])
            seen += 1
            if seen == count:
                done.set()

        async def tick() -> None:
            last = seen
            while not done.is_set():
                await asyncio.sleep(0)
                gaps.append(seen - last)
                last = seen

        loop = ReceiveLoop(router, handle)
        ticker = asyncio.create_task(tick())
        loop.start()
        await done.wait()
        await ticker
        loop.stop()
        # A turn that was scheduled and one for the descriptor may fall into one round of the event loop.
        assert max(gaps) <= 2 * TURN_MESSAGES
        assert sum(gaps) == count
        assert loop.messages == count

    runner.run(run())


def test_messages_that_come_one_by_one_are_all_seen(runner: asyncio.Runner, make: Make) -> None:
    # The descriptor hints at changes only; a hint that is used up by a send must not lose a message.
    router, dealer = _router(make), _dealer(make, b"a")

    async def run() -> None:
        got: asyncio.Queue[bytes] = asyncio.Queue()

        def echo(identity: bytes, frames: list[bytes]) -> None:
            router.send_multipart([identity, *frames], zmq.NOBLOCK)
            loop.poke()

        loop = ReceiveLoop(router, echo)
        back = ReceiveLoop(dealer, lambda _, frames: got.put_nowait(frames[0]))
        loop.start()
        back.start()
        for number in range(300):
            for part in range(number % 3 + 1):
                dealer.send(b"%d.%d" % (number, part), zmq.NOBLOCK)
                back.poke()
            for part in range(number % 3 + 1):
                async with asyncio.timeout(20):
                    assert await got.get() == b"%d.%d" % (number, part)
        loop.stop()
        back.stop()

    runner.run(run())


def _use_up_the_hint(router: zmq.Socket[bytes], dealer: zmq.Socket[bytes], text: bytes) -> None:
    """A message arrives at the router, and a send there takes note of it instead of the descriptor."""
    dealer.send(text)
    # ZeroMQ looks at what arrived in a send at most once a millisecond.
    time.sleep(0.01)
    router.send_multipart([b"a", b"unrelated"])
    assert not select.select([router.fileno()], [], [], 0)[0]


@pytest.mark.parametrize("place", ["outside", "on_wake"])
async def test_a_send_that_uses_up_the_hint_loses_no_message(make: Make, place: str) -> None:
    router, dealer = _router(make), _dealer(make, b"a")
    got: asyncio.Queue[bytes] = asyncio.Queue()
    waiting = False

    def woken() -> None:
        nonlocal waiting
        if waiting:
            waiting = False
            _use_up_the_hint(router, dealer, b"second")

    loop = ReceiveLoop(router, lambda _, frames: got.put_nowait(frames[0]), on_wake=woken)
    loop.start()
    # The start has a turn of its own, which must not be the one that finds the message.
    for _ in range(5):
        await asyncio.sleep(0)
    waiting = place == "on_wake"
    dealer.send(b"first")
    async with asyncio.timeout(20):
        assert await got.get() == b"first"
        if place == "outside":
            _use_up_the_hint(router, dealer, b"second")
            loop.poke()
        assert await got.get() == b"second"
    loop.stop()


def test_a_flood_does_not_hold_up_another_peer(runner: asyncio.Runner, make: Make) -> None:
    router = _router(make)
    flood, quiet = _dealer(make, b"flood"), _dealer(make, b"quiet")
    for _ in range(5000):
        flood.send(b"x", zmq.NOBLOCK)
    for _ in range(10):
        quiet.send(b"y", zmq.NOBLOCK)

    async def run() -> None:
        order: list[bytes] = []
        done = asyncio.Event()

        def handle(identity: bytes, frames: list[bytes]) -> None:
            order.append(identity)
            if len(order) == 5010:
                done.set()

        loop = ReceiveLoop(router, handle)
        loop.start()
        await done.wait()
        loop.stop()
        places = [place for place, identity in enumerate(order) if identity == b"quiet"]
        # ZeroMQ looks for newly active peers every 100 messages at the latest, and then takes them in rotation.
        assert places[-1] < 100 + 2 * 10 + 2

    runner.run(run())


def test_one_peer_alone_gets_its_budget_and_not_the_turn(runner: asyncio.Runner, make: Make) -> None:
    router, dealer = _router(make), _dealer(make, b"a")
    for _ in range(100):
        dealer.send(b"x", zmq.NOBLOCK)

    async def run() -> None:
        done = asyncio.Event()
        by_turn: dict[int, int] = {}

        def handle(identity: bytes, frames: list[bytes]) -> None:
            by_turn[loop.turns] = by_turn.get(loop.turns, 0) + 1
            if sum(by_turn.values()) == 100:
                done.set()

        loop = ReceiveLoop(router, handle, peer_messages=8, turn_seconds=3600)
        loop.start()
        await done.wait()
        loop.stop()
        assert max(by_turn.values()) == 8

    runner.run(run())


async def test_what_is_too_large_is_refused_and_what_follows_is_read(make: Make) -> None:
    router, dealer = _router(make), _dealer(make, b"a")
    bad: list[tuple[bytes, str]] = []
    good: list[list[bytes]] = []
    done = asyncio.Event()

    def handle(identity: bytes, frames: list[bytes]) -> None:
        good.append(frames)
        if frames == [b"last"]:
            done.set()

    dealer.send_multipart([b"h", b"b"])
    dealer.send_multipart([b"p"] * 5000)  # far more parts than a turn reads
    dealer.send_multipart([b"h", b"z" * 101])
    dealer.send_multipart([b"z" * 101, b"h"])
    dealer.send_multipart([b"z" * 50, b"z" * 50])
    dealer.send(b"last")
    loop = ReceiveLoop(
        router,
        handle,
        on_bad=lambda identity, error: bad.append((identity, str(error))),
        max_frames=2,
        max_bytes=100,
    )
    loop.start()
    async with asyncio.timeout(30):
        await done.wait()
    loop.stop()
    assert good == [[b"h", b"b"], [b"z" * 50, b"z" * 50], [b"last"]]
    assert [identity for identity, _ in bad] == [b"a"] * 3
    assert "more than 2 frames" in bad[0][1]
    assert "102 bytes" in bad[1][1]
    assert "101 bytes" in bad[2][1]
    assert loop.refused == 3
    assert loop.turns > 5000 // TURN_MESSAGES


async def test_a_handler_that_fails_costs_its_message_only(make: Make) -> None:
    router, dealer = _router(make), _dealer(make, b"a")
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
    done = asyncio.Event()

    def handle(identity: bytes, frames: list[bytes]) -> None:
        if frames == [b"bad"]:
            raise BadFrame("no")
        done.set()

    dealer.send(b"bad")
    dealer.send(b"good")
    loop = ReceiveLoop(router, handle)
    loop.start()
    async with asyncio.timeout(30):
        await done.wait()
    loop.stop()
    assert [type(what["exception"]) for what in told] == [BadFrame]


async def test_a_handler_may_stop_the_loop(make: Make) -> None:
    router, dealer = _router(make), _dealer(make, b"a")
    seen: list[bytes] = []
    first = asyncio.Event()

    def handle(identity: bytes, frames: list[bytes]) -> None:
        seen.append(frames[0])
        loop.stop()
        router.close(linger=0)
        first.set()

    dealer.send(b"1")
    dealer.send(b"2")
    loop = ReceiveLoop(router, handle)
    loop.start()
    async with asyncio.timeout(30):
        await first.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    loop.stop()
    assert seen == [b"1"]


async def test_a_socket_closed_under_the_loop_ends_it(make: Make) -> None:
    router = _router(make)
    told = asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.set())
    loop = ReceiveLoop(router, lambda *_: None)
    loop.start()
    router.close(linger=0)
    async with asyncio.timeout(30):
        await told.wait()
    turns = loop.turns
    for _ in range(5):
        await asyncio.sleep(0)
    assert loop.turns == turns
