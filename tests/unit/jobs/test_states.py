"""Leases, stoppable bodies, and waits that a cancellation does not cut short."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from hawk.errors import Aborted, HawkError, InternalError
from hawk.jobs.states import Lease, Stoppable, settle
from tests.unit.jobs.clock import ClockLoop


async def test_a_lease_ends_once_and_not_before_its_time() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[float] = loop.create_future()
    began = loop.time()
    lease = Lease(0.05, lambda: ended.set_result(loop.time()))
    assert await asyncio.wait_for(ended, 10) >= began + 0.05 - 0.001
    assert not lease.renew()
    assert lease.remaining <= 0


async def test_a_renewed_lease_counts_from_when_it_was_meant_to() -> None:
    loop = asyncio.get_running_loop()
    lease = Lease(10, lambda: None)
    assert lease.renew(since=loop.time() + 5)
    assert 14 < lease.remaining <= 15
    assert lease.renew(since=loop.time() - 100)  # never shorter than it was
    assert lease.remaining > 14
    lease.end()
    assert not lease.renew()


async def test_a_lease_that_began_too_long_ago_is_over_at_once() -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    lease = Lease(1, lambda: ended.set_result(None), since=loop.time() - 2)
    assert not lease.renew()
    await asyncio.wait_for(ended, 10)


@pytest.mark.parametrize(
    ("late", "heard", "held"), [(0.5, True, False), (9.0, True, True), (9.0, False, False)]
)
def test_who_gives_a_lease_and_stood_still_hears_first_what_was_said(
    late: float, heard: bool, held: bool
) -> None:
    loop, ended = ClockLoop(), [0]

    def over() -> None:
        ended[0] += 1

    lease = loop.do(lambda: Lease(10.0, over, grace=1.0))
    loop.now += (
        10.0 + late
    )  # no turn of the loop in all that time: the timer comes before what lies in the sockets
    loop.settle()
    loop.do(lambda: None)
    assert ended == [late < 1.0]
    if heard:
        assert loop.do(lease.renew) is held
        loop.advance(9.9)
        assert ended == [not held]
        loop.now += 5.0
    loop.advance(0.9)
    if not heard:
        assert ended == [0]
    loop.advance(2.0)
    assert ended == [1]  # and put off once
    lease.end()
    loop.close()


def test_a_message_before_the_timer_of_a_lease_that_was_put_off_renews_it() -> None:
    loop, ended = ClockLoop(), []
    lease = loop.do(lambda: Lease(10.0, lambda: ended.append(1), grace=1.0))
    loop.now += 19.0
    assert loop.do(lease.renew)
    assert lease.remaining == pytest.approx(10.0)
    assert not ended
    lease.end()
    loop.close()


async def test_an_ended_lease_says_nothing() -> None:
    lease = Lease(0.01, lambda: pytest.fail("it was ended"))
    lease.end()
    lease.end()
    await asyncio.sleep(0.03)


class Held:
    """A body that holds something until it is let go, as one does that waits for a thread."""

    def __init__(self) -> None:
        self.began, self.free, self.over = asyncio.Event(), asyncio.Event(), False

    async def body(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self.free.wait()
            self.over = True


async def test_stop_waits_for_the_body() -> None:
    held, job = Held(), Stoppable()
    task = asyncio.get_running_loop().create_task(job.supervise(held.body()))
    await held.began.wait()
    job.stop(Aborted("first"))
    job.stop(Aborted("second"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    held.free.set()
    with pytest.raises(Aborted, match="first"):
        await task
    assert held.over


async def test_a_cancellation_waits_for_the_body_however_often_it_comes() -> None:
    held, job = Held(), Stoppable()
    task = asyncio.get_running_loop().create_task(job.supervise(held.body()))
    await held.began.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    held.free.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.over


async def test_what_was_stopped_before_it_began_never_begins() -> None:
    held, job = Held(), Stoppable()
    job.stop(Aborted("too early"))
    with pytest.raises(Aborted, match="too early"):
        await job.supervise(held.body())
    assert not held.began.is_set()


async def test_the_bodys_own_error_and_its_success() -> None:
    async def fails() -> None:
        raise InternalError("own")

    async def succeeds() -> None:
        return

    with pytest.raises(InternalError, match="own"):
        await Stoppable().supervise(fails())
    done = Stoppable()
    await done.supervise(succeeds())
    done.stop(HawkError("late"))  # changes nothing


async def test_settle_passes_cancellations_on_at_the_end() -> None:
    end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.get_running_loop().create_task(settle(end))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    end.set_exception(HawkError("the task's own"))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_that_was_put_off_keeps_nothing() -> None:
    """What the waiting frames refer to, memory of clients among it, goes with them, not when a collector comes by."""

    class Thing:
        pass

    kept: list[weakref.ref[Thing]] = []

    async def holder(task: asyncio.Task[object]) -> None:
        thing = Thing()
        kept.append(weakref.ref(thing))
        await settle(task)

    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = loop.create_task(end.wait())
    waiting = loop.create_task(holder(task))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    gc.disable()
    try:
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        end.set()
        await asyncio.wait({waiting})
        assert waiting.cancelled()
        del waiting
        assert kept[0]() is None
    finally:
        gc.enable()
