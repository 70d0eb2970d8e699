"""A link whose reads are cut into pieces and worked off by lanes: tcp, shm and cuda."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hawk.errors import AccessDenied
from hawk.transports import _pieces
from hawk.transports._grants import KEY_BYTES
from hawk.transports._lanes import Lane, Lanes, Work
from hawk.transports.base import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.memory.region import I64, Region, Segments


class LanesLink(Link):
    """Reads from one peer over several lanes.

    A read is cut so that every lane has a share of it, into pieces of at least `least` bytes where there are as many,
    and of at most `most` bytes and `rows` segments.
    """

    def __init__(self, name: str, lanes: Sequence[Lane], *, least: int, most: int, rows: int) -> None:
        self.on_close: Callable[[], None] = lambda: None
        self._lanes = Lanes(name, lanes)
        self._count = len(lanes)
        self._least, self._most, self._rows = least, most, rows

    async def open(self, timeout: float) -> None:
        """Opens every lane.  Raises `PeerUnreachable` or `DeadlineExceeded`, and leaves nothing open then."""
        until = time.monotonic() + timeout
        try:
            await self._lanes.start(timeout)
            await self._opened(until)
        except BaseException:
            await self._lanes.close()
            self._release()
            raise

    async def read(
        self, key: bytes, segments: Segments, regions: Sequence[Region], *, timeout: float
    ) -> None:
        """See `Link.read`."""
        segments.check(regions)
        bases = self._bases(regions)
        if len(segments) == 0:
            return
        if len(key) != KEY_BYTES:
            raise AccessDenied("no key of this transport has that length", got=len(key), expected=KEY_BYTES)
        share = -(-segments.total // self._count)
        limit = min(max(share, self._least), self._most)
        pieces = _pieces.cut(segments, limit, self._rows)
        await self._lanes.carry(Work(key, pieces, bases, regions), timeout)

    @property
    def broken(self) -> bool:
        """See `Link.broken`."""
        return self._lanes.broken

    async def close(self) -> None:
        """See `Link.close`."""
        await self._lanes.close()
        self._release()
        self.on_close()

    def _bases(self, regions: Sequence[Region]) -> I64:
        """The address of each target region; raises for one that cannot be read into."""
        return _pieces.bases(regions)

    async def _opened(self, until: float) -> None:
        """What remains to be opened once every lane is, by `until` on the monotonic clock."""

    def _release(self) -> None:
        """Gives back what else the link has; once the lanes' threads have ended, and more than once."""
