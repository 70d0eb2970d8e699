"""Seeing that the event loop runs, from outside of it: a stuck loop cannot tell of itself.

`LoopWatch` sets a timer on the loop and measures how late it comes.  `Watchdog` is a thread that looks at the last
time it came, says so in the log when that is too long ago, and serves `/livez`, `/readyz` and `/metrics`, which are
answered therefore while the loop stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.observe.http import ObserveServer

log = get_log("hawk.observe.watchdog")

INTERVAL = 0.25
"""Seconds between two looks."""

_FRAMES = 12
"""Innermost frames of the stuck thread that the log names."""


class LoopWatch:
    """Measures how late the running loop is; make and start it there.

    limit     seconds without a turn after which the loop counts as stuck
    observe   told how late each timer was, in seconds
    alone     no `Watchdog` looks at it, so it tells afterwards, itself, that the loop was stuck
    """

    def __init__(self, limit: float, observe: Callable[[float], None], *, alone: bool = False) -> None:
        self.limit = limit
        self._alone = alone
        self.thread = threading.get_ident()
        self._observe = observe
        self._loop = asyncio.get_running_loop()
        self._last = time.monotonic()
        self._due = self._last
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Sets the timer."""
        self._last = time.monotonic()
        self._due = self._last + INTERVAL
        self._timer = self._loop.call_later(INTERVAL, self._tick)

    def stop(self) -> None:
        """Takes the timer away; the loop counts as running from now on.  Safe to call twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._due)
        self._observe(late)
        if self._alone and late > self.limit:
            log.warning(
                "the event loop stood still, and whoever waited for this agent with it",
                stood_seconds=round(late, 1),
                hint="The program that it is part of kept Python's lock, or had no processor",
            )
        self._last, self._due = now, now + INTERVAL
        self._timer = self._loop.call_later(INTERVAL, self._tick)

    def late(self) -> float:
        """Seconds by which the next turn of the loop is overdue; from any thread."""
        return max(0.0, time.monotonic() - self._due) if self._timer is not None else 0.0

    def trouble(self) -> str | None:
        """What `/livez` says of a loop that is stuck, None while it runs."""
        late = self.late()
        return None if late <= self.limit else f"the event loop has not run for {late:.1f} seconds"

    def stack(self) -> list[str]:
        """Where the loop's thread is, the innermost last: places in the code, and nothing of what is handled there."""
        frame = sys._current_frames().get(self.thread)
        places = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
        return [f"{place.filename}:{place.lineno} {place.name}" for place in places]


class Watchdog:
    """The thread; `server`, where there is one, runs on its own event loop there.

    look    called in the thread again and again; returns within how many seconds it has to be called next
    """

    def __init__(
        self,
        watch: LoopWatch,
        server: ObserveServer | None,
        look: Callable[[], float] = lambda: INTERVAL,
    ) -> None:
        self._watch = watch
        self._look_also = look
        self._server = server
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    async def start(self) -> None:
        """Starts the thread; raises what starting the server there raises."""
        loop = asyncio.get_running_loop()
        up: asyncio.Future[None] = loop.create_future()

        def told(error: BaseException | None) -> None:
            if up.done():
                return
            if error is None:
                up.set_result(None)
            else:
                up.set_exception(error)

        def run() -> None:
            try:
                asyncio.run(self._run(lambda: loop.call_soon_threadsafe(told, None)))
            except BaseException as error:  # noqa: BLE001  # whatever it is, whoever waits has to hear of it
                loop.call_soon_threadsafe(told, error)

        self._thread = threading.Thread(target=run, name="hawk-watchdog", daemon=True)
        self._thread.start()
        await up

    async def close(self) -> None:
        """Ends the server and the thread.  Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # it never came up, and its loop has ended
                self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.get_running_loop().run_in_executor(None, thread.join)

    async def _run(self, up: Callable[[], object]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self._server is not None:
            await self._server.start()
        up()
        stuck = 0.0
        try:
            while not self._stop.is_set():
                stuck = self._look(stuck)
                try:
                    async with asyncio.timeout(min(self._look_also(), INTERVAL)):
                        await self._stop.wait()
                except TimeoutError:
                    continue
        finally:
            if self._server is not None:
                await self._server.close()

    def _look(self, stuck: float) -> float:
        """Tells once that the loop got stuck, and once that it runs again; returns for how long it has been so."""
        late = self._watch.late()
        if late > self._watch.limit:
            if not stuck:
                log.error("the event loop stands still", seconds=round(late, 1), where=self._watch.stack())
            return late
        if stuck:
            log.warning("the event loop runs again", stood_seconds=round(stuck, 1))
        return 0.0
