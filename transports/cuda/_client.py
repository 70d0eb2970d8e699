"""The reading side of cuda: lanes that copy out of the peer's arena, each on a stream of its own for each GPU."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import HawkError, PeerUnreachable
from hawk.memory.cuda import device
from hawk.memory.cuda_rows import Rows, most_rows
from hawk.memory.cuda_share import MOST_MAPPINGS, Exported, Imported
from hawk.memory.cuda_wait import none_left
from hawk.memory.shared import recv_fds
from hawk.transports import _copy, _pieces
from hawk.transports._lanes import Work
from hawk.transports._links import LanesLink
from hawk.transports.cuda import _wire
from hawk.transports.shm import _wire as _doors
from hawk.transports.shm._client import Far, ShmLane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.memory.cuda import CudaDevice
    from hawk.memory.cuda_driver import Call, Driver
    from hawk.memory.region import I64, Region
    from hawk.transports._pieces import Piece
    from hawk.transports.cuda._config import CudaConfig
    from hawk.transports.cuda._pace import Pace

_MAX_ROWS = 1 << 16
"""Rows whose copies are put onto a stream at once: bounds the table of a kernel."""

_BETWEEN = 8 << 20
"""Bytes that go to memory of the host at a time, by way of locked memory."""

_SPARSE = 4
"""How much longer than its bytes a stretch of the arena may be to be copied whole."""


class _Arena(Far):
    """The peer's arena, opened once for each GPU that copies out of it; closed when no lane does any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exported: Exported | None = None
        self._opened: dict[int, Imported] = {}
        self.nbytes = 0
        self.clocks = Clocks()

    def found(self, exported: Exported) -> None:
        """A lane was told where it is, and has no use for the descriptors any more.

        Raises `PeerUnreachable` where it is not what other lanes were told.
        """
        with self._lock:
            if self._exported is None:
                self._exported, self.nbytes = exported, exported.nbytes
                return
            known = self._exported
        exported.close()
        if (known.nbytes, known.offset, known.sizes) != (exported.nbytes, exported.offset, exported.sizes):
            raise PeerUnreachable("the peer serves another arena than when this link was made")

    def address(self, there: CudaDevice) -> int:
        """Where it begins for that GPU; raises `RegistrationFailed` or `DeviceLost`."""
        with self._lock:
            opened = self._opened.get(there.number)
            if opened is None:
                assert self._exported is not None
                opened = self._opened[there.number] = Imported(there, self._exported, name="the peer's arena")
            return opened.address

    def close(self) -> None:
        """Unmaps it."""
        with self._lock:
            opened, self._opened = list(self._opened.values()), {}
            exported, self._exported = self._exported, None
        self.clocks.close()
        for each in opened:
            each.close()
        if exported is not None:
            exported.close()


class Clocks:
    """When copies of a link began and ended, by the GPUs' own events: seconds since the first on each GPU.

    For measurements: the latest of them are kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zero: dict[int, int] = {}
        self._spans: deque[tuple[int, float, float]] = deque(maxlen=1 << 14)

    def zero(self, driver: Driver, gpu: int, stream: int) -> int:
        """The GPU's timer that all others are compared with."""
        with self._lock:
            timer = self._zero.get(gpu)
            if timer is None:
                timer = driver.timer()
                try:
                    driver.record(timer, stream)
                    driver.synchronise(timer)
                except BaseException:
                    driver.drop_event(timer)  # one that was never reached would fail every read from now on
                    raise
                self._zero[gpu] = timer
            return timer

    def add(self, gpu: int, begin: float, seconds: float) -> None:
        """One batch of copies."""
        self._spans.append((gpu, begin, begin + seconds))

    def busy(self) -> float:
        """Seconds in which a GPU was copying, since this was last asked; copies side by side count once."""
        spans = []
        while self._spans:
            spans.append(self._spans.popleft())
        total, until, gpu = 0.0, 0.0, -1
        for where, begin, end in sorted(spans):
            if where != gpu:
                gpu, until = where, begin
            total += max(end - max(begin, until), 0.0)
            until = max(until, end)
        return total

    def close(self) -> None:
        """Gives the timers back."""
        for gpu, timer in self._zero.items():
            with contextlib.suppress(HawkError), device(gpu).current() as driver:
                driver.drop_event(timer)
        self._zero.clear()


class _Stream:
    """What one lane has on one GPU; `between` is locked memory of the host, made when first wanted."""

    def __init__(self, there: CudaDevice, config: CudaConfig, clocks: Clocks) -> None:
        self.there, self._clocks = there, clocks
        self.most = min(config.chunk, _BETWEEN)
        self.between = self.stream = self.begin = self.end = 0
        self._rows: Rows | None = None
        try:
            with there.current() as driver:
                self.stream = driver.stream(low=False)
                self.begin = driver.timer()
                self.end = driver.timer()
                most = most_rows(config.chunk, min(_MAX_ROWS, config.chunk))
                self._rows = Rows(there, driver, self.stream, most, kernels=config.kernels)
        except BaseException:
            self.close()
            raise

    @property
    def rows(self) -> Rows:
        assert self._rows is not None
        return self._rows

    def finish(self, driver: Driver, calls: Sequence[Call] = ()) -> None:
        """Puts this onto the stream, too, and returns when all that is there has been done."""
        driver.run([*calls, ("record", self.end, self.stream), ("outwait", self.end)])
        zero = self._clocks.zero(driver, self.there.number, self.stream)
        begin = driver.elapsed(zero, self.begin)
        self._clocks.add(self.there.number, begin, driver.elapsed(self.begin, self.end))

    def close(self) -> None:
        with contextlib.suppress(HawkError), self.there.current() as driver:
            if self._rows is not None:
                self._rows.close(driver)
            if self.between:
                driver.free_host(self.between)
            for event in (self.begin, self.end):
                if event:
                    driver.drop_event(event)
            if self.stream:
                driver.drop_stream(self.stream)
        self.between = self.stream = self.begin = self.end = 0
        self._rows = None


class CudaLane(ShmLane):
    """One connection to the server, the thread that waits for copies, and its streams."""

    def __init__(
        self,
        config: CudaConfig,
        path: str,
        token: bytes,
        arena: _Arena,
        on_step: Callable[[int], None],
        pace: Pace | None,
    ) -> None:
        super().__init__(config, path, token, arena, on_step)  # type: ignore[arg-type]
        self._own = config
        self._arena = arena
        self._pace = pace
        self._streams: dict[int, _Stream] = {}

    def _connect(self, deadline: float) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._adopt(sock)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.connect(self.peer)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.sendall(_doors.HELLO.pack(_doors.HELLO_MAGIC, _doors.VERSION, self._token))
        message, fds = recv_fds(sock, _wire.LARGEST, MOST_MAPPINGS)
        try:
            told = _wire.read(message, fds)
        except HawkError:
            _close(fds)
            raise
        if not isinstance(told, Exported):
            _close(fds)
            full = told == _doors.FULL
            raise PeerUnreachable(
                "the peer serves as many connections as it may" if full else "the peer serves no arena",
                peer=self.peer,
                hint="Raise transport.cuda.max_connections there" if full else None,
            )
        self._arena.found(told)
        self._mapping = self._arena
        sock.settimeout(None)

    def close(self) -> None:
        """See `Lane.close`."""
        super().close()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.close()

    def _copy(self, work: Work, piece: Piece, far: Far) -> None:
        gpus = np.asarray([region.gpu for region in work.regions])
        one = len(set(gpus.tolist())) == 1
        done = 0
        for step in _pieces.cut(piece, self._own.chunk, min(_MAX_ROWS, self._own.chunk)):
            if self._interrupted:
                return
            due = self._pace.begin(step.total) if self._pace is not None else 0.0
            rows = _pieces.join(step)
            if one:
                self._carry_out(int(gpus[0]), work, rows)
            else:
                of_row = gpus[rows.region]
                for gpu in np.unique(of_row).tolist():
                    self._carry_out(gpu, work, _only(rows, of_row == gpu))
            if self._pace is not None:
                self._pace.end(due, lambda: self._interrupted)
            done += step.total
            self._on_step(done)

    def _carry_out(self, gpu: int, work: Work, rows: Piece) -> None:
        """Copies these rows to that GPU, or to memory of the host, and returns when nothing of it is under way."""
        there = device(self._own.gpu if gpu < 0 else gpu)
        stream = self._streams.get(there.number)
        if stream is None:
            stream = self._streams[there.number] = _Stream(there, self._own, self._arena.clocks)
        source = self._arena.address(there)
        with there.current() as driver, none_left(driver, stream.stream, stream.end):
            if gpu < 0:
                self._to_host(driver, stream, source, work, rows)
                return
            target = work.bases[rows.region] + rows.local
            stream.finish(driver, stream.rows.calls(source + rows.remote, target, rows.nbytes, stream.begin))

    def _to_host(self, driver: Driver, stream: _Stream, source: int, work: Work, rows: Piece) -> None:
        """By way of locked memory, a stretch of the arena at a time; a processor takes it on from there."""
        if not stream.between:
            stream.between = driver.allocate_host(stream.most)
        copy = _copy.best()
        for part in _pieces.cut(rows, stream.most, _MAX_ROWS):
            low, high = part.low, part.high
            whole = high - low <= min(stream.most, _SPARSE * part.total)
            calls: list[Call] = [("record", stream.begin, stream.stream)]
            if whole:
                calls.append(("to_host", stream.between, source + low, high - low, stream.stream))
                at = part.remote - low
            else:
                at = np.cumsum(part.nbytes) - part.nbytes
                columns = zip(part.remote.tolist(), at.tolist(), part.nbytes.tolist(), strict=True)
                calls += (
                    ("to_host", stream.between + to, source + r, n, stream.stream) for r, to, n in columns
                )
            stream.finish(driver, calls)
            copy(work.bases, part.region, part.local, stream.between, at, part.nbytes)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _only(rows: Piece, which: np.ndarray) -> Piece:
    nbytes = rows.nbytes[which]
    return type(rows)(rows.region[which], rows.local[which], rows.remote[which], nbytes, int(nbytes.sum()))


def bases(regions: Sequence[Region]) -> I64:
    """Addresses of regions in memory of GPUs or of the host; raises as `hawk.transports._pieces.bases` does."""
    return np.asarray(
        [r.address if r.gpu >= 0 else int(_pieces.bases([r])[0]) for r in regions], dtype=np.int64
    )


class CudaLink(LanesLink):
    """Reads from one peer on this machine; `check` raises for a GPU that does not reach the peer's."""

    def __init__(
        self,
        config: CudaConfig,
        path: str,
        token: bytes,
        on_step: Callable[[int], None],
        pace: Pace | None,
        check: Callable[[int], None],
    ) -> None:
        self._check = check
        self._arena = _Arena()
        lanes = [CudaLane(config, path, token, self._arena, on_step, pace) for _ in range(config.streams)]
        super().__init__("hawk-cuda-read", lanes, least=config.chunk, most=config.piece, rows=_MAX_ROWS)

    def busy(self) -> float:
        """See `Clocks.busy`."""
        return self._arena.clocks.busy()

    def _bases(self, regions: Sequence[Region]) -> I64:
        """Raises `NotViable`, too, for a target on a GPU that does not reach the peer's."""
        for gpu in {region.gpu for region in regions if region.gpu >= 0}:
            self._check(gpu)
        return bases(regions)

    def _release(self) -> None:
        self._arena.close()
