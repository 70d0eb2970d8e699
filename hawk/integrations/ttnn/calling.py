"""Calls that take a thread: begun or given up, and in no way of a process that ends."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Turn:
    """Work that has begun, or never will once it was given up."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._begun = False
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """Does the work, unless it was given up."""
        with self._lock:
            work, self._begun = self._work, True
        if work is not None:
            work()

    def give_up(self) -> bool:
        """Whether it began before this; if not, it does not any more."""
        with self._lock:
            self._work = None
            return self._begun


def in_a_thread(work: Callable[[], None]) -> Future[None]:
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
