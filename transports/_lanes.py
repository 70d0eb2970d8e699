"""The reading side that tcp and shm share: threads ("lanes") that carry pieces of reads, fairly and stoppably.

A read is cut into pieces.  Lanes take a piece of each waiting read in turn, so that a small read waits for at
most one piece of a large one.  A read is over only when no lane works on it any more: whoever ends one early
interrupts the lanes first and then waits for them, which is what lets `Link.read` promise that no byte lands
after it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

from hawk.endings import outlast
from hawk.errors import DeadlineExceeded, HawkError, InternalError, PeerUnreachable, TransferFailed
from hawk.transports._forks import ends_with_process
from hawk.transports._threads import Crew, Latch, shut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hawk.memory.region import I64, Region
    from hawk.transports._pieces import Piece


class Work:
    """One read: its key, its pieces not yet taken, and the regions, which it keeps alive."""

    def __init__(self, key: bytes, pieces: Iterable[Piece], bases: I64, regions: Sequence[Region]) -> None:
        self.key = key
        self.pieces = deque(pieces)
        self.bases = bases
        self.regions = tuple(regions)
        self.lanes: set[Lane] = set()
        self.error: HawkError | None = None
        self.stopped = False
        self.latch = Latch()


class Lane(ABC):
    """One connection to the peer and the thread that owns it.  Only `interrupt` is for other threads."""

    def __init__(self, peer: str, reopen_timeout: float) -> None:
        self.peer = peer
        self.broken = False
        self._reopen_timeout = reopen_timeout
        self._guard = threading.Lock()
        self._sock: socket.socket | None = None
        self._interrupted = False
        self._hands_off = False

    @abstractmethod
    def _connect(self, deadline: float) -> None:
        """Opens the connection and hands its socket to `_adopt`.  Raises `OSError` or `PeerUnreachable`."""

    @abstractmethod
    def _carry(self, sock: socket.socket, work: Work, piece: Piece) -> None:
        """Moves one piece.  Raises `AccessDenied`, or `OSError` when the connection is of no more use."""

    def _call(self, host: str, port: int, greet: Callable[[socket.socket, tuple[object, ...]], None]) -> None:
        """Opens the connection to the first address of a host that answers: what a `_connect` over TCP does.

        `greet` is given a socket that is the lane's already, and the address to connect it to; it raises `OSError`
        where another address may do better.  Raises what the last one did, and `PeerUnreachable` for a host that has
        no address.
        """
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except ValueError as error:  # how Python says that this can be no name of a host
            raise PeerUnreachable("no name of a host", got=repr(host)) from error
        last: OSError | None = None
        try:
            for family, kind, protocol, _, address in found:
                try:
                    sock = socket.socket(family, kind, protocol)
                    self._adopt(sock)
                    greet(sock, address)
                except TimeoutError:  # the time is over for all of them
                    raise
                except OSError as error:
                    if isinstance(error, PeerUnreachable) or self._interrupted:
                        raise
                    self._drop()
                    last = error
                else:
                    return
            raise last or PeerUnreachable("the host name means no address", got=host)
        finally:
            last = None  # it has this frame in its traceback

    def _drop(self) -> None:
        """Closes the connection."""
        with self._guard:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _adopt(self, sock: socket.socket) -> None:
        """Makes `sock` the lane's, so that `interrupt` reaches it from here on; closes it when told to stop."""
        with self._guard:
            if not self._interrupted:
                self._sock = sock
                ends_with_process(sock)
                return
        sock.close()
        raise ConnectionAbortedError("stopped while connecting")

    @property
    def interrupted(self) -> bool:
        """Whether the piece in hand is to be left."""
        return self._interrupted

    def interrupt(self) -> None:
        """Makes the lane leave its piece soon: whatever blocks on the socket returns."""
        with self._guard:
            self._interrupted = True
            # Some lanes are inside the peer's memory and must say so until they have left it.
            if self._sock is not None and not self._hands_off:
                shut(self._sock)

    def rearm(self) -> None:
        """Before a new piece: forgets an interrupt, and the connection that it cut."""
        with self._guard:
            if not self._interrupted:
                return
            stale, self._sock = self._sock, None
            self._interrupted = False
        if stale is not None:
            stale.close()

    def open(self, timeout: float) -> None:
        """Connects.  Raises `PeerUnreachable` or `DeadlineExceeded`."""
        try:
            self._connect(time.monotonic() + timeout)
        except TimeoutError as error:
            self._drop()
            raise DeadlineExceeded("the peer did not answer", peer=self.peer, timeout=timeout) from error
        except (OSError, HawkError) as error:
            self._drop()
            if isinstance(error, PeerUnreachable):
                raise
            raise PeerUnreachable("cannot connect", got=error, peer=self.peer) from error

    def close(self) -> None:
        """Ends the lane's connection; called by its own thread as the last thing."""
        self._drop()

    def carry(self, work: Work, piece: Piece) -> None:
        """Moves one piece; on a connection that turns out dead once more on a fresh one.

        The second try tells three things apart: a peer that closed an idle or revoked connection (the key
        decides then), a hiccup of the network, and a peer that is gone.
        """
        last: OSError | None = None
        try:
            for _ in range(2):
                sock = self._sock
                if sock is None:
                    sock = self._reopen()
                try:
                    self._carry(sock, work, piece)
                except OSError as error:
                    # AccessDenied is an OSError too, by its second base: it is an answer, not a fault.
                    if isinstance(error, HawkError):
                        raise
                    last = error
                    self._drop()
                    if self._interrupted:
                        break
                except BaseException:
                    self._drop()
                    raise
                else:
                    return
            if self._sock is None and not self._interrupted:
                self._reopen()  # raises where the peer is gone
            raise TransferFailed("the connection broke", got=last, peer=self.peer) from last
        finally:
            last = None  # it has this frame in its traceback, and the frame the read's regions

    def _reopen(self) -> socket.socket:
        try:
            self.open(self._reopen_timeout)
        except HawkError as error:
            if not self._interrupted:
                self.broken = True
            raise TransferFailed("the peer is gone", got=error.message, peer=self.peer) from error
        sock = self._sock
        if sock is None:
            raise TransferFailed("the link was stopped", peer=self.peer)
        return sock


class Lanes:
    """The lanes of one link, and the reads that wait for them."""

    def __init__(self, name: str, lanes: Sequence[Lane]) -> None:
        self._name = name
        self._lanes = tuple(lanes)
        self._crew = Crew()
        self._ready = threading.Condition()
        self._queue: deque[Work] = deque()
        self._running: set[Work] = set()
        self._closing = False
        self._unopened = len(self._lanes)
        self._open_error: HawkError | None = None
        self._opened: Latch | None = None

    @property
    def broken(self) -> bool:
        """Whether nothing more can be carried."""
        return self._closing or any(lane.broken for lane in self._lanes)

    async def start(self, timeout: float) -> None:
        """Opens every lane.  Raises `PeerUnreachable` or `DeadlineExceeded`, and leaves nothing behind then."""
        opened = self._opened = Latch()
        try:
            for i, lane in enumerate(self._lanes):
                self._crew.start(f"{self._name}-{i}", lambda lane=lane: self._run(lane, timeout))  # type: ignore[misc]
            await asyncio.wait({opened.future}, timeout=timeout)
            if not opened.future.done():
                raise DeadlineExceeded("the peer did not answer", peer=self._lanes[0].peer, timeout=timeout)
            if self._open_error is not None:
                raise self._open_error
        except RuntimeError as error:
            await self.close()
            raise PeerUnreachable(
                "no thread for the connection", got=error, peer=self._lanes[0].peer
            ) from error
        except BaseException:
            await self.close()
            raise

    async def carry(self, work: Work, timeout: float) -> None:
        """Carries a read to its end.  Raises as `Link.read` does."""
        with self._ready:
            if self.broken:
                raise TransferFailed("the link is closed or broken", peer=self._lanes[0].peer)
            self._queue.append(work)
            self._running.add(work)
            self._ready.notify(len(work.pieces))  # a lane that finds nothing left was woken for nothing
        done = work.latch.future
        try:
            await asyncio.wait({done}, timeout=max(timeout, 0.0))
        except asyncio.CancelledError:
            self._stop(work, None)
            try:
                await outlast(done)
            finally:
                work.error = None  # as below
            raise
        if not done.done():
            said = "the read did not end in time"
            self._stop(work, DeadlineExceeded(said, timeout=timeout, peer=self._lanes[0].peer))
            await outlast(done)
        try:
            if work.error is not None:
                raise work.error
        finally:
            work.error = None  # it has frames in its traceback that refer to the read, and so to its regions

    async def close(self) -> None:
        """Ends reads in flight and returns when every lane's thread has ended.  Safe to call twice."""
        with self._ready:
            self._closing = True
            for work in list(self._running):
                self._halt(work, TransferFailed("the link was closed", peer=self._lanes[0].peer))
            for lane in self._lanes:
                lane.interrupt()
            self._ready.notify_all()
        await self._crew.join()

    def _stop(self, work: Work, error: HawkError | None) -> None:
        with self._ready:
            self._halt(work, error)

    def _halt(self, work: Work, error: HawkError | None) -> None:
        """Under the lock: takes away what nobody began, and interrupts those who did."""
        if work not in self._running:
            return
        work.stopped = True
        work.error = work.error or error
        work.pieces.clear()
        with contextlib.suppress(ValueError):
            self._queue.remove(work)
        for lane in work.lanes:
            lane.interrupt()
        self._finish_if_over(work)

    def _finish_if_over(self, work: Work) -> None:
        if not work.lanes and not work.pieces and work in self._running:
            self._running.discard(work)
            work.latch.set()

    def _run(self, lane: Lane, timeout: float) -> None:
        try:
            if self._begin(lane, timeout):
                while (taken := self._take(lane)) is not None:
                    self._carry_one(lane, *taken)
                    del taken
        finally:
            lane.close()

    def _begin(self, lane: Lane, timeout: float) -> bool:
        error: HawkError | None = None
        try:
            lane.open(timeout)
        except HawkError as caught:
            error = caught
        with self._ready:
            self._open_error = self._open_error or error
            self._unopened -= 1
            # One lane that cannot connect settles it; the others are not worth waiting for.
            if self._opened is not None and (error is not None or self._unopened == 0):
                self._opened.set()
        opened = error is None
        error = None  # it has this frame in its traceback
        return opened

    def _take(self, lane: Lane) -> tuple[Work, Piece] | None:
        with self._ready:
            while not self._queue and not self._closing:
                self._ready.wait()
            if self._closing:
                return None
            work = self._queue.popleft()
            piece = work.pieces.popleft()
            if work.pieces:
                self._queue.append(work)
            work.lanes.add(lane)
            lane.rearm()
            return work, piece

    def _carry_one(self, lane: Lane, work: Work, piece: Piece) -> None:
        error: HawkError | None = None
        try:
            lane.carry(work, piece)
        except HawkError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - a bug must end this read, not the lane and every later read
            error = InternalError("a lane failed", got=repr(caught), peer=lane.peer)
        with self._ready:
            work.lanes.discard(lane)
            if error is not None and not work.stopped:
                self._halt(work, error)
            error = None  # it has this frame in its traceback
            self._finish_if_over(work)
