"""On Mooncake's Transfer Engine, over TCP or RDMA.

Readers pull out of the arena.  Each link has an engine of its own, and the serving side one.  What they say to each
other beside it, and how a read ends, is in `hawk.transports._engine`.

What it trusts: whoever reaches its ports.  The engine listens on every address of the host, whatever it is told, on
two ports of its choice for every engine, and serves anyone who asks there: all that is registered can be read and
written, granted or not.  So this transport cannot fence, and a host beyond loopback has to be allowed by `open_ports`.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar

from hawk.observe.log import get as get_log
from hawk.transports._engine._transport import EngineTransport
from hawk.transports.base import Capabilities, Viability
from hawk.transports.mooncake._config import MooncakeConfig
from hawk.transports.mooncake._te import EXTRA, MooncakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hawk.transports._engine._seam import Engine

__all__ = ["MooncakeConfig", "MooncakeTransport"]

log = get_log("hawk.transports.mooncake")


class MooncakeTransport(EngineTransport):
    """See the module.

    opener    makes the engines; for tests
    """

    name: ClassVar[str] = "mooncake"
    Config: ClassVar[type[MooncakeConfig]] = MooncakeConfig

    def __init__(
        self, config: MooncakeConfig | None = None, *, opener: Callable[[], Engine] | None = None
    ) -> None:
        self.config = config or MooncakeConfig()
        super().__init__(self.config)
        # Short rows are gathered, so what a stretch of its own costs is its place in a copy.
        self.capabilities = Capabilities(can_fence=False, max_sge=1024, request_cost=2e-7, bandwidth=2e9)
        self._opener = opener

    @classmethod
    def probe(cls) -> Viability:
        """The Python package."""
        if importlib.util.find_spec("mooncake") is None:
            return Viability(False, f"the Python package mooncake is not installed. {EXTRA}")
        return Viability(True)

    async def start(self) -> None:
        """See `Transport.start`; raises `NotViable` where the engine cannot be loaded or does not start."""
        await super().start()
        log.warning("the engine's ports are open on every address of this host", transport=self.name)

    def engine(self) -> Engine:
        """See `EngineTransport.engine`."""
        return MooncakeEngine(self.config) if self._opener is None else self._opener()

    def _facts(self) -> dict[str, str]:
        return {"protocol": self.config.protocol}

    def _objection(self, endpoint: Mapping[str, str]) -> str:
        theirs = endpoint.get("protocol")
        if theirs == self.config.protocol:
            return ""
        return f"the peer's engine speaks {theirs}, ours {self.config.protocol}"
