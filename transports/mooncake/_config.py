"""Settings of the mooncake transport."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from hawk.errors import InvalidArgument
from hawk.transports import _checks
from hawk.units import Duration, Size


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """Settings of the mooncake transport; sizes in bytes, durations in seconds.

    host               address to listen on for handshakes, and the one that the engine gives to its peers; no IPv6
    port               port to listen on for handshakes; 0 lets the system choose
    advertise          host that peers connect to, where it differs from `host`
    open_ports         allows a host beyond loopback: the engine's own ports then let anyone who reaches them read and
                       write what is registered
    protocol           how the engine moves bytes
    devices            RDMA devices that the engine may use; none: its own choice
    batch              rows handed to the engine at a time; it refuses more than 2048, and serves that peer no more
    retries            how often rows that failed are tried again, by a fresh engine and a quarter as many at a time
    stall_timeout      how long the engine waits for a transfer to get on before it gives up, whole seconds; that of the
                       first link counts for all of the process
    chunk              bytes moved by one request of the engine; two are under way at a time
    piece              bytes moved under one entry at the server
    gather             rows shorter than this on average arrive in a buffer, and are dealt out from there
    grace              how long `revoke` waits for readers that are inside the range
    drain_timeout      how long transfers of a read that was ended may take to end before the link's engine is destroyed
    max_connections    links that are served at a time
    handshake_timeout  how long a connection may take to say hello
    connect_timeout    how long a lost connection may take to come back before the link counts as broken
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    open_ports: bool = False
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: tuple[str, ...] = ()
    batch: int = 1024
    retries: int = 2
    stall_timeout: Duration = 10.0
    chunk: Size = 8 << 20
    piece: Size = 128 << 20
    gather: Size = 64 << 10
    grace: Duration = 2.0
    drain_timeout: Duration = 2.0
    max_connections: int = 256
    handshake_timeout: Duration = 5.0
    connect_timeout: Duration = 5.0

    def __post_init__(self) -> None:
        _checks.engine("transport.mooncake", self)
        _checks.whole("transport.mooncake.batch", self.batch, 1, 2048)
        _checks.whole("transport.mooncake.retries", self.retries, 0, 8)
        _checks.seconds("transport.mooncake.stall_timeout", self.stall_timeout)
        _checks.choice("transport.mooncake.protocol", self.protocol, ("tcp", "rdma"))
        if ":" in (self.advertise or self.host):
            raise InvalidArgument(
                "the engine finds its peers by IPv4 only",
                field=f"transport.mooncake.{'advertise' if self.advertise else 'host'}",
                got=self.advertise or self.host,
                expected="an IPv4 address, or a host's name",
            )
        for host in (self.host, self.advertise):
            if host and not self.open_ports and not _loopback(host):
                raise InvalidArgument(
                    "the engine's own ports would be open to anyone who reaches this host",
                    field="transport.mooncake.open_ports",
                    got="false",
                    expected=f"true, to serve at {host}",
                    hint="It listens on every address, whatever it is told, and asks nobody for a key: a firewall "
                    "has to keep strangers from those ports",
                )


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
