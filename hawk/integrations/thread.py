"""A thread with an event loop of its own, and the bounded line of calls that others put before it.

An engine's hooks must not wait for the loop, which may be busy: `post` appends and returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import uvloop

from hawk.errors import DeadlineExceeded
from hawk.integrations import processors
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

log = get_log("hawk.integrations.thread")


class LoopThread:
    """Runs `main(up)` on a loop in a thread of its own; it calls `up()` when it has started, and ends after `close`.

    cpus     processors of the thread and of those that it starts, see `processors.take`
    room     calls that may stand in line
    ended    called on the thread when all is over, in whichever way
    """

    def __init__(
        self,
        main: Callable[[Callable[[], None]], Coroutine[Any, Any, None]],
        *,
        cpus: str,
        room: int,
        ended: Callable[[], None],
    ) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.over = False
        self._main = main
        self._cpus = cpus
        self._room = room
        self._ended = ended
        self._queue: deque[Callable[[], object]] = deque()
        self._awake = False
        self._stop: asyncio.Event | None = None
        self._up = threading.Event()
        self._fault: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="hawk-engine", daemon=True)

    def start(self, seconds: float) -> None:
        """Returns when `main` has started; raises what kept it from that, or `DeadlineExceeded`."""
        self._thread.start()
        if not self._up.wait(seconds):
            raise DeadlineExceeded("the agent did not come up in time", seconds=seconds)
        if self._fault is not None:
            self._thread.join()
            raise self._fault

    def _run(self) -> None:
        try:
            processors.take(self._cpus)  # first: the threads that this one starts have what it has
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._begin())
        except BaseException as error:  # noqa: BLE001 - it is told where the engine can hear it
            if self._up.is_set():
                log.error("the connector's thread has ended", reason=repr(error))
            self._fault = error
        finally:
            self.over = True
            self._ended()
            self._up.set()

    async def _begin(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self._main(self._up.set)

    async def until_stopped(self, seconds: float) -> None:
        """For `main`: waits for `close`, then ends all tasks and waits for them, at most so many seconds."""
        assert self._stop is not None
        await self._stop.wait()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=seconds)

    def close(self, seconds: float) -> None:
        """Ends the thread, and waits so long for it.  Safe to call twice, and where it never started."""
        if self.loop is None or self._stop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(seconds)

    def wait(self, coroutine: Coroutine[Any, Any, None], seconds: float) -> None:
        """Runs it on the loop and waits for its end, from another thread."""
        assert self.loop is not None
        asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def post(self, call: Callable[[], object], *, bounded: bool = True) -> bool:
        """Puts a call in line for the loop; False if there is no room, or no loop any more.

        What only wakes or ends an order that is there already always has room: there are no more of those than orders.
        """
        if self.over or (bounded and len(self._queue) >= self._room):
            return False
        self._queue.append(call)
        if not self._awake:
            self._awake = True
            assert self.loop is not None
            try:
                self.loop.call_soon_threadsafe(self._empty)
            except RuntimeError:  # the loop has ended
                self._awake = False
                self._queue.clear()
                return False
        return True

    def _empty(self) -> None:
        self._awake = False
        while self._queue:
            self._queue.popleft()()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """On the loop: a task that ends with it."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
