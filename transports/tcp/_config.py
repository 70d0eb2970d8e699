"""Settings of the tcp transport."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hawk.errors import InvalidArgument
from hawk.transports import _checks
from hawk.units import Duration, Size


@dataclass(frozen=True, slots=True)
class TcpConfig:
    """Settings of the tcp transport; sizes in bytes, durations in seconds.

    host               address to listen on
    port               port to listen on; 0 lets the system choose
    advertise          host that peers connect to, where it differs from `host`
    streams            parallel connections of one link
    socket_buffer      SO_SNDBUF and SO_RCVBUF of every connection
    chunk              most bytes that one send or receive call moves
    piece              most bytes asked for at once: a read of more goes out in several pieces, over all streams
    max_connections    admitted connections that are served at a time
    max_strangers      connections that have not said hello yet; of more, the oldest is dropped
    handshake_timeout  how long a connection may take to say hello, or to finish a request it began
    connect_timeout    how long a lost connection may take to come back before the link counts as broken
    stall_timeout      how long a peer may take nothing of what it asked for before its connection is dropped
    tls_cert           this agent's certificate; with it, tls_key and tls_ca every connection is encrypted
    tls_key            its private key, readable by its user only
    tls_ca             the authority whose certificates peers have to show, and nobody else's
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    streams: int = 2
    socket_buffer: Size = 4 << 20
    chunk: Size = 2 << 20
    piece: Size = 32 << 20
    max_connections: int = 256
    max_strangers: int = 64
    handshake_timeout: Duration = 5.0
    connect_timeout: Duration = 5.0
    stall_timeout: Duration = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None

    def __post_init__(self) -> None:
        _checks.whole("transport.tcp.streams", self.streams, 1, 64)
        _checks.whole("transport.tcp.socket_buffer", self.socket_buffer, 4096, 1 << 30)
        _checks.whole("transport.tcp.chunk", self.chunk, 4096, 1 << 30)
        _checks.whole("transport.tcp.piece", self.piece, 4096, 1 << 40)
        _checks.whole("transport.tcp.max_connections", self.max_connections, 1, 65536)
        _checks.whole("transport.tcp.max_strangers", self.max_strangers, 1, 65536)
        for name in ("handshake_timeout", "connect_timeout", "stall_timeout"):
            _checks.seconds(f"transport.tcp.{name}", getattr(self, name))
        tls = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        absent = [name for name, value in tls.items() if value is None]
        if absent and len(absent) < len(tls):
            raise InvalidArgument(
                "TLS needs all three files",
                field=f"transport.tcp.{absent[0]}",
                expected="a path, since transport.tcp." + next(n for n in tls if n not in absent) + " is set",
            )
        _checks.listens("transport.tcp", self)
