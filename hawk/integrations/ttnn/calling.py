"""Calls of ttnn: one at a time, begun or given up, in no way of a process that ends; and what it says when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING

from hawk.errors import HawkError, HawkMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor


_LOOK = 0.2
"""Seconds between two looks whether a call that waits for others was given up, and its thread is free for others."""


class NotBegun(Exception):
    """Nothing of the call was done, and nothing will be."""


class NotEnded(Exception):
    """The call, or the one before it, began and did not end in time; it may go on whenever it does."""


def words(fault: Exception) -> str:
    """What ttnn says: behind the place in its sources, and before its calls."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    said = (lines[i + 1] for i, line in enumerate(lines[:-1]) if line == "info:")
    return next(said, lines[0] if lines else type(fault).__name__)[:300]


@contextlib.contextmanager
def told(message: str, field: str, hint: str | None = None) -> Iterator[None]:
    """Turns whatever ttnn raises within, which is of many classes, into `HawkMemoryError` with its own words."""
    try:
        yield
    except (HawkError, NotBegun, NotEnded):
        raise
    except Exception as fault:
        raise HawkMemoryError(message, field=field, got=words(fault), hint=hint) from fault


class _Turn:
    """Work that has begun, or never will once it was given up.

    began   when it did, by `time.monotonic`
    hung    it did not end in time
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._lock = threading.Lock()
        self.began: float | None = None
        self.hung = False

    def __call__(self) -> None:
        """Does the work, unless it was given up."""
        with self._lock:
            work, self._work = self._work, None
            self.began = time.monotonic()
        if work is not None:
            work()

    @property
    def given_up(self) -> bool:
        """Whether it will never begin."""
        return self._work is None and self.began is None

    def give_up(self) -> bool:
        """Whether it began before this; if not, it does not any more."""
        with self._lock:
            self._work = None
            return self.began is not None


class _Line:
    """Who calls, of all in this process: a library that drives several chips is one for all of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.first: _Turn | None = None

    def moves(self) -> bool:
        """Whether somebody calls, and may yet end in time."""
        first = self.first
        return first is not None and not first.hung


_line = _Line()


class Calls:
    """Calls one after the other, those of others in this process included.

    They are made in the executor's threads, or in one of its own each if that is None.

    hung   one did not end in time, after which none is made
    """

    def __init__(self, executor: Executor | None) -> None:
        self._executor = executor
        self.hung = False

    async def __call__(self, work: Callable[[], None], timeout: float) -> None:
        """Makes one, for which it has `timeout` seconds from when it begins: those before it have their own.

        Raises `NotBegun` where no thread came to it in that time, `NotEnded`, and what the work raises.
        """
        if self.hung:
            raise NotEnded
        turn = _Turn(work)
        running = self._begun(turn)
        # Maybe nobody waits any more by then.
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        left = timeout
        while not (await asyncio.wait([running], timeout=left))[0]:
            left = timeout
            if turn.began is None and _line.moves() and not self.hung:
                continue  # whoever is before it is judged there
            begun = turn.give_up()
            if turn.began is not None and not self.hung:
                left = turn.began + timeout - time.monotonic()
                if left > 0:
                    continue
            running.cancel()  # which ends nothing that began, but nobody is told any more when that ends
            if not begun and not self.hung:
                behind = ", behind a call that does not end" if _line.first is not None else ""
                raise NotBegun(f"not begun in {timeout:g} s{behind}")
            self.hung = turn.hung = True
            raise NotEnded
        running.result()

    def _begun(self, turn: _Turn) -> asyncio.Future[None]:
        def in_turn() -> None:
            while not _line.lock.acquire(timeout=_LOOK):
                if turn.given_up:
                    return
            try:
                _line.first = turn
                turn()
            finally:
                _line.first = None
                _line.lock.release()

        try:
            if self._executor is not None:
                return asyncio.get_running_loop().run_in_executor(self._executor, in_turn)
            return asyncio.wrap_future(_in_a_thread(in_turn))
        except RuntimeError as error:  # an executor that was shut down, or no thread to be had
            raise NotBegun(str(error)) from error


def _in_a_thread(work: Callable[[], None]) -> Future[None]:
    """Begins it in a thread that keeps no process from ending: one whose chip hangs would wait for ever."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (whoever waits is told)
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="hawk-mover", daemon=True).start()
    return future
