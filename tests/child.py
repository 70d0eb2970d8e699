"""Child processes of asynchronous tests, of which nothing is left for the collector."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any


@contextlib.asynccontextmanager
async def child(*command: str | Path, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts a process; kills it at the end if it still lives, and closes its pipes.

    `wait()` returns when the process has ended, while the pipes may still be open (a grandchild has them, or nobody
    read to their end); they would be closed whenever the collector comes by, in the middle of another test.
    """
    process = await asyncio.create_subprocess_exec(*command, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)  # the pipes themselves are closed by callbacks
