"""Peers by host name: looked up when they are wanted, and again after they were lost."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hawk.control.discovery import Directory, unknown_peer
from hawk.errors import HawkError, PeerUnreachable, UnknownPeer
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

log = get_log("hawk.control.dns")

MOST = 1024
"""Names whose addresses are kept."""

_TCP = re.compile(r"tcp://(\[[^]]+\]|[^:/]+):([0-9]+)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(slots=True)
class _Known:
    """The addresses of one host, the one that is used, and until when (loop time) they count."""

    addresses: list[str] = field(default_factory=list)
    chosen: str = ""
    until: float = 0.0
    lost: bool = False


async def lookup(host: str, port: int) -> list[str]:
    """The numeric addresses of a host in order, IPv6 only where it has no IPv4; raises `OSError`.

    An agent listens at one address, and which one it is must not change from one attempt to the next.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # how Python says that this can be no name of a host
        raise socket.gaierror(socket.EAI_NONAME, "no name of a host") from error
    by_family: dict[int, set[str]] = {}
    for family, _, _, _, address in found:
        by_family.setdefault(family, set()).add(str(address[0]))
    if socket.AF_INET in by_family:
        return sorted(by_family[socket.AF_INET])
    return [f"[{address}]" for address in sorted(by_family.get(socket.AF_INET6, ()))]


class DnsPeers(Directory):
    """A table of peers whose addresses may name hosts, and a pattern for peers that are not in it.

    peers     name to `tcp://HOST:PORT` or `ipc://PATH`; numeric addresses and paths are taken as they are
    pattern   `tcp://HOST:PORT` with `{name}` in it, for every other name; empty for none
    ttl       seconds for which an address is used before it is looked up again
    timeout   seconds that a lookup may take

    Of several addresses one is used until it was lost or is not among them any more; then the next.  A lookup that
    fails leaves the address that is known in use, until another succeeds.
    """

    def __init__(
        self,
        peers: Mapping[str, str],
        pattern: str = "",
        *,
        ttl: float = 30.0,
        timeout: float = 5.0,
        lookup: Callable[[str, int], Awaitable[list[str]]] = lookup,
    ) -> None:
        self._peers = dict(peers)
        self._pattern = pattern
        self._ttl = ttl
        self._timeout = timeout
        self._lookup = lookup
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._asking: dict[str, asyncio.Task[list[str]]] = {}

    def configured(self) -> dict[str, str]:
        """The whole table."""
        return dict(self._peers)

    def replace(self, peers: Mapping[str, str]) -> None:
        """Another table from now on; what was looked up for the old one is forgotten."""
        self._peers = dict(peers)
        self._known.clear()

    def lost(self, name: str) -> None:
        """The peer could not be reached, or is gone: it is looked up anew when it is next wanted."""
        known = self._known.get(name)
        if known is not None:
            known.until, known.lost = 0.0, True

    async def resolve(self, name: str, otherwise: str = "", *, wait: float = 0.0) -> str:
        """A numeric address, or a path; `otherwise` as it is, for a name that can be nowhere here.

        Raises `UnknownPeer` for a name that is neither in the table nor, by the pattern, in DNS, and
        `PeerUnreachable` where DNS does not answer, or knows no host of the table's.
        """
        address = self._peers.get(name, "")
        listed = bool(address)
        if not listed:
            if not self._pattern or not _NAME.fullmatch(name):
                if otherwise:
                    return otherwise
                raise unknown_peer(name, sorted(self._peers))
            address = self._pattern.replace("{name}", name)
        match = _TCP.fullmatch(address)
        if match is None or _numeric(match[1]):
            return address
        host, port = match[1], int(match[2])
        return f"tcp://{await self._host(name, host, port, listed)}:{port}"

    async def _host(self, name: str, host: str, port: int, listed: bool) -> str:
        loop = asyncio.get_running_loop()
        known = self._known.setdefault(name, _Known())
        self._known.move_to_end(name)
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        if known.chosen and loop.time() < known.until:
            return known.chosen
        try:
            addresses = await self._asked(name, host, port)
        except (OSError, HawkError) as error:
            if known.chosen:
                log.warning(
                    "lookup failed; the last address is used", peer=name, host=host, reason=str(error)
                )
                known.until = loop.time() + min(self._ttl, 1.0)
                return known.chosen
            raise self._unknown(name, host, listed, error) from error
        self._choose(known, addresses)
        known.until = loop.time() + self._ttl
        return known.chosen

    async def _asked(self, name: str, host: str, port: int) -> list[str]:
        """The addresses; one lookup serves all who ask meanwhile, and goes on when one of them leaves."""
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = asyncio.get_running_loop().create_task(self._look_up(host, port))
            task.add_done_callback(lambda done: self._done(name, done))
        return await asyncio.shield(task)

    def _done(self, name: str, task: asyncio.Task[list[str]]) -> None:
        self._asking.pop(name, None)
        if not task.cancelled():
            task.exception()  # whoever waited has it; and nobody may be left who did

    async def _look_up(self, host: str, port: int) -> list[str]:
        try:
            async with asyncio.timeout(self._timeout):
                addresses = await self._lookup(host, port)
        except TimeoutError:
            raise PeerUnreachable(
                "the name of the peer's host could not be looked up in time", seconds=self._timeout
            ) from None
        if not addresses:
            raise PeerUnreachable("the name of the peer's host has no address", got=host)
        return addresses

    @staticmethod
    def _choose(known: _Known, addresses: list[str]) -> None:
        """The address in use stays while it is one of them and was not lost; else the next in order."""
        known.addresses = addresses
        if known.chosen in addresses:
            if known.lost:
                known.chosen = addresses[(addresses.index(known.chosen) + 1) % len(addresses)]
        else:
            known.chosen = addresses[0]
        known.lost = False

    def _unknown(self, name: str, host: str, listed: bool, error: Exception) -> HawkError:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME and not listed:
            return UnknownPeer(
                "no peer of that name is configured, and none is in DNS",
                field="peer",
                got=repr(name),
                host=host,
                hint="Add it to [peers], or its name to the domain that discovery.dns names",
            )
        if isinstance(error, PeerUnreachable):
            return error
        return PeerUnreachable(
            "the name of the peer's host cannot be looked up",
            field=f"peers.{name}" if listed else "discovery.dns",
            got=host,
            peer=name,
            reason=error,
        )

    async def close(self) -> None:
        """Ends the lookups that are under way."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _numeric(host: str) -> bool:
    """Whether it is an address already, which needs no lookup."""
    if host.startswith("["):
        return True
    try:
        socket.inet_pton(socket.AF_INET, host)
    except OSError:
        return False
    return True
