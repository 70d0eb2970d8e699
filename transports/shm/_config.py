"""Settings of the shm transport."""

from __future__ import annotations

from dataclasses import dataclass

from hawk.transports import _checks
from hawk.units import Duration, Size


@dataclass(frozen=True, slots=True)
class ShmConfig:
    """Settings of the shm transport; sizes in bytes, durations in seconds.

    directory          folder for the socket, made with mode 0700 if it is not there; "" makes a fresh one
    threads            threads of one link that copy
    chunk              bytes copied in one go; a read that is ended early ends at the next such boundary
    piece              bytes copied under one entry at the server; a revoked read ends at the next such boundary
    grace              how long `revoke` waits for readers that are inside the range
    max_connections    connections that are served at a time, and as many more of links that read without asking
    handshake_timeout  how long a connection may take to say hello
    connect_timeout    how long a lost connection may take to come back before the link counts as broken
    """

    directory: str = ""
    threads: int = 1
    chunk: Size = 8 << 20
    piece: Size = 64 << 20
    grace: Duration = 2.0
    max_connections: int = 256
    handshake_timeout: Duration = 5.0
    connect_timeout: Duration = 5.0

    def __post_init__(self) -> None:
        _checks.whole("transport.shm.threads", self.threads, 1, 64)
        _checks.whole("transport.shm.chunk", self.chunk, 4096, 1 << 40)
        _checks.whole("transport.shm.piece", self.piece, 4096, 1 << 40)
        _checks.whole("transport.shm.max_connections", self.max_connections, 1, 65536)
        for name in ("grace", "handshake_timeout", "connect_timeout"):
            _checks.seconds(f"transport.shm.{name}", getattr(self, name))
