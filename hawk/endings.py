"""How tasks and connections are waited for to their end, whatever comes meanwhile; threads that do what they took.

A leaf module: it imports nothing of HAWK, and everything may import it.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

P = ParamSpec("P")
T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """Threads that never do what they did not take.

    Where the system gives no more threads, Python's own raises `RuntimeError` and keeps the work on its list all the
    same: it is done whenever a thread comes by, on memory that somebody else has by then.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See `concurrent.futures.Executor.submit`; after an error the work is not under way, and never will be."""
        once = _Once(fn)
        try:
            return super().submit(once, *args, **kwargs)
        except RuntimeError:
            once.withdraw()
            raise


class _Once:
    """A call that can be taken back."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call: Callable[..., Any] | None = call
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            call, self._call = self._call, None
            return None if call is None else call(*args, **kwargs)

    def withdraw(self) -> None:
        """Returns when it has ended, if another thread has begun it, or will not begin any more."""
        with self._lock:
            self._call = None


async def outlast(future: asyncio.Future[None]) -> None:
    """Waits for `future` through every cancellation, and raises `CancelledError` afterwards if one came.

    Only for waits that are bounded by what the caller did before: here lies memory that a thread may still
    write to, and leaving early would hand it out.
    """
    cancelled: tuple[object, ...] | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error.args
    if cancelled is not None:
        raise asyncio.CancelledError(*cancelled)


async def all_ended(*endings: Awaitable[None]) -> None:
    """Waits until each has ended, also through a cancellation, which they hear of; raises what the first failed with.

    `asyncio.gather` as it is goes on as soon as one of them was cancelled or failed: what the others still destroy
    would be taken for gone.
    """
    for result in await asyncio.gather(*endings, return_exceptions=True):
        if result is not None:
            raise result


async def gone(writer: asyncio.StreamWriter) -> None:
    """Ends a connection at once; when this returns, also by a cancellation, its socket is closed.

    What the connection broke on is asyncio's to keep: in the reader, whose calls raise it, and in a future that nobody
    waits for but here.  Raised, it refers to the frames that it came through, which refer to the reader and to all that
    a session has.  That ring would stay until a collector came by, with the memory that is served; and where the
    collector ended the future before its owner, asyncio would log it as never retrieved, and the log keep the ring.
    """
    writer.transport.abort()
    # A task, since a cancellation of ours would go through to asyncio's future.  It takes a turn or two of the loop.
    closing = asyncio.get_running_loop().create_task(writer.wait_closed())
    try:
        await outlast(closing)
    finally:
        error = closing.exception() if closing.done() and not closing.cancelled() else None
        if error is not None:
            error.__traceback__ = error.__context__ = None
            error = None
