"""A few pieces of work at a time, none of which outlives the block that they were put into."""

from __future__ import annotations

import asyncio

import pytest

from hawk.jobs.ahead import Ahead


class Work:
    """Pieces that end when they are told to."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.stubborn = False

    async def piece(self, number: int, error: Exception | None = None) -> None:
        self.begun.append(number)
        gate = self.gates.setdefault(number, asyncio.Event())
        try:
            await gate.wait()
            if error is not None:
                raise error
        except asyncio.CancelledError:
            if self.stubborn:
                await gate.wait()
            raise
        finally:
            self.ended.append(number)

    def open(self, number: int) -> None:
        self.gates.setdefault(number, asyncio.Event()).set()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_at_a_time_is_done_by_who_puts_it() -> None:
    work = Work()
    work.open(1)
    async with Ahead(1) as ahead:
        await ahead.put(work.piece(1))
        assert work.ended == [1]


async def test_the_next_begins_when_there_is_room_for_it() -> None:
    work = Work()

    async def all_of_them() -> None:
        async with Ahead(2) as ahead:
            for number in range(4):
                await ahead.put(work.piece(number))

    task = asyncio.ensure_future(all_of_them())
    await turns()
    assert work.begun == [0, 1]
    work.open(1)
    await turns()
    assert work.begun == [0, 1, 2]
    for number in (0, 2, 3):
        work.open(number)
    await task
    assert sorted(work.ended) == [0, 1, 2, 3]


async def test_an_error_ends_the_others_and_is_raised_once_they_have_ended() -> None:
    work = Work()
    work.stubborn = True

    async def all_of_them() -> None:
        async with Ahead(2) as ahead:
            await ahead.put(work.piece(0))
            await ahead.put(work.piece(1, ValueError("it")))
            await ahead.put(work.piece(2))

    task = asyncio.ensure_future(all_of_them())
    await turns()
    work.open(1)
    await turns()
    assert not task.done()
    work.open(0)
    with pytest.raises(ValueError, match="it"):
        await task
    assert sorted(work.ended) == [0, 1]


async def test_a_cancelled_one_waits_through_further_cancellations() -> None:
    work = Work()
    work.stubborn = True

    async def all_of_them() -> None:
        async with Ahead(3) as ahead:
            await ahead.put(work.piece(0))
            await ahead.put(work.piece(1))

    task = asyncio.ensure_future(all_of_them())
    await turns()
    for _ in range(3):
        task.cancel()
        await turns()
        assert not task.done()
    work.open(0)
    work.open(1)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(work.ended) == [0, 1]
