"""Transport links to the peers that this agent reads from."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from hawk.errors import NotViable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.jobs.peers import PeerSession
    from hawk.transports.base import Link, Transport


class _Known:
    """The link of one session over one transport, and the endpoint that it leads to."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.endpoint: dict[str, str] = {}
        self.link: Link | None = None


class Links:
    """Links by session and transport, made when first wanted, and again when broken or when the peer is another."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self._transports = transports
        self._known: WeakKeyDictionary[PeerSession, dict[str, _Known]] = WeakKeyDictionary()
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, session: PeerSession, transport: str, *, timeout: float) -> Link:
        """A working link to the session's peer; raises what `Transport.connect` raises."""
        of_session = self._known.get(session)
        if of_session is None:
            of_session = self._known[session] = {}
        known = of_session.get(transport)
        if known is None:
            known = of_session[transport] = _Known()
        async with known.lock:
            endpoint = session.endpoints.get(transport)
            if endpoint is None:
                raise NotViable("the peer came back without this transport", field="transport", got=transport)
            if known.link is not None and known.endpoint == endpoint and not known.link.broken:
                return known.link
            self._retire(known)
            known.link = await self._transports[transport].connect(endpoint, timeout=timeout)
            known.endpoint = endpoint
            return known.link

    def drop(self, session: PeerSession) -> None:
        """Closes the links of a session whose peer is gone, and lets go of the memory they have mapped."""
        for known in self._known.get(session, {}).values():
            self._retire(known)

    def _retire(self, known: _Known) -> None:
        link, known.link = known.link, None
        if link is None:
            return
        task = asyncio.get_running_loop().create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes every link."""
        for session in list(self._known):
            self.drop(session)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)
