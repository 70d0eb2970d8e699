"""The reading side: a link of several queue pairs, dealt over the ports, and the reads that share them.

Reads take turns batch by batch, and each batch goes to the queue pair that has least to do.  A queue pair that breaks
is destroyed first; then what was under way on it is posted on another, and a fresh pair is agreed with the peer in the
background.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

from hawk.endings import all_ended, outlast
from hawk.errors import (
    AccessDenied,
    DeadlineExceeded,
    HawkError,
    PeerUnreachable,
    RegistrationFailed,
    TransferFailed,
)
from hawk.observe.log import get as get_log
from hawk.transports import _pieces
from hawk.transports._grants import KEY_BYTES
from hawk.transports.base import Link
from hawk.transports.verbs import _mend, _wire
from hawk.transports.verbs._abi import Shape
from hawk.transports.verbs._device import BIND, LOCAL_WRITE, VerbsError
from hawk.transports.verbs._dialogue import Dialogue
from hawk.transports.verbs._end import End
from hawk.transports.verbs._inlet import Inlet
from hawk.transports.verbs._shared import BROKEN, PULLED
from hawk.transports.verbs._stripe import Stripe, best
from hawk.transports.verbs._work import Flight, Reading, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from hawk.memory.region import Region, Segments
    from hawk.transports.verbs._device import Device
    from hawk.transports.verbs._shared import Shared

log = get_log("hawk.transports.verbs")


class VerbsLink(Link):
    """See the module.

    `peer_ports` is how many ports the peer has, `name` what we call ourselves; with `pushes` the peer may write.
    """

    def __init__(
        self,
        shared: Shared,
        peer_ports: int,
        name: bytes,
        pushes: bool,
    ) -> None:
        self._config = config = shared.config
        self._ports = ports = shared.ports
        self._registrations = shared.registrations
        self._worker = shared.worker
        self._counts, self._distances = shared.counts, shared.distances
        self._peer_ports = peer_ports
        self._name = name
        self.on_close: Callable[[VerbsLink], None] = lambda link: None
        self._stripes = [
            Stripe(i, i % len(ports), ports[i % len(ports)].node) for i in range(config.queue_pairs)
        ]
        self._works: deque[Reading] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._inlet = Inlet(shared, peer_ports) if pushes else None
        if self._inlet is not None:
            self._inlet.ways.on_alone = self._lost
        self._access = LOCAL_WRITE | (BIND if pushes and shared.pools else 0)
        self._opening: asyncio.Task[None] | None = None
        self._dialogue: Dialogue | None = None
        self._shape: Shape | None = None
        self._over: HawkError | None = None
        self._ending = asyncio.Event()
        self._peer = ""

    # -- opening -------------------------------------------------------------------------------------------------

    async def open(self, host: str, port: int, token: bytes, timeout: float) -> None:
        """Connects.  Raises `PeerUnreachable` or `DeadlineExceeded`, and leaves nothing behind then."""
        self._peer = f"{host}:{port}"
        try:
            async with asyncio.timeout(timeout):
                self._opening = asyncio.get_running_loop().create_task(self._open(host, port, token))
                await self._opening
        except asyncio.CancelledError:
            asked = (me := asyncio.current_task()) is not None and me.cancelling() > 0
            await self.close()
            if asked:
                raise
            raise PeerUnreachable("the link was closed while it opened", peer=self._peer) from None
        except TimeoutError as error:
            await self.close()
            if isinstance(error, HawkError):
                raise
            raise DeadlineExceeded("the peer did not answer", peer=self._peer, timeout=timeout) from error
        except (OSError, VerbsError) as error:
            await self.close()
            if isinstance(error, HawkError):
                raise
            raise PeerUnreachable("cannot connect", got=error, peer=self._peer) from error
        except BaseException:
            await self.close()
            raise

    async def _open(self, host: str, port: int, token: bytes) -> None:
        ends = [self._end(stripe) for stripe in self._stripes]
        connected = False
        try:
            for end in ends:
                await end.open()
            mine = [end.facts(s.index % self._peer_ports) for s, end in zip(self._stripes, ends, strict=True)]
            inlets = await self._inlet.open() if self._inlet is not None else []
            # Last: the peer waits for a hello only so long, and a queue pair may take its time.
            self._dialogue = dialogue = await Dialogue.connect(host, port)
            answer = await dialogue.first(_wire.Hello(_wire.VERSION, token, mine, self._name, inlets))
            if isinstance(answer, _wire.Refused):
                full = answer.why == _wire.FULL
                raise PeerUnreachable(
                    "the peer serves as many links as it may" if full else "the peer cannot serve this link",
                    peer=self._peer,
                    got=None if full else answer.text,
                    hint="Raise transport.verbs.max_connections there" if full else None,
                )
            if not isinstance(answer, _wire.Welcome) or len(answer.queues) != len(ends):
                raise _wire.BadWire("whoever listens there speaks another protocol")
            for stripe, end, theirs in zip(self._stripes, ends, answer.queues, strict=True):
                _wire.check(theirs, self._peer_ports)
                await end.connect(theirs)
                self._adopt(stripe, end, theirs.number)
            if self._inlet is not None:
                await self._inlet.connect(answer.outlets, dialogue)
            connected = True
        finally:
            if not connected:
                await all_ended(*(_mend.destroy(end, peer=self._peer) for end in ends))
        messages = [self._config.message, *(q.message for q in (*mine, *answer.queues))]
        self._shape = Shape(
            max_sge=min(end.sge for end in ends),
            message=min(messages),
            batch_wrs=max(min(end.depth for end in ends) // 4, 1),
            batch_bytes=self._config.batch,
        )
        dialogue.listen(self._lost)

    def _end(self, stripe: Stripe) -> End:
        chosen = self._ports[stripe.device]
        limits = chosen.device.limits
        sge = max(min(self._config.max_sge, limits.max_sge, limits.max_sge_read), 1)
        return End(chosen, self._config, self._worker, depth=self._config.depth, sge=sge)

    def _adopt(self, stripe: Stripe, end: End, peer: int) -> None:
        stripe.adopt(end, peer)
        stripe.on_free = self._pump
        stripe.on_broken = lambda broken: self._start(self._recover(broken))

    def _start(self, doing: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(doing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- reading -------------------------------------------------------------------------------------------------

    async def read(
        self, key: bytes, segments: Segments, regions: Sequence[Region], *, timeout: float
    ) -> None:
        """See `Link.read`; raises `RegistrationFailed` for a region that the device cannot reach."""
        segments.check(regions)
        _pieces.bases(regions)
        if len(segments) == 0:
            return
        if len(key) != KEY_BYTES:
            raise AccessDenied("no key of this transport has that length", got=len(key), expected=KEY_BYTES)
        until = time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                registered = [await self._registrations.of(region, self._access) for region in regions]
                if self._inlet is not None and await self._inlet.read(key, segments, regions, registered):
                    return
                work = Reading(key, segments, regions, registered)
                known = self._dialogue.announced(key) if self._dialogue is not None else None
                self._enter(work, known or await self._ask(_wire.Enter(0, key)))
        except TimeoutError as error:
            if isinstance(error, HawkError):
                raise
            raise self._late(timeout) from error
        except RegistrationFailed as error:
            if self._over is not None:
                raise self._ended() from error
            raise
        if self._over is not None:
            raise self._ended()
        self._counts[PULLED] += 1
        self._works.append(work)
        self._pump()
        try:
            await self._finish(work, until, timeout)
        finally:
            with contextlib.suppress(ValueError):
                self._works.remove(work)

    async def _finish(self, work: Work, until: float, timeout: float) -> None:
        try:
            await asyncio.wait({work.done}, timeout=max(until - time.monotonic(), 0.0))
        except asyncio.CancelledError:
            work.stop(None)
            await self._drained(work)
            raise
        if not work.done.done():
            work.stop(self._late(timeout))
            await self._drained(work)
        try:
            if work.error is not None:
                raise work.error
        finally:
            work.error = None  # it has frames in its traceback that refer to the read, and so to its regions

    async def _drained(self, work: Work) -> None:
        """Returns when nothing of a read that was stopped is under way any more."""
        forcing = asyncio.get_running_loop().call_later(self._config.drain_timeout, self._force, work)
        try:
            await outlast(work.done)
        finally:
            forcing.cancel()

    def _force(self, work: Work) -> None:
        for stripe in self._stripes:
            if stripe.carries(work):
                stripe.break_()

    def _late(self, timeout: float) -> DeadlineExceeded:
        return DeadlineExceeded("the read did not end in time", timeout=timeout, peer=self._peer)

    async def _ask(self, question: _wire.Enter) -> _wire.Answer:
        if self._over is not None or self._dialogue is None:
            raise self._ended()
        return await self._dialogue.ask(question)

    def _enter(self, work: Reading, answer: _wire.Answer) -> None:
        """Takes in the answer to Enter.  Raises `AccessDenied`, or `TransferFailed` where the peer has a fault."""
        if isinstance(answer, _wire.Refused):
            if answer.why == _wire.DENIED:
                raise AccessDenied("the key is unknown or revoked", peer=self._peer)
            raise TransferFailed("the peer cannot open the range", got=answer.text, peer=self._peer)
        try:
            if not isinstance(answer, _wire.Entered):
                raise _wire.BadWire(f"{type(answer).__name__} in answer to Enter")
            _wire.check_entered(answer, len(self._stripes))
            assert self._shape is not None
            work.enter(answer, self._shape)
        except _wire.BadWire as error:
            raise TransferFailed("the peer's answer makes no sense", got=error, peer=self._peer) from error
        for stripe, keys, number in zip(self._stripes, answer.keys, answer.queues, strict=True):
            if stripe.end is None or number != stripe.peer:
                work.keys[stripe.index] = None  # the answer and a fresh queue pair crossed on their way
            elif not keys:
                stripe.break_()  # at the peer's end it is broken already

    def _pump(self) -> None:
        """Posts what can be posted, a batch of each read in turn."""
        idle = 0
        while idle < len(self._works):
            work = self._works[0]
            self._works.rotate(-1)
            flight = work.peek() if work.waiting else None
            stripe = None if flight is None else self._choose(work, flight)
            if flight is None or stripe is None or not work.take():
                idle += 1
                continue
            idle = 0
            stripe.post(flight, work)

    def _choose(self, work: Reading, flight: Flight) -> Stripe | None:
        """Where a batch goes: where least is under way, and not where it failed before unless all others are down."""
        up = [s for s in self._stripes if s.end is not None and not s.broken]
        if any(work.keys[s.index] is None for s in up) and not work.asking:
            work.asking = True
            self._start(self._enter_again(work))
        up = [s for s in up if work.keys[s.index] is not None]
        elsewhere = [s for s in up if s.index != flight.avoid]
        return best(elsewhere or up, flight, self._config.near, self._distances)

    async def _enter_again(self, work: Reading) -> None:
        """Keys for queue pairs that were made since the read began."""
        try:
            self._enter(work, await self._ask(_wire.Enter(0, work.key)))
        except HawkError as error:
            work.stop(error)
        work.asking = False
        self._pump()

    # -- when something breaks -----------------------------------------------------------------------------------

    async def _recover(self, stripe: Stripe) -> None:
        """Destroys a broken queue pair, puts what was on it elsewhere, and makes it anew."""
        end = stripe.end
        if self._over is None:
            self._counts[BROKEN] += 1
            log.warning(
                "a queue pair broke",
                peer=self._peer,
                device=self._ports[stripe.device].device.name,
                reason=stripe.fault,
                failures=stripe.failures,
            )
        if end is not None:
            await _mend.destroy(end, peer=self._peer)
        stripe.bury(self._over)
        for work in self._works:
            work.keys[stripe.index] = None
        self._pump()
        stripe.since = time.monotonic()
        while self._over is None:
            if delay := _mend.pause(stripe.failures):
                await _mend.rest(delay, self._ending)
            try:
                await self._renew(stripe)
                break
            except (HawkError, VerbsError, TimeoutError) as error:
                stripe.failures += 1
                log.warning("a queue pair could not be made anew", peer=self._peer, reason=str(error))
                alone, since = all(s.end is None for s in self._stripes), max(s.since for s in self._stripes)
                if alone and time.monotonic() - since > self._config.handshake_timeout:
                    self._lost(TransferFailed("no queue pair can be made anew", got=error, peer=self._peer))
        self._pump()

    def device_failed(self, device: Device) -> None:
        """Its queue pairs are of no more use, whether they have said so or not."""
        for stripe in self._stripes:
            if self._ports[stripe.device].device is device and stripe.end is not None:
                stripe.break_()
        if self._inlet is not None:
            self._inlet.ways.device_failed(device)

    async def _renew(self, stripe: Stripe) -> None:
        if self._over is not None or self._dialogue is None:
            raise self._ended()
        end = self._end(stripe)
        adopted = False
        try:
            await end.open()
            facts, limit = end.facts(stripe.index % self._peer_ports), self._config.handshake_timeout
            theirs = await _mend.anew(self._dialogue, stripe.index, facts, self._peer_ports, limit)
            await end.connect(theirs)
            if self._over is not None:
                raise self._ended()
            self._adopt(stripe, end, theirs.number)
            adopted = True
        finally:
            if not adopted:
                await end.close()

    def _lost(self, error: HawkError) -> None:
        """The link can carry nothing more: its reads end, once its queue pairs are destroyed."""
        if self._over is not None:
            return
        self._over = error
        self._ending.set()
        if self._dialogue is not None:
            self._dialogue.abort()
        for work in list(self._works):
            work.stop(self._ended())
        for stripe in self._stripes:
            if stripe.end is not None:
                stripe.break_()
        if self._inlet is not None:
            self._inlet.lost(self._ended())

    def _ended(self) -> TransferFailed:
        why = self._over
        return TransferFailed(why.message if why is not None else "the link is not open", peer=self._peer)

    @property
    def broken(self) -> bool:
        """See `Link.broken`."""
        return self._over is not None

    async def close(self) -> None:
        """See `Link.close`."""
        self._lost(TransferFailed("the link is closed", peer=self._peer))
        if self._opening is not None and not self._opening.done():
            self._opening.cancel()
            await asyncio.wait({self._opening})
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._inlet is not None:
            await self._inlet.close()
        if self._dialogue is not None:
            await self._dialogue.close()
        self.on_close(self)
