"""RDMA: the reader's network card fetches bytes out of the peer's arena and scatters them where they belong.

Reliable connected queue pairs, agreed over a handshake connection; READs chained and posted with one doorbell; work
completions on the event loop.  Neither side's processors touch the bytes, and the serving side's process is not even
woken.  A grant is opened to a reader by memory windows on its own queue pairs and closed by invalidating them, so this
transport can fence (see `_windows` for devices without them).  `_device` is the seam to the RDMA library,
`hawk.transports.verbs.testing` a device without hardware.

What it trusts: the network of the RDMA device, and that of the handshake, which should be the same.  RDMA is neither
encrypted nor signed: who can listen sees the bytes, and who can send to a queue pair may guess a 32-bit key of a range
that is open at that moment.  A stranger who can reach the handshake port but has no endpoint of ours gets past no
hello, and a peer without a grant's own key (256 random bits) is given no remote key.  With `direction = "pull"`
nobody can write: no queue pair allows it.  Otherwise a peer that this side reads from may write the very bytes that a
read is to fill, while that lasts (`_inlet`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from hawk.errors import InvalidArgument, NotViable, PeerUnreachable, RegistrationFailed
from hawk.observe.log import get as get_log
from hawk.transports import _checks, _machine
from hawk.transports._grants import GrantTable
from hawk.transports.base import Capabilities, Grant, Link, Transport, Viability
from hawk.transports.verbs import _device, _find, _wire
from hawk.transports.verbs._choose import ip_of, open_ports
from hawk.transports.verbs._config import VerbsConfig
from hawk.transports.verbs._device import VerbsError
from hawk.transports.verbs._events import Watch
from hawk.transports.verbs._link import VerbsLink
from hawk.transports.verbs._numa import Distances
from hawk.transports.verbs._pyverbs import PyverbsDriver
from hawk.transports.verbs._register import Registrations
from hawk.transports.verbs._server import Server
from hawk.transports.verbs._shared import Shared
from hawk.transports.verbs._windows import WindowPool
from hawk.transports.verbs._worker import Worker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hawk.memory.region import Region
    from hawk.transports.verbs._choose import Chosen
    from hawk.transports.verbs._device import Device, Driver

__all__ = ["VerbsConfig", "VerbsTransport"]

log = get_log("hawk.transports.verbs")

_FENCE_TIMEOUT = 10.0
"""Seconds that revoking waits until every window of a grant is invalidated, or its queue pair destroyed."""

_MOST_PORTS = 32


class VerbsTransport(Transport):
    """See the module.  `driver` is where devices come from, by default the machine's own."""

    name: ClassVar[str] = "verbs"
    Config: ClassVar[type[VerbsConfig]] = VerbsConfig

    def __init__(self, config: VerbsConfig | None = None, *, driver: Driver | None = None) -> None:
        self.config = config or VerbsConfig()
        self.capabilities = Capabilities(
            can_fence=True, max_sge=self.config.max_sge, request_cost=3e-7, bandwidth=10e9
        )
        self.driver = driver
        self._grants = GrantTable()
        self._token = secrets.token_bytes(_checks.TOKEN_BYTES)
        self._worker: Worker | None = None
        self._ports: Sequence[Chosen] = ()
        self._registrations: Registrations | None = None
        self._shared: Shared | None = None
        self._watch: Watch | None = None
        self._server: Server | None = None
        self._links: set[VerbsLink] = set()
        self._registering: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._host = ""
        self._starting = asyncio.Lock()

    @classmethod
    def probe(cls) -> Viability:
        """Whether there is an RDMA device and the distribution's pyverbs; names what is missing."""
        return _find.probe()

    # -- serving -------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Opens the device and listens for handshakes.

        Raises `InvalidArgument` or `NotViable` naming the setting or the device, `TransportError` naming the address.
        """
        async with self._starting:  # whoever comes second finds it started, or tries it anew
            if self._server is None:
                await self._start()

    async def _start(self) -> None:
        self._worker = worker = Worker()
        try:
            driver: Driver = self.driver if self.driver is not None else PyverbsDriver()
            await worker.call(self._open_ports, driver)
            devices = list({id(p.device): p.device for p in self._ports}.values())
            self._check_ports()
            self._registrations = Registrations(
                [p.device for p in self._ports], worker, self.config.slice, self.config.nodes
            )
            self._host = self.config.host or self._host_of_gid()
            rate = sum(p.port.rate for p in self._ports)
            self.capabilities = Capabilities(
                can_fence=True,
                max_sge=min(self.config.max_sge, *(d.limits.max_sge_read for d in devices)),
                request_cost=3e-7,
                bandwidth=max(rate / 8, 1e6),
            )
            windows = self.config.windows == "auto" and all(d.limits.windows for d in devices)
            pools = {id(d): WindowPool(d, worker) for d in devices} if windows else {}
            self._shared = Shared(
                self.config, self._ports, worker, self._registrations, pools, Distances.read()
            )
            self._watch = Watch(self._shared, self._device_failed)
            self._watch.start()
            server = Server(self._shared, self._grants, self._token)
            self._server = server
            await server.start(self._host)
            self._prepare()
        except VerbsError as error:
            await self.close()
            raise NotViable("the RDMA device cannot be used", got=error, field="transport.verbs") from error
        except BaseException:
            await self.close()
            raise

    def _open_ports(self, driver: Driver) -> None:
        # In the worker's thread: whoever is cancelled meanwhile closes what was opened.
        self._ports = open_ports(driver, self.config.devices, self.config.gid_index)

    def _check_ports(self) -> None:
        kinds = {(p.port.link, _family(p.gid.gid)) for p in self._ports}
        if len(kinds) > 1:
            raise NotViable(
                "ports of different kinds cannot share a link",
                field="transport.verbs.devices",
                got=", ".join(f"{p.device.name}:{p.port.number} {p.port.link}" for p in self._ports),
                expected="ports of one kind, with GIDs of one kind",
            )

    def _host_of_gid(self) -> str:
        host = ip_of(self._ports[0].gid.gid) if self._ports[0].port.link == _device.ETHERNET else None
        if host is None:
            raise InvalidArgument(
                "the port's GID is no address that peers could connect to",
                field="transport.verbs.host",
                expected="an address of this machine, for handshakes",
            )
        return host

    async def close(self) -> None:
        """See `Transport.close`; goes on where it is cancelled, and the next call waits for its end."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._end()
        finally:
            self._closing = None

    async def _end(self) -> None:
        for link in list(self._links):
            await link.close()
        server, self._server = self._server, None
        if server is not None:
            # Before the grants end: a reader is to see a peer that is gone, not a key that was taken away.
            await server.close()
        for grant in self._grants.open_grants():
            await self.revoke(grant)
        if self._registering is not None:
            await asyncio.wait({self._registering})
            self._registering = None
        if self._registrations is not None:
            await self._registrations.close()
            self._registrations = self._shared = None
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.close()
        worker, self._worker = self._worker, None
        ports, self._ports = self._ports, ()
        if worker is not None:
            for device in {id(p.device): p.device for p in ports}.values():
                try:
                    await worker.call(device.close)
                except VerbsError as error:
                    log.error("a device could not be closed", device=device.name, reason=str(error))
            await worker.close()

    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        if self._server is None or not self._server.listening:
            return "it does not listen any more"
        return (self._watch.trouble() if self._watch is not None else None) or self._server.trouble

    def _device_failed(self, device: Device) -> None:
        for link in list(self._links):
            link.device_failed(device)
        if self._server is not None:
            for session in self._server.sessions:
                session.device_failed(device)

    def counts(self) -> Mapping[str, int]:
        """See `Transport.counts`."""
        return {} if self._shared is None else dict(self._shared.counts)

    @property
    def _pushes(self) -> bool:
        """Whether this side writes to its readers and lets those that it reads from write."""
        return self.config.direction != "pull" and all(p.device.limits.immediates for p in self._ports)

    @property
    def endpoint(self) -> dict[str, str]:
        """Where we listen for handshakes, the token that admits a link, our kind of ports, and whether we push."""
        first = self._ports[0] if self._ports else None
        return {
            "host": self.config.advertise or self._host,
            "port": str(self._server.port if self._server is not None else 0),
            "token": self._token.hex(),
            "net": _machine.network(),
            "link": first.port.link if first is not None else "none",
            "family": _family(first.gid.gid) if first is not None else "none",
            "ports": str(len(self._ports)),
            "push": "1" if self._pushes else "0",
        }

    def serve(self, region: Region) -> None:
        """See `Transport.serve`; the region is registered in the background."""
        self._grants.serve(region)
        self._prepare()

    def _prepare(self) -> None:
        """Begins to register what is served, so that the first reader finds it done."""
        server = self._server
        if server is None or self._grants.region is None:
            return

        async def register() -> None:
            try:
                await server.registered()
            except RegistrationFailed as error:
                log.error("what is served cannot be registered", reason=str(error))

        with contextlib.suppress(RuntimeError):  # no loop runs; the first reader will register it
            self._registering = asyncio.get_running_loop().create_task(register())

    def grant(self, offset: int, nbytes: int) -> Grant:
        """See `Transport.grant`; raises `InvalidArgument` for a range outside the served region."""
        return self._grants.grant(offset, nbytes)

    def expect(self, grant: Grant, reader: Mapping[str, str]) -> None:
        """See `Transport.expect`: windows are bound before the reader asks, and it is told."""
        token = _checks.token_of(reader.get("token", ""))
        if self._server is not None and token is not None:
            self._server.announce(grant.key, _wire.reader_id(token))

    async def revoke(self, grant: Grant) -> bool:
        """See `Transport.revoke`: the device has said that every key that readers were given for it is gone."""
        return await self._grants.revoke(grant, _evict, _FENCE_TIMEOUT)

    # -- reading -------------------------------------------------------------------------------------------------

    def reachable(self, endpoint: Mapping[str, str]) -> Viability:
        """Refuses what is no endpoint of ours, ports of another kind, and a loopback address of another host."""
        host, port = endpoint.get("host", ""), endpoint.get("port", "")
        if not host or not 0 < _checks.number_of(port) < 65536:
            return Viability(False, f"the peer does not listen: host {host!r:.99}, port {port!r:.9}")
        if _checks.token_of(endpoint.get("token", "")) is None:
            return Viability(False, "the peer's endpoint has no token")
        if not 0 < _checks.number_of(endpoint.get("ports", "")) <= _MOST_PORTS:
            return Viability(False, "the peer's endpoint has no ports")
        if not self._ports:
            return Viability(False, "this side has not started")
        ours = (self._ports[0].port.link, _family(self._ports[0].gid.gid))
        theirs = (endpoint.get("link", ""), endpoint.get("family", ""))
        if ours != theirs:
            return Viability(
                False,
                f"our port is {' '.join(ours)}, the peer's {' '.join(theirs)}; "
                "set transport.verbs.devices or gid_index",
            )
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = host == "localhost"
        if loopback and endpoint.get("net") != _machine.network():
            return Viability(
                False, f"the peer listens on {host} of another host; set transport.verbs.host there"
            )
        return Viability(True)

    async def connect(self, endpoint: Mapping[str, str], *, timeout: float) -> Link:
        """See `Transport.connect`."""
        verdict = self.reachable(endpoint)
        token = _checks.token_of(endpoint.get("token", ""))
        if not verdict.ok or token is None or self._shared is None:
            raise PeerUnreachable(verdict.reason, transport=self.name)
        if self._closing is not None:
            raise PeerUnreachable("this side is closing", transport=self.name)
        link = VerbsLink(
            self._shared,
            int(endpoint["ports"]),
            _wire.reader_id(self._token),
            self._pushes and endpoint.get("push") == "1",
        )
        link.on_close = self._links.discard
        self._links.add(link)  # before it is open: closing ends that as well
        await link.open(endpoint["host"], int(endpoint["port"]), token, timeout)
        return link


class _Inside(Protocol):
    """Who is inside a grant: a reader's way into it, or a push out of it."""

    def evict(self) -> None: ...


def _evict(guest: object) -> None:
    cast("_Inside", guest).evict()


def _family(gid: bytes) -> str:
    """`IPv4`, `IPv6` or `link-local`: queue pairs connect only between GIDs of one family; `none` on InfiniBand."""
    address = ipaddress.IPv6Address(gid)
    if address.ipv4_mapped is not None:
        return "IPv4"
    if address.is_unspecified:
        return "none"
    return "link-local" if address.is_link_local else "IPv6"
