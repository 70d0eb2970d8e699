"""On NIXL with its UCX back end: over whatever UCX finds between two hosts, or two processes of one.

Readers pull out of the arena, or ask its owner to push, whichever is faster (`direction`).  Each link has an agent
of its own, and the serving side one; none has a thread that polls.  Memory of GPUs is read into, and served (`gpu`),
where UCX takes it.  What they say to each other beside NIXL, and how a read ends, is in `hawk.transports._engine`.

What it trusts: the network and its peers.  UCX neither encrypts nor checks: whoever has an agent's metadata, which
goes to every peer that the endpoint's token admits, can read and write all that is registered, granted or not, and
over some of UCX's transports all that the process has mapped.  So this transport cannot fence: a range returns
on its reader's word, or on the end of its connection.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, ClassVar

from hawk.errors import HawkError, RegistrationFailed
from hawk.memory.cuda import CudaMemory, DeviceRegion
from hawk.observe.log import get as get_log
from hawk.transports import _machine
from hawk.transports._engine._seam import EngineFailed
from hawk.transports._engine._transport import EngineTransport
from hawk.transports.base import Capabilities, Viability
from hawk.transports.nixl import _vram
from hawk.transports.nixl._agent import EXTRA, NixlAgent, ways
from hawk.transports.nixl._config import NixlConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hawk.memory.region import Region
    from hawk.transports._engine._seam import Engine

__all__ = ["NixlConfig", "NixlTransport"]

log = get_log("hawk.transports.nixl")

_ALIGNED = 256

_SHARED = {"all", "sm", "shm", "mm", "posix", "sysv", "xpmem", "cma", "knem", "cuda", "cuda_ipc"}
"""UCX's ways by which a process gets at another's memory without that one's doing, and so cannot be kept out."""


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
        self._arena: CudaMemory | None = None
        self._shadow: Region | None = None

    @classmethod
    def probe(cls) -> Viability:
        """The Python package; where memory of GPUs cannot be used with it, the reason is that."""
        if importlib.util.find_spec("nixl") is None:
            return Viability(False, f"the Python package nixl is not installed. {EXTRA}")
        why = _vram.foreseen()
        return Viability(True, f"memory of GPUs by way of the host: {why}" if why else "")

    def engine(self) -> Engine:
        """See `EngineTransport.engine`."""
        if self._opener is not None:
            return self._opener()
        return NixlAgent(self.config.tls, self.config.ucx)

    def serve(self, region: Region) -> None:
        """See `Transport.serve`: with `gpu`, as much of that GPU's memory (`shadow`), where the engine can serve that.

        Tries it with an engine of its own, for a moment; where it cannot be, the log says why, and chunks are served
        from memory of the host.
        """
        number = self.config.gpu
        if number < 0 or region.gpu >= 0:
            super().serve(region)
            return
        if self._arena is not None and self.shadow is not None and self.shadow.nbytes == region.nbytes:
            return
        before, self._arena, self._shadow = self._arena, None, None
        try:
            self._arena, self._shadow = self._on_gpu(region)
        except HawkError as error:
            log.warning("chunks are served from memory of the host", transport=self.name, reason=str(error))
        super().serve(self._shadow or region)
        if before is not None:
            before.close()

    def _on_gpu(self, region: Region) -> tuple[CudaMemory, Region]:
        """An arena on the GPU; raises `HawkError`, of `RegistrationFailed` where the engine does not take it."""
        number = self.config.gpu
        name = f"{region.name}/gpu{number}"
        engine: Engine | None = None
        memory: CudaMemory | None = None
        try:
            engine = self.engine()
            if engine.gpus:
                raise EngineFailed(engine.gpus)
            memory = CudaMemory(name, capacity=-(-region.nbytes // _ALIGNED) * _ALIGNED, gpu=number)
            shadow = DeviceRegion(name, memory.regions[0].address, region.nbytes, number)
            engine.register(shadow.address, shadow.nbytes, number)
        except BaseException as error:
            if memory is not None:
                memory.close()
            if isinstance(error, EngineFailed):
                raise RegistrationFailed(
                    "the engine cannot serve memory of this GPU",
                    field="transport.nixl.gpu",
                    got=f"cuda:{number}: {error}",
                    expected="a GPU whose memory UCX takes, or -1",
                ) from error
            raise
        finally:
            if engine is not None:
                engine.close()
        return memory, shadow

    @property
    def shadow(self) -> Region | None:
        """See `Transport.shadow`."""
        return self._shadow

    def _closed(self) -> None:
        arena, self._arena, self._shadow = self._arena, None, None
        if arena is not None:
            arena.close()

    def _may_push(self) -> bool:
        return self.config.direction != "pull"

    def _shares_memory(self, endpoint: Mapping[str, str]) -> bool:
        """Whether UCX gets at the peer's memory without that one's doing."""
        if endpoint.get("boot") != _machine.boot_id():
            return False
        tls = ways(self.config.tls)
        # What stands behind a backslash is no alias.
        names = {name.strip().removeprefix("\\") for name in tls.split(",")}
        return not tls or tls.startswith("^") or bool(_SHARED & names)

    def _asks(self, endpoint: Mapping[str, str]) -> bool:
        # What writes into our memory must be kept from it by closing our end, should it neither finish nor answer.
        return self.config.direction != "pull" and not self._shares_memory(endpoint)

    def _lanes(self, endpoint: Mapping[str, str]) -> int:
        # Through shared memory it is the reader that copies, in the thread that posts; into memory of GPUs it is they.
        copies = self._shares_memory(endpoint) and bool(_vram.foreseen(self.config.tls))
        return self.config.copiers if copies else 1
