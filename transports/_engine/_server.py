"""The serving side: one thread that lets readers in and out, writes for those that ask for it, and works the engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import selectors
import socket
import time
from typing import TYPE_CHECKING

import numpy as np

from hawk.endings import outlast
from hawk.errors import NotViable, TransportError
from hawk.observe.log import get as get_log
from hawk.transports._engine import _wire
from hawk.transports._engine._door import Settings
from hawk.transports._engine._guest import Guest, tune
from hawk.transports._engine._pause import Pause
from hawk.transports._engine._pushes import Pushes
from hawk.transports._engine._seam import EngineFailed
from hawk.transports._forks import ends_with_process
from hawk.transports._listen import listen
from hawk.transports._threads import Crew, Latch, Wake

if TYPE_CHECKING:
    from hawk.memory.region import Region
    from hawk.transports._engine._seam import Engine, Opener
    from hawk.transports._grants import GrantTable

log = get_log("hawk.transports.engine")

_ACCEPT_PAUSE = 0.1
_HEARTBEAT = 1.0
"""Seconds between two looks at an engine that has readers, but none at work: it keeps its own connections in order."""

_MOST_PUSHES = 8
"""Pushes of one reader that are under way at a time."""

_MOST_OUT = 256 << 10
"""Bytes of answers that a reader may leave unread."""

_LARGEST_IN = _wire.REQUEST.size + _wire.MAX_ROWS * _wire.ROW_BYTES + _wire.MAX_DESCRIPTION


class Server:
    """Listens on TCP and serves with an engine of its own.  Only `start`, `serve` and `close` are for the event loop.

    transport    whose server it is
    failed       why the engine serves nobody any more, or nothing
    entered      how often a reader came in
    """

    def __init__(
        self,
        transport: str,
        config: Settings,
        grants: GrantTable,
        token: bytes,
        may_push: bool,
        opener: Opener,
    ) -> None:
        self._transport = transport
        self._config = config
        self._grants = grants
        self._token = token
        self._may_push = may_push
        self._opener = opener
        self._crew = Crew()
        self._closing = False
        self._wake = Wake()
        self._listener: socket.socket | None = None
        self._engine: Engine | None = None
        self._registered: Region | None = None
        self._pushes: Pushes[Guest] = Pushes(grants)
        self._refusal: NotViable | None = None
        self.failed = ""
        self.entered = 0
        self.port = 0

    async def start(self) -> None:
        """Listens, and makes the engine in the thread that is to work it.

        Raises `TransportError` naming the address, `NotViable` without an engine.
        """
        self._listener = listen(self._transport, self._config.host, self._config.port)
        self.port = int(self._listener.getsockname()[1])
        started = Latch()
        try:
            self._wake.open()
            self._crew.start(f"hawk-{self._transport}-serve", lambda: self._run(started))
        except (OSError, RuntimeError) as error:
            self._listener.close()
            self._wake.close()
            raise TransportError("cannot serve", transport=self._transport, got=error) from error
        try:
            await outlast(started.future)
        except asyncio.CancelledError:
            await self.close()
            raise
        if self._refusal is not None:
            await self.close()
            refusal, self._refusal = self._refusal, None
            try:
                raise refusal
            finally:
                del refusal  # it has this frame in its traceback

    def _open_engine(self) -> NotViable | None:
        """Makes the engine; why there is none."""
        try:
            self._engine = self._opener()
        except NotViable as error:
            return error
        except OSError as error:
            return NotViable("the engine does not start", transport=self._transport, got=error)
        return None

    @property
    def pushed(self) -> int:
        """Chunks that were written for readers."""
        return self._pushes.done

    @property
    def listening(self) -> bool:
        """Whether the door is kept; its thread closes the listener when it ends, however it ends."""
        return self._listener is not None and self._listener.fileno() >= 0

    async def close(self) -> None:
        """Closes every connection and then the engine: what was under way has ended."""
        self._closing = True
        self._wake.ring()
        await self._crew.join()
        self._wake.close()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self, started: Latch) -> None:
        listener, wake = self._listener, self._wake.fd
        assert listener is not None
        try:
            self._refusal = self._open_engine()
        finally:
            started.set()
        if self._engine is None:
            listener.close()
            return
        guests: dict[int, Guest] = {}
        paused_until = 0.0
        pause = Pause()
        with selectors.EpollSelector() as selector, listener:
            try:
                selector.register(wake, selectors.EVENT_READ)
                selector.register(listener, selectors.EVENT_READ)
                while not self._closing:
                    waiting = [guest for guest in guests.values() if guest.waits]
                    at_work = bool(waiting or self._pushes) or any(g.held for g in guests.values())
                    if at_work and not waiting:
                        pause.wait(selector.fileno())
                    # Who has just said something, or been answered, may well go on.
                    at_work = at_work or (bool(guests) and pause.linger())
                    wait = 0.0 if at_work else self._wait(guests, paused_until)
                    for key, _ in selector.select(wait):
                        pause.touch()
                        if key.fileobj is listener:
                            if not self._accept(listener, guests, selector):
                                selector.unregister(listener)
                                paused_until = time.monotonic() + _ACCEPT_PAUSE
                        elif (guest := guests.get(key.fd)) is not None and not self._attend(guest, selector):
                            self._part(guest, guests, selector)
                    for guest in waiting:
                        if guest.sock.fileno() in guests and not self._listen(guest, selector):
                            self._part(guest, guests, selector)
                    for guest in self._work(pause):
                        if guest.sock.fileno() in guests and not self._send(guest, selector):
                            self._part(guest, guests, selector)
                    now = time.monotonic()
                    if paused_until and now >= paused_until:
                        paused_until = 0.0
                        selector.register(listener, selectors.EVENT_READ)
                    for guest in [g for g in guests.values() if not g.greeted and g.deadline <= now]:
                        self._part(guest, guests, selector)
            finally:
                for guest in list(guests.values()):
                    # That we hang up is no proof that the reader has left, so its grant stays in use.
                    guest.held = None
                    self._part(guest, guests, selector)
                engine, self._engine = self._engine, None
                if engine is not None:
                    engine.close()
                self._pushes.close()

    @staticmethod
    def _wait(guests: dict[int, Guest], paused_until: float) -> float | None:
        now = time.monotonic()
        times = [guest.deadline for guest in guests.values() if not guest.greeted]
        if paused_until:
            times.append(paused_until)
        if any(guest.greeted for guest in guests.values()):
            times.append(now + _HEARTBEAT)
        return max(min(times) - now, 0.0) if times else None

    def _work(self, pause: Pause) -> list[Guest]:
        """Lets the engine get on; those whose pushes have ended."""
        engine = self._engine
        if engine is None:
            return []
        try:
            engine.notices()
        except OSError as error:
            self._give_up(error)
            return []
        told: list[Guest] = []
        for guest, number, verdict in self._pushes.ended(engine):
            pause.touch()
            if guest is not None:
                guest.outbox += _wire.VERDICT.pack(verdict, number)
                told.append(guest)
        return told

    def _give_up(self, error: OSError) -> None:
        """The engine serves no more: readers find the door closed, and the agent says why."""
        self.failed = f"the engine has failed: {error}"
        log.error("the engine has failed", transport=self._transport, reason=str(error))
        self._closing = True

    # -- connections -----------------------------------------------------------------------------------

    def _accept(
        self, listener: socket.socket, guests: dict[int, Guest], selector: selectors.BaseSelector
    ) -> bool:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
        ends_with_process(sock)
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            tune(sock)
        if len(guests) >= self._config.max_connections:
            # Who has not said hello yet makes room; a peer says it right away.
            strangers = [guest for guest in guests.values() if not guest.greeted]
            if not strangers:
                with contextlib.suppress(OSError):
                    sock.send(_wire.WELCOME.pack(_wire.WELCOME_MAGIC, _wire.FULL, 0, 0, 0, 0))
                sock.close()
                return True
            self._part(min(strangers, key=lambda guest: guest.deadline), guests, selector)
        guests[sock.fileno()] = Guest(sock, time.monotonic() + self._config.handshake_timeout)
        selector.register(sock, selectors.EVENT_READ)
        return True

    def _part(self, guest: Guest, guests: dict[int, Guest], selector: selectors.BaseSelector) -> None:
        guests.pop(guest.sock.fileno(), None)
        selector.unregister(guest.sock)
        guest.sock.close()
        if guest.held is not None:
            self._grants.leave(guest.held, guest)
            guest.held = None
        self._pushes.part(guest)
        # One that has connected anew may be in before its old connection has ended.
        if self._engine is not None and guest.peer not in (None, *(g.peer for g in guests.values())):
            with contextlib.suppress(OSError):
                self._engine.part(guest.peer)

    def _attend(self, guest: Guest, selector: selectors.BaseSelector) -> bool:
        """Hears and answers; False where the connection is to end."""
        try:
            data = guest.sock.recv(_LARGEST_IN - len(guest.inbox))
        except BlockingIOError:
            return self._send(guest, selector)
        except OSError:
            return False
        if not data:
            return False
        guest.inbox += data
        return self._listen(guest, selector)

    def _listen(self, guest: Guest, selector: selectors.BaseSelector) -> bool:
        """Answers what a guest has said, up to one push: posting that may take as long as its bytes do, and who asked
        for it is to hear of the one before meanwhile.  False where the connection is to end.
        """
        guest.waits = False
        try:
            while not guest.waits and self._hear(guest):
                pass
        except EngineFailed as error:
            log.warning("a reader is turned away", transport=self._transport, reason=str(error))
            return False
        except OSError:
            return False
        return self._send(guest, selector) and len(guest.outbox) <= _MOST_OUT

    def _hear(self, guest: Guest) -> bool:
        """Answers one message, if a whole one is there.  Raises `OSError` where the connection is to end."""
        inbox = guest.inbox
        if not guest.greeted:
            return self._greet(guest)
        if len(inbox) < _wire.REQUEST.size:
            return False
        word, count, number, low, high, key = _wire.REQUEST.unpack_from(inbox)
        op, gpu = (word & 0xFFFF, _wire.gpu_of(word)) if word & 0xFFFF == _wire.PUSH else (word, -1)
        if op not in (_wire.PUSH, _wire.TELL):
            del inbox[: _wire.REQUEST.size]
            guest.outbox += _wire.VERDICT.pack(self._answer(guest, op, low, high, key), number)
            return True
        each, most = (_wire.ROW_BYTES, _wire.MAX_ROWS) if op == _wire.PUSH else (1, _wire.MAX_DESCRIPTION)
        if not 0 < count <= most or guest.peer is None or self._pushes.of(guest) >= _MOST_PUSHES:
            raise _wire.BadWire("not a push that was agreed on")
        whole = _wire.REQUEST.size + count * each
        if len(inbox) < whole:
            return False
        body = bytes(inbox[_wire.REQUEST.size : whole])
        del inbox[:whole]
        engine = self._engine
        if engine is None:
            raise _wire.BadWire("the engine has failed")
        if op == _wire.PUSH:
            rows = np.frombuffer(body, _wire.ROW).reshape(count, 3)
            verdict = self._pushes.begin(engine, guest, guest.peer, number, key, (low, high), rows, gpu)
            guest.waits = bool(inbox)
            if verdict != _wire.OK:
                guest.outbox += _wire.VERDICT.pack(verdict, number)
        elif engine.meet(body) != guest.peer:
            raise _wire.BadWire("another's description")
        return True

    def _answer(self, guest: Guest, op: int, low: int, high: int, key: bytes) -> int:
        if op == _wire.ENTER and guest.held is None:
            guest.held = self._grants.enter(key, low, high, guest)
            self.entered += guest.held is not None
            return _wire.OK if guest.held is not None else _wire.DENIED
        if op == _wire.LEAVE and guest.held is not None:
            held, guest.held = guest.held, None
            return _wire.OK if self._grants.leave(held, guest) else _wire.DENIED
        raise _wire.BadWire("neither an entry nor a leave")

    def _greet(self, guest: Guest) -> bool:
        inbox = guest.inbox
        if len(inbox) < _wire.HELLO.size:
            if not _wire.HELLO_MAGIC.startswith(bytes(inbox[:8])):
                raise _wire.BadWire("not a hello")
            return False
        magic, version, token, flags, length = _wire.HELLO.unpack_from(inbox)
        if magic != _wire.HELLO_MAGIC or version != _wire.VERSION or length > _wire.MAX_DESCRIPTION:
            raise _wire.BadWire("not a hello")
        if not hmac.compare_digest(token, self._token):
            raise _wire.BadWire("another's token")
        whole = _wire.HELLO.size + length
        if len(inbox) < whole:
            return False
        description = bytes(inbox[_wire.HELLO.size : whole])
        del inbox[:whole]
        guest.greeted = True
        engine, region = self._engine, self._grants.region
        if region is None or engine is None or (region.gpu >= 0 and not flags & _wire.GPUS):
            guest.outbox += _wire.WELCOME.pack(_wire.WELCOME_MAGIC, _wire.EMPTY, 0, 0, 0, 0)
            return True
        if region is not self._registered:
            engine.register(region.address, region.nbytes, region.gpu)
            self._registered = region
        granted = _wire.with_gpu(_wire.GPUS, region.gpu)
        if flags & _wire.PUSHES and self._may_push and engine.pushes:
            guest.peer = engine.meet(description)
            granted |= _wire.PUSHES
        ours = engine.description
        guest.outbox += _wire.WELCOME.pack(
            _wire.WELCOME_MAGIC, _wire.OK, region.address, region.nbytes, granted, len(ours)
        )
        guest.outbox += ours
        return True

    @staticmethod
    def _send(guest: Guest, selector: selectors.BaseSelector) -> bool:
        """Sends what can be sent now; False where the peer is gone."""
        try:
            while guest.outbox:
                del guest.outbox[: guest.sock.send(guest.outbox, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if guest.outbox else 0)
        if selector.get_key(guest.sock).events != events:
            selector.modify(guest.sock, events)
        return True
