"""The queue pairs by which a peer writes into memory here: made, connected, and made anew when they break."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from hawk.errors import HawkError, TransferFailed
from hawk.observe.log import get as get_log
from hawk.transports.verbs import _mend, _wire
from hawk.transports.verbs._device import REMOTE_WRITE, VerbsError
from hawk.transports.verbs._end import End
from hawk.transports.verbs._shared import BROKEN
from hawk.transports.verbs._windows import Visit, WindowEnd, WindowPool, retire

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from hawk.transports.verbs._device import Device
    from hawk.transports.verbs._dialogue import Dialogue
    from hawk.transports.verbs._shared import Shared

log = get_log("hawk.transports.verbs")

_DEPTH = 128
"""Send slots: windows that are being bound or invalidated at a time."""

RECEIVES = 2 * _wire.PUSHES
"""One for each credit that the peer can have, and as many for marks that came and were not looked at yet."""


class Way:
    """One queue pair of a link that the peer writes by; `end` is the present one, None while there is none.

    since    when the last one was destroyed
    spare    marks that may come before the peer is taken for one that says more than it was given credits for
    """

    def __init__(self, index: int, device: int) -> None:
        self.index = index
        self.device = device
        self.end: WindowEnd | None = None
        self.failures = 0
        self.since = 0.0
        self.spare = 0

    @property
    def up(self) -> bool:
        """Whether it can be used."""
        return self.end is not None and not self.end.broken


class Ways:
    """The queue pairs of one link.

    visits       what is opened to the peer at the moment
    on_received  called with the index of a queue pair and immediate data that came
    on_broken    called with the index of a queue pair that broke
    on_alone     called when there is none any more, and none can be made for longer than an answer may take
    """

    def __init__(
        self,
        shared: Shared,
        peer_ports: int,
    ) -> None:
        self._config = config = shared.config
        self._ports = ports = shared.ports
        self._peer_ports = peer_ports
        self._worker = shared.worker
        self._pools = shared.pools
        self._counts = shared.counts
        self._ways = [Way(i, i % len(ports)) for i in range(config.queue_pairs)]
        self._dialogue: Dialogue | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: HawkError | None = None
        self._ending = asyncio.Event()
        self.visits: set[Visit] = set()
        self.on_received: Callable[[int, int], None] = lambda index, immediate: None
        self.on_broken: Callable[[int], None] = lambda index: None
        self.on_alone: Callable[[HawkError], None] = lambda error: None

    def __iter__(self) -> Iterator[Way]:
        return iter(self._ways)

    def __getitem__(self, index: int) -> Way:
        return self._ways[index]

    async def open(self) -> list[_wire.QueueFacts]:
        """Makes the queue pairs, and gives what the peer has to know of them.  Raises `VerbsError`."""
        facts = []
        for way in self._ways:
            way.end = await self._make(way)
            facts.append(way.end.end.facts(way.index % self._peer_ports))
        return facts

    async def connect(self, answers: Sequence[_wire.QueueFacts], dialogue: Dialogue) -> None:
        """Connects them.  Raises `VerbsError`, or `BadWire` for impossible answers."""
        self._dialogue = dialogue
        if len(answers) != len(self._ways):
            raise _wire.BadWire("another number of queue pairs")
        for way, theirs in zip(self._ways, answers, strict=True):
            _wire.check(theirs, self._peer_ports)
            assert way.end is not None
            await self._adopt(way, way.end, theirs)

    async def _make(self, way: Way) -> WindowEnd:
        chosen = self._ports[way.device]
        end = WindowEnd(
            End(
                chosen,
                self._config,
                self._worker,
                depth=_DEPTH,
                sge=1,
                access=REMOTE_WRITE,
                receives=RECEIVES,
            )
        )
        try:
            await end.end.open()
            pool = self.pool(way)
            if pool is not None:
                pool.outdate()
            end.number = end.end.queue.number
        except BaseException:
            await end.close()
            raise
        return end

    async def _adopt(self, way: Way, end: WindowEnd, theirs: _wire.QueueFacts) -> None:
        await end.end.connect(theirs)
        end.receive(RECEIVES)
        if end.broken:
            raise VerbsError(0, "ibv_post_recv")
        way.spare = RECEIVES
        end.on_received = lambda immediate: self._received(way, immediate)
        end.on_broken = lambda: self._broke(way)
        way.end = end
        self._changed.set()

    def pool(self, way: Way) -> WindowPool | None:
        """Where its windows come from; None where memory is opened by registrations."""
        return self._pools.get(id(self._ports[way.device].device))

    def _start(self, doing: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- when something breaks -----------------------------------------------------------------------------------

    async def up(self) -> None:
        """Returns when one of them can be used.  Raises `TransferFailed` when the link is over."""
        while self._over is not None or not any(way.up for way in self._ways):
            if self._over is not None:
                raise TransferFailed(self._over.message)
            self._changed.clear()
            await self._changed.wait()

    def _received(self, way: Way, immediate: int) -> None:
        way.spare -= 1
        if way.spare < 0 and way.end is not None:
            log.warning("a peer says more marks than it has credits for")
            way.end.break_()
            return
        self.on_received(way.index, immediate)

    def device_failed(self, device: Device) -> None:
        """Its queue pairs are of no more use, whether they have said so or not."""
        for way in self._ways:
            if self._ports[way.device].device is device and way.end is not None:
                way.end.break_()

    def _broke(self, way: Way) -> None:
        way.failures += 1
        self.on_broken(way.index)
        self._start(self._mend(way))

    async def _mend(self, way: Way) -> None:
        """Ends a queue pair that broke, with the windows on it, and makes it anew."""
        end = way.end
        assert end is not None
        name = self._ports[way.device].device.name
        if self._over is None:
            self._counts[BROKEN] += 1
            log.warning("a queue pair that is written by broke", device=name, failures=way.failures)
        pool = self.pool(way)
        await _mend.insist(
            lambda: retire(end, list(self.visits), pool), "a queue pair could not be destroyed", device=name
        )
        way.end = None
        way.since = time.monotonic()
        while self._over is None:
            if delay := _mend.pause(way.failures):
                await _mend.rest(delay, self._ending)
            try:
                await self._renew(way)
                return
            except (OSError, HawkError) as error:
                way.failures += 1
                if self._over is None:
                    reason = str(error) or "the peer did not answer"
                    log.warning("a queue pair could not be made anew", device=name, reason=reason)
                alone = all(each.end is None for each in self._ways)
                since = max(each.since for each in self._ways)
                if alone and time.monotonic() - since > self._config.handshake_timeout:
                    self.on_alone(TransferFailed("no queue pair can be made anew", got=error))

    async def _renew(self, way: Way) -> None:
        assert self._dialogue is not None
        end = await self._make(way)
        adopted = False
        try:
            facts, limit = end.end.facts(way.index % self._peer_ports), self._config.handshake_timeout
            theirs = await _mend.anew(self._dialogue, way.index, facts, self._peer_ports, limit, inlet=True)
            await self._adopt(way, end, theirs)
            adopted = True
        finally:
            if not adopted:
                way.end = None
                await end.close()
        if self._over is not None:
            end.break_()

    # -- the end -------------------------------------------------------------------------------------------------

    def lost(self, error: HawkError) -> None:
        """The link carries nothing more: nothing is asked for any more, and the queue pairs go."""
        self._over = error
        self._changed.set()
        self._ending.set()
        for way in self._ways:
            if way.end is not None:
                way.end.break_()

    async def close(self) -> None:
        """Returns when the queue pairs are destroyed."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        for way in self._ways:  # those that were never connected
            if way.end is not None:
                await _mend.destroy(
                    way.end
                )  # there until it is destroyed: another that closes waits for it too
                way.end = None
