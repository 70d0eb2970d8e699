"""Moves inside banks that end badly: what ttnn raises, chips that do not answer, and who waits for whom."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hawk.errors import DeviceReset, HawkMemoryError
from hawk.integrations.ttnn import BankMover, reserve
from tests import fake_ttnn_programs as programs
from tests.fake_ttnn import Mesh
from tests.unit.integrations.test_ttnn_mover import SMALL, lent, moves

__all__ = ["lent"]


def test_what_ttnn_says_against_the_program_is_told(lent):
    held_by = lent()
    mesh = Mesh()
    mover = BankMover(mesh, reserve(mesh, 4096))
    held_by.failing = RuntimeError("TT_FATAL @ x.cpp\ninfo:\nFailed to generate binaries\nbacktrace:\n--- 1")
    with pytest.raises(HawkMemoryError, match=r"Failed to generate binaries.*compiler"):
        asyncio.run(mover(moves([(0, 0, 64, 64)])))
    assert not mesh.queue  # what was put there is over: the host's tensors may go
    mover.close()


async def test_a_chip_that_does_not_answer_is_given_up_for_good(lent):
    go_on = threading.Event()
    lent(lambda *_: go_on.wait(60))
    mesh = Mesh()
    mover = BankMover(mesh, reserve(mesh, 4096), timeout=0.02)
    for _ in range(2):
        with pytest.raises(DeviceReset, match=r"chip 0.*0\.02 s"):
            await mover(moves([(0, 0, 64, 64)]))
    go_on.set()
    mover.close()
    other = BankMover(mesh, reserve(mesh, 4096))
    await other(moves([(0, 0, 64, 64)]))  # behind what has ended now
    other.close()


async def test_a_busy_executor_is_no_chip_that_hangs(lent):
    """What was not begun is not begun any more, and the next call finds the chip as it was."""
    seen = lent().seen
    mesh = Mesh()
    with ThreadPoolExecutor(1) as engine:
        mover = BankMover(mesh, reserve(mesh, 4096), executor=engine, timeout=0.02)
        go_on = threading.Event()
        busy = engine.submit(go_on.wait, 60)
        with pytest.raises(HawkMemoryError, match=r"not begun in 0\.02 s") as caught:
            await mover(moves([(0, 0, 64, 64)]))
        assert not isinstance(caught.value, DeviceReset)
        go_on.set()
        await asyncio.wrap_future(busy)
        mover._timeout = 60.0
        await mover(moves([(0, 0, 64, 64)]))
    assert len(seen) == 1
    mover.close()
    with pytest.raises(HawkMemoryError, match="closed"):
        await mover(moves([(0, 0, 64, 64)]))


async def test_whoever_waits_for_others_moves_finds_no_chip_that_hangs(lent):
    """Each has the chip's time for itself; all of them together take longer."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        begun.set()
        go_on.wait(60)

    lent(slow)
    mesh = Mesh(banks=1)
    mover = BankMover(mesh, reserve(mesh, 4096), timeout=60)
    first = asyncio.create_task(mover(moves([(0, 0, 64, 64)])))
    await asyncio.to_thread(begun.wait, 60)
    mover._timeout = 0.01
    second = asyncio.create_task(mover(moves([(0, 0, 64, 64)])))
    assert not (await asyncio.wait([first, second], timeout=0.1))[0]
    mover._timeout = 60
    second.cancel()  # its 10 ms would begin with its turn
    third = asyncio.create_task(mover(moves([(0, 0, 64, 64)])))
    go_on.set()
    await asyncio.gather(first, third)
    mover.close()


async def test_a_chip_whose_end_ttnn_does_not_know_may_still_write(lent, monkeypatch):
    lent()
    mesh = Mesh(banks=1)
    mover = BankMover(mesh, reserve(mesh, 4096))

    def hangs(_: Mesh) -> None:
        raise RuntimeError("TIMEOUT: device timeout, potential hang detected")

    monkeypatch.setattr(__import__("ttnn"), "synchronize_device", hangs)
    with pytest.raises(DeviceReset, match=r"chip 0.*potential hang"):
        await mover(moves([(0, 0, 64, 64)]))
    monkeypatch.undo()
    with pytest.raises(DeviceReset):
        await mover(moves([(0, 0, 64, 64)]))
    mesh.queue.clear()
    mover.close()


@pytest.mark.parametrize(
    "fault", [ValueError("no such core"), IndexError("map::at"), OSError(28, "disk full")]
)
def test_whatever_ttnn_raises_is_typed_and_the_queue_is_waited_for(fault, lent):
    held_by = lent()
    mesh = Mesh(banks=1, bank_bytes=1 << 19)
    mover = BankMover(mesh, reserve(mesh, 1 << 15), **SMALL)
    op, launched = held_by.generic_op, []

    def second(tensors: Any, program: Any) -> Any:
        launched.append(program)
        if len(launched) == 2:
            raise fault
        return op(tensors, program)

    __import__("ttnn").generic_op = second
    with pytest.raises(HawkMemoryError, match=str(fault).split("]")[-1].strip()[:8]):
        asyncio.run(mover(moves([(0, 64 * i, 1 << 14 | 64 * (255 - i), 32) for i in range(256)])))
    assert len(launched) == 2
    assert not mesh.queue
    with pytest.raises(HawkMemoryError):
        launched.clear()
        launched.append(None)
        asyncio.run(mover.measure())
    mover.close()


async def test_a_mover_that_is_closed_meanwhile_keeps_its_table_until_the_chip_is_done(lent):
    begun, go_on = threading.Event(), threading.Event()

    def slow(mesh: Mesh, *given: Any) -> None:
        begun.set()
        go_on.wait(60)
        programs.interpreted(mesh, *given)

    lent(slow)
    mesh = Mesh(banks=1)
    mover = BankMover(mesh, reserve(mesh, 4096))
    table = weakref.ref(mover._table)
    first = asyncio.create_task(mover(moves([(0, 0, 64, 64)])))
    await asyncio.to_thread(begun.wait, 60)
    second = asyncio.create_task(mover(moves([(0, 0, 64, 64)])))
    await asyncio.sleep(0)
    mover.close()
    gc.collect()
    assert table() is not None
    go_on.set()
    await first
    with pytest.raises(HawkMemoryError, match="closed"):
        await second
    mesh.queue.clear()
    gc.collect()
    assert table() is None


async def test_an_executor_that_has_ended_is_said(lent):
    lent()
    mesh = Mesh()
    with ThreadPoolExecutor(1) as engine:
        mover = BankMover(mesh, reserve(mesh, 4096), executor=engine)
    with pytest.raises(HawkMemoryError, match="shutdown"):
        await mover(moves([(0, 0, 64, 64)]))
    mover.close()


async def test_movers_of_a_meshs_chips_call_ttnn_one_after_the_other(lent):
    begun, go_on = threading.Event(), threading.Event()

    def slow(mesh: Mesh, chip: int, *_: Any) -> None:
        if chip == 0:
            begun.set()
            go_on.wait(60)

    seen = lent(slow).seen
    mesh = Mesh(chips=2, banks=1)
    held = reserve(mesh, 4096)
    here, beside = (BankMover(mesh, held.of_chip(chip), timeout=60) for chip in (0, 1))
    first = asyncio.create_task(here(moves([(0, 0, 64, 64)])))
    await asyncio.to_thread(begun.wait, 60)
    second = asyncio.create_task(beside(moves([(0, 0, 64, 64)])))
    await asyncio.wait([second], timeout=0.1)
    assert len(seen) == 1
    go_on.set()
    await asyncio.gather(first, second)
    assert len(seen) == 2
    here.close()
    beside.close()


async def test_a_chip_that_hangs_costs_no_other_chip_more_than_its_turn(lent):
    begun, go_on = threading.Event(), threading.Event()

    def hangs(mesh: Mesh, chip: int, *_: Any) -> None:
        if chip == 0:
            begun.set()
            go_on.wait(60)

    lent(hangs)
    mesh = Mesh(chips=2, banks=1)
    held = reserve(mesh, 4096)
    here, beside = (BankMover(mesh, held.of_chip(chip), timeout=0.02) for chip in (0, 1))
    with pytest.raises(DeviceReset):
        await here(moves([(0, 0, 64, 64)]))
    with pytest.raises(HawkMemoryError, match="behind a call that does not end") as caught:
        await beside(moves([(0, 0, 64, 64)]))
    assert not isinstance(caught.value, DeviceReset)
    beside._timeout = 60
    third = asyncio.create_task(beside(moves([(0, 0, 64, 64)])))
    go_on.set()
    await third
    here.close()
    beside.close()


CALLED = ["CoreRangeSet", "MeshCoordinate", "allocate_tensor_on_device", "copy_host_to_device_tensor"]
CALLED += ["from_device", "generic_op", "get_dram_alignment", "get_memory_view", "synchronize_device"]


@pytest.mark.parametrize("name", CALLED)
def test_whichever_call_fails_it_is_said_in_ttnns_words_and_typed(name, lent, monkeypatch):
    lent()
    mesh = Mesh(banks=1, bank_bytes=1 << 22)
    held = reserve(mesh, 4096)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("TT_FATAL @ x.cpp\ninfo:\nno such thing\nbacktrace:\n--- 1")

    monkeypatch.setattr(__import__("ttnn"), name, broken)
    with pytest.raises(HawkMemoryError, match="no such thing") as caught:
        asyncio.run(BankMover(mesh, held).measure())
    assert isinstance(caught.value, DeviceReset) == (name == "synchronize_device")
    mesh.queue.clear()
