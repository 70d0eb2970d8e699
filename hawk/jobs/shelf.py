"""The chunks of one serve that lie in the arena: from when there is room for them until nobody reads them any more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.errors import HawkMemoryError
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from hawk.control.messages import Prepared
    from hawk.jobs.quarantine import Quarantine
    from hawk.jobs.room import Room, RoomAsk
    from hawk.memory.arena import Range
    from hawk.transports.base import Grant, Transport

log = get_log("hawk.jobs.shelf")


@dataclass(eq=False)
class Held:
    """One chunk; its bytes count against its peer's credit until it goes."""

    ask: RoomAsk
    range: Range
    grant: Grant | None = None
    message: Prepared | None = None


class Shelf:
    """The chunks of one job.

    credit       bytes that the job may have prepared and not yet consumed, as its consumer said
    transport    how they are read; None where the agent has no such transport, and the job will prepare nothing

    `read` counts the bytes that the consumer says it has read.
    """

    def __init__(
        self, room: Room, quarantine: Quarantine, transport: Transport | None, *, job: str, credit: int
    ) -> None:
        self._arena_room = room
        self._quarantine = quarantine
        self._transport = transport
        self._job = job
        self._credit = credit
        self._held: dict[int, Held] = {}
        self._consumed: set[int] = set()
        self._freeing: set[asyncio.Task[None]] = set()
        self._outstanding = 0
        self.read = 0
        self._room = asyncio.Event()

    async def place(self, number: int, ask: RoomAsk) -> Held:
        """A place for a chunk, once the job's own credit and the room that all share allow it."""
        while self._outstanding and self._outstanding + ask.nbytes > self._credit:
            self._room.clear()
            await self._room.wait()
        held = self._held[number] = Held(ask, await self._arena_room.take(ask))
        self._outstanding += ask.nbytes
        return held

    def prepared(self) -> list[Prepared]:
        """What was said of the chunks that lie here, to be said again."""
        return [held.message for held in self._held.values() if held.message is not None]

    def consumed(self, number: int) -> None:
        """The consumer has read a chunk.  Said again, or of one that it was not told of, it means nothing."""
        held = self._held.get(number)
        if held is None or held.message is None or number in self._consumed:
            return
        self._consumed.add(number)
        self.read += held.ask.nbytes
        if self._shut(held):
            del self._held[number]
            self._outstanding -= held.range.nbytes
            self._room.set()
            return
        task = asyncio.get_running_loop().create_task(self._let_go(number))
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    def clear_at_once(self) -> bool:
        """Returns every chunk for which nobody has to be waited for; whether that was all of them."""
        for number, held in list(self._held.items()):
            if self._shut(held):
                del self._held[number]
        return not self._held and not self._freeing

    def _shut(self, held: Held) -> bool:
        """Closes a range to its reader and frees it, where neither takes a wait; else `_return` has to."""
        if self._arena_room.arena.scrub:
            return False
        if held.grant is not None:
            try:
                if self._transport is None or not self._transport.shut(held.grant):
                    return False
            except Exception:
                log.exception("a range could not be closed to its reader", job=self._job)
                return False
        self._arena_room.give(held.ask, held.range)
        return True

    async def clear(self, *, on_its_word: bool, reason: str) -> None:
        """Returns every chunk, or quarantines it; `on_its_word` where the consumer said that it reads no more."""
        # All at once: where a reader has to be waited for, one wait serves for all ranges.
        left = [self._return(held, on_its_word=on_its_word, reason=reason) for held in self._held.values()]
        self._held.clear()
        await asyncio.gather(*self._freeing, *left, return_exceptions=True)

    async def _let_go(self, number: int) -> None:
        """Closes one chunk's range on the consumer's word and returns it to the arena."""
        held = self._held.pop(number)
        # The consumer said it has read all it wants; whether the transport can prove it does not matter here.
        await self._return(held, on_its_word=True)
        self._outstanding -= held.range.nbytes
        self._room.set()

    async def _return(self, held: Held, *, on_its_word: bool, reason: str = "") -> None:
        """Closes a range to the reader, then frees it; quarantines it where the reader may still be inside."""
        closed = held.grant is None
        try:
            if held.grant is not None and self._transport is not None:
                closed = await self._transport.revoke(held.grant)
        except Exception:
            log.exception("a range could not be closed to its reader", job=self._job)
            on_its_word = False
        if closed or on_its_word:
            try:
                await self._arena_room.arena.wipe(held.range)
            except HawkMemoryError as error:
                reason = f"it cannot be zeroed: {error}"
                self._arena_room.give(held.ask, held.range, quarantine=reason)
                self._quarantine.watch(held.range, None, None, job=self._job, reason=reason, closed=True)
                return
            self._arena_room.give(held.ask, held.range)
            return
        self._arena_room.give(held.ask, held.range, quarantine=reason or "its reader may still be inside")
        self._quarantine.watch(held.range, held.grant, self._transport, job=self._job, reason=reason)
