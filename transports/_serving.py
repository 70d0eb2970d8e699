"""What transports share that serve one region from behind a door of their own: tcp, shm and cuda."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from hawk.errors import PeerUnreachable
from hawk.transports import _checks
from hawk.transports._grants import GrantTable
from hawk.transports._links import LanesLink
from hawk.transports.base import Grant, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hawk.memory.region import Region


class Door(Protocol):
    """A server as its transport sees it."""

    @property
    def listening(self) -> bool:
        """Whether peers can still connect."""
        ...

    async def close(self) -> None:
        """Ends every connection, and returns when their threads have ended."""
        ...


DoorT = TypeVar("DoorT", bound=Door)
LinkT = TypeVar("LinkT", bound=LanesLink)


class Serving(Transport, Generic[DoorT, LinkT]):
    """A transport whose server admits by a token, whose grants lie in a table, and whose links have lanes.

    `on_step(done)`, where set, is called by a reading thread after every chunk, with the bytes of its piece so far.
    It may block, which holds the read there; for tests.
    """

    def __init__(self) -> None:
        self.on_step: Callable[[int], None] | None = None
        self._grants = GrantTable()
        self._token = secrets.token_bytes(_checks.TOKEN_BYTES)
        self._server: DoorT | None = None
        self._links: set[LinkT] = set()

    async def close(self) -> None:
        """See `Transport.close`; a peer that is still reading finds its read failed."""
        for link in list(self._links):
            await link.close()
        server, self._server = self._server, None
        if server is not None:
            # Before the grants end: a reader is to see a peer that is gone, not a key that was taken away.
            await server.close()
        for grant in self._grants.open_grants():
            await self._give_up(grant)
        self._closed()

    @abstractmethod
    async def _give_up(self, grant: Grant) -> None:
        """Ends a grant whose readers are gone with the server."""

    def _closed(self) -> None:
        """Gives back what else was taken; the last step of `close`."""

    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        return None if self._server is not None and self._server.listening else "it does not listen any more"

    def serve(self, region: Region) -> None:
        """See `Transport.serve`."""
        self._grants.serve(region)

    def grant(self, offset: int, nbytes: int) -> Grant:
        """See `Transport.grant`; raises `InvalidArgument` for a range outside the served region."""
        return self._grants.grant(offset, nbytes)

    def shut(self, grant: Grant) -> bool:
        """See `Transport.shut`."""
        return self._grants.shut(grant)

    def _token_of(self, endpoint: Mapping[str, str]) -> bytes:
        """What admits us there; raises `PeerUnreachable` for an endpoint that is out of reach."""
        verdict = self.reachable(endpoint)
        token = _checks.token_of(endpoint.get("token", ""))
        if not verdict.ok or token is None:
            raise PeerUnreachable(verdict.reason, transport=self.name)
        return token

    async def _open(self, link: LinkT, timeout: float) -> LinkT:
        """Opens a link and keeps it in mind until it is closed."""
        await link.open(timeout)
        link.on_close = lambda: self._links.discard(link)
        self._links.add(link)
        return link

    def _step(self, done: int) -> None:
        if self.on_step is not None:
            self.on_step(done)
