"""Between processes of one host: one copy, out of the peer's arena, made by the owner of the target.

The server hands a read-only descriptor of its arena to peers of the same user; a reader maps it once per link
and copies what it is granted.  Before each piece the reader presents its key, and afterwards it says that it
has left and asks whether the grant stood until then; only then do the bytes count.

What it trusts: processes of the same user.  One that was let in has the whole arena mapped and can read all of
it, granted or not, and for as long as it likes, which is why this transport cannot fence.  `revoke` says True
once every reader has left (or died, which closes its connection), and False if one did not within the grace.
The descriptor is opened read-only, which keeps a correct peer from writing; a hostile process of the same user
has other ways into ours anyway.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, ClassVar

from hawk.errors import InvalidArgument
from hawk.transports import _machine
from hawk.transports._serving import Serving
from hawk.transports.base import Capabilities, Grant, Link, Viability
from hawk.transports.shm import _board
from hawk.transports.shm._client import ShmLink
from hawk.transports.shm._config import ShmConfig
from hawk.transports.shm._mapping import sealed
from hawk.transports.shm._server import Server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.memory.region import Region

__all__ = ["ShmConfig", "ShmTransport"]


class ShmTransport(Serving[Server, ShmLink]):
    """See the module."""

    name: ClassVar[str] = "shm"
    Config: ClassVar[type[ShmConfig]] = ShmConfig

    def __init__(self, config: ShmConfig | None = None) -> None:
        super().__init__()
        self.config = config or ShmConfig()
        self.capabilities = Capabilities(
            can_fence=False, same_host=True, max_sge=1 << 18, request_cost=1e-7, bandwidth=8e9
        )

    @classmethod
    def probe(cls) -> Viability:
        """Linux with memfds and /proc."""
        if sys.platform != "linux" or not hasattr(os, "memfd_create"):
            return Viability(False, "needs Linux with memfd_create")
        if not os.path.isdir("/proc/self/fd"):
            return Viability(False, "needs /proc, to open the arena read-only for peers")
        return Viability(True)

    async def start(self) -> None:
        """Listens on a Unix socket.  Raises `TransportError` naming the path."""
        if self._server is None:
            made = _board.core()
            board = None if made is None else _board.Board(made)
            server = Server(self.config, self._grants, self._token, board)
            try:
                server.start()
            except BaseException:
                if board is not None:
                    board.close()
                raise
            self._server, self._grants.board = server, board

    async def _give_up(self, grant: Grant) -> None:
        await self._grants.revoke(grant, None, 0.0)

    def _closed(self) -> None:
        board, self._grants.board = self._grants.board, None
        if board is not None:
            board.close()

    @property
    def endpoint(self) -> dict[str, str]:
        """The socket's path, the token that admits a connection, and which machine and user that is."""
        return _machine.listening(self._server.path if self._server is not None else "", self._token)

    def serve(self, region: Region) -> None:
        """See `Transport.serve`; raises `InvalidArgument` unless the region is a sealed memfd's."""
        if region.fd < 0 or not sealed(region.fd):
            raise InvalidArgument(
                "only shared memory can be served",
                field="region.fd",
                got=f"{region.name}, descriptor {region.fd}",
                expected="a memfd that is sealed against shrinking",
            )
        super().serve(region)

    async def revoke(self, grant: Grant) -> bool:
        """See `Transport.revoke`: False if a reader was still inside after `grace` seconds; ask again later."""
        return await self._grants.revoke(grant, None, self.config.grace)

    def reachable(self, endpoint: Mapping[str, str]) -> Viability:
        """Refuses another host, another user, and a socket that we cannot see."""
        why = _machine.objection(endpoint)
        return Viability(why is None, why or "")

    async def connect(self, endpoint: Mapping[str, str], *, timeout: float) -> Link:
        """See `Transport.connect`."""
        token = self._token_of(endpoint)
        link = ShmLink(self.config, endpoint["path"], token, self._step, lambda: self.on_step is not None)
        return await self._open(link, timeout)
