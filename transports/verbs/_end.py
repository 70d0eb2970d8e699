"""The near end of one queue pair, with a completion queue of its own, on the event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import TYPE_CHECKING

from hawk.endings import outlast
from hawk.observe.log import get as get_log
from hawk.transports.verbs._device import FLUSHED, Path, VerbsError
from hawk.transports.verbs._wire import QueueFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.transports.verbs._abi import Batch
    from hawk.transports.verbs._choose import Chosen
    from hawk.transports.verbs._config import VerbsConfig
    from hawk.transports.verbs._device import Completion, Completions, Queue
    from hawk.transports.verbs._worker import Worker

log = get_log("hawk.transports.verbs")

_POLL = 64

_AT_ONCE = 16
"""Polls in one turn of the loop: a peer that never stops sending must not keep it."""


class End:
    """Made, connected and destroyed in the worker's thread; posted to and polled on the loop.

    on_done    called with completions, in the order of the send queue
    on_lost    called once, when the completion queue is of no more use
    access     what the other end may do to memory here, by a key
    receives   receives that may be posted

    The completion queue has an entry for every send slot and receive, so that it cannot overrun even when all are
    flushed.
    """

    def __init__(
        self,
        chosen: Chosen,
        config: VerbsConfig,
        worker: Worker,
        *,
        depth: int,
        sge: int,
        access: int = 0,
        receives: int = 0,
    ) -> None:
        limits = chosen.device.limits
        self.chosen = chosen
        self.depth = min(depth, limits.max_send_wr, limits.max_cqe - receives)
        self.sge = sge
        self.access = access
        self.receives = receives
        self.on_done: Callable[[Sequence[Completion]], None] = lambda done: None
        self.on_lost: Callable[[], None] = lambda: None
        self.closed = False
        self._config = config
        self._worker = worker
        self._psn = secrets.randbits(24)
        self._queue: Queue | None = None
        self._completions: Completions | None = None
        self._watched = -1
        self._spinning = False
        self._until = 0.0
        self._next_id = 1
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Makes the queue pair.  Raises `VerbsError`."""
        await self._worker.call(self._open)

    def _open(self) -> None:
        device = self.chosen.device
        completions = device.completions(self.depth + self.receives)
        try:
            self._queue = device.queue(completions, self.depth, self.sge, max(self.receives, 1))
        except BaseException:
            completions.close()
            raise
        self._completions = completions

    def facts(self, port: int) -> QueueFacts:
        """What the other end has to know; `port` is the index of the serving side's port."""
        assert self._queue is not None
        here, limits = self.chosen.port, self.chosen.device.limits
        return QueueFacts(
            port=port,
            number=self._queue.number,
            psn=self._psn,
            gid=self.chosen.gid.gid,
            lid=here.lid,
            link=here.link,
            mtu=here.mtu,
            message=here.max_message,
            reads_out=max(min(self._config.reads, limits.max_reads_out), 1),
            reads_in=max(min(self._config.reads, limits.max_reads_in), 1),
        )

    async def connect(self, peer: QueueFacts) -> None:
        """Connects it, with the lower of what both ends can do, and begins to watch.  Raises `VerbsError`."""
        queue, completions, mine = self._queue, self._completions, self.facts(0)
        assert queue is not None
        assert completions is not None
        config = self._config
        path = Path(
            port=self.chosen.port.number,
            gid_index=self.chosen.gid.index,
            link=self.chosen.port.link,
            psn=self._psn,
            peer_number=peer.number,
            peer_psn=peer.psn,
            peer_gid=peer.gid,
            peer_lid=peer.lid,
            mtu=min(mine.mtu, peer.mtu),
            reads_out=min(mine.reads_out, peer.reads_in),
            reads_in=min(mine.reads_in, peer.reads_out),
            timeout=config.timeout_exponent,
            retries=config.retries,
            traffic_class=config.traffic_class,
            service_level=config.service_level,
            access=self.access,
        )
        await self._worker.call(queue.connect, path)
        if self.closed:
            return
        completions.arm()
        self._watched = completions.fd
        asyncio.get_running_loop().add_reader(self._watched, self._event)

    # -- posting -------------------------------------------------------------------------------------------------

    @property
    def queue(self) -> Queue:
        """The queue pair; raises `VerbsError` when it is closed."""
        if self._queue is None or self.closed:
            raise VerbsError(FLUSHED, "the queue pair is closed")
        return self._queue

    def take_ids(self, count: int) -> int:
        """The first of `count` ids for work requests, which grow in the order of posting."""
        first, self._next_id = self._next_id, self._next_id + count
        return first

    def post(self, batch: Batch) -> None:
        """Posts a batch.  Raises `VerbsError`."""
        self.queue.post(batch)
        self.posted()

    def posted(self) -> None:
        """Something was posted: its completion may be there in no time."""
        self._until = time.monotonic() + self._config.spin
        if not self._spinning:
            self._spinning = True
            asyncio.get_running_loop().call_soon(self._spin)

    # -- completions ---------------------------------------------------------------------------------------------

    def _event(self) -> None:
        completions = self._completions
        if completions is None or self.closed:
            return
        while completions.take_event():
            pass
        self._take()
        if not self._spinning:
            self._rest()

    def _spin(self) -> None:
        """Polls once in each turn of the loop, until nothing has come for a while."""
        if self.closed or self._completions is None:
            self._spinning = False
            return
        if self._take():
            self._until = time.monotonic() + self._config.spin
        if time.monotonic() < self._until:
            asyncio.get_running_loop().call_soon(self._spin)
            return
        self._spinning = False
        self._rest()

    def _rest(self) -> None:
        """Asks for an event, and looks once more at what came before it was asked for."""
        completions = self._completions
        if completions is None or self.closed:
            return
        try:
            completions.arm()
        except VerbsError as error:
            self._lost(error)
            return
        self._take()

    def _take(self) -> bool:
        """Takes the completions that are there, where they are many over several turns; whether there were any."""
        came = False
        for _ in range(_AT_ONCE):
            if self.closed or self._completions is None:
                return came
            try:
                done = self._completions.poll(_POLL)
            except VerbsError as error:
                self._lost(error)
                return came
            if not done:
                return came
            came = True
            self.on_done(done)
        self.posted()  # for the rest
        return came

    def _lost(self, error: VerbsError) -> None:
        log.error("a completion queue is lost", device=self.chosen.device.name, reason=str(error))
        on_lost, self.on_lost = self.on_lost, lambda: None
        on_lost()

    # -- the end -------------------------------------------------------------------------------------------------

    async def fail(self) -> None:
        """Breaks the queue pair: what was posted completes as flushed."""
        if self._queue is not None and not self.closed:
            try:
                await self._worker.call(self._queue.fail)
            except VerbsError:
                self._unwatch()  # of a device that is gone the descriptor is readable from now on

    async def close(self) -> None:
        """Destroys the queue pair: when this ends, also by a cancellation, it neither reads nor writes any memory.

        Safe to call twice.  Raises `VerbsError` where the device would not: it may still move bytes then, and this may
        be asked again.
        """
        self.closed = True
        self._unwatch()
        if self._closing is None or (self._closing.done() and self._closing.exception() is not None):
            self._closing = asyncio.get_running_loop().create_task(self._worker.call(self._close))
            # Asked for here, since who is cancelled below does not.
            self._closing.add_done_callback(lambda done: done.cancelled() or done.exception())
        closing = self._closing
        await outlast(closing)
        closing.result()

    def _unwatch(self) -> None:
        if self._watched >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
            self._watched = -1

    def _close(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        if self._completions is not None:
            self._completions.close()
            self._completions = None
