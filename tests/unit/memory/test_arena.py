"""The arena gives pieces of one region, and knows when it cannot."""

from __future__ import annotations

import pytest

from hawk.errors import Draining, InvalidArgument, OutOfMemory
from hawk.memory.arena import Arena, Range
from tests.descriptors import fds

KIB = 1024


@pytest.fixture
def arena():
    arena = Arena(64 * KIB, name="arena", alignment=4 * KIB)
    yield arena
    arena.close()


def taken(arena: Arena, nbytes: int, owner: str = "a") -> Range:
    got = arena.reserve(nbytes, owner)
    assert got is not None
    return got


def test_reserve_and_free(arena: Arena) -> None:
    assert arena.region.nbytes == 64 * KIB
    assert arena.region.fd >= 0
    a = taken(arena, 10_000, "job-1")
    assert (a.offset, a.nbytes, a.owner) == (0, 10_000, "job-1")
    assert arena.allocator.owned() == {"job-1": 12 * KIB}
    arena.free(a)
    assert arena.allocator.free_bytes == 64 * KIB
    with pytest.raises(InvalidArgument):
        arena.free(a)


def test_what_does_not_fit_now_is_not_what_never_fits(arena: Arena) -> None:
    held = [taken(arena, 16 * KIB) for _ in range(4)]
    assert arena.reserve(1, "b") is None
    with pytest.raises(OutOfMemory) as e:
        arena.reserve(64 * KIB + 1, "c")
    assert e.value.facts["asked"] == str(64 * KIB + 1)
    arena.free(held[0])
    arena.free(held[2])
    assert arena.reserve(32 * KIB, "b") is None  # half of it is free, in two pieces
    assert taken(arena, 16 * KIB).offset == 0


def test_quarantine_is_not_room_until_released(arena: Arena) -> None:
    told: list[str] = []
    arena.on_room = lambda: told.append("room")
    held = taken(arena, 64 * KIB)
    arena.quarantine(held, "the peer is silent")
    assert arena.allocator.quarantined_bytes == 64 * KIB
    assert arena.reserve(KIB, "b") is None
    assert not told
    arena.release_quarantined(held)
    assert told == ["room"]
    taken(arena, 64 * KIB)
    assert arena.allocator.quarantined_bytes == 0


def test_close_gives_the_memory_back() -> None:
    before = fds()
    arena = Arena(64 * KIB)
    view = arena.region.array
    taken(arena, 64 * KIB)
    arena.close()
    arena.close()
    with pytest.raises(Draining):
        arena.reserve(1, "c")
    with pytest.raises(InvalidArgument):
        _ = arena.region
    view[:] = 1  # a view outlives the arena
    assert fds() == before
