"""On NIXL with its UCX back end: over whatever UCX finds between two hosts, or two processes of one.

Readers pull out of the arena, or ask its owner to push, whichever is faster (`direction`).  Each link has an agent
of its own, and the serving side one; none has a thread that polls.  What they say to each other beside NIXL, and how
a read ends, is in `hawk.transports._engine`.

What it trusts: the network and its peers.  UCX neither encrypts nor checks: whoever has an agent's metadata, which
goes to every peer that the endpoint's token admits, can read and write all that is registered, granted or not, and
over some of UCX's transports all that the process has mapped.  So this transport cannot fence: a range returns
on its reader's word, or on the end of its connection.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar

from hawk.transports import _machine
from hawk.transports._engine._transport import EngineTransport
from hawk.transports.base import Capabilities, Viability
from hawk.transports.nixl._agent import EXTRA, NixlAgent
from hawk.transports.nixl._config import NixlConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hawk.transports._engine._seam import Engine

__all__ = ["NixlConfig", "NixlTransport"]

_SHARED = {"all", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem"}
"""Names in `tls` by which a process gets at another's memory without that one's doing, and so cannot be kept out."""


class NixlTransport(EngineTransport):
    """See the module.

    opener    makes the engines; for tests
    """

    name: ClassVar[str] = "nixl"
    Config: ClassVar[type[NixlConfig]] = NixlConfig

    def __init__(
        self, config: NixlConfig | None = None, *, opener: Callable[[], Engine] | None = None
    ) -> None:
        self.config = config or NixlConfig()
        super().__init__(self.config)
        # Short rows are gathered, so what a stretch of its own costs is its place in a copy.
        self.capabilities = Capabilities(can_fence=False, max_sge=1024, request_cost=2e-7, bandwidth=4e9)
        self._opener = opener

    @classmethod
    def probe(cls) -> Viability:
        """The Python package."""
        if importlib.util.find_spec("nixl") is None:
            return Viability(False, f"the Python package nixl is not installed. {EXTRA}")
        return Viability(True)

    def engine(self) -> Engine:
        """See `EngineTransport.engine`."""
        if self._opener is not None:
            return self._opener()
        return NixlAgent(self.config.tls, self.config.ucx)

    def _may_push(self) -> bool:
        return self.config.direction != "pull"

    def _asks(self, endpoint: Mapping[str, str]) -> bool:
        if self.config.direction == "pull":
            return False
        # What writes into our memory must be kept from it by closing our end, should it neither finish nor answer.
        if endpoint.get("boot") == _machine.boot_id():
            shares = not self.config.tls or bool(_SHARED & set(self.config.tls.split(",")))
            return self.config.direction == "push" and not shares
        return True
