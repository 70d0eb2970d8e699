"""Settings of the cuda transport."""

from __future__ import annotations

from dataclasses import dataclass

from hawk.errors import InvalidArgument
from hawk.transports import _checks
from hawk.units import Duration, Rate, Size


@dataclass(frozen=True, slots=True)
class CudaConfig:
    """Settings of the cuda transport; sizes in bytes, durations in seconds, rates in bytes a second.

    gpu                the GPU that chunks are served from, as the driver numbers them
    streams            reads of one link that are under way at a time, each on a stream of its own
    chunk              bytes whose copies are put onto a stream before it is waited for; a read that is ended early ends
                       at the next such boundary
    piece              bytes copied under one entry at the server; a revoked read ends at the next such boundary
    kernels            copy short rows by a kernel, where CuPy is there to compile it; without, copy engines take them
                       one by one
    pace               bytes a second that a link carries at most, as a slower one would; 0: as many as it can
    directory          folder for the socket, made with mode 0700 if it is not there; "" makes a fresh one
    grace              how long `revoke` waits for readers that are inside the range
    max_connections    connections that are served at a time
    handshake_timeout  how long a connection may take to say hello
    connect_timeout    how long a lost connection may take to come back before the link counts as broken
    """

    gpu: int = 0
    streams: int = 2
    chunk: Size = 64 << 20
    piece: Size = 256 << 20
    kernels: bool = True
    pace: Rate = 0.0
    directory: str = ""
    grace: Duration = 2.0
    max_connections: int = 256
    handshake_timeout: Duration = 5.0
    connect_timeout: Duration = 5.0

    def __post_init__(self) -> None:
        _checks.whole("transport.cuda.gpu", self.gpu, 0, 1 << 16)
        _checks.whole("transport.cuda.streams", self.streams, 1, 64)
        _checks.whole("transport.cuda.chunk", self.chunk, 4096, 1 << 30)
        _checks.whole("transport.cuda.piece", self.piece, 4096, 1 << 40)
        _checks.whole("transport.cuda.max_connections", self.max_connections, 1, 65536)
        for name in ("grace", "handshake_timeout", "connect_timeout"):
            _checks.seconds(f"transport.cuda.{name}", getattr(self, name))
        if not isinstance(self.kernels, bool):
            raise InvalidArgument(
                "neither true nor false", field="transport.cuda.kernels", got=repr(self.kernels)
            )
        pace: object = self.pace
        if isinstance(pace, bool) or not isinstance(pace, (int, float)) or not 0 <= pace < 1e15:
            raise InvalidArgument(
                "no rate", field="transport.cuda.pace", got=repr(pace), expected="bytes a second, or 0"
            )
