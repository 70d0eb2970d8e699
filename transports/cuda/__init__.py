"""Between GPUs of one host: chunks lie in the memory of the sender's GPU, and the reader's copies them into its own.

The server's arena is physical memory of a GPU that is passed on by descriptor: a reader maps it, once for each GPU that
it copies to, and copies over NVLink, or whatever the GPUs have between them.  Long runs of bytes are taken by the copy
engines, short ones by a kernel, a table of them at a time, both on streams of the reader's own, and a thread waits for
the event behind them.  Who may read what, and whether it stood until the end, is asked as in shm.

What it trusts: processes of the same user, as shm does, and more, for memory of a GPU cannot be passed on to be read
only: one that was let in can read and write all of the arena, for as long as it likes.  So `revoke` says True once
every reader has left or died, and False if one did not within the grace.  A peer that dies takes nothing away under a
copy: its memory stays until nobody has it mapped.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from hawk.errors import HawkMemoryError, InvalidArgument, MissingDependency, NotViable
from hawk.memory import cuda_driver
from hawk.memory.cuda import CudaDevice, device
from hawk.memory.cuda_driver import CudaFault
from hawk.memory.cuda_shared import SharedDeviceMemory
from hawk.transports import _machine
from hawk.transports._serving import Serving
from hawk.transports.base import Capabilities, Grant, Link, Viability
from hawk.transports.cuda._client import CudaLink
from hawk.transports.cuda._config import CudaConfig
from hawk.transports.cuda._pace import Pace
from hawk.transports.cuda._server import CudaServer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.memory.region import Region

__all__ = ["CudaConfig", "CudaTransport"]

_REMEDY = (
    "GPUs reach each other over NVLink, or below one PCIe switch where the host's isolation of devices (ACS, IOMMU) "
    "leaves them to; name another transport behind this one in transport.prefer"
)


class CudaTransport(Serving[CudaServer, CudaLink]):
    """See the module."""

    name: ClassVar[str] = "cuda"
    Config: ClassVar[type[CudaConfig]] = CudaConfig

    def __init__(self, config: CudaConfig | None = None) -> None:
        super().__init__()
        self.config = config or CudaConfig()
        self.capabilities = Capabilities(
            can_fence=False,
            same_host=True,
            max_sge=1 << 18,
            request_cost=1e-7,
            bandwidth=self.config.pace or 2e11,
            into_gpus=True,
        )
        self._pace = Pace(self.config.pace) if self.config.pace else None
        self._device: CudaDevice | None = None
        self._identity = ""
        self._arena: SharedDeviceMemory | None = None
        self._known: dict[str, tuple[int, frozenset[int]]] = {}
        """GPUs that this process sees: their numbers, and which of them reach each."""

    @classmethod
    def probe(cls) -> Viability:
        """A driver, and a GPU that it drives."""
        try:
            count = cuda_driver.load().device_count()
        except MissingDependency as error:
            return Viability(False, str(error))
        except CudaFault as fault:
            return Viability(False, f"the CUDA driver does not answer: {fault}")
        return Viability(count > 0, "" if count else "the CUDA driver finds no GPU")

    async def start(self) -> None:
        """Starts the driver and listens on a Unix socket.  Raises `NotViable` without the GPU, `TransportError`."""
        if self._server is not None:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._find)
        except (MissingDependency, InvalidArgument, HawkMemoryError) as error:
            raise NotViable("cuda cannot be used here", got=error) from error
        server = CudaServer(self.config, self._grants, self._token)  # type: ignore[arg-type]
        server.start()
        self._server = server

    def _find(self) -> None:
        own = device(self.config.gpu, field="transport.cuda.gpu")
        with own.current() as driver:
            seen = range(driver.device_count())
            for number in seen:
                reaching = frozenset(each for each in seen if driver.reaches(each, number))
                self._known[driver.identity(number)] = number, reaching
            self._identity = driver.identity(own.number)
        self._device = own

    async def _give_up(self, grant: Grant) -> None:
        await self._grants.revoke(grant, None, 0.0)

    def _closed(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def trouble(self) -> str | None:
        """See `Transport.trouble`."""
        if self._device is not None and self._device.lost is not None:
            return str(self._device.lost)
        return super().trouble()

    @property
    def endpoint(self) -> dict[str, str]:
        """The socket's path, the token that admits a connection, which machine and user that is, and the GPU."""
        return _machine.listening(self._server.path if self._server is not None else "", self._token) | {
            "gpu": self._identity
        }

    def serve(self, region: Region) -> None:
        """See `Transport.serve`: beside memory of the host it allocates as much of the GPU's (`shadow`).

        Raises `NotViable` where the GPU has no room for that, `InvalidArgument` for another region than before.
        """
        if self._device is None:
            raise InvalidArgument("not started", field="cuda", hint="Call start() first")
        if self._arena is not None and self._arena.region.nbytes == region.nbytes:
            return
        if region.gpu >= 0:
            self._grants.serve(region)
            return
        try:
            _, reaching = self._known[self._identity]
            name = f"{region.name}/gpu{self._device.number}"
            made = SharedDeviceMemory(self._device, region.nbytes, name, sorted(reaching))
        except HawkMemoryError as error:
            raise NotViable("the GPU has no arena for chunks", got=error, hint=error.hint) from error
        try:
            self._grants.serve(made.region)
        except BaseException:
            made.close()
            raise
        before, self._arena = self._arena, made
        if before is not None:
            before.close()

    @property
    def shadow(self) -> Region | None:
        """See `Transport.shadow`."""
        return None if self._arena is None else self._arena.region

    def busy(self) -> float:
        """Seconds in which GPUs were copying for this side's reads since this was last asked, by their own events."""
        return sum(link.busy() for link in self._links)

    async def revoke(self, grant: Grant) -> bool:
        """See `Transport.revoke`: False if a reader was still inside after `grace` seconds; ask again later."""
        return await self._grants.revoke(grant, None, self.config.grace)

    def reachable(self, endpoint: Mapping[str, str]) -> Viability:
        """Refuses another host, another user, a GPU that is not seen here, and one that ours does not reach."""
        if (why := _machine.objection(endpoint)) is not None:
            return Viability(False, why)
        gpu = endpoint.get("gpu", "")
        if gpu not in self._known:
            return Viability(
                False,
                f"this process does not see the peer's GPU {gpu[:32]!r}; let CUDA_VISIBLE_DEVICES name both, and "
                "transport.cuda.gpu say which is whose",
            )
        number, reaching = self._known[gpu]
        if self.config.gpu not in reaching:
            return Viability(
                False,
                f"cuda:{self.config.gpu} has no peer access to the peer's GPU, cuda:{number}. {_REMEDY}",
            )
        return Viability(True)

    async def connect(self, endpoint: Mapping[str, str], *, timeout: float) -> Link:
        """See `Transport.connect`."""
        token = self._token_of(endpoint)
        number, reaching = self._known[endpoint["gpu"]]

        def check(gpu: int) -> None:
            if gpu not in reaching:
                what = f"cuda:{gpu} has no peer access to the peer's GPU, cuda:{number}"
                raise NotViable(what, transport=self.name, hint=_REMEDY)

        link = CudaLink(self.config, endpoint["path"], token, self._step, self._pace, check)
        return await self._open(link, timeout)
