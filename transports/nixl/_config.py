"""Settings of the nixl transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hawk.transports import _checks
from hawk.units import Duration, Size


@dataclass(frozen=True, slots=True)
class NixlConfig:
    """Settings of the nixl transport; sizes in bytes, durations in seconds.

    host               address to listen on for handshakes; where UCX listens is its own affair (`ucx`, UCX_NET_DEVICES)
    port               port to listen on for handshakes; 0 lets the system choose
    advertise          host that peers connect to, where it differs from `host`
    tls                UCX transports that may be used, as UCX_TLS takes them, such as "tcp" or "rc,ud"; "": all it has
    ucx                further settings of UCX, as "NAME=VALUE" without the UCX_
    direction          who moves the bytes: "pull": the reader, by READs; "push" and "auto": the sender, by WRITEs,
                       unless both are on one host and `tls` has ways through shared memory; what is pushed takes two
                       sides of which neither says "pull"
    gpu                the GPU whose memory chunks are served from; -1: memory of the host
    copiers            agents, each with a thread, of a link through shared memory, where the reader's side copies
    chunk              bytes moved by one request of the engine; two are under way at a time
    piece              bytes moved under one entry at the server
    gather             rows shorter than this on average arrive in a buffer, and are dealt out from there
    grace              how long `revoke` waits for readers that are inside the range
    drain_timeout      how long requests of a read that was ended may take to end before the link's agent is destroyed
    max_connections    links that are served at a time; one of several agents counts as so many
    handshake_timeout  how long a connection may take to say hello
    connect_timeout    how long a lost connection may take to come back before the link counts as broken
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    tls: str = ""
    ucx: tuple[str, ...] = ()
    direction: Literal["pull", "push", "auto"] = "auto"
    gpu: int = -1
    copiers: int = 2
    chunk: Size = 8 << 20
    piece: Size = 128 << 20
    gather: Size = 64 << 10
    grace: Duration = 2.0
    drain_timeout: Duration = 2.0
    max_connections: int = 256
    handshake_timeout: Duration = 5.0
    connect_timeout: Duration = 5.0

    def __post_init__(self) -> None:
        _checks.engine("transport.nixl", self)
        _checks.whole("transport.nixl.gpu", self.gpu, -1, 1 << 16)
        _checks.whole("transport.nixl.copiers", self.copiers, 1, 16)
        _checks.choice("transport.nixl.direction", self.direction, ("pull", "push", "auto"))
        for entry in self.ucx:
            _checks.setting("transport.nixl.ucx", entry)
