"""The seam to the RDMA library: what the transport asks of a device, and nothing more.

Everything in this package but `_pyverbs` talks to these protocols; `hawk.transports.verbs.testing` has devices that
keep them without hardware.  Numbers are those of the verbs interface (`ibv_*`), so that either side can pass them on.
Methods may block for as long as a system call does unless they say that they are quick, and are called from other
threads (`_worker`), several at a time; quick ones are called on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.transports.verbs._abi import Batch

# enum ibv_access_flags
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, BIND = 1, 2, 4, 16

# enum ibv_wc_status
SUCCESS, LOC_LEN, LOC_QP_OP, LOC_PROT, FLUSHED, BIND_ERROR = 0, 1, 2, 4, 5, 6
REM_INVALID, REM_ACCESS, REM_OP, RETRY_EXCEEDED, RNR_EXCEEDED = 9, 10, 11, 12, 13

STATUS = {
    SUCCESS: "success",
    LOC_LEN: "local length error",
    LOC_QP_OP: "local queue pair operation error",
    3: "local end-to-end context operation error",
    LOC_PROT: "local protection error",
    FLUSHED: "flushed",
    BIND_ERROR: "memory window bind error",
    7: "bad response",
    8: "local access error",
    REM_INVALID: "remote invalid request",
    REM_ACCESS: "remote access error",
    REM_OP: "remote operation error",
    RETRY_EXCEEDED: "transport retries exceeded",
    RNR_EXCEEDED: "receiver not ready, retries exceeded",
}

# enum ibv_event_type
DEVICE_FATAL, PORT_ACTIVE, PORT_ERROR, QUEUE_FATAL = 8, 9, 10, 1

EVENTS = {
    0: "completion queue error",
    QUEUE_FATAL: "queue pair fatal",
    2: "queue pair request error",
    3: "queue pair access error",
    DEVICE_FATAL: "device fatal",
    PORT_ACTIVE: "port active",
    PORT_ERROR: "port error",
    11: "local identifier changed",
    18: "GID changed",
}

PORT_EVENTS = (PORT_ACTIVE, PORT_ERROR)
QUEUE_EVENTS = (0, QUEUE_FATAL, 2, 3)

ETHERNET, INFINIBAND = "Ethernet", "InfiniBand"

MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
"""enum ibv_mtu."""


RECEIVED = 0
"""The `wr_id` of all receives; those of other requests begin at 1."""


class VerbsError(OSError):
    """A call of the RDMA library failed; `errno` is what it said, `what` the call."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(number, what)
        self.what = what


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device can do.  Sizes in bytes.

    windows     whether it has memory windows of type 2
    immediates  whether completions tell the immediate data that came; older libraries leave it out
    """

    max_mr_size: int
    max_send_wr: int
    max_sge: int
    max_sge_read: int
    max_cqe: int
    max_reads_out: int
    max_reads_in: int
    windows: bool
    immediates: bool = True


@dataclass(frozen=True, slots=True)
class Port:
    """One port as it is now.

    active     whether it carries traffic
    link       `Ethernet` (RoCE) or `InfiniBand`
    lid        its local identifier on InfiniBand, else 0
    mtu        active path MTU, enum ibv_mtu
    max_message  bytes of the largest message
    rate       bits per second, for comparing ports
    numa       the node it is near to, -1 where unknown
    """

    number: int
    active: bool
    link: str
    lid: int
    mtu: int
    max_message: int
    rate: float
    numa: int = -1


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One entry of a port's GID table: 16 bytes, `kind` as the kernel names it ("RoCE v2"), `netdev` or ""."""

    index: int
    gid: bytes
    kind: str
    netdev: str = ""


@dataclass(frozen=True, slots=True)
class Path:
    """What one end of a connection needs to know, of itself and of the other, to connect its queue pair.

    number, psn          queue pair number and first packet number, of the other end (`peer_*`) and of this one
    gid, lid             the other end's address
    reads_out, reads_in  reads that this end may have outstanding, and that the other may have at this one
    timeout              exponent: 4.096 us times two to it until a packet is sent again
    access               what the other end may do here: REMOTE_READ, REMOTE_WRITE, or 0
    """

    port: int
    gid_index: int
    link: str
    psn: int
    peer_number: int
    peer_psn: int
    peer_gid: bytes
    peer_lid: int
    mtu: int
    reads_out: int
    reads_in: int
    timeout: int
    retries: int
    traffic_class: int = 0
    service_level: int = 0
    access: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One work request that ended, or with `wr_id` `RECEIVED` a receive, and the immediate data that it was for."""

    wr_id: int
    status: int
    immediate: int = 0


class Registration(Protocol):
    """A memory region that the device can reach.  `address` is what work requests call its first byte."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...

    def close(self) -> None:
        """Ends it: afterwards the device reaches this memory by it no more.  Raises `VerbsError`."""


class Window(Protocol):
    """A memory window of type 2, to be bound once."""

    def close(self) -> None:
        """Gives it back.  Raises `VerbsError`."""


class Completions(Protocol):
    """A completion queue and the descriptor that tells of it.  All quick but `close`."""

    @property
    def fd(self) -> int:
        """Readable when an event came that was asked for by `arm`."""

    def poll(self, most: int) -> Sequence[Completion]:
        """Up to `most` completions.  Raises `VerbsError` for a queue that overran."""

    def arm(self) -> None:
        """Asks for one event at the next completion."""

    def take_event(self) -> bool:
        """Takes an event off the descriptor; False where none was there."""

    def close(self) -> None:
        """Gives it back; its queue pairs are closed by then."""


class Queue(Protocol):
    """A reliable connected queue pair.

    post, receive, bind and invalidate are quick; each raises `VerbsError`, and how much of a batch was posted is
    unknown then.
    """

    @property
    def number(self) -> int:
        """The queue pair's number."""

    def connect(self, path: Path) -> None:
        """Takes it from reset to ready-to-send."""

    def post(self, batch: Batch) -> None:
        """Posts a chain of work requests with one doorbell."""

    def receive(self, count: int) -> None:
        """Posts receives without memory, each of which takes one immediate datum."""

    def bind(
        self, wr_id: int, window: Window, memory: Registration, address: int, nbytes: int, access: int
    ) -> int:
        """Posts a signalled bind for REMOTE_READ or REMOTE_WRITE; the key that opens the window once that completed."""

    def invalidate(self, wr_id: int, key: int) -> None:
        """Posts a signalled invalidation: once it completed nobody reads or writes by `key` any more."""

    def fail(self) -> None:
        """Moves it to the error state: what was posted is flushed."""

    def close(self) -> None:
        """Destroys it: afterwards it neither writes nor reads any memory."""


class Device(Protocol):
    """An opened device with one protection domain."""

    @property
    def name(self) -> str: ...
    @property
    def limits(self) -> Limits: ...

    @property
    def event_fd(self) -> int:
        """Readable when the device says something by itself; -1 where the library does not show that."""

    def take_event(self) -> int | None:
        """The kind (`EVENTS`) of the next thing that it said, None where there is none.  Quick."""

    def ports(self) -> Sequence[Port]:
        """Its ports as they are now."""

    def gids(self, port: int) -> Sequence[GidEntry]:
        """The port's GID table, without empty entries."""

    def register(self, address: int, nbytes: int, access: int) -> Registration:
        """Registers memory of this process.  Raises `VerbsError`."""

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, access: int) -> Registration:
        """Registers `[offset, offset + nbytes)` of a dma-buf.  Raises `VerbsError`."""

    def window(self) -> Window:
        """A fresh memory window of type 2."""

    def completions(self, depth: int) -> Completions:
        """A completion queue of `depth` entries."""

    def queue(self, completions: Completions, depth: int, sge: int, receives: int = 1) -> Queue:
        """A queue pair with `depth` send slots of up to `sge` pieces, and room for so many receives."""

    def close(self) -> None:
        """Gives back all that is left of it."""


class Driver(Protocol):
    """Where devices come from."""

    def devices(self) -> Sequence[str]:
        """Names of the devices that are there."""

    def open(self, name: str) -> Device:
        """Opens one.  Raises `VerbsError`."""
