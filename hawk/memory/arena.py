"""The arena: one touched, shareable region that jobs reserve pieces of, waiting their turn."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from dataclasses import dataclass

from hawk.errors import Busy, DeadlineExceeded, Draining, InvalidArgument
from hawk.memory.ranges import Range, RangeAllocator
from hawk.memory.region import Region
from hawk.memory.shared import alloc

__all__ = ["Arena", "Range", "RangeAllocator"]


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    owner: str
    alignment: int | None
    granted: asyncio.Future[Range]


class Arena:
    """A memfd region and the ranges of it that jobs hold.

    Reservations are served strictly in order of arrival: a large one at the head is never overtaken by small
    ones that would fit, so it gets its turn as soon as enough came back.  All methods belong to one event loop;
    the constructor blocks while it fills the memory and may run anywhere.

    nbytes       size in bytes, rounded down to a multiple of `alignment`
    alignment    every range starts at a multiple of this many bytes
    max_waiters  reservations that may wait at a time; more get `Busy`
    """

    def __init__(
        self,
        nbytes: int,
        *,
        name: str = "arena",
        alignment: int = 4096,
        max_waiters: int = 1024,
        huge_pages: bool = False,
    ) -> None:
        self.name = name
        self.allocator = RangeAllocator(nbytes, alignment, name)
        self._max_waiters = max_waiters
        self._waiters: deque[_Waiter] = deque()
        self._buffer = alloc(self.allocator.nbytes, name=name, huge_pages=huge_pages)
        self._region: Region | None = self._buffer.region()

    @property
    def region(self) -> Region:
        """The arena's memory.  Raises `InvalidArgument` once closed."""
        if self._region is None:
            raise InvalidArgument("the arena is closed", field=self.name)
        return self._region

    @property
    def waiting(self) -> int:
        """Reservations that wait for room."""
        return len(self._waiters)

    async def reserve(
        self, nbytes: int, owner: str, timeout: float, *, alignment: int | None = None
    ) -> Range:
        """A range of `nbytes`, as soon as it fits and everyone who asked earlier was served.

        Ended early (by deadline or cancellation) it holds nothing and is in nobody's way.

        Raises
        ------
        OutOfMemory
            more than the whole arena; said at once.
        DeadlineExceeded
            it did not fit within `timeout` seconds (0 or less: does not fit now).
        Busy
            too many others wait.
        Draining
            the arena is closed, or was while this waited.
        """
        if self._region is None:
            raise Draining("the arena is closed", field=self.name)
        if not self.allocator.fits_empty(nbytes, alignment):
            raise self.allocator.out_of_memory(nbytes, alignment)
        if not self._waiters:
            offset = self.allocator.first_fit(nbytes, alignment=alignment)
            if offset is not None:
                return self.allocator.claim(offset, nbytes, owner)
        if timeout <= 0:
            raise self._deadline(nbytes, owner, timeout)
        if len(self._waiters) >= self._max_waiters:
            raise Busy("too many reservations wait", field=self.name, waiting=len(self._waiters))
        loop = asyncio.get_running_loop()
        waiter = _Waiter(nbytes, owner, alignment, loop.create_future())
        self._waiters.append(waiter)
        timer = loop.call_later(timeout, functools.partial(self._expire, waiter, timeout))
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            # The grant and the cancellation may meet in one turn of the loop; the grant is then nobody's.
            if waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                self.allocator.free(waiter.granted.result())
            raise
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self._serve()

    def free(self, taken: Range) -> None:
        """Gives a range back.  Raises `InvalidArgument` if it is not allocated any more."""
        self.allocator.free(taken)
        self._serve()

    def quarantine(self, taken: Range, reason: str) -> None:
        """Takes a range from its owner, but keeps it from use: a byte may still move in it."""
        self.allocator.quarantine(taken, reason)

    def release_quarantined(self, taken: Range) -> None:
        """Makes a range in quarantine free."""
        self.allocator.release_quarantined(taken)
        self._serve()

    def close(self) -> None:
        """Fails whoever waits with `Draining` and lets go of the memory.  Safe to call twice.

        The pages stay mapped for as long as somebody holds the region or a view of it.
        """
        self._region = None
        for waiter in self._waiters:
            if not waiter.granted.done():
                waiter.granted.set_exception(Draining("the arena was closed", field=self.name))
        self._waiters.clear()
        self._buffer.close()

    def _serve(self) -> None:
        while self._waiters:
            head = self._waiters[0]
            if not head.granted.done():
                offset = self.allocator.first_fit(head.nbytes, alignment=head.alignment)
                if offset is None:
                    return
                head.granted.set_result(self.allocator.claim(offset, head.nbytes, head.owner))
            self._waiters.popleft()

    def _expire(self, waiter: _Waiter, timeout: float) -> None:
        if not waiter.granted.done():
            waiter.granted.set_exception(self._deadline(waiter.nbytes, waiter.owner, timeout))

    def _deadline(self, nbytes: int, owner: str, timeout: float) -> DeadlineExceeded:
        return DeadlineExceeded(
            "no room in time",
            field=self.name,
            owner=owner,
            asked=nbytes,
            free=self.allocator.free_bytes,
            largest_piece=self.allocator.largest_free,
            quarantined=self.allocator.quarantined_bytes,
            waiting=len(self._waiters),
            timeout=f"{timeout:g}s",
        )
