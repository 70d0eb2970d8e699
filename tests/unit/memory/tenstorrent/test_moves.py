"""Moves inside banks through windows: a program of the chip's owner, which is awaited, weighed and given up."""

import asyncio
import math

import numpy as np
import pytest

from hawk.errors import DeviceReset, InvalidArgument
from hawk.memory.base import MoveSupport
from hawk.memory.region import Moves
from tests.fake_tenstorrent import FakeKmd
from tests.unit.memory.tenstorrent.test_direct import NBYTES, made, ranges


async def test_moves_are_the_chips_where_it_was_given_a_program_and_come_behind_a_flush() -> None:
    class Mover:
        cost, row_cost = 1e-11, 2e-6

        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        async def __call__(self, moves: Moves) -> None:
            self.seen.append((len(moves), npu.counts["flushed_windows"]))

    fake, mover = FakeKmd(), Mover()
    plain = made(fake, nbytes=64 * 1024)
    assert plain.move_support is MoveSupport.NONE
    plain.close()
    npu = made(FakeKmd(), mover=mover)
    try:
        assert npu.move_support is MoveSupport.DEVICE
        assert (npu.move_cost, npu.move_row_cost) == (1e-11, 2e-6)
        one = np.asarray([3], np.int32)
        await npu.move(Moves(one, np.asarray([0]), np.asarray([4096]), np.asarray([64])))
        assert mover.seen == [(1, 1)]
        with pytest.raises(InvalidArgument, match="moves"):
            await npu.move(Moves(one, np.asarray([0]), np.asarray([NBYTES]), np.asarray([64])))
    finally:
        npu.close()


async def test_moves_are_dear_until_they_were_measured() -> None:
    class Mover:
        cost, row_cost, call_cost = math.inf, 0.0, 0.0

        async def __call__(self, moves: Moves) -> None:
            raise AssertionError

    npu = made(FakeKmd(), mover=Mover())
    assert "moves inside its banks were not measured, so plans are direct" in npu.said
    npu.close()
    Mover.cost, Mover.call_cost = 2e-11, 3e-4
    npu = made(FakeKmd(), mover=Mover())
    assert (npu.move_cost, npu.move_call_cost) == (2e-11, 3e-4)
    assert "the chip moves bytes inside its banks, 2e-11 s a byte" in npu.said
    npu.close()


async def test_nothing_is_ready_after_a_program_that_did_not_end() -> None:
    class Mover:
        cost, row_cost = 1e-11, 2e-6

        async def __call__(self, moves: Moves) -> None:
            raise DeviceReset("the chip does not end the program", field="chip 0")

    npu = made(FakeKmd(), mover=Mover())
    await npu.flush(ranges((0, 0, 64)))
    one = np.asarray([3], np.int32)
    with pytest.raises(DeviceReset, match="does not end"):
        await npu.move(Moves(one, np.asarray([0]), np.asarray([4096]), np.asarray([64])))
    for _ in range(2):
        with pytest.raises(DeviceReset, match=r"memory\.npu0: .*may still write"):
            await npu.flush(ranges((0, 0, 64)))
    npu.close()


async def test_cancelled_moves_end_with_the_chips_program() -> None:
    inside, go_on, ended = asyncio.Event(), asyncio.Event(), []

    class Mover:
        cost, row_cost = 1e-11, 2e-6

        async def __call__(self, moves: Moves) -> None:
            inside.set()
            await go_on.wait()
            ended.append(len(moves))

    npu = made(FakeKmd(), mover=Mover())
    one = np.asarray([3], np.int32)
    moves = Moves(one, np.asarray([0]), np.asarray([4096]), np.asarray([64]))
    task = asyncio.create_task(npu.move(moves))
    await inside.wait()
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1]
    npu.close()


async def test_a_program_that_did_not_end_is_known_of_though_nobody_waits_any_more() -> None:
    """A job that is cancelled gives its blocks back, and the chip may go on writing there."""
    inside, give_up = asyncio.Event(), asyncio.Event()

    class Mover:
        cost, row_cost = 1e-11, 2e-6

        async def __call__(self, moves: Moves) -> None:
            inside.set()
            await give_up.wait()
            raise DeviceReset("the chip does not end the program", field="chip 0")

    npu = made(FakeKmd(), mover=Mover())
    one = np.asarray([3], np.int32)
    task = asyncio.create_task(npu.move(Moves(one, np.asarray([0]), np.asarray([4096]), np.asarray([64]))))
    await inside.wait()
    task.cancel()
    await asyncio.sleep(0)
    give_up.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(DeviceReset, match=r"memory\.npu0: .*may still write"):
        await npu.flush(ranges((0, 0, 64)))
    npu.close()
