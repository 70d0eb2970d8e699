"""The reading side: a link whose one thread has a connection to the server and an engine of its own.

An engine of its own, for two reasons: closing it is what proves that nothing lands any more when a peer neither
finishes nor answers, and that must not end other peers' reads.  Rows that are long enough go straight to their places;
many short ones arrive in a buffer as the few long ranges that they are at the sender's, and are dealt out from there.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hawk.errors import AccessDenied
from hawk.transports._engine import _greeting, _places, _steps, _wire
from hawk.transports._engine._deal import Dealer
from hawk.transports._engine._guest import limit_send, tune
from hawk.transports._engine._kept import Kept
from hawk.transports._engine._pause import Pause
from hawk.transports._engine._seam import EngineFailed
from hawk.transports._engine._steps import Pace
from hawk.transports._grants import KEY_BYTES
from hawk.transports._lanes import Lane, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hawk.memory.region import Region
    from hawk.transports._engine._seam import Engine, Handle, Opener
    from hawk.transports._engine._steps import Step
    from hawk.transports._pieces import Piece

_DEPTH = 2
"""Chunks under way at a time; one more is dealt out meanwhile."""


class Settings(Protocol):
    """What a link reads of its transport's settings; see there."""

    @property
    def chunk(self) -> int: ...
    @property
    def piece(self) -> int: ...
    @property
    def gather(self) -> int: ...
    @property
    def drain_timeout(self) -> float: ...
    @property
    def connect_timeout(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Way:
    """Where a peer serves, what is needed to get in, and whether to ask it for pushes."""

    host: str
    port: int
    token: bytes
    push: bool


_NOBODY = _greeting.Welcome(0, 0, -1, False, False, b"")


@dataclass(slots=True)
class _Flight:
    """One chunk under way: its rows, whose turn of the buffers it is, and what tells of its end.

    Where rows go to their places, `turn` is -1.
    """

    rows: Piece
    turn: int
    number: int
    handle: Handle | None


class EngineLane(Lane):
    """The connection, the engine, and the thread that works both; `beside` as `Dealer` has it."""

    def __init__(
        self,
        config: Settings,
        way: Way,
        opener: Opener,
        on_step: Callable[[int], None],
        beside: bool = True,
    ) -> None:
        super().__init__(f"{way.host}:{way.port}", config.connect_timeout)
        self._config = config
        self._way = way
        self._opener = opener
        self._on_step = on_step
        self._engine: Engine | None = None
        self._kept = Kept()
        self._dealer = Dealer(_DEPTH + 1, config.chunk, beside)
        self._peer: object | None = None
        self._welcome = _NOBODY
        self.gpus = ""
        self._refused: dict[int, str] = {}
        self._number = 0
        self._pause = Pause()
        self._pace = Pace(config.chunk)
        self._inbox = bytearray()
        self._verdicts: dict[int, int] = {}
        self._notices: set[int] = set()

    # -- the connection --------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> None:
        engine = self._opened()
        self._call(self._way.host, self._way.port, lambda sock, at: self._greet(engine, sock, at, deadline))

    def _opened(self) -> Engine:
        """The engine, made anew if the last one was closed, with buffers."""
        if self._engine is None:
            self._engine = self._opener()
            self._kept = Kept()
            self.gpus = self.gpus or self._engine.gpus
        return self._engine

    def _greet(
        self, engine: Engine, sock: socket.socket, address: tuple[object, ...], deadline: float
    ) -> None:
        tune(sock)
        ours = b""
        if self._way.push and engine.pushes:  # before the peer hears of us: it waits for a hello only so long
            for buffer in self._dealer.buffers:
                self._kept.knows(engine, buffer)
            ours = engine.description
            self._kept.news = False
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.connect(address)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        welcome = self._welcome = _greeting.greet(sock, self.peer, self._way.token, ours)
        stale, self._peer = self._peer, None
        if stale is not None:
            with contextlib.suppress(EngineFailed):
                engine.part(stale)
        if not welcome.pushes:
            self._peer = engine.meet(welcome.description)
        self._inbox.clear()
        sock.settimeout(None)
        # While chunks are under way nobody may cut the connection, so what is sent meanwhile has an end of its own.
        limit_send(sock, self._config.connect_timeout)

    def _give_up(self) -> None:
        """Closes the engine: after that nothing lands, whatever was under way."""
        engine, self._engine, self._peer = self._engine, None, None
        self._verdicts.clear()
        self._notices.clear()
        if engine is not None:
            engine.close()

    def close(self) -> None:
        """See `Lane.close`."""
        self._give_up()
        self._dealer.close()
        super().close()

    # -- one piece -------------------------------------------------------------------------------------

    def _carry(self, sock: socket.socket, work: Work, piece: Piece) -> None:
        low, high = piece.low, piece.high
        if self._engine is None:
            raise EngineFailed("the engine was closed")
        self._take_in(sock, self._engine, work, piece)
        pushed = self._welcome.pushes
        if high > self._welcome.nbytes:
            raise self._denied(low, high)
        if not pushed:
            self._say(sock, _wire.ENTER, low, high, work.key)
        # The first step is laid out while the server hears of us.
        steps = self._steps(sock, work, piece)
        first = next(steps)
        if not pushed and not self._heard(sock):
            raise self._denied(low, high)
        # From here until we have left, the connection must stand: its end tells the server that we are out.
        with self._guard:
            if self._interrupted:
                raise ConnectionAbortedError("stopped")
            self._hands_off = True
        try:
            try:
                self._move(sock, work, itertools.chain((first,), steps), low, high)
            finally:
                self._dealer.settle()
        except AccessDenied:
            raise  # an answer, and everything that was begun has ended
        except BaseException:
            self._give_up()
            raise
        finally:
            with self._guard:
                self._hands_off = False
                interrupted = self._interrupted
        if interrupted:
            raise ConnectionAbortedError("stopped")
        if not pushed and not self._heard(sock):
            raise AccessDenied("the key was revoked during the read", peer=self.peer)

    def _take_in(self, sock: socket.socket, engine: Engine, work: Work, piece: Piece) -> None:
        """Sees to it that the engine knows the memory of GPUs that a piece goes into; raises `RegistrationFailed`."""
        if not _places.in_gpus(work):
            return
        for region in _places.used(work, piece):
            if region.gpu < 0:
                continue
            if self._welcome.pushes and not self._welcome.fills_gpus:
                self.gpus = "the peer's version does not write into memory of GPUs"
            elif not self.why_not(region.gpu) and not self._kept.knows(engine, region):
                self._refused[region.gpu] = f"the engine does not take it: {self._kept.said}"
            elif not self.gpus and not self._told(sock):
                self.gpus = "the peer cannot be told of so much memory"
            if why := self.why_not(region.gpu):
                raise _places.not_taken(region, why)

    def why_not(self, gpu: int) -> str:
        """Why nothing is read into memory of that GPU, or nothing."""
        return self.gpus or self._refused.get(gpu, "")

    def _denied(self, low: int, high: int) -> AccessDenied:
        return AccessDenied(
            "the key is unknown, revoked, or does not cover the range",
            got=f"remote bytes {low}..{high}",
            peer=self.peer,
        )

    @staticmethod
    def _say(sock: socket.socket, op: int, low: int, high: int, key: bytes) -> None:
        sock.sendall(_wire.REQUEST.pack(op, 0, 0, low, high, key))

    def _heard(self, sock: socket.socket) -> bool:
        """The verdict on what was said last."""
        answer, pause = b"", self._pause
        pause.touch()
        while pause.linger():
            with contextlib.suppress(BlockingIOError):
                answer = sock.recv(_wire.VERDICT.size, socket.MSG_DONTWAIT)
                break
        answer += _greeting.exactly(sock, _wire.VERDICT.size - len(answer))
        if len(answer) < _wire.VERDICT.size:
            raise ConnectionResetError("the peer ended before it answered")
        return bool(_wire.VERDICT.unpack(answer)[0] == _wire.OK)

    def _steps(self, sock: socket.socket, work: Work, piece: Piece) -> Iterator[Step]:
        engine, chunk = self._engine, self._config.chunk
        assert engine is not None

        def taken(regions: Sequence[Region]) -> bool:
            return all(self._kept.knows(engine, r) for r in regions) and self._told(sock)

        return _steps.steps(work, piece, chunk, self._pace.stride, self._config.gather, taken)

    def _move(self, sock: socket.socket, work: Work, steps: Iterable[Step], low: int, high: int) -> None:
        """Moves all rows, or as many as were begun before an interrupt.  Raises `OSError` or `AccessDenied`."""
        flights: deque[_Flight] = deque()
        done = 0
        refused: AccessDenied | None = None
        began = time.monotonic()
        for turn, step in enumerate(steps):
            if len(flights) == _DEPTH:
                done, refused = self._land(sock, work, flights.popleft(), done, last=False)
            if self._interrupted or refused is not None:
                break
            flights.append(self._begin(sock, work, step, turn, low, high))
        while flights:
            flight = flights.popleft()
            done, late = self._land(sock, work, flight, done, last=not flights)
            refused = refused or late
        late = None
        try:
            if refused is not None:
                raise refused
        finally:
            refused = None  # it has this frame in its traceback, and the frame the read's regions
        self._pace.went(done, time.monotonic() - began)

    def _begin(self, sock: socket.socket, work: Work, step: Step, turn: int, low: int, high: int) -> _Flight:
        engine, gpu = self._engine, step.gpu
        assert engine is not None
        local, remote, nbytes = step.local, step.remote, step.nbytes
        if not step.places:
            buffer = self._dealer.take(turn)
            if not self._kept.knows(engine, buffer):
                raise EngineFailed("the engine takes no memory of this process")
            local = local + int(buffer.ctypes.data)
        self._number += 1
        flight = _Flight(step.rows, -1 if step.places else turn, self._number, None)
        if self._welcome.pushes:
            table = np.stack((remote, local, nbytes), axis=1).astype(_wire.ROW)
            op = _wire.with_gpu(_wire.PUSH, gpu)
            head = _wire.REQUEST.pack(op, len(table), flight.number, low, high, work.key)
            sock.sendall(head + table.tobytes())
        else:
            theirs, there = remote + self._welcome.address, self._welcome.gpu
            flight.handle = engine.post(self._peer, False, local, theirs, nbytes, here=gpu, there=there)
        return flight

    def _told(self, sock: socket.socket) -> bool:
        """Tells who pushes of memory that it has not heard of; False where that does not go into a message."""
        if not self._welcome.pushes or not self._kept.news:
            return True
        assert self._engine is not None
        ours = self._engine.description
        if len(ours) > _wire.MAX_DESCRIPTION:
            return False
        sock.sendall(_wire.REQUEST.pack(_wire.TELL, len(ours), 0, 0, 0, bytes(KEY_BYTES)) + ours)
        self._kept.news = False
        return True

    def _land(
        self, sock: socket.socket, work: Work, flight: _Flight, done: int, *, last: bool
    ) -> tuple[int, AccessDenied | None]:
        """Waits for a chunk and has it dealt out; the bytes so far, and why it did not come if that was the answer.

        Raises `EngineFailed` where it did not end in time after an interrupt: then the engine is to be closed.
        """
        pause = self._pause
        pause.touch()
        until = 0.0
        pushed = self._welcome.pushes
        while not (self._pushed_yet(sock, flight) if pushed else self._read_yet(flight)):
            pause.wait()
            if self._interrupted:
                now = time.monotonic()
                until = until or now + self._config.drain_timeout
                if now > until:
                    raise EngineFailed("it did not end in time")
        if pushed:
            status = self._verdicts.pop(flight.number)
            self._notices.discard(flight.number)
            if status == _wire.DENIED:
                return done, self._denied(flight.rows.low, flight.rows.high)
            if status != _wire.OK:
                raise EngineFailed("the peer's engine could not write")
        rows = flight.rows
        done += rows.total
        self._on_step(done)
        if last and not pushed and not self._interrupted:
            # No more is read there.  What is dealt out meanwhile is ours already.
            self._say(sock, _wire.LEAVE, 0, 0, bytes(KEY_BYTES))
        if flight.turn >= 0 and not self._interrupted:
            self._dealer.deal(work, rows, flight.turn, at_once=last)
        return done, None

    def _read_yet(self, flight: _Flight) -> bool:
        assert self._engine is not None
        return self._engine.poll(flight.handle)

    def _pushed_yet(self, sock: socket.socket, flight: _Flight) -> bool:
        """Whether the server has given its verdict, and the notice behind the bytes has come through the engine."""
        assert self._engine is not None
        for notice in self._engine.notices():
            if len(notice) == _wire.NOTICE.size:
                self._notices.add(_wire.NOTICE.unpack(notice)[0])
        with contextlib.suppress(BlockingIOError):
            data = sock.recv(_wire.VERDICT.size * _DEPTH, socket.MSG_DONTWAIT)
            if not data:
                raise ConnectionResetError("the peer ended in mid-push")
            self._inbox += data
        while len(self._inbox) >= _wire.VERDICT.size:
            status, number = _wire.VERDICT.unpack_from(self._inbox)
            del self._inbox[: _wire.VERDICT.size]
            if 0 < number <= self._number:
                self._verdicts[number] = status
        status = self._verdicts.get(flight.number)
        return status is not None and (status != _wire.OK or flight.number in self._notices)
