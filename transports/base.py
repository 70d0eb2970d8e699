"""The seam every transport implements: regions and keys on the serving side, links on the reading side.

A transport never sees a tensor, a layout or a job.  The side that owns the source *serves* a region and
*grants* ranges of it under keys; the side that wants the bytes *connects* and reads segments into its own
regions.  Access by a key ends when the grant is revoked.

A back end is one `Transport` class; see `hawk.transports.testing.TransportContract` for the behaviour that
every one of them has to show.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hawk.memory.region import Region, Segments


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do and roughly what it costs; the planner and the jobs read nothing else of it.

    can_fence      after `revoke` returned, no peer can read the range any more, whatever it does.  Where this is
                   False the range returns only on the peer's word or its death.
    same_host      works only between processes of one machine
    max_sge        pieces one work request may gather or scatter
    request_cost   seconds per work request, beyond the bytes
    bandwidth      bytes per second to expect, for choosing chunk sizes (not a promise)
    into_gpus      reads land in memory of GPUs, too; others' go there by way of the host
    """

    can_fence: bool
    same_host: bool = False
    max_sge: int = 1024
    request_cost: float = 2e-6
    bandwidth: float = 4e9
    into_gpus: bool = False


@dataclass(frozen=True, slots=True)
class Viability:
    """Whether something can be used here, and why not."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Grant:
    """Read access to `[offset, offset + nbytes)` of a served region, for whoever holds `key` (16 to 64 bytes)."""

    key: bytes
    offset: int
    nbytes: int


class Link(ABC):
    """A way to read from one peer.  Made by `Transport.connect`; used for many jobs, several at a time."""

    @abstractmethod
    async def read(
        self, key: bytes, segments: Segments, regions: Sequence[Region], *, timeout: float
    ) -> None:
        """Reads every segment into `regions`; returns when all bytes are in place.

        `segments.remote` counts from the first byte of the served region (not of the grant).  However this
        ends (return, error, cancellation), no byte lands in `regions` after it has ended.

        Raises
        ------
        AccessDenied
            the key is unknown, revoked, or does not cover a segment; nothing was read past what it covers.
        TransferFailed
            the connection broke or the peer ended early; part of the bytes may have arrived.
        DeadlineExceeded
            not done after `timeout` seconds.
        InvalidArgument
            a segment lies outside its local region; nothing was moved.
        """

    def read_now(self, key: bytes, segments: Segments, regions: Sequence[Region]) -> bool:
        """`read` of a few bytes in this very call, where that neither waits nor holds up a loop for long.

        After False `read` has to be called, which also says what is wrong, if something is; bytes may have landed.
        Raises `InvalidArgument` as `read` does.
        """
        del key, segments, regions
        return False

    def into(self, gpu: int) -> bool:
        """Whether `read` takes regions in memory of that GPU, as far as is known.

        Should it find out that it cannot, it raises `RegistrationFailed` and does not say so again.  A transport that
        always does says `Capabilities.into_gpus`, and nobody asks.
        """
        del gpu
        return False

    @property
    @abstractmethod
    def broken(self) -> bool:
        """True once this link can carry nothing more and should be made anew."""

    @abstractmethod
    async def close(self) -> None:
        """Ends reads in flight (they fail with `TransferFailed`) and returns when no byte can land any more."""


class Transport(ABC):
    """One way of moving bytes.  An agent makes one instance of each that its config allows."""

    name: ClassVar[str]
    Config: ClassVar[type[object]]
    """A frozen dataclass of this transport's settings, each with a default."""
    capabilities: Capabilities

    @abstractmethod
    def __init__(self, config: object | None = None) -> None:
        """Takes an instance of `Config`, or None for the defaults; opens nothing."""

    @classmethod
    @abstractmethod
    def probe(cls) -> Viability:
        """Whether this machine can use the transport at all (drivers, packages, devices)."""

    @abstractmethod
    async def start(self) -> None:
        """Opens what serving needs.  Raises `TransportError` (for a port in use: naming it).

        `NotViable` says that this machine cannot use the transport after all: an agent goes on without it.
        """

    @abstractmethod
    async def close(self) -> None:
        """Revokes every grant, closes every link and listener.  Safe to call twice."""

    def trouble(self) -> str | None:
        """Why a transport that was started serves nobody any more, or None while it does."""
        return None

    def counts(self) -> Mapping[str, int]:
        """What happened how often since it was started, by names from a short fixed list; quick, from any thread."""
        return {}

    def reread(self) -> Callable[[], bool]:
        """Reads files that may have changed, certificates for instance; what is returned takes them over.

        That tells whether `endpoint` is another now, of which peers are told then.  Connections that stand are left
        alone.  Raises `InvalidArgument` for files that cannot be used, and then nothing has changed.
        """
        return lambda: False

    @property
    @abstractmethod
    def endpoint(self) -> dict[str, str]:
        """What a peer needs to connect, as short strings; travels in the handshake."""

    @abstractmethod
    def serve(self, region: Region) -> None:
        """Makes `region` the one that grants refer to (one per instance: the arena)."""

    @property
    def shadow(self) -> Region | None:
        """Memory of the transport's own, as large as the served region, that chunks lie in, at the same offsets.

        None, as for most, where they are read from the served region itself.
        """
        return None

    @abstractmethod
    def grant(self, offset: int, nbytes: int) -> Grant:
        """Opens a range of the served region under a fresh random key."""

    def expect(self, grant: Grant, reader: Mapping[str, str]) -> None:
        """A hint: the peer whose own endpoint is `reader` will read this grant, and its way in may be prepared."""
        del grant, reader

    def shut(self, grant: Grant) -> bool:
        """`revoke` as far as that goes without waiting: True if provably nobody reads the range any more.

        After False access may have ended or not, and `revoke` has to be called.
        """
        del grant
        return False

    @abstractmethod
    async def revoke(self, grant: Grant) -> bool:
        """Ends access.  True: provably nobody reads the range any more.  False: a peer still may (see `can_fence`)."""

    @abstractmethod
    def reachable(self, endpoint: Mapping[str, str]) -> Viability:
        """Whether a peer with this endpoint can be read from here.  Pure and quick: no I/O that can block."""

    @abstractmethod
    async def connect(self, endpoint: Mapping[str, str], *, timeout: float) -> Link:
        """A link to the peer.  Raises `PeerUnreachable` or `DeadlineExceeded`."""
