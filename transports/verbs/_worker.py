"""The threads in which calls of the RDMA library run that may take long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from hawk.endings import outlast

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_THREADS = 4


class Worker:
    """A few threads, so that a call that hangs holds up no other."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "hawk-verbs-control")

    async def call(self, function: Callable[..., T], *args: object) -> T:
        """Runs `function` in a thread.

        Cancelled, it waits for the call to end all the same, and what the call gave is lost: functions that open
        something put it where its owner finds it.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: settled.set_result(None))
        await outlast(settled)
        return future.result()

    async def close(self) -> None:
        """Ends the threads; whoever called has waited for the end of its call."""
        self._pool.shutdown(wait=True)
