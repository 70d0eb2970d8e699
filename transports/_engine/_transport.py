"""A transport on a foreign engine: everything but the engine itself."""

from __future__ import annotations

import contextlib
import ipaddress
import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol

from hawk.errors import PeerUnreachable
from hawk.transports import _checks, _machine
from hawk.transports._engine import _client, _door
from hawk.transports._engine._link import EngineLink
from hawk.transports._engine._server import Server
from hawk.transports._serving import Serving
from hawk.transports.base import Grant, Link, Viability

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.transports._engine._seam import Engine


class Settings(_door.Settings, _client.Settings, Protocol):
    """What every transport of this kind has among its settings."""

    @property
    def advertise(self) -> str: ...
    @property
    def grace(self) -> float: ...


class EngineTransport(Serving[Server, EngineLink]):
    """See the package.  A subclass has `name`, `Config`, `capabilities`, `probe` and `engine`."""

    def __init__(self, config: Settings) -> None:
        super().__init__()
        self._settings = config

    @abstractmethod
    def engine(self) -> Engine:
        """Makes an engine.  Raises `EngineFailed`, or `NotViable` where there can be none."""

    def _may_push(self) -> bool:
        """Whether this side writes for readers that ask for it."""
        return False

    def _asks(self, endpoint: Mapping[str, str]) -> bool:
        """Whether to ask this peer to write."""
        del endpoint
        return False

    def _lanes(self, endpoint: Mapping[str, str]) -> int:
        """How many engines a link to this peer has."""
        del endpoint
        return 1

    def _facts(self) -> dict[str, str]:
        """What the endpoint says beyond where we listen."""
        return {}

    def _objection(self, endpoint: Mapping[str, str]) -> str:
        """Why a peer that can be reached cannot be read from, if so."""
        del endpoint
        return ""

    async def start(self) -> None:
        """See `Transport.start`."""
        if self._server is None:
            server = Server(
                self.name, self._settings, self._grants, self._token, self._may_push(), self.engine
            )
            await server.start()
            self._server = server

    async def _give_up(self, grant: Grant) -> None:
        await self._grants.revoke(grant, None, 0.0)

    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        failed = "" if self._server is None else self._server.failed
        return failed or super().trouble()

    def counts(self) -> Mapping[str, int]:
        """See `Transport.counts`: entries of readers, and chunks that were written for them."""
        server = self._server
        return {} if server is None else {"piece-entered": server.entered, "chunk-pushed": server.pushed}

    @property
    def endpoint(self) -> dict[str, str]:
        """Where we listen, the token that admits a connection, and which machine and network that is."""
        return {
            "host": self._settings.advertise or self._settings.host,
            "port": str(self._server.port if self._server is not None else 0),
            "token": self._token.hex(),
            "net": _machine.network(),
            "boot": _machine.boot_id(),
            **self._facts(),
        }

    async def revoke(self, grant: Grant) -> bool:
        """See `Transport.revoke`: False if a reader was still inside after `grace` seconds; ask again later."""
        return await self._grants.revoke(grant, None, self._settings.grace)

    def reachable(self, endpoint: Mapping[str, str]) -> Viability:
        """Refuses what is no endpoint of ours, and a loopback address of another host."""
        host, port = endpoint.get("host", ""), endpoint.get("port", "")
        if not host or not 0 < _checks.number_of(port) < 65536:
            return Viability(False, f"the peer does not listen: host {host!r}, port {port!r}")
        if _checks.token_of(endpoint.get("token", "")) is None:
            return Viability(False, "the peer's endpoint has no token")
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
        if loopback and endpoint.get("net") != _machine.network():
            return Viability(
                False,
                f"the peer listens on {host} of another host; set transport.{self.name}.host or "
                f"transport.{self.name}.advertise there",
            )
        why = self._objection(endpoint)
        return Viability(not why, why)

    async def connect(self, endpoint: Mapping[str, str], *, timeout: float) -> Link:
        """See `Transport.connect`."""
        token = self._token_of(endpoint)
        way = _client.Way(endpoint["host"], int(endpoint["port"]), token, self._asks(endpoint))
        until = time.monotonic() + timeout
        if (lanes := self._lanes(endpoint)) > 1:
            # A peer may have room for one connection more, and not for all of these.
            with contextlib.suppress(PeerUnreachable):
                return await self._open(self._link(way, lanes), timeout)
        return await self._open(self._link(way, 1), max(until - time.monotonic(), 0.001))

    def _link(self, way: _client.Way, lanes: int) -> EngineLink:
        return EngineLink(self.name, self._settings, way, self.engine, self._step, lanes)
