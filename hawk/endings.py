"""How tasks and connections are waited for to their end, whatever comes meanwhile.

A leaf module: it imports nothing of HAWK, and everything may import it.
"""

from __future__ import annotations

import asyncio


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
