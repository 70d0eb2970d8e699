"""Where a chunk may be prepared: a range of the arena, within what its peer and its transport may have under way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hawk.jobs.scheduler import Ask
from hawk.jobs.turns import Short, Turns

if TYPE_CHECKING:
    from hawk.memory.arena import Arena, Range


@dataclass(eq=False, slots=True)
class RoomAsk(Ask):
    """A chunk that wants room: `owner` is its job, `transport` how it will be read."""

    owner: str = ""
    transport: str = ""

    def __post_init__(self) -> None:
        self.uses = (f"peer {self.peer}", f"transport {self.transport}", "arena")


class Room:
    """The arena's bytes, and each peer's and each transport's credit of them, given out together in one order.

    Together, so that nobody holds the one while it waits for the other.  A chunk larger than a credit gets its turn
    when nothing else uses that, so nobody waits for ever for a limit that was set too low.

    per_peer         bytes that all jobs of one peer may have prepared and not yet consumed
    per_transport    bytes that all peers together may have so over one transport
    """

    def __init__(self, arena: Arena, *, per_peer: int, per_transport: int) -> None:
        self.arena = arena
        self._per_peer = per_peer
        self._per_transport = per_transport
        self._used: Counter[str] = Counter()
        self._turns: Turns[Range] = Turns(self._take, self._undo)
        arena.on_room = self._turns.check

    @property
    def waiting(self) -> int:
        """Chunks that wait for room."""
        return len(self._turns)

    def used(self, name: str) -> int:
        """Bytes under way of `"peer NAME"` or `"transport NAME"`."""
        return self._used[name]

    async def take(self, ask: RoomAsk) -> Range:
        """A range for the chunk, when its turn has come.

        Raises `OutOfMemory` at once for more than the whole arena, and `Draining` if the arena is closed.
        """
        self.arena.check(ask.nbytes)
        return await self._turns.take(ask)

    def give(self, ask: RoomAsk, taken: Range, *, quarantine: str = "") -> None:
        """The chunk uses its credit no more.  Its range is free, or goes into quarantine for the reason given."""
        self._return(ask)
        if quarantine:
            self.arena.quarantine(taken, quarantine)
        else:
            self.arena.free(taken)
        self._turns.check()

    def _take(self, ask: Ask) -> Range | Short:
        assert isinstance(ask, RoomAsk)
        peer, transport, arena = ask.uses
        for name, limit in ((peer, self._per_peer), (transport, self._per_transport)):
            if self._used[name] and self._used[name] + ask.nbytes > limit:
                return Short(name)
        taken = self.arena.reserve(ask.nbytes, ask.owner)
        if taken is None:
            return Short(arena)
        self._used[peer] += ask.nbytes
        self._used[transport] += ask.nbytes
        return taken

    def _undo(self, ask: Ask, taken: Range) -> None:
        self._return(ask)
        self.arena.free(taken)

    def _return(self, ask: Ask) -> None:
        for name in ask.uses[:2]:
            self._used[name] -= ask.nbytes
            if not self._used[name]:
                del self._used[name]
