"""Work of which a little is done ahead: a few pieces at a time, none left behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hawk.jobs.states import settle

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import TracebackType


class Ahead:
    """At most `most` pieces under way at a time: `async with Ahead(2) as ahead: await ahead.put(work)`.

    With one, `put` does the work itself.  With more it returns once there is room for the next, and raises what an
    earlier one failed with.  Leaving the block waits for all that are under way, which an error cancels first.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Ahead:
        return self

    async def put(self, work: Coroutine[object, object, None]) -> None:
        """Begins with a piece of work, which is done when this block has been left without an error."""
        if self._most == 1:
            await work
            return
        self._tasks.add(asyncio.get_running_loop().create_task(work))
        await self._until(self._most - 1)

    async def _until(self, left: int) -> None:
        while len(self._tasks) > left:
            done, self._tasks = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self._until(0)
        finally:
            await self._end()

    async def _end(self) -> None:
        tasks, self._tasks = self._tasks, set()
        for task in tasks:
            task.cancel()
        if tasks:
            # Each of them ends only when nobody touches its bytes any more.
            await settle(asyncio.gather(*tasks, return_exceptions=True))
