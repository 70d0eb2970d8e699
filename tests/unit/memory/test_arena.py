"""Reserving from the arena: order of arrival, deadlines, cancellation, closing."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from hawk.errors import Busy, DeadlineExceeded, Draining, InvalidArgument, OutOfMemory
from hawk.memory.arena import Arena, Range

KIB = 1024
LONG = 30.0


@pytest.fixture
def arena():
    arena = Arena(64 * KIB, name="arena", alignment=4 * KIB)
    yield arena
    arena.close()


async def settled() -> None:
    """Lets every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


def waiting(arena: Arena, nbytes: int, owner: str, timeout: float = LONG) -> asyncio.Task[Range]:
    return asyncio.create_task(arena.reserve(nbytes, owner, timeout))


async def test_reserve_and_free(arena: Arena) -> None:
    assert arena.region.nbytes == 64 * KIB
    assert arena.region.fd >= 0
    a = await arena.reserve(10_000, "job-1", LONG)
    assert (a.offset, a.nbytes, a.owner) == (0, 10_000, "job-1")
    assert arena.allocator.owned() == {"job-1": 12 * KIB}
    arena.free(a)
    assert arena.allocator.free_bytes == 64 * KIB
    with pytest.raises(InvalidArgument):
        arena.free(a)


async def test_more_than_the_arena_fails_at_once_even_behind_others(arena: Arena) -> None:
    full = await arena.reserve(64 * KIB, "a", LONG)
    behind = waiting(arena, 4 * KIB, "b")
    await settled()
    with pytest.raises(OutOfMemory) as e:
        await arena.reserve(64 * KIB + 1, "c", LONG)
    assert e.value.facts["asked"] == str(64 * KIB + 1)
    arena.free(full)
    arena.free(await behind)


async def test_first_come_first_served_and_the_large_one_is_not_starved(arena: Arena) -> None:
    held = [await arena.reserve(16 * KIB, "old", LONG) for _ in range(4)]
    large = waiting(arena, 48 * KIB, "large")
    await settled()
    small = [waiting(arena, 4 * KIB, f"small{i}") for i in range(3)]
    await settled()
    arena.free(held[0])
    await settled()
    # Room for every small one, but the large one was first.
    assert not large.done()
    assert not any(t.done() for t in small)
    with pytest.raises(DeadlineExceeded):
        await arena.reserve(4 * KIB, "late", 0)
    arena.free(held[1])
    arena.free(held[2])
    got = await large
    assert (got.offset, got.nbytes) == (0, 48 * KIB)
    await settled()
    assert not any(t.done() for t in small)
    arena.free(held[3])
    assert [(await t).offset for t in small] == [48 * KIB, 52 * KIB, 56 * KIB]
    assert arena.waiting == 0


async def test_deadline_leaves_nothing_behind_and_lets_the_next_one_in(arena: Arena) -> None:
    held = await arena.reserve(32 * KIB, "old", LONG)
    large = waiting(arena, 64 * KIB, "large", 0.01)
    await settled()
    small = waiting(arena, 4 * KIB, "small")
    with pytest.raises(DeadlineExceeded) as e:
        await large
    assert isinstance(e.value, TimeoutError)
    assert e.value.facts["owner"] == "large"
    assert e.value.facts["free"] == str(32 * KIB)
    arena.free(await small)
    arena.free(held)
    assert arena.waiting == 0
    assert arena.allocator.owned() == {}


async def test_no_time_means_now_or_never(arena: Arena) -> None:
    held = await arena.reserve(64 * KIB, "a", 0)
    with pytest.raises(DeadlineExceeded):
        await arena.reserve(1, "b", 0)
    arena.free(held)
    arena.free(await arena.reserve(1, "b", 0))


async def test_cancelled_while_waiting(arena: Arena) -> None:
    held = await arena.reserve(64 * KIB, "a", LONG)
    first, second = waiting(arena, 64 * KIB, "b"), waiting(arena, 4 * KIB, "c")
    await settled()
    first.cancel()
    await settled()
    assert first.cancelled()
    arena.free(held)
    assert (await second).owner == "c"
    assert arena.allocator.owned() == {"c": 4 * KIB}


async def test_cancelled_in_the_turn_of_the_grant(arena: Arena) -> None:
    held = await arena.reserve(64 * KIB, "a", LONG)
    first, second = waiting(arena, 64 * KIB, "b"), waiting(arena, 4 * KIB, "c")
    await settled()
    arena.free(held)  # grants to b, whose task has not run yet
    assert arena.allocator.owned() == {"b": 64 * KIB}
    first.cancel()
    await settled()
    assert first.cancelled()
    assert (await second).owner == "c"
    assert arena.allocator.owned() == {"c": 4 * KIB}


async def test_quarantine_is_not_room_until_released(arena: Arena) -> None:
    held = await arena.reserve(64 * KIB, "a", LONG)
    waiter = waiting(arena, 64 * KIB, "b")
    await settled()
    arena.quarantine(held, "the peer is silent")
    await settled()
    assert not waiter.done()
    assert arena.allocator.quarantined_bytes == 64 * KIB
    arena.release_quarantined(held)
    assert (await waiter).owner == "b"
    assert arena.allocator.quarantined_bytes == 0


async def test_the_queue_is_bounded() -> None:
    arena = Arena(8 * KIB, alignment=4 * KIB, max_waiters=2)
    held = await arena.reserve(8 * KIB, "a", LONG)
    waiters = [waiting(arena, KIB, "w") for _ in range(2)]
    await settled()
    with pytest.raises(Busy):
        await arena.reserve(KIB, "too many", LONG)
    arena.free(held)
    for t in waiters:
        arena.free(await t)
    arena.close()


async def test_close_ends_every_wait_and_gives_the_memory_back() -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(64 * KIB)
    view = arena.region.array
    await arena.reserve(64 * KIB, "a", LONG)
    waiter = waiting(arena, KIB, "b")
    await settled()
    arena.close()
    arena.close()
    with pytest.raises(Draining):
        await waiter
    with pytest.raises(Draining):
        await arena.reserve(1, "c", LONG)
    with pytest.raises(InvalidArgument):
        _ = arena.region
    view[:] = 1  # a view outlives the arena
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("seed", range(4))
async def test_many_jobs_that_wait_cancel_and_run_out_of_time(arena: Arena, seed: int) -> None:
    rng = random.Random(seed)
    owners: dict[int, Range] = {}

    async def job(i: int) -> None:
        try:
            got = await arena.reserve(rng.randint(1, 64 * KIB), f"job{i}", rng.choice([0.002, LONG]))
        except DeadlineExceeded:
            return
        try:
            for other in owners.values():
                assert got.end <= other.offset or other.end <= got.offset
            owners[i] = got
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
        finally:
            owners.pop(i, None)
            arena.free(got)

    tasks = [asyncio.create_task(job(i)) for i in range(150)]
    for t in rng.sample(tasks, 50):
        asyncio.get_running_loop().call_later(rng.random() * 0.01, t.cancel)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
    arena.allocator.check()
    assert arena.allocator.free_bytes == 64 * KIB
    assert arena.waiting == 0
