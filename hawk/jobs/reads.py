"""Reads that go on at a time, from each peer over each transport."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hawk.jobs.turns import Slots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hawk.jobs.scheduler import Ask

MOST = 64
"""Reads of one peer at a time; many small ones side by side hide what each of them waits."""


class Reads:
    """Turns at reading from a peer, fair between this agent's clients.

    Each peer has its own, so that one that stands still costs nobody else's reads.

    nbytes    bytes that are read from one peer at a time over one transport
    """

    def __init__(self, nbytes: int = 64 << 20) -> None:
        self._nbytes = nbytes
        self._slots: dict[tuple[str, str], Slots] = {}

    def passes(self, peer: str, transport: str, ask: Ask) -> bool:
        """Whether a read that takes no wait may go now: nobody waits, and there is room for it."""
        slots = self._slots.get((peer, transport))
        return slots is None or slots.passes(ask)

    @contextlib.asynccontextmanager
    async def turn(self, peer: str, transport: str, ask: Ask) -> AsyncIterator[None]:
        """The turn of one read from `peer`, for as long as the block lasts."""
        key = (peer, transport)
        slots = self._slots.setdefault(key, Slots(MOST, self._nbytes))
        try:
            async with slots.turn(ask):
                yield
        finally:
            if not slots.running and not slots.waiting and self._slots.get(key) is slots:
                del self._slots[key]
