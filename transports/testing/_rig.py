"""What every part of the contract stands on: the hooks of the class, and a serving and a reading side."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hawk.transports.testing._helpers import Gate, SharedArena, Targets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from hawk.errors import HawkError
    from hawk.memory.region import U8, Region, Segments
    from hawk.transports.base import Grant, Link, Transport

LIMIT = float(os.environ.get("HAWK_CONTRACT_LIMIT", "60"))
"""Seconds that any single read or test of the contract may take; emulated machines take long to start Python alone."""

_Self = TypeVar("_Self")


def on_a_loop(test: Callable[[_Self], Awaitable[None]]) -> Callable[[_Self], None]:
    """Makes a coroutine method a plain test, so that the contract needs no plug-in of pytest."""

    @functools.wraps(test)
    def run(self: _Self) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(self), LIMIT)

        asyncio.run(bounded())

    # pytest looks through wrappers and would take the method for a coroutine.
    del cast("Any", run).__wrapped__
    assert not inspect.iscoroutinefunction(run)
    return run


@dataclass
class Rig:
    """One serving transport with an arena, one reading transport, and a link from one to the other."""

    serving: Transport
    reading: Transport
    link: Link
    arena: Region
    source: U8

    async def read(
        self, grant: Grant, segments: Segments, targets: Targets, *, link: Link | None = None
    ) -> None:
        """Reads with the contract's limit."""
        await (link or self.link).read(grant.key, segments, targets.regions, timeout=LIMIT)

    async def outcome(self, task: asyncio.Task[None]) -> BaseException | None:
        """How a read ended: its error or None."""
        await asyncio.wait({task}, timeout=LIMIT)
        assert task.done(), "the read did not end"
        return asyncio.CancelledError() if task.cancelled() else task.exception()

    async def usable_link(self) -> Link:
        """The link, made anew where it says that it is broken."""
        if self.link.broken:
            await self.link.close()
            self.link = await self.reading.connect(self.serving.endpoint, timeout=LIMIT)
        return self.link


class ContractBase:
    """Hooks of the contract; a subclass has to write `make` alone."""

    large: int = 32 << 20
    """Bytes of a read that cannot be over before it is interrupted: well above what buffers on the way hold."""

    def make(self) -> Transport:
        """A transport, not started."""
        raise NotImplementedError

    def arena(self, nbytes: int) -> SharedArena:
        """Memory to serve that holds `pattern(nbytes)` and that this process sees, or something that looks like it."""
        return SharedArena(nbytes)

    def hold(self, reading: Transport, gate: Gate) -> bool:
        """Arranges that `gate` is called by whoever moves bytes, between chunks, on the reading side.

        True if the transport can do so.  The default knows the attribute `on_step`.  Without it the tests of
        interrupted reads depend on `large` being large enough.
        """
        if not hasattr(reading, "on_step"):
            return False
        reading.on_step = gate
        return True

    async def held(self, rig: Rig, start: Callable[[], Awaitable[None]]) -> tuple[asyncio.Task[None], Gate]:
        """Starts a read and returns with it held in the middle, or over if it ended before that.

        Where the transport cannot be held (see `hold`) it has just begun.
        """
        gate = Gate()
        can_hold = self.hold(rig.reading, gate)

        async def reading() -> None:
            await start()

        task = asyncio.get_running_loop().create_task(reading())
        if can_hold:
            reached = asyncio.get_running_loop().create_task(gate.reached())
            await asyncio.wait({task, reached}, return_when=asyncio.FIRST_COMPLETED)
            if not reached.done():
                reached.cancel()
            else:
                reached.result()
        else:
            gate.open()
            await asyncio.sleep(0)
        return task, gate

    @contextlib.asynccontextmanager
    async def rig(self, nbytes: int) -> AsyncIterator[Rig]:
        """A rig whose arena has `nbytes` of a pattern; everything is closed at the end."""
        arena = self.arena(nbytes)
        serving, reading = self.make(), self.make()
        try:
            await serving.start()
            await reading.start()
            serving.serve(arena.region)
            link = await reading.connect(serving.endpoint, timeout=LIMIT)
            try:
                rig = Rig(serving, reading, link, arena.region, arena.region.array.copy())
                yield rig
            finally:
                await link.close()
        finally:
            await reading.close()
            await serving.close()
            arena.close()


async def refused(expected: type[HawkError], reading: Awaitable[None]) -> HawkError:
    """Asserts that a read ends with this error, and gives it."""
    try:
        await reading
    except expected as error:
        return error
    raise AssertionError(f"ended without {expected.__name__}")
