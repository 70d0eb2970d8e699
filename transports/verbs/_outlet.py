"""The serving side of pushes: what a reader asks for is written into its memory, by queue pairs of their own.

A push is asked for with the keys of the reader's windows and a credit for one mark on each queue pair that it may use.
Its batches go to whichever of these has least to do; when the last is posted each of them says the mark, and since a
queue pair keeps its order, the reader that has heard all of them has all bytes.  Where one breaks meanwhile, the push
as a whole is refused once nothing of it is under way, and the reader asks again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from hawk.errors import AccessDenied, HawkError, RegistrationFailed, TransferFailed
from hawk.observe.log import get as get_log
from hawk.transports.verbs import _abi, _mend, _wire
from hawk.transports.verbs._abi import Shape
from hawk.transports.verbs._device import VerbsError
from hawk.transports.verbs._end import End
from hawk.transports.verbs._shared import BROKEN
from hawk.transports.verbs._stripe import Stripe, best
from hawk.transports.verbs._work import Writing

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from hawk.memory.region import I64
    from hawk.transports._grants import Held
    from hawk.transports.verbs._device import Device
    from hawk.transports.verbs._register import Registered
    from hawk.transports.verbs._server import Server

log = get_log("hawk.transports.verbs")


class _Guest:
    """A push inside its grant; `evict` is called when the grant is revoked, under the lock of the table."""

    def __init__(self, outlet: Outlet, seq: int) -> None:
        self._outlet = outlet
        self._seq = seq

    def evict(self) -> None:
        """See `Evictable`."""
        revoked = AccessDenied("the grant was revoked")
        asyncio.get_running_loop().call_soon(self._outlet.drop, self._seq, revoked)


class Outlet:
    """The queue pairs by which one reader is written to."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stripes: list[Stripe] = []
        self._works: deque[Writing] = deque()
        self._under_way: dict[int, Writing | None] = {}
        self._dropped: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewing: list[asyncio.Lock] = []
        self._message = server.config.message
        self._closed = False

    def __len__(self) -> int:
        return len(self._stripes)

    async def add(self, facts: _wire.QueueFacts) -> _wire.QueueFacts:
        """One more queue pair, connected to the reader's.  Raises `VerbsError`."""
        self._stripes.append(Stripe(len(self._stripes), facts.port, self._server.ports[facts.port].node))
        self._renewing.append(asyncio.Lock())
        return await self._connect(self._stripes[-1], facts)

    async def _connect(self, stripe: Stripe, facts: _wire.QueueFacts) -> _wire.QueueFacts:
        config, chosen = self._server.config, self._server.ports[stripe.device]
        sge = max(min(config.max_sge, chosen.device.limits.max_sge), 1)
        end = End(chosen, config, self._server.worker, depth=config.depth, sge=sge)
        try:
            await end.open()
            await end.connect(facts)
            if self._closed:
                raise VerbsError(0, "the session is closing")
        except BaseException:
            await end.close()
            raise
        stripe.adopt(end, facts.number)
        stripe.on_free = self._pump
        stripe.on_broken = lambda broken: self._start(self._bury(broken))
        mine = end.facts(stripe.device)
        self._message = min(self._message, mine.message, facts.message)
        return mine

    async def renew(self, index: int, facts: _wire.QueueFacts) -> _wire.QueueFacts:
        """Replaces a queue pair whose other end broke.  Raises `VerbsError`."""
        stripe = self._stripes[index]
        async with self._renewing[index]:
            if stripe.end is not None:
                stripe.break_()
            while stripe.end is not None:
                await asyncio.wait(set(self._tasks))
            stripe.device, stripe.node = facts.port, self._server.ports[facts.port].node
            return await self._connect(stripe, facts)

    def _start(self, doing: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bury(self, stripe: Stripe) -> None:
        """Destroys a queue pair that broke; what was under way on it is over then."""
        end = stripe.end
        assert end is not None
        name = end.chosen.device.name
        if not self._closed:
            self._server.shared.counts[BROKEN] += 1
            log.warning("a queue pair that writes broke", device=name, reason=stripe.fault)
        await _mend.destroy(end, device=name)
        stripe.bury(None)
        self._pump()

    # -- pushes --------------------------------------------------------------------------------------------------

    def push(self, push: _wire.Push) -> Coroutine[None, None, _wire.Pushed | _wire.Refused]:
        """Writes; what is returned gives the answer when nothing of it is under way any more.  Raises `BadWire`."""
        rows = _wire.rows_of(push)
        if push.seq in self._under_way or len(self._under_way) >= _wire.PUSHES or len(push.keys) != len(self):
            raise _wire.BadWire("a push out of place")
        self._under_way[push.seq] = None
        return self._push(push, rows)

    async def _push(self, push: _wire.Push, rows: I64) -> _wire.Pushed | _wire.Refused:
        try:
            registered = await self._server.registered()
            guest = _Guest(self, push.seq)
            held = self._server.grants.admit(push.key, guest)
            if held is None:
                return _wire.Refused(push.seq, _wire.DENIED, "")
            try:
                return await self._write(push, rows, held, registered)
            finally:
                self._server.grants.leave(held, guest)
        except RegistrationFailed as error:
            return _wire.Refused(push.seq, _wire.FAILED, str(error))
        finally:
            del self._under_way[push.seq]
            self._dropped.discard(push.seq)

    async def _write(
        self, push: _wire.Push, rows: I64, held: Held, registered: Registered
    ) -> _wire.Pushed | _wire.Refused:
        low, high = held.grant.offset, held.grant.offset + held.grant.nbytes
        if int(rows[:, 0].min()) < low or int((rows[:, 0] + rows[:, 2]).max()) > high:
            return _wire.Refused(push.seq, _wire.DENIED, "the key does not cover the range")
        if broken := self._down(push):
            return _wire.Refused(push.seq, _wire.BROKEN, "a queue pair is broken", broken)
        if self._closed or push.seq in self._dropped:
            return _wire.Refused(push.seq, _wire.FAILED, "wanted no more")
        work = Writing(registered, push, rows, self._shape())
        self._under_way[push.seq] = work
        self._works.append(work)
        self._pump()
        await asyncio.wait({work.done})
        self._works.remove(work)
        error, work.error = work.error, None
        if error is None:
            return _wire.Pushed(push.seq)
        if work.broken:
            return _wire.Refused(push.seq, _wire.BROKEN, str(error), self._down(push))
        denied = isinstance(error, AccessDenied)
        return _wire.Refused(push.seq, _wire.DENIED if denied else _wire.FAILED, str(error), self._down(push))

    def _shape(self) -> Shape:
        ends = [s.end for s in self._stripes if s.end is not None]
        return Shape(
            max_sge=min(end.sge for end in ends),
            message=self._message,
            batch_wrs=max(min(end.depth for end in ends) // 4, 1),
            batch_bytes=self._server.config.batch,
            opcode=_abi.WRITE,
        )

    def _down(self, push: _wire.Push) -> list[int]:
        """Numbers of the reader's queue pairs among those of a push that are of no use."""
        return [
            number
            for stripe, keys, number in zip(self._stripes, push.keys, push.queues, strict=True)
            if keys and (stripe.end is None or stripe.broken or stripe.peer != number)
        ]

    def drop(self, seq: int, why: HawkError | None = None) -> None:
        """Writes no more of a push: what is posted may end, for a while, and then its queue pairs are destroyed."""
        work = self._under_way.get(seq)
        if work is None:
            if seq in self._under_way:
                self._dropped.add(seq)
            return
        if work.done.done():
            return
        work.stop(why or TransferFailed("the reader gave up"))
        if not work.done.done():
            asyncio.get_running_loop().call_later(self._server.config.drain_timeout, self._force, work)

    def _force(self, work: Writing) -> None:
        for stripe in self._stripes:
            if stripe.carries(work):
                stripe.break_()

    def _pump(self) -> None:
        """Posts what can be posted, a batch of each push in turn."""
        idle = 0
        while idle < len(self._works):
            work = self._works[0]
            self._works.rotate(-1)
            idle = 0 if self._post(work) else idle + 1

    def _post(self, work: Writing) -> bool:
        """Posts one batch of a push; whether it could."""
        if not work.waiting:
            return False
        wanted = [s for s in self._stripes if work.keys[s.index] is not None]
        if any(s.broken or s.end is None for s in wanted):
            work.broken = True
            work.stop(TransferFailed("a queue pair broke under the push"))
            return False
        flight = work.peek()
        if flight is not None:
            stripe = best(wanted, flight, self._server.config.near, self._server.shared.distances)
            if stripe is None or not work.take():
                return False
            stripe.post(flight, work)
            return True
        for index, mark in work.marks.items():
            if self._stripes[index].fits(mark):
                self._stripes[index].post(work.mark(index), work)
                return True
        return False

    def device_failed(self, device: Device) -> None:
        """Its queue pairs are of no more use, whether they have said so or not."""
        for stripe in self._stripes:
            if stripe.end is not None and stripe.end.chosen.device is device:
                stripe.break_()

    async def close(self) -> None:
        """Destroys the queue pairs; nothing is written afterwards."""
        self._closed = True
        for work in list(self._works):
            work.stop(TransferFailed("the session is closing"))
        for stripe in self._stripes:
            if stripe.end is not None:
                stripe.break_()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for stripe in self._stripes:
            stripe.forget()
