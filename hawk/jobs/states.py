"""The states of a job, its lease, and the names of its endings.

A fetch (decode side) goes

    reserving -> queued -> connecting -> requested -> receiving -> releasing -> ready
          any of these -> draining -> failed

and a serve (prefill side)

    waiting -> queued -> preparing -> prepared -> released
          any of these -> draining -> failed

`draining` means that the outcome is decided and the job still waits until nobody touches its bytes.
"""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Any

from hawk.errors import HawkError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class State(enum.StrEnum):
    """Where a job is."""

    RESERVING = "reserving"
    QUEUED = "queued"
    CONNECTING = "connecting"
    REQUESTED = "requested"
    RECEIVING = "receiving"
    RELEASING = "releasing"
    READY = "ready"
    WAITING = "waiting"
    PREPARING = "preparing"
    PREPARED = "prepared"
    RELEASED = "released"
    DRAINING = "draining"
    FAILED = "failed"


class Lease:
    """A right that ends by itself unless it is renewed; counted on this process' monotonic clock only.

    `on_expiry` is called once, from the event loop, when `seconds` have passed since the last renewal; the first
    period begins at loop time `since`, or now.

    Whoever gives a right may leave it to others for longer: with `grace`, an end to which this loop comes more than so
    many seconds late, because it stood still itself, is put off once by as many, for renewals that were not read yet.
    """

    def __init__(
        self,
        seconds: float,
        on_expiry: Callable[[], None],
        *,
        since: float | None = None,
        grace: float | None = None,
    ) -> None:
        self.seconds = seconds
        self._grace = grace
        self._put_off = False
        self._loop = asyncio.get_running_loop()
        self._until = (self._loop.time() if since is None else since) + seconds
        self._on_expiry = on_expiry
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._until, self._check)

    @property
    def remaining(self) -> float:
        """Seconds left; zero or less once it has expired."""
        return self._until - self._loop.time()

    def renew(self, since: float | None = None) -> bool:
        """Starts the period anew, at loop time `since` (now if not given).  False if it had expired already."""
        if self._timer is None or (self.remaining <= 0 and not self._late()):
            return False
        self._put_off = False
        start = self._loop.time() if since is None else since
        self._until = max(self._until, start + self.seconds)
        return True

    def end(self) -> None:
        """Stops the clock without calling `on_expiry`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        if self._timer is None:
            return
        if self.remaining <= 0 and self._late():
            assert self._grace is not None
            self._put_off, self._until = True, self._loop.time() + self._grace
        if self.remaining > 0:
            self._timer = self._loop.call_at(self._until, self._check)
            return
        self._timer = None
        self._on_expiry()

    def _late(self) -> bool:
        """Whether this loop has come to the end so late that it may be put off."""
        return self._grace is not None and not self._put_off and -self.remaining > self._grace


class Stoppable:
    """Runs one coroutine that can be stopped from outside with a named error.

    The first `stop` wins.  The coroutine is then cancelled and waited for, so that whatever it held is out of
    its hands when `supervise` raises the error.  A cancellation of `supervise` itself passes through, after
    the coroutine has ended.
    """

    def __init__(self) -> None:
        self._error: HawkError | None = None
        self._body: asyncio.Task[None] | None = None

    @property
    def stopped(self) -> HawkError | None:
        """The error it was stopped with, if it was."""
        return self._error

    def stop(self, error: HawkError) -> None:
        """Ends the coroutine with `error`; later calls change nothing."""
        if self._error is not None:
            return
        self._error = error
        if self._body is not None:
            self._body.cancel()

    async def supervise(self, coroutine: Coroutine[object, object, None]) -> None:
        """Runs `coroutine` to its end; raises what it raised, or the error given to `stop`."""
        if self._error is not None:
            coroutine.close()
            raise self._error
        self._body = asyncio.get_running_loop().create_task(coroutine)
        try:
            await _over(self._body)
        except asyncio.CancelledError:
            self._body.cancel()
            try:
                await settle(self._body)
            finally:
                self._body = None  # as below
            raise
        # The task, what it raised and this job refer to each other; nobody asks for the task any more.
        body, self._body = self._body, None
        if body.cancelled():
            raise HawkError("the job's task was cancelled") if self.stopped is None else self.stopped
        fault = body.exception()
        if fault is not None:
            try:
                raise fault
            finally:
                fault = None


def forget_frames(error: BaseException | None) -> None:
    """Lets go of the frames that an error and its causes passed through, and so of all that those refer to.

    For an error that is kept, as text or for the wire, and not raised any more: its frames would keep the job's
    caches, and with them a client's memory, until a garbage collection.
    """
    seen: set[int] = set()
    left = [error]
    while left:
        fault = left.pop()
        if fault is not None and id(fault) not in seen:
            seen.add(id(fault))
            left += (fault.__cause__, fault.__context__)
            fault.__traceback__ = None


async def _over(task: asyncio.Future[Any]) -> None:
    """Waits for one task as `asyncio.wait` does for many, which costs every job several times as much."""
    if task.done():
        return
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(_: asyncio.Future[Any]) -> None:
        if not waiter.done():
            waiter.set_result(None)

    task.add_done_callback(done)
    try:
        await waiter
    finally:
        task.remove_done_callback(done)


async def settle(task: asyncio.Future[Any]) -> None:
    """Waits until `task` has ended, through further cancellations of the caller; raises nothing of the task's.

    A cancellation that arrives meanwhile is raised again once the task has ended.
    """
    # Here and wherever else one is put off, only its arguments are kept: the exception has this frame in its traceback,
    # the frame would have the exception, and with them all that either refers to would stay until a collector comes by.
    again: tuple[object, ...] | None = None
    while not task.done():
        try:
            await _over(task)
        except asyncio.CancelledError as error:
            again = error.args
    if not task.cancelled():
        task.exception()
    if again is not None:
        raise asyncio.CancelledError(*again)
