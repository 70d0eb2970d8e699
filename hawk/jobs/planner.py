"""Plans are pure and quick, but not so quick that an event loop should wait for them."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class Planner:
    """One thread for planning; plans are numpy and hold the GIL for much of their time, so a second gains little."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hawk-plan")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a pure function off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def soon(self, function: Callable[[], None]) -> None:
        """Has a pure function run some time, before whatever is asked for later; it raises nothing."""
        with contextlib.suppress(RuntimeError):  # closed, and nobody waits for it any more
            self._pool.submit(function)

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)
