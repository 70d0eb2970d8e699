"""Fake devices, and where they come from."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import ipaddress
import os
import socket
import threading
from collections import deque
from typing import TYPE_CHECKING

from hawk.transports._threads import shut
from hawk.transports.verbs._device import ETHERNET, GidEntry, Limits, Port, VerbsError
from hawk.transports.verbs.testing import _wire
from hawk.transports.verbs.testing._completions import FakeCompletions
from hawk.transports.verbs.testing._faults import Faults
from hawk.transports.verbs.testing._memory import FakeRegistration, FakeWindow, Table, map_dmabuf
from hawk.transports.verbs.testing._queue import RTS, FakeQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hawk.transports.verbs._device import Completions

LIMITS = Limits(
    max_mr_size=1 << 40,
    max_send_wr=1024,
    max_sge=32,
    max_sge_read=30,
    max_cqe=4096,
    max_reads_out=16,
    max_reads_in=16,
    windows=True,
)

PORT = Port(number=1, active=True, link=ETHERNET, lid=0, mtu=5, max_message=4 << 20, rate=100e9)


def own_gids() -> tuple[GidEntry, ...]:
    """A table as a network card has it, with a loopback address that no other device has."""
    linklocal = bytes.fromhex("fe80") + bytes(6) + os.urandom(8)
    mapped = ipaddress.IPv6Address(
        f"::ffff:127.{os.urandom(1)[0]}.{os.urandom(1)[0]}.{2 + os.urandom(1)[0] % 250}"
    )
    return (
        GidEntry(0, linklocal, "IB/RoCE v1", "fake0"),
        GidEntry(1, linklocal, "RoCE v2", "fake0"),
        GidEntry(2, mapped.packed, "IB/RoCE v1", "fake0"),
        GidEntry(3, mapped.packed, "RoCE v2", "fake0"),
    )


class FakeDriver:
    """Devices by name; each that is opened has GIDs of its own unless `gids` gives them.

    opened    every device that was opened, in order
    """

    def __init__(
        self,
        names: Sequence[str] = ("fake0",),
        *,
        limits: Limits = LIMITS,
        ports: Mapping[str, Sequence[Port]] | None = None,
        gids: Mapping[str, Sequence[GidEntry]] | None = None,
    ) -> None:
        self.faults = Faults()
        self.opened: list[FakeDevice] = []
        self._names = list(names)
        self._limits = limits
        self._ports = dict(ports or {})
        self._gids = dict(gids or {})

    def devices(self) -> list[str]:
        """See `Driver.devices`."""
        return list(self._names)

    def open(self, name: str) -> FakeDevice:
        """See `Driver.open`."""
        if name not in self._names:
            raise VerbsError(errno.ENODEV, "ibv_open_device")
        device = FakeDevice(
            name,
            self._limits,
            self._ports.get(name, [PORT]),
            self._gids[name] if name in self._gids else own_gids(),
            self.faults,
        )
        self.opened.append(device)
        return device


class FakeDevice:
    """See `Device`.

    table     its registrations and windows
    queues    its queue pairs by number
    closed    whether it was closed
    left      what was still open then: queue pairs, registrations and windows
    """

    def __init__(
        self, name: str, limits: Limits, ports: Sequence[Port], gids: Sequence[GidEntry], faults: Faults
    ) -> None:
        self.name = name
        self.limits = limits
        self.faults = faults
        self.table = Table()
        self.queues: dict[int, FakeQueue] = {}
        self._ports = list(ports)
        self._gids = list(gids)
        self._lock = threading.Lock()
        self._next = int.from_bytes(os.urandom(2), "little") + 1
        self._listeners: list[socket.socket] = []
        self._connections: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.closed = False
        self.left = 0
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self._events: deque[int] = deque()

    def say(self, kind: int, *, ports_active: bool | None = None) -> None:
        """The device says something by itself; its ports are up or down by then."""
        if ports_active is not None:
            self._ports = [dataclasses.replace(port, active=ports_active) for port in self._ports]
        self._events.append(kind)
        os.eventfd_write(self.event_fd, 1)

    def take_event(self) -> int | None:
        """See `Device.take_event`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)
            return self._events.popleft()
        return None

    def ports(self) -> list[Port]:
        """See `Device.ports`."""
        return list(self._ports)

    def port_of(self, number: int) -> Port:
        """The port of that number."""
        return next(port for port in self._ports if port.number == number)

    def gids(self, port: int) -> list[GidEntry]:
        """See `Device.gids`."""
        self.port_of(port)
        return list(self._gids)

    def register(self, address: int, nbytes: int, access: int) -> FakeRegistration:
        """See `Device.register`."""
        self.faults.registering()
        if nbytes <= 0 or nbytes > self.limits.max_mr_size:
            raise VerbsError(errno.EINVAL, "ibv_reg_mr")
        return FakeRegistration(self.table, address, nbytes, access, address, None)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, access: int) -> FakeRegistration:
        """See `Device.register_dmabuf`; any file that can be mapped will do."""
        self.faults.registering_dmabuf()
        if nbytes <= 0 or nbytes > self.limits.max_mr_size:
            raise VerbsError(errno.EINVAL, "ibv_reg_dmabuf_mr")
        mapping, memory = map_dmabuf(fd, offset, nbytes)
        return FakeRegistration(self.table, offset, nbytes, access, memory, mapping)

    def window(self) -> FakeWindow:
        """See `Device.window`."""
        if not self.limits.windows:
            raise VerbsError(errno.EOPNOTSUPP, "ibv_alloc_mw")
        return FakeWindow(self.table)

    def completions(self, depth: int) -> FakeCompletions:
        """See `Device.completions`."""
        if not 0 < depth <= self.limits.max_cqe:
            raise VerbsError(errno.EINVAL, "ibv_create_cq")
        return FakeCompletions(depth)

    def queue(self, completions: Completions, depth: int, sge: int, receives: int = 1) -> FakeQueue:
        """See `Device.queue`."""
        assert isinstance(completions, FakeCompletions)
        self.faults.creating_queue(self.name)
        if not 0 < depth <= self.limits.max_send_wr or not 0 < sge <= self.limits.max_sge:
            raise VerbsError(errno.EINVAL, "ibv_create_qp")
        queue = FakeQueue(self, completions, depth, sge, receives)
        with self._lock:
            self._next += 1
            queue.number = self._next
            self.queues[queue.number] = queue
            if not self._listeners:
                for gid in {entry.gid for entry in self._gids}:
                    self._listen(gid)
        return queue

    def forget(self, queue: FakeQueue) -> None:
        """A queue pair is gone."""
        with self._lock:
            self.queues.pop(queue.number, None)

    def close(self) -> None:
        """See `Device.close`.  Raises EBUSY where something of it is left open, having closed it all the same."""
        left = [*self.queues.values()]
        for window in self.table.windows():
            window.memory = None
        for queue in left:
            queue.close()
        with self._lock:
            self.closed = True
            sockets = [*self._listeners, *self._connections]
        for sock in sockets:
            shut(sock)
        for thread in self._threads:
            thread.join()
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1
        self.left = len(left) + len(self.table)
        if self.left:
            raise VerbsError(errno.EBUSY, "ibv_dealloc_pd")

    # -- the responder -------------------------------------------------------------------------------------------

    def _listen(self, gid: bytes) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(_wire.address(gid))
        except OSError as error:
            listener.close()
            raise VerbsError(errno.EADDRINUSE, "a device with this GID is there already") from error
        listener.listen(128)
        self._listeners.append(listener)
        self._start(lambda: self._accept(listener))

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="fake-rdma-port", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive() or not t.ident] + [thread]
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with listener, contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with self._lock:
                    if self.closed:
                        sock.close()
                        return
                    self._connections.add(sock)
                    self._start(functools.partial(self._serve, sock))

    def _serve(self, sock: socket.socket) -> None:
        queue: FakeQueue | None = None
        try:
            head = bytearray(_wire.CONNECT.size)
            _wire.receive(sock, memoryview(head))
            number, peer, psn, gid = _wire.CONNECT.unpack(head)
            queue = self._admit(sock, number, peer, psn, gid)
            if queue is not None:
                queue.respond(sock)
        except OSError:
            pass
        finally:
            with self._lock:
                self._connections.discard(sock)
            if queue is not None:
                with self.table.lock:
                    queue.inbound.discard(sock)
            sock.close()

    def _admit(self, sock: socket.socket, number: int, peer: int, psn: int, gid: bytes) -> FakeQueue | None:
        """The queue pair that is connected to this reader; None where there is none, and it gets no answer."""
        with self._lock:
            queue = self.queues.get(number)
        if queue is None:
            return None
        with self.table.lock:
            path = queue.path
            if queue.state != RTS or path is None:
                return None
            if (path.peer_number, path.peer_psn, path.peer_gid) != (peer, psn, gid):
                return None
            queue.inbound.add(sock)
        return queue
