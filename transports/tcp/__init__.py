"""Host staging over plain sockets: works between any two machines that reach each other.

The serving side sends straight out of its region, the reading side receives straight into the target regions
at the places that the segments name; Python touches neither bytes nor single segments.  The serving side can
fence: revoking a grant cuts the connection that is sending from it, and waits until the sender has left.

What it trusts: the network, unless `tls_cert`, `tls_key` and `tls_ca` are set.  Without them nothing is encrypted; who
can listen on the wire sees bytes and keys.  A stranger who can reach the port but has no endpoint of ours gets past no
hello, and a peer without a key reads nothing.  Nobody can write: the protocol has no such request.  With TLS (1.3,
certificates on both sides, see `_tls`) the network is trusted with nothing but being there.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, ClassVar

from hawk.transports import _checks, _machine
from hawk.transports._serving import Serving
from hawk.transports.base import Capabilities, Grant, Link, Viability
from hawk.transports.tcp import _tls
from hawk.transports.tcp._client import TcpLink, Way
from hawk.transports.tcp._config import TcpConfig
from hawk.transports.tcp._server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["TcpConfig", "TcpTransport"]

_FENCE_TIMEOUT = 10.0
"""Seconds that revoking waits for a sender whose connection was cut; it leaves within one system call."""

_PATIENCE = 0.05
"""Seconds that a sender has to leave a revoked range by itself before its connection is cut."""


class TcpTransport(Serving[Server, TcpLink]):
    """See the module."""

    name: ClassVar[str] = "tcp"
    Config: ClassVar[type[TcpConfig]] = TcpConfig

    def __init__(self, config: TcpConfig | None = None) -> None:
        super().__init__()
        self.config = config or TcpConfig()
        # Stretches that follow each other in the arena are one request, and one system call takes 1024 places: what
        # a stretch of its own costs is its places in the kernel's loop.
        self.capabilities = Capabilities(can_fence=True, max_sge=1024, request_cost=2e-7, bandwidth=4e9)
        self._loaded: _tls.Tls | None = None

    @classmethod
    def probe(cls) -> Viability:
        """Sockets are everywhere."""
        return Viability(True)

    async def start(self) -> None:
        """Listens.  Raises `TransportError` naming the address, `InvalidArgument` for files that TLS cannot use."""
        if self._server is None:
            server = Server(self.config, self._grants, self._token, self._tls)
            server.start()
            self._server = server

    async def _give_up(self, grant: Grant) -> None:
        await self.revoke(grant)

    def reread(self) -> Callable[[], bool]:
        """See `Transport.reread`: the certificate, its key and the authority, for connections made from then on."""
        now = self._tls
        if now is None:
            return super().reread()
        fresh = _read_tls(self.config)
        assert fresh is not None
        return lambda: now.adopt(fresh)

    @property
    def endpoint(self) -> dict[str, str]:
        """Where we listen, the token that admits a connection, which loopback is ours, and our certificate."""
        tls = {} if self._tls is None else {"tls": self._tls.fingerprint}
        return {
            "host": self.config.advertise or self.config.host,
            "port": str(self._server.port if self._server is not None else 0),
            "token": self._token.hex(),
            "net": _machine.network(),
            **tls,
        }

    @property
    def _tls(self) -> _tls.Tls | None:
        if self._loaded is None:
            self._loaded = _read_tls(self.config)
        return self._loaded

    async def revoke(self, grant: Grant) -> bool:
        """See `Transport.revoke`: connections that send from the range are cut, and their senders gone."""
        evict = self._server.evict if self._server is not None else None
        return await self._grants.revoke(grant, evict, _FENCE_TIMEOUT, patience=_PATIENCE)

    def reachable(self, endpoint: Mapping[str, str]) -> Viability:
        """Refuses what is no endpoint of ours, TLS on one side only, and a loopback address of another host."""
        host, port = endpoint.get("host", ""), endpoint.get("port", "")
        if not host or not 0 < _checks.number_of(port) < 65536:
            return Viability(False, f"the peer does not listen: host {host!r}, port {port!r}")
        if _checks.token_of(endpoint.get("token", "")) is None:
            return Viability(False, "the peer's endpoint has no token")
        ours = "" if self._tls is None else self._tls.fingerprint
        if (why := _tls.objection(ours, endpoint.get("tls"), host)) is not None:
            return Viability(False, why)
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if loopback and endpoint.get("net") != _machine.network():
            return Viability(
                False,
                f"the peer listens on {host} of another host; set transport.tcp.host or transport.tcp.advertise there",
            )
        return Viability(True)

    async def connect(self, endpoint: Mapping[str, str], *, timeout: float) -> Link:
        """See `Transport.connect`."""
        token = self._token_of(endpoint)
        way = Way(endpoint["host"], int(endpoint["port"]), token, self._tls, endpoint.get("tls", ""))
        return await self._open(TcpLink(self.config, way, self._step), timeout)


def _read_tls(config: TcpConfig) -> _tls.Tls | None:
    """What the files of the configuration say; None where it names none."""
    cert, key, ca = config.tls_cert, config.tls_key, config.tls_ca
    if cert is None or key is None or ca is None:
        return None
    return _tls.Tls(cert, key, ca)
