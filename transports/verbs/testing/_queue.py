"""Queue pairs of fake devices: a thread that works the send queue, over a socket to the responder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from hawk.transports._threads import shut
from hawk.transports.verbs import _abi, _device
from hawk.transports.verbs._device import Completion, Path, VerbsError
from hawk.transports.verbs.testing import _wire
from hawk.transports.verbs.testing._faults import refused
from hawk.transports.verbs.testing._memory import FakeRegistration, FakeWindow, next_key
from hawk.transports.verbs.testing._requests import Bind, Invalidate, Read, Write, parse

if TYPE_CHECKING:
    from hawk.transports.verbs._abi import Batch
    from hawk.transports.verbs._device import Registration, Window
    from hawk.transports.verbs.testing._completions import FakeCompletions
    from hawk.transports.verbs.testing._driver import FakeDevice
    from hawk.transports.verbs.testing._requests import Request

RESET, RTS, ERR, DEAD = "reset", "ready to send", "error", "destroyed"

_REACH = 5.0
"""Seconds that a responder may stay silent before retries count as exceeded."""

_NOT_READY = 0.5
"""Seconds that immediate data wait for a receive."""


class FakeQueue:
    """See `Queue`."""

    def __init__(
        self, device: FakeDevice, completions: FakeCompletions, depth: int, sge: int, receives: int
    ) -> None:
        self._device = device
        self._completions = completions
        self._depth = depth
        self._sge = sge
        self._most_receives = receives
        self._receives = 0
        self._changed = threading.Condition()
        self._work: deque[Request] = deque()
        self._slots: deque[int] = deque()
        self._thread: threading.Thread | None = None
        self._sock: socket.socket | None = None
        self.inbound: set[socket.socket] = set()
        self.state = RESET
        self.path: Path | None = None
        self.number = 0

    # -- the seam ------------------------------------------------------------------------------------------------

    def connect(self, path: Path) -> None:
        """See `Queue.connect`."""
        limits = self._device.limits
        if self.state != RESET or not 0 < path.peer_number < 1 << 24 or not 0 < path.mtu <= 5:
            raise refused("ibv_modify_qp")
        if path.reads_out > limits.max_reads_out or path.reads_in > limits.max_reads_in:
            raise refused("ibv_modify_qp")
        if path.gid_index not in [entry.index for entry in self._device.gids(path.port)]:
            raise refused("ibv_modify_qp")
        with self._changed:
            self.path, self.state = path, RTS
        self._thread = threading.Thread(target=self._run, name="fake-rdma-queue", daemon=True)
        self._thread.start()

    def post(self, batch: Batch) -> None:
        """See `Queue.post`; follows the addresses in the requests as hardware does."""
        wanted = [int(batch.wr.ctypes.data) + (i + 1) * _abi.SEND_WR.itemsize for i in range(len(batch) - 1)]
        if batch.wr["next"].tolist() != [*wanted, 0]:
            raise refused("ibv_post_send: the chain leads elsewhere")
        assert self.path is not None
        longest = self._device.port_of(self.path.port).max_message
        self._add([parse(row, self._sge, longest) for row in batch.wr])

    def receive(self, count: int) -> None:
        """See `Queue.receive`."""
        with self._changed:
            if self.state not in (RTS, ERR):
                raise refused("ibv_post_recv")
            if self._receives + count > self._most_receives:
                raise VerbsError(errno.ENOMEM, "ibv_post_recv")
            self._receives += count
            if self.state == ERR:
                self._flush_receives()
            self._changed.notify_all()

    def _flush_receives(self) -> None:
        while self._receives:
            self._receives -= 1
            self._completions.push(Completion(_device.RECEIVED, _device.FLUSHED), self._polled)

    def bind(
        self, wr_id: int, window: Window, memory: Registration, address: int, nbytes: int, access: int
    ) -> int:
        """See `Queue.bind`."""
        assert isinstance(window, FakeWindow)
        assert isinstance(memory, FakeRegistration)
        key = next_key(window.rkey)
        self._add([Bind(wr_id, window, memory, address, nbytes, access)])
        return key

    def invalidate(self, wr_id: int, key: int) -> None:
        """See `Queue.invalidate`."""
        self._add([Invalidate(wr_id, key)])

    def _add(self, work: list[Read] | list[Bind] | list[Invalidate]) -> None:
        with self._changed:
            if self.state not in (RTS, ERR):
                raise refused("ibv_post_send")
            if len(self._slots) + len(work) > self._depth:
                raise VerbsError(errno.ENOMEM, "ibv_post_send")
            self._slots.extend(each.wr_id for each in work)
            self._work.extend(work)
            self._changed.notify_all()

    def fail(self) -> None:
        """See `Queue.fail`."""
        self._become(ERR)

    def close(self) -> None:
        """See `Queue.close`; EBUSY where windows are bound on it."""
        if any(w.owner == self.number and w.memory is not None for w in self._device.table.windows()):
            raise VerbsError(errno.EBUSY, "ibv_destroy_qp")
        self._become(DEAD)
        if self._thread is not None:
            self._thread.join()
        self._completions.purge(self._polled)
        self._device.forget(self)

    def _become(self, state: str) -> None:
        # Under the table's lock, so that no responder is reading for this queue pair when this has returned.
        with self._device.table.lock, self._changed:
            if self.state != DEAD and not (state == ERR and self.state == RESET):
                self.state = state
            if self.state == ERR:
                self._flush_receives()
            if self._sock is not None:
                shut(self._sock)
            for sock in self.inbound:
                shut(sock)
            self._changed.notify_all()

    # -- the send queue ------------------------------------------------------------------------------------------

    def _polled(self, wr_id: int) -> None:
        """A completion was taken: its slot is free, and those of all requests before it."""
        if wr_id == _device.RECEIVED:
            return
        with self._changed:
            while self._slots and self._slots.popleft() != wr_id:
                pass

    def _done(self, work: Request, status: int) -> None:
        signalled = not isinstance(work, Read) or work.signalled
        if status != _device.SUCCESS:
            self._become(ERR)
        if (signalled or status != _device.SUCCESS) and not self._completions.push(
            Completion(work.wr_id, status), self._polled
        ):
            self._become(ERR)

    def _run(self) -> None:
        assert self.path is not None
        try:
            while True:
                with self._changed:
                    while not self._work and self.state != DEAD:
                        self._changed.wait()
                    if self.state == DEAD:
                        return
                    taken = [self._work.popleft()]
                    while (
                        type(taken[0]) is Read
                        and self._work
                        and type(self._work[0]) is Read
                        and len(taken) < self.path.reads_out
                    ):
                        taken.append(self._work.popleft())
                if isinstance(taken[0], Write):
                    self._done(taken[0], self._write(taken[0]))
                elif isinstance(taken[0], Read):
                    self._read([each for each in taken if isinstance(each, Read)])
                else:
                    self._done(taken[0], self._local(taken[0]))
        finally:
            if self._sock is not None:
                self._sock.close()

    def _local(self, work: Bind | Invalidate) -> int:
        if self.state != RTS:
            return _device.FLUSHED
        table = self._device.table
        if isinstance(work, Bind):
            bound = table.bind(work.window, work.memory, work.address, work.nbytes, self.number, work.access)
            return _device.SUCCESS if bound else _device.BIND_ERROR
        return _device.SUCCESS if table.invalidate(work.key, self.number) else _device.LOC_QP_OP

    def _read(self, reads: list[Read]) -> None:
        """Asks for all of these at once, and takes the answers in order."""
        status = _device.SUCCESS if self.state == RTS else _device.FLUSHED
        if status == _device.SUCCESS:
            try:
                sock = self._reach()
                requests = [
                    _wire.REQUEST.pack(_abi.READ, r.address, r.nbytes, r.key, i + 1)
                    for i, r in enumerate(reads)
                ]
                sock.sendall(b"".join(requests))
            except OSError:
                status = self._lost()
        for work in reads:
            if status == _device.SUCCESS:
                try:
                    status = self._place(work)
                except OSError:
                    status = self._lost()
            self._done(work, status)
            if status != _device.SUCCESS:
                status = _device.FLUSHED

    def _write(self, work: Write) -> int:
        """Gathers and sends one WRITE, and waits until it is acknowledged."""
        if self.state != RTS:
            return _device.FLUSHED
        data = [self._device.table.local_read(key, address, nbytes) for address, nbytes, key in work.pieces]
        if None in data:
            return _device.LOC_PROT
        head = _wire.REQUEST.pack(work.opcode, work.address, work.nbytes, work.key, work.immediate)
        answer = bytearray(_wire.PIECE.size)
        try:
            sock = self._reach()
            sock.sendall(head + b"".join(filter(None, data)))
            _wire.receive(sock, memoryview(answer))
        except OSError:
            return self._lost()
        return int(_wire.PIECE.unpack(answer)[0]) if self.state == RTS else _device.FLUSHED

    def _lost(self) -> int:
        return _device.RETRY_EXCEEDED if self.state == RTS else _device.FLUSHED

    def _reach(self) -> socket.socket:
        """The socket to the responder."""
        if self._device.faults.loses(self._device.name):
            raise ConnectionResetError("cut")
        if self._sock is None:
            assert self.path is not None
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(_REACH)
            with self._changed:
                self._sock = sock
                if self.state != RTS:
                    raise ConnectionAbortedError("stopped")
            sock.connect(_wire.address(self.path.peer_gid))
            mine = next(e.gid for e in self._device.gids(self.path.port) if e.index == self.path.gid_index)
            sock.sendall(_wire.CONNECT.pack(self.path.peer_number, self.number, self.path.psn, mine))
        return self._sock

    def _place(self, work: Read) -> int:
        """Takes the answer to one READ and scatters it."""
        sock, faults = self._sock, self._device.faults
        assert sock is not None
        head = bytearray(_wire.PIECE.size)
        done, total = 0, work.nbytes
        while done < total:
            if faults.loses(self._device.name):
                raise ConnectionResetError("cut")
            _wire.receive(sock, memoryview(head))
            status, nbytes = _wire.PIECE.unpack(head)
            if status != _device.SUCCESS:
                return int(status)
            if faults.on_step is not None:
                faults.on_step(done)
            with self._changed:
                # Here a broken queue pair stops writing.
                if self.state != RTS:
                    return _device.FLUSHED
            for view in self._scatter(work, done, nbytes):
                if view is None:
                    return _device.LOC_PROT
                _wire.receive(sock, view)
            done += nbytes
        return _device.SUCCESS

    def _scatter(self, work: Read, done: int, nbytes: int) -> list[memoryview | None]:
        """Where bytes `[done, done + nbytes)` of a READ go; None for a piece that its key does not allow."""
        found: list[memoryview | None] = []
        begin, end, at = done, done + nbytes, 0
        for address, length, key in work.pieces:
            low, high = max(begin - at, 0), min(end - at, length)
            if low < high:
                place = self._device.table.local(key, address + low, high - low)
                found.append(
                    None
                    if place is None
                    else memoryview((ctypes.c_char * (high - low)).from_address(place)).cast("B")
                )
            at += length
        return found

    # -- the responder -------------------------------------------------------------------------------------------

    def respond(self, sock: socket.socket) -> None:
        """Answers the READs and WRITEs of a connection until it ends, or breaks the rules."""
        header = bytearray(_wire.REQUEST.size)
        assert self.path is not None
        while True:
            _wire.receive(sock, memoryview(header))
            opcode, address, nbytes, key, number = _wire.REQUEST.unpack(header)
            right = _device.REMOTE_READ if opcode == _abi.READ else _device.REMOTE_WRITE
            if not self.path.access & right:
                self._refuse(sock, _device.REM_INVALID)
                return
            if opcode != _abi.READ:
                status = self._take(sock, address, nbytes, key, number if opcode == _abi.WRITE_IMM else None)
                if status != _device.SUCCESS:
                    self._refuse(sock, status)
                    return
                sock.sendall(_wire.PIECE.pack(status, 0))
                continue
            if number > self.path.reads_in or nbytes == 0:
                self._refuse(sock, _device.REM_INVALID)
                return
            for at in range(0, nbytes, _wire.PIECE_BYTES):
                part = min(nbytes - at, _wire.PIECE_BYTES)
                with self._device.table.lock:
                    if self.state != RTS:
                        return
                    # The whole range is checked first, as with the first packet of a READ.
                    allowed = at > 0 or self._device.table.covers(key, address, nbytes, self.number, right)
                    data = self._device.table.read(key, address + at, part, self.number) if allowed else None
                if data is None:
                    self._refuse(sock, _device.REM_ACCESS)
                    return
                sock.sendall(_wire.PIECE.pack(_device.SUCCESS, part))
                sock.sendall(data)

    def _take(self, sock: socket.socket, address: int, nbytes: int, key: int, immediate: int | None) -> int:
        """Places the bytes of one WRITE, and says its immediate datum to who posted a receive; what became of it."""
        table, faults = self._device.table, self._device.faults
        if nbytes and not table.covers(key, address, nbytes, self.number, _device.REMOTE_WRITE):
            return _device.REM_ACCESS
        if faults.loses(self._device.name):
            raise ConnectionResetError("cut")
        for at in range(0, nbytes, _wire.PIECE_BYTES):
            part = bytearray(min(nbytes - at, _wire.PIECE_BYTES))
            _wire.receive(sock, memoryview(part))
            if faults.on_step is not None:
                faults.on_step(at)
            with table.lock:
                if self.state != RTS:
                    raise ConnectionAbortedError("stopped")
                if not table.write(key, address + at, part, self.number):
                    return _device.REM_ACCESS
        if immediate is None:
            return _device.SUCCESS
        with self._changed:
            if not self._changed.wait_for(lambda: self._receives or self.state != RTS, _NOT_READY):
                faults.starved += 1
                return _device.RNR_EXCEEDED
            if self.state != RTS:
                raise ConnectionAbortedError("stopped")
            self._receives -= 1
            done = Completion(_device.RECEIVED, _device.SUCCESS, immediate)
            return _device.SUCCESS if self._completions.push(done, self._polled) else _device.REM_OP

    def _refuse(self, sock: socket.socket, status: int) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(_wire.PIECE.pack(status, 0))
        with self._device.table.lock:
            self.inbound.discard(sock)  # whose last word is on the way
        self._become(ERR)
