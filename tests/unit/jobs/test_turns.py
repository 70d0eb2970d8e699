"""Those who wait: room in the arena with its credits, slots, and places among an agent's jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.errors import Busy, Draining, OutOfMemory
from hawk.jobs.admission import LATEST, SOONEST, Admission, Pace, Place
from hawk.jobs.reads import Reads
from hawk.jobs.room import Room, RoomAsk
from hawk.jobs.scheduler import Ask
from hawk.jobs.turns import Slots
from hawk.memory.arena import Arena, Range

KIB = 1024


def begin(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(coroutine)


async def settled() -> None:
    """Lets every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


# -- room ------------------------------------------------------------------------------------------------


@pytest.fixture
def room() -> Iterator[Room]:
    arena = Arena(64 * KIB)
    yield Room(arena, per_peer=32 * KIB, per_transport=48 * KIB)
    arena.close()


def ask(nbytes: int, peer: str = "a", transport: str = "tcp", **more: Any) -> RoomAsk:
    return RoomAsk(peer, nbytes, owner="job", transport=transport, **more)


async def test_room_is_bounded_per_peer_per_transport_and_in_all(room: Room) -> None:
    first = ask(32 * KIB)
    held = await room.take(first)
    over_peer = begin(room.take(ask(4 * KIB)))
    second = ask(16 * KIB, "b")
    of_b = await room.take(second)
    over_transport = begin(room.take(ask(4 * KIB, "b")))
    other_way = ask(16 * KIB, "c", "shm")
    of_c = await room.take(other_way)
    over_arena = begin(room.take(ask(4 * KIB, "c", "shm")))
    await settled()
    assert not any(task.done() for task in (over_peer, over_transport, over_arena))
    assert room.waiting == 3
    room.give(first, held)
    assert len({await over_peer, await over_transport, await over_arena, of_b, of_c}) == 5
    assert (room.used("peer a"), room.used("transport tcp")) == (4 * KIB, 24 * KIB)


async def test_a_chunk_larger_than_a_credit_goes_alone(room: Room) -> None:
    small, large = ask(4 * KIB), ask(48 * KIB, left=1)
    held = await room.take(small)
    waiting = begin(room.take(large))
    await settled()
    assert not waiting.done()
    room.give(small, held)
    room.give(large, await waiting)
    assert room.used("peer a") == room.used("transport tcp") == 0


async def test_more_than_the_arena_is_said_at_once_even_behind_others(room: Room) -> None:
    first = ask(32 * KIB)
    await room.take(first)
    behind = begin(room.take(ask(32 * KIB)))
    await settled()
    with pytest.raises(OutOfMemory):
        await room.take(ask(65 * KIB))
    behind.cancel()
    room.arena.close()
    with pytest.raises(Draining):
        await room.take(ask(1))


async def test_a_range_in_quarantine_uses_no_credit_but_the_arena(room: Room) -> None:
    first = ask(32 * KIB)
    held = await room.take(first)
    room.give(first, held, quarantine="the reader is silent")
    assert room.used("peer a") == 0
    await room.take(ask(32 * KIB))
    waiting = begin(room.take(ask(16 * KIB, "b", "shm")))
    await settled()
    assert not waiting.done()
    room.arena.release_quarantined(held)
    await asyncio.wait_for(waiting, 10)


async def test_a_small_job_does_not_wait_for_a_large_one(room: Room) -> None:
    order: list[str] = []

    async def job(name: str, chunks: int) -> None:
        for number in range(chunks):
            chunk = ask(32 * KIB, left=(chunks - number) * 32 * KIB)
            held = await room.take(chunk)
            order.append(name)
            await asyncio.sleep(0)
            room.give(chunk, held)

    large = begin(job("large", 20))
    await settled()
    small = begin(job("small", 1))
    await asyncio.gather(large, small)
    assert order.index("small") < 10


async def test_one_whose_grant_meets_its_end_gives_it_on(room: Room) -> None:
    first = ask(32 * KIB)
    held = await room.take(first)
    second, third = begin(room.take(ask(32 * KIB))), begin(room.take(ask(4 * KIB, left=9)))
    await settled()
    room.give(first, held)  # to the second, which does not know yet
    second.cancel()
    assert (await third).nbytes == 4 * KIB
    assert room.used("peer a") == 4 * KIB
    room.arena.allocator.check()


@given(
    st.lists(
        st.tuples(
            st.integers(1, 64 * KIB),
            st.sampled_from("ab"),
            st.sampled_from(["tcp", "shm"]),
            st.integers(0, 5),
        ),
        max_size=25,
    ),
    st.data(),
)
def test_room_is_kept_whoever_comes_and_goes(steps: list[tuple[int, str, str, int]], data: Any) -> None:
    async def run() -> None:
        arena = Arena(64 * KIB)
        room = Room(arena, per_peer=32 * KIB, per_transport=48 * KIB)
        held: list[tuple[RoomAsk, Range]] = []
        tasks: list[asyncio.Task[Any]] = []

        async def one(chunk: RoomAsk) -> None:
            held.append((chunk, await room.take(chunk)))

        for nbytes, peer, transport, turns in steps:
            tasks.append(begin(one(ask(nbytes, peer, transport, left=turns))))
            for _ in range(turns):
                await asyncio.sleep(0)
            if data.draw(st.booleans()):
                data.draw(st.sampled_from(tasks)).cancel()
            if held and data.draw(st.booleans()):
                room.give(*held.pop(0))
            for name, limit in (("peer a", 32), ("peer b", 32), ("transport tcp", 48), ("transport shm", 48)):
                mine = [chunk.nbytes for chunk, _ in held if name in chunk.uses]
                assert sum(mine) <= max(limit * KIB, *mine, 0)
                assert sum(mine) <= room.used(name)
        async with asyncio.timeout(10):
            while not all(task.done() for task in tasks):
                await asyncio.sleep(0)
                while held:
                    room.give(*held.pop())
        while held:
            room.give(*held.pop())
        assert room.waiting == 0
        assert not +room._used
        assert arena.allocator.owned() == {}
        arena.allocator.check()
        arena.close()

    asyncio.run(run())


# -- slots -----------------------------------------------------------------------------------------------


async def test_slots_by_count_and_by_bytes() -> None:
    slots, running, most = Slots(3, 100), [0], [0]

    async def work(nbytes: int) -> None:
        async with slots.turn(Ask("a", nbytes)):
            running[0] += 1
            most[0] = max(most[0], running[0])
            assert slots.used <= 100 or slots.running == 1
            await asyncio.sleep(0)
            running[0] -= 1

    await asyncio.gather(*(work(nbytes) for nbytes in (10, 20, 500, 30, 60, 60, 10, 10, 10)))
    assert most == [3]
    assert (slots.running, slots.used, slots.waiting) == (0, 0, 0)


async def test_what_fails_in_its_turn_gives_it_back() -> None:
    slots = Slots(1)
    with pytest.raises(ValueError, match="x"):
        async with slots.turn(Ask("a", 1)):
            raise ValueError("x")
    async with slots.turn(Ask("a", 1)):
        pass


async def test_a_peer_that_stands_still_keeps_only_its_own_reads() -> None:
    reads, stuck = Reads(100), asyncio.Event()

    async def read(peer: str, wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        async with reads.turn(peer, "tcp", Ask("client", 80)):
            await wait()

    still = [begin(read("p0", stuck.wait)) for _ in range(3)]
    await settled()
    await asyncio.wait_for(read("p1", lambda: asyncio.sleep(0)), 10)
    stuck.set()
    await asyncio.gather(*still)
    assert not reads._slots


# -- admission -------------------------------------------------------------------------------------------


async def worked(place: Place, order: list[str], name: str, go: asyncio.Event, **ask: Any) -> None:
    try:
        await place.work(Ask("peer", 1, **ask))
        order.append(name)
        await go.wait()
    finally:
        place.leave()


async def test_jobs_work_stand_in_line_and_are_refused() -> None:
    admission = Admission(working=1, queued=2, early=0, what="serves")
    order: list[str] = []
    go = asyncio.Event()
    tasks = []
    for name, left in (("first", 9), ("large", 5), ("small", 1)):
        tasks.append(begin(worked(admission.enter(early=False), order, name, go, left=left)))
        await settled()
    assert (admission.working, admission.queued) == (1, 2)
    with pytest.raises(Busy, match="serves at most 1 jobs at a time, and 2 stand in line") as caught:
        admission.enter(early=False)
    assert SOONEST <= caught.value.retry_after <= LATEST
    go.set()
    await asyncio.gather(*tasks)
    assert order == ["first", "small", "large"]
    assert (admission.working, admission.queued) == (0, 0)


async def test_who_comes_before_its_offer_takes_nobodys_place() -> None:
    admission = Admission(working=1, queued=0, early=2, what="serves")
    early = [admission.enter(early=True) for _ in range(2)]
    with pytest.raises(Busy, match="wait for their offers"):
        admission.enter(early=True)
    other = admission.enter(early=False)
    await other.work(Ask("peer", 1))
    early[0].arrived()
    line = begin(early[0].work(Ask("peer", 1)))
    await settled()
    assert (admission.working, admission.queued, admission.early) == (1, 1, 1)
    other.leave()
    other.leave()
    await line
    # Where the other side has begun, there is nothing to wait for.
    early[1].begin()
    assert (admission.working, admission.queued, admission.early) == (2, 0, 0)
    assert admission.full
    with pytest.raises(Busy):
        admission.enter(early=False)
    for place in early:
        place.leave()
    assert not admission.full
    admission.enter(early=False).leave()


async def test_one_who_leaves_the_line_is_in_nobodys_way() -> None:
    admission = Admission(working=1, queued=9, early=0, what="serves")
    order: list[str] = []
    go = asyncio.Event()
    tasks = [begin(worked(admission.enter(early=False), order, str(i), go)) for i in range(4)]
    await settled()
    tasks[1].cancel()
    tasks[0].cancel()
    await settled()
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["0", "2", "3"]
    assert (admission.working, admission.queued) == (0, 0)


def test_the_pace_is_that_at_which_jobs_leave() -> None:
    pace = Pace()
    for i in range(200):
        pace.left(i * 0.1, busy=True)
    now = 20.0
    told = [pace.retry_after(now) for _ in range(5)]
    # One comes free every tenth of a second, and each of those refused finds one.
    assert told == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5], rel=0.1)
    assert pace.retry_after(now + 10) == pytest.approx(0.1, rel=0.1)
    for _ in range(1000):
        assert pace.retry_after(now + 10) <= LATEST
    pace.left(1000.0, busy=False)  # nobody waited for it: it says nothing of the pace
    assert pace.retry_after(2000.0) == pytest.approx(0.1, rel=0.1)


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.booleans()), max_size=50))
def test_what_is_told_is_bounded(steps: list[tuple[float, bool, bool]]) -> None:
    pace, now = Pace(), 0.0
    for passed, left, busy in steps:
        now += passed
        if left:
            pace.left(now, busy=busy)
        else:
            assert SOONEST <= pace.retry_after(now) <= LATEST + 1e-9
