"""Consumers that are silent for a while, or for good: what is kept for them, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from hawk.control.channel import SILENT
from hawk.control.frames import PROTOCOL_VERSION
from hawk.control.messages import Abort, Ended, Fetch, Hello, PeerMessage
from hawk.errors import Aborted, BadFrame, PeerLost, PeerUnreachable
from hawk.jobs import dialogue, part
from tests.unit.jobs import clock
from tests.unit.jobs.rig import PEER, FakeSession, rig

pytestmark = pytest.mark.usefixtures("impatient")


async def test_a_consumer_that_stood_still_is_known_when_it_speaks_again() -> None:
    """It was taken for gone, does not know that, and says no second hello."""
    async with rig() as made:
        process = SimpleNamespace(identity=PEER, generation=1, version=PROTOCOL_VERSION, name="")
        made.server.peers[PEER] = process
        made.server.handler(PEER, SimpleNamespace(from_generation=1), Hello("d0", "both", "t", {}))
        del made.server.peers[PEER]
        made.server.on_gone(process, PeerLost("silent"))
        made.server.peers[PEER] = process
        await made.fetch(made.offer().claim).run()
        made.check_bytes()
        # Another process has to introduce itself, whoever's identity it has.
        process.generation = 2
        with pytest.raises(BadFrame, match="first word is hello"):
            await made.fetch(made.offer(request="r2").claim, request="r2").run()


async def test_a_fetch_that_comes_after_its_abort_begins_nothing() -> None:
    async with rig() as made:
        entry = made.offer()
        kept: list[PeerMessage] = []

        def hold_back(message: PeerMessage) -> tuple[PeerMessage, ...]:
            if isinstance(message, Fetch):
                kept.append(message)
                return ()
            return (message,)

        made.to_p.change = hold_back
        job = made.fetch(entry.claim)
        task = asyncio.get_running_loop().create_task(job.run())
        await made.reach("requested")
        job.stop(Aborted("enough"))
        with pytest.raises(Aborted):
            await task
        await asyncio.sleep(0)  # the abort is heard
        made.server.handler(PEER, SimpleNamespace(from_generation=1), kept[0])
        assert made.serving.jobs == 0
        assert not entry.claims
        assert entry.outcome is None


def test_a_fetch_that_waits_ends_with_whoever_asks_for_it() -> None:
    """Its abort was lost, and what it waits for never comes."""

    async def run() -> None:
        async with rig(lease=0.1) as made:
            made.to_p.change = lambda message: () if isinstance(message, Abort) else (message,)
            job = made.fetch("", wait=True, request="never", timeout=60.0)
            task = asyncio.get_running_loop().create_task(job.run())
            await made.reach("requested")
            while not made.serving.jobs:
                await asyncio.sleep(0)
            job.stop(Aborted("enough"))
            with pytest.raises(Aborted):
                await task
            began = asyncio.get_running_loop().time()
            await made.serving.idle()
            assert asyncio.get_running_loop().time() - began <= dialogue.SILENCE + 0.1

    clock.run(run())


def test_a_fetch_that_asks_again_waits_as_long_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue, "NUDGE", 1.0)

    async def run() -> None:
        async with rig(lease=0.1) as made:
            clock.without_threads(made)
            task = asyncio.get_running_loop().create_task(
                made.fetch("", wait=True, request="late", timeout=60.0).run()
            )
            await asyncio.sleep(8 * dialogue.SILENCE)
            made.offer(request="late", consumers=("d0",))
            await task
            made.check_bytes()

    clock.run(run())


@pytest.mark.parametrize("order", ["refused first", "ended first"])
async def test_of_a_refusal_and_an_end_in_one_turn_the_first_counts(order: str) -> None:
    """A peer that talks no more with this agent ends its jobs, too; why it ended them is what it said first."""
    refused, ended = PeerUnreachable("another name"), PeerLost("the consumer is gone")
    session = FakeSession(lambda message: None)
    talk = dialogue.Dialogue(session, lambda: None)  # type: ignore[arg-type]
    talk.attach()
    asked = asyncio.ensure_future(talk.prepared(0))
    await asyncio.sleep(0)
    words = [lambda: session.lose(refused), lambda: session.take(Ended(talk.id, ended.to_wire()))]
    for word in words if order == "refused first" else reversed(words):
        word()
    with pytest.raises(PeerUnreachable if order == "refused first" else PeerLost):
        await asked
    talk.detach()


@pytest.mark.parametrize("there", [True, False])
async def test_a_peer_that_is_there_is_asked_again(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "CONNECT_TIMEOUT", 0.2)
    async with rig() as made:
        entry, given = made.offer(), []

        @contextlib.asynccontextmanager
        async def busy(name: str, address: str, *, timeout: float, patience: float) -> AsyncIterator[object]:
            given.append(timeout)
            if len(given) < 3:
                raise PeerUnreachable("the peer did not answer in time", reason=SILENT if there else None)
            yield made.peer

        monkeypatch.setattr(made.context.peers, "session", busy)
        if there:
            await made.fetch(entry.claim).run()
            assert given == [0.2] * 3
        else:
            with pytest.raises(PeerUnreachable):
                await made.fetch(entry.claim).run()
            assert given == [0.2]


@pytest.mark.parametrize("how", ["ended", "lost"])
def test_a_read_that_nobody_answers_ends_with_the_prefill_side(how: str) -> None:
    """Not with the lease, long after: whoever took the consumer for gone has said so, or died."""

    async def run() -> None:
        async with rig(lease=30.0) as made:
            clock.without_threads(made)
            made.transport.hold = asyncio.Event().wait  # it never comes to an end by itself
            began = asyncio.get_running_loop().time()
            task = asyncio.get_running_loop().create_task(made.fetch(made.offer().claim, timeout=60.0).run())
            while not made.transport.reading:
                await asyncio.sleep(0)
            error = PeerLost("silent")
            if how == "ended":
                made.server.on_gone(SimpleNamespace(identity=PEER), error)
            else:
                made.peer.lose(error)
            with pytest.raises(PeerLost):
                await task
            assert made.transport.reading == 0
            assert asyncio.get_running_loop().time() - began < 1.0

    clock.run(run())
