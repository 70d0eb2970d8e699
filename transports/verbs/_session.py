"""One reader on the serving side: its queue pairs, and the grants that it has entered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from hawk.errors import RegistrationFailed
from hawk.observe.log import get as get_log
from hawk.transports.verbs import _wire
from hawk.transports.verbs._device import REMOTE_READ, VerbsError
from hawk.transports.verbs._end import End
from hawk.transports.verbs._outlet import Outlet
from hawk.transports.verbs._shared import BROKEN
from hawk.transports.verbs._windows import Broken, Visit, WindowEnd, WindowPool, parts, retire

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from hawk.transports.verbs._device import Device
    from hawk.transports.verbs._server import Server

log = get_log("hawk.transports.verbs")

_DEPTH = 128
"""Send slots: windows that are being bound or invalidated at a time."""

_MOST_QUEUES = 64
_MOST_QUESTIONS = 4096
_MOST_PROMISED = 1024


class Session:
    """See the module; `reader` is what the reader calls itself.

    Questions are answered as they come; binding for one does not hold up the next.
    """

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._ends: list[WindowEnd | None] = []
        self._ports: list[int] = []
        self._outlet = Outlet(server)
        self._visits: dict[bytes, Visit] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._renewing: list[asyncio.Lock] = []
        self._promised: dict[bytes, None] = {}  # in order
        self._proven = False
        self.reader = b""

    async def run(self, hello: _wire.Hello) -> None:
        """Serves until the reader ends.  Raises `OSError`, or `VerbsError` where its queue pairs cannot be made."""
        if not 0 < len(hello.queues) <= _MOST_QUEUES or len(hello.inlets) > _MOST_QUEUES:
            raise _wire.BadWire("no queue pairs, or too many")
        self.reader = hello.reader
        answers = []
        for facts in hello.queues:
            _wire.check(facts, len(self._server.ports))
            self._ports.append(facts.port)
            self._ends.append(None)
            self._renewing.append(asyncio.Lock())
            answers.append(await self._connect(len(self._ends) - 1, facts))
        outlets = []
        for facts in hello.inlets if self._server.config.direction != "pull" else []:
            _wire.check(facts, len(self._server.ports))
            outlets.append(await self._outlet.add(facts))
        _wire.write(self._writer, _wire.Welcome(answers, outlets))
        while True:
            question = await _wire.read_question(self._reader)
            await self._writer.drain()
            if len(self._tasks) >= _MOST_QUESTIONS:
                raise _wire.BadWire("too many questions at a time")
            if isinstance(question, _wire.Enter):
                self._start(self._enter(question))
            elif isinstance(question, _wire.Push):
                self._start(self._push(self._outlet.push(question)))
            elif isinstance(question, _wire.Drop):
                self._outlet.drop(question.seq)
            elif isinstance(question, _wire.Renew) and 0 <= question.index < len(
                self._outlet if question.inlet else self._ends
            ):
                _wire.check(question.queue, len(self._server.ports))
                self._start(self._renew(question))
            else:
                raise _wire.BadWire("a question out of place")

    def _start(self, doing: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(doing)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, index: int, facts: _wire.QueueFacts) -> _wire.QueueFacts:
        """Makes the queue pair that goes with the reader's.  Raises `VerbsError`."""
        server = self._server
        chosen = server.ports[self._ports[index]]
        end = End(chosen, server.config, server.worker, depth=_DEPTH, sge=1, access=REMOTE_READ)
        serving = WindowEnd(end)
        try:
            await end.open()
            if server.pools:
                self._pool(serving).outdate()
            serving.number = end.queue.number
            await end.connect(facts)
        except BaseException:
            await serving.close()
            raise
        if self._closing is not None:
            await serving.close()
            raise VerbsError(0, "the session is closing")
        self._ends[index] = serving
        return end.facts(self._ports[index])

    async def _renew(self, question: _wire.Renew) -> None:
        """Replaces a queue pair that broke; what was bound on the old one ends with it.

        One after the other: a reader that has given up waiting asks again while the first is under way.
        """
        try:
            if question.inlet:
                renewed = await self._outlet.renew(question.index, question.queue)
                _wire.write(self._writer, _wire.Renewed(question.seq, renewed))
                return
            async with self._renewing[question.index]:
                old = self._ends[question.index]
                if old is not None:
                    self._server.shared.counts[BROKEN] += 1
                    await self._retire(old)  # kept until it is gone, so that closing finds it
                    self._ends[question.index] = None
                answer = await self._connect(question.index, question.queue)
            _wire.write(self._writer, _wire.Renewed(question.seq, answer))
        except VerbsError as error:
            _wire.write(self._writer, _wire.Refused(question.seq, _wire.FAILED, str(error)))

    async def _retire(self, end: WindowEnd) -> None:
        """Ends a queue pair and what is bound on it.  Raises `VerbsError`, and may be called again then."""
        await retire(end, list(self._visits.values()), self._pool(end) if self._server.pools else None)

    def device_failed(self, device: Device) -> None:
        """Its queue pairs are of no more use, whether they have said so or not; the reader is to make them anew."""
        for end in self._ends:
            if end is not None and end.end.chosen.device is device:
                self._start(end.fail())
        self._outlet.device_failed(device)

    async def _push(self, pushing: Coroutine[None, None, _wire.Pushed | _wire.Refused]) -> None:
        _wire.write(self._writer, await pushing)

    def _pool(self, end: WindowEnd) -> WindowPool:
        return self._server.pools[id(end.end.chosen.device)]

    # -- grants --------------------------------------------------------------------------------------------------

    def announce(self, key: bytes) -> None:
        """Opens a grant that the reader is about to ask for, and tells it.

        Only once it has entered one by itself that nobody but the reader that it calls itself was given the key of:
        other agents know that reader's token, too.
        """
        if len(self._outlet) and self._server.config.direction == "push":
            return  # it does not come to read
        if not self._proven:
            self._promised[key] = None
            if len(self._promised) > _MOST_PROMISED:
                del self._promised[next(iter(self._promised))]
        elif self._closing is None and len(self._tasks) < _MOST_QUESTIONS:
            self._start(self._announce(key))

    async def _announce(self, key: bytes) -> None:
        try:
            answer = await self._answer(_wire.Enter(0, key))
        except (VerbsError, RegistrationFailed) as error:
            log.debug("a grant was not announced", reason=str(error))  # said when the reader asks
            return
        if isinstance(answer, _wire.Entered):
            _wire.write(self._writer, msgspec.structs.replace(answer, key=key))

    async def _enter(self, question: _wire.Enter) -> None:
        try:
            answer = await self._answer(question)
            if isinstance(answer, _wire.Entered) and question.key in self._promised:
                self._proven = True
                self._promised.clear()
        except (VerbsError, RegistrationFailed) as error:
            log.warning("a grant could not be opened", reason=str(error))
            answer = _wire.Refused(question.seq, _wire.FAILED, str(error))
        _wire.write(self._writer, answer)

    async def _answer(self, question: _wire.Enter) -> _wire.Entered | _wire.Refused:
        server = self._server
        denied = _wire.Refused(question.seq, _wire.DENIED, "")
        registered = await server.registered()
        visit = self._visits.get(question.key)
        if visit is None:
            visit = Visit()
            held = server.grants.admit(question.key, visit)
            if held is None:
                return denied
            visit.held = held
            visit.parts = parts(registered, held.grant.offset, held.grant.nbytes)
            visit.evict = lambda: self._evict(question.key, visit)
            self._visits[question.key] = visit
        if not _wire.fits(len(visit.parts), len(self._ends)):
            text = f"{len(visit.parts)} windows on {len(self._ends)} queue pairs: raise transport.verbs.slice"
            return _wire.Refused(question.seq, _wire.FAILED, text)
        keys: list[list[int]] = []
        numbers: list[int] = []
        async with visit.lock:
            for index, end in enumerate(list(self._ends)):
                if visit.over or self._closing is not None:
                    return denied
                keys.append([])
                numbers.append(0)
                if end is None:
                    continue
                numbers[-1] = end.number
                if end.broken:
                    continue
                try:
                    device = self._ports[index]
                    if server.pools:
                        keys[-1] = await visit.bind(end, self._pool(end), registered, device)
                    else:
                        chosen = server.ports[device]
                        keys[-1] = await visit.share(chosen.device, registered, device, server.worker)
                except Broken:
                    continue
        if visit.over:
            return denied
        assert visit.held is not None
        grant = visit.held.grant
        return _wire.Entered(
            question.seq,
            grant.offset,
            grant.nbytes,
            int(registered.address[0]) - int(registered.start[0]),
            [part.offset for part in visit.parts],
            keys,
            numbers,
        )

    def _evict(self, key: bytes, visit: Visit) -> None:
        """The grant is revoked: ends the reader's way in, and says so when that is done."""
        visit.over = True
        asyncio.get_running_loop().call_soon(self._start, self._leave(key, visit))

    async def _leave(self, key: bytes, visit: Visit) -> None:
        async with visit.lock:
            visit.over = True
            try:
                await visit.unbind(self._server.worker, self._pool)
            except VerbsError as error:
                log.error("a range could not be closed to its reader", reason=str(error))
                return  # the grant stays as it is, and whoever revoked it asks again
        if self._visits.get(key) is visit:
            del self._visits[key]
        assert visit.held is not None
        self._server.grants.leave(visit.held, visit)
        visit.evict = lambda: None  # what it was refers to the visit, and to us

    # -- the end -------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Destroys the queue pairs, and with them every way in.  Safe to call twice."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._writer.transport.abort()
        ends = [end for end in self._ends if end is not None]
        self._ends = [None] * len(self._ends)
        for end in ends:
            try:
                await self._retire(end)
            except VerbsError as error:
                log.error("a queue pair could not be destroyed", reason=str(error))
        await self._outlet.close()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for key, visit in list(self._visits.items()):
            await self._leave(key, visit)
