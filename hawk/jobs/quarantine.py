"""Ranges that a peer may still read, or that could not be zeroed, kept out of the pool until it is provably over.

A range comes here when a job ended without the reader's word and its transport could not shut the reader out.
Each is tried again in the background; the transport's revoke says True once the reader let go or died.  So is one that
a GPU did not zero when it was asked to.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hawk.errors import HawkMemoryError
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from hawk.memory.arena import Arena, Range
    from hawk.transports.base import Grant, Transport

log = get_log("hawk.jobs.quarantine")


class Quarantine:
    """The quarantined ranges of one arena."""

    def __init__(self, arena: Arena, *, interval: float = 1.0) -> None:
        self._arena = arena
        self._interval = interval
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def watch(
        self,
        kept: Range,
        grant: Grant | None,
        transport: Transport | None,
        *,
        job: str,
        reason: str,
        closed: bool = False,
    ) -> None:
        """Watches a range that was put into quarantine for the moment when it may come back.

        closed    no reader is inside: it only has to be zeroed
        """
        log.warning("range quarantined", job=job, bytes=kept.nbytes, reason=reason)
        if not closed and (grant is None or transport is None):
            return
        task = asyncio.get_running_loop().create_task(self._watch(kept, grant, transport, job))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, kept: Range, grant: Grant | None, transport: Transport | None, job: str) -> None:
        while grant is not None and transport is not None and not await transport.revoke(grant):
            await asyncio.sleep(self._interval)
        while not await self._wiped(kept):
            await asyncio.sleep(self._interval)
        self._arena.release_quarantined(kept)
        log.info("range left quarantine", job=job, bytes=kept.nbytes)

    async def _wiped(self, kept: Range) -> bool:
        try:
            await self._arena.wipe(kept)
        except HawkMemoryError as error:
            log.debug("range not zeroed yet", bytes=kept.nbytes, reason=str(error))
            return False
        return True

    async def close(self) -> None:
        """Stops watching; the arena goes away with the agent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
