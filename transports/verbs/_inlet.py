"""The reading side of pushes: queue pairs by which the peer writes, and the memory that is opened to it for one read.

A read opens exactly the bytes that it is to fill, by a window for each stretch of them on each queue pair, and closes
them before it ends.  Its rows are asked for in portions; each names, by the immediate datum that its last WRITE on each
queue pair carries, a slot and how often that slot was used before (`mark_of`).  Data of a portion that is over belong
to no slot, and are dropped.  A portion under which a queue pair breaks is asked for again, under another mark.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from hawk.endings import outlast
from hawk.errors import AccessDenied, HawkError, RegistrationFailed, TransferFailed
from hawk.observe.log import get as get_log
from hawk.transports.verbs import _mend, _wire
from hawk.transports.verbs._device import REMOTE_WRITE, VerbsError
from hawk.transports.verbs._plan import plan
from hawk.transports.verbs._shared import PUSHED
from hawk.transports.verbs._ways import Ways
from hawk.transports.verbs._windows import Broken, Visit, WindowEnd, WindowPool
from hawk.transports.verbs._work import MOST_TRIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.memory.region import I64, Region, Segments
    from hawk.transports.verbs._dialogue import Dialogue
    from hawk.transports.verbs._plan import Plan
    from hawk.transports.verbs._register import Registered
    from hawk.transports.verbs._shared import Shared

log = get_log("hawk.transports.verbs")


def mark_of(slot: int, use: int) -> int:
    """The immediate datum of a slot's n-th use.

    It reads the same from both ends: whether a release of pyverbs turns immediate data round is not said anywhere.
    """
    return slot << 24 | (use & 0xFF) << 16 | (use & 0xFF) << 8 | slot


class _Attempt:
    """A portion that was asked for: which queue pairs it may use, and which have not said its mark.

    heard    True once all have, False once one of them is broken
    """

    def __init__(self, ends: set[int]) -> None:
        self.ends = frozenset(ends)
        self.missing = ends
        self.heard: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def settle(self, heard: bool) -> None:
        if not self.heard.done():
            self.heard.set_result(heard)


class Inlet:
    """The queue pairs by which one peer writes; see the module.

    dropped    immediate data that belonged to nothing
    """

    def __init__(
        self,
        shared: Shared,
        peer_ports: int,
    ) -> None:
        self._config = shared.config
        self._ports = shared.ports
        self._worker = shared.worker
        self._pools = shared.pools
        self._counts = shared.counts
        self._dialogue: Dialogue | None = None
        self.ways = Ways(shared, peer_ports)
        self.ways.on_received = self._received
        self.ways.on_broken = self._broke
        self._attempts: dict[int, _Attempt] = {}
        self._slots = list(range(_wire.PUSHES))
        self._room = asyncio.Semaphore(_wire.PUSHES)
        self._uses = [0] * _wire.PUSHES
        self.dropped = 0

    async def open(self) -> list[_wire.QueueFacts]:
        """Makes the queue pairs, and gives what the peer has to know of them.  Raises `VerbsError`."""
        return await self.ways.open()

    async def connect(self, answers: Sequence[_wire.QueueFacts], dialogue: Dialogue) -> None:
        """Connects them.  Raises `VerbsError`, or `BadWire` for impossible answers."""
        self._dialogue = dialogue
        await self.ways.connect(answers, dialogue)

    # -- reading -------------------------------------------------------------------------------------------------

    async def read(
        self, key: bytes, segments: Segments, regions: Sequence[Region], registered: Sequence[Registered]
    ) -> bool:
        """Has the peer write what a read wants; False where that is to be read by READs (`_plan.plan`).

        However this ends, nothing is written afterwards.  Raises what `Link.read` does but `DeadlineExceeded`, which is
        the caller's.
        """
        wanted = plan(segments, regions, registered, self._config)
        if wanted is not None:
            self._counts[PUSHED] += 1
            await self._push(key, wanted)
        return wanted is not None

    async def _push(self, key: bytes, wanted: Plan) -> None:
        """All rows of a plan."""
        visit = Visit(access=REMOTE_WRITE, parts=wanted.parts)
        self.ways.visits.add(visit)
        rows = wanted.rows
        portions = [
            asyncio.get_running_loop().create_task(
                self._portion(key, wanted, visit, rows[at : at + _wire.PUSH_ROWS])
            )
            for at in range(0, len(rows), _wire.PUSH_ROWS)
        ]
        error: BaseException | None = None
        try:
            await asyncio.wait(portions, return_when=asyncio.FIRST_EXCEPTION)
            error = next(filter(None, (each.exception() for each in portions if each.done())), None)
        finally:
            await outlast(asyncio.get_running_loop().create_task(self._end(visit, portions)))
            portions.clear()
        try:
            if error is not None:
                raise error
        finally:
            error = None  # it has frames in its traceback that refer to the plan, and so to the regions

    async def _end(self, visit: Visit, portions: list[asyncio.Task[None]]) -> None:
        """Ends all portions, and takes the peer's keys away."""
        for portion in portions:
            portion.cancel()
        await asyncio.gather(*portions, return_exceptions=True)

        async def unbind() -> None:
            async with visit.lock:
                visit.over = True
                await visit.unbind(self._worker, self._pool_of)

        forcing = asyncio.get_running_loop().call_later(self._config.drain_timeout, self._force, visit)
        await _mend.insist(unbind, "memory could not be closed to its writer")
        forcing.cancel()
        self.ways.visits.discard(visit)

    @staticmethod
    def _force(visit: Visit) -> None:
        """Its windows are not invalidated in time: they end with their queue pairs."""
        for end in visit.bound:
            end.break_()

    def _pool_of(self, end: WindowEnd) -> WindowPool:
        return self._pools[id(end.end.chosen.device)]

    async def _portion(self, key: bytes, wanted: Plan, visit: Visit, rows: NDArray[np.int64]) -> None:
        for _ in range(MOST_TRIES):
            await self.ways.up()
            if await self._attempt(key, wanted, visit, rows):
                return
        raise TransferFailed("queue pairs broke under it again and again", tries=MOST_TRIES)

    async def _attempt(self, key: bytes, wanted: Plan, visit: Visit, rows: I64) -> bool:
        """Asks for a portion once; False where a queue pair broke under it, and nothing of it is under way."""
        # To its end even if cancelled: a window that is being made would be lost.
        binding = asyncio.get_running_loop().create_task(self._keys(wanted, visit))
        binding.add_done_callback(lambda done: done.cancelled() or done.exception())
        keys, numbers = await asyncio.shield(binding)
        ends = {index for index, each in enumerate(keys) if each}
        if not ends:
            return False
        await self._room.acquire()
        slot = self._slots.pop()
        self._uses[slot] += 1
        mark = mark_of(slot, self._uses[slot])
        attempt = self._attempts[mark] = _Attempt(ends)
        assert self._dialogue is not None
        if not all(self.ways[index].up for index in ends):
            self._give(slot)
            del self._attempts[mark]
            return False
        seq, answer = self._dialogue.send(
            _wire.Push(
                0, key, mark, wanted.windows, wanted.bases, keys, numbers, rows.astype("<i8").tobytes()
            )
        )
        for index in ends:
            self.ways[index].spare += 1
        answer.add_done_callback(lambda said: self._give(slot, said))
        waiting: set[asyncio.Future[bool] | asyncio.Future[_wire.Answer]] = {answer, attempt.heard}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if answer.done() and isinstance(self._said(answer), _wire.Pushed):
                await asyncio.wait({attempt.heard})  # the marks are there, or their queue pair is not
            if attempt.heard.done() and attempt.heard.result():
                for index in ends:
                    self.ways[index].failures = 0
                return True
        finally:
            del self._attempts[mark]
            if not attempt.heard.done() or not attempt.heard.result():
                await outlast(asyncio.get_running_loop().create_task(self._stop(seq, answer, attempt)))
            del answer, waiting  # what it failed with has this frame in its traceback
        return False

    def _give(self, slot: int, answer: asyncio.Future[_wire.Answer] | None = None) -> None:
        """A slot can be used again; what the peer said may be of no interest any more."""
        if answer is not None and not answer.cancelled():
            answer.exception()
        self._slots.append(slot)
        self._room.release()

    async def _keys(self, wanted: Plan, visit: Visit) -> tuple[list[list[int]], list[int]]:
        """Keys of the windows for each queue pair, and its number; none for one that is broken."""
        keys: list[list[int]] = []
        numbers: list[int] = []
        async with visit.lock:
            for way in self.ways:
                end, pool = way.end, self.ways.pool(way)
                keys.append([])
                numbers.append(0)
                if end is None or end.broken or visit.over:
                    continue
                numbers[-1] = end.number
                try:
                    if pool is not None:
                        keys[-1] = await visit.bind(end, pool, wanted.line, way.device)
                    else:
                        device = self._ports[way.device].device
                        keys[-1] = await visit.share(device, wanted.line, way.device, self._worker)
                except Broken:
                    continue
                except VerbsError as error:
                    raise RegistrationFailed(
                        "the RDMA device cannot open this memory to a writer", got=error
                    ) from error
        return keys, numbers

    def _said(self, answer: asyncio.Future[_wire.Answer]) -> _wire.Answer:
        """The answer to a push, where it is no end of the read; queue pairs that it says are broken are ended."""
        try:
            said = answer.result()
        finally:
            del answer  # as in `_attempt`
        if isinstance(said, _wire.Refused):
            for way in self.ways:
                if way.end is not None and way.end.number in said.broken:
                    way.end.break_()
            if said.why == _wire.DENIED:
                raise AccessDenied("the key is unknown or revoked, or does not cover the range")
            if said.why != _wire.BROKEN:
                raise TransferFailed("the peer could not write", got=said.text)
        elif not isinstance(said, _wire.Pushed):
            raise TransferFailed("the peer's answer makes no sense", got=type(said).__name__)
        return said

    async def _stop(self, seq: int, answer: asyncio.Future[_wire.Answer], attempt: _Attempt) -> None:
        """Returns when nothing of an attempt is under way any more."""
        if not answer.done() and self._dialogue is not None:
            self._dialogue.drop(seq)
            await asyncio.wait({answer}, timeout=self._config.drain_timeout)
        if not answer.done():
            for index in attempt.ends:
                end = self.ways[index].end
                if end is not None:
                    end.break_()

    # -- what comes ----------------------------------------------------------------------------------------------

    def _received(self, index: int, immediate: int) -> None:
        attempt = self._attempts.get(immediate)
        if attempt is None or index not in attempt.missing:
            self.dropped += 1
            return
        attempt.missing.remove(index)
        if not attempt.missing:
            attempt.settle(True)

    def _broke(self, index: int) -> None:
        for attempt in self._attempts.values():
            if index in attempt.ends:
                attempt.settle(False)

    # -- the end -------------------------------------------------------------------------------------------------

    def lost(self, error: HawkError) -> None:
        """The link carries nothing more: nothing is asked for any more, and the queue pairs go."""
        self.ways.lost(error)

    async def close(self) -> None:
        """Returns when the queue pairs are destroyed."""
        await self.ways.close()
