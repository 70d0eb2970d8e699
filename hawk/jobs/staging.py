"""Where chunks wait in the target's own channels between the read that brings them and the moves that finish them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from hawk.errors import HawkError, OutOfMemory
from hawk.jobs.scrub import wipe
from hawk.memory.scrub import of_allocation
from hawk.observe.log import get as get_log
from hawk.plan.decide import decide

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from hawk.jobs.fetch import FetchContext
    from hawk.jobs.request import FetchRequest
    from hawk.memory.base import Allocation, Memory
    from hawk.plan.types import TargetChunk
    from hawk.transports.base import Capabilities

log = get_log("hawk.jobs.staging")


class Staging:
    """Slots for chunks, each as large in every channel; made by `take`, given back by `free`."""

    def __init__(self, memory: Memory, nbytes: int) -> None:
        self._memory = memory
        self._bytes = nbytes
        self._taken: list[Allocation] = []
        self._free: asyncio.Queue[int] = asyncio.Queue()

    def __len__(self) -> int:
        return len(self._taken)

    @classmethod
    def take(cls, memory: Memory, like: TargetChunk, most: int, slots: int, owner: str) -> Staging:
        """So many slots for chunks like that one, in at most so many bytes of each channel, or as many as there are.

        Raises `OutOfMemory` where there is room for none.
        """
        # Blocks spread unevenly over the channels where pages per block do not divide; a quarter covers that,
        # and a chunk that needs more than its slot is written directly.
        wanted = int(like.channel_bytes.max()) * 5 // 4
        made = cls(
            memory, min(wanted, most // slots) // memory.alignment * memory.alignment + memory.alignment
        )
        try:
            while len(made) < slots:
                taken = memory.allocate(made._bytes, owner=owner, brief=True)
                made._taken.append(taken)
                made._free.put_nowait(taken.offset)
        except OutOfMemory:
            if not made:
                raise
        except BaseException:
            for taken in made._taken:
                memory.free(taken)
            raise
        return made

    def fits(self, planned: TargetChunk) -> bool:
        """Whether a chunk has room in a slot."""
        return int(planned.channel_bytes.max()) <= self._bytes

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[int]:
        """Waits for a slot; its offset, the same in every channel, for as long as the block lasts."""
        offset = await self._free.get()
        try:
            yield offset
        finally:
            self._free.put_nowait(offset)

    async def free(self, *, scrub: bool) -> None:
        """Gives all back, zeroed with `scrub`, however this ends.  Safe to call twice.

        Raises the first error of a device that does not take the zeros.
        """
        again: tuple[object, ...] | None = None
        fault: HawkError | None = None
        taken, self._taken = self._taken, []
        for slot in taken:
            try:
                if scrub:
                    await wipe(self._memory.regions, of_allocation(slot), self._memory)
            except asyncio.CancelledError as error:
                again = error.args
            except HawkError as error:
                fault = fault or error
            finally:
                self._memory.free(slot)
        try:
            if again is not None:
                raise asyncio.CancelledError(*again)
            if fault is not None:
                raise fault
        finally:
            fault = None  # it has this frame in its traceback


def weighed(
    context: FetchContext, request: FetchRequest, like: TargetChunk, capabilities: Capabilities, slots: int
) -> Staging | None:
    """Decides how chunks like that one are written: None directly, else by way of the slots that were taken for it.

    Raises `OutOfMemory` where the config says staged and there is no room for that.
    """
    memory, cache = request.cache.memory, request.cache
    decision = decide(
        like,
        cache.placement,
        move_support="none" if memory is None else memory.move_support.value,
        move_cost=0.0 if memory is None else memory.move_cost,
        move_row_cost=0.0 if memory is None else memory.move_row_cost,
        move_call_cost=0.0 if memory is None else memory.move_call_cost,
        request_cost=capabilities.request_cost,
        bandwidth=capabilities.bandwidth,
        max_sge=capabilities.max_sge,
        override=context.mode,  # type: ignore[arg-type]
    )
    log.debug("write mode", job=request.job, mode=decision.mode, reason=decision.reason)
    if decision.mode == "direct" or memory is None:
        return None
    try:
        most = context.staging // cache.layout.channels
        made = Staging.take(memory, like, most, slots, f"{request.job}/staging")
    except OutOfMemory as fault:
        if context.mode == "staged":
            raise
        log.info("no room for staging; writing directly", job=request.job, reason=str(fault))
        return None
    if len(made) < slots:  # the chunks take turns, then
        log.debug("less room for staging than wanted", job=request.job, slots=len(made))
    return made
