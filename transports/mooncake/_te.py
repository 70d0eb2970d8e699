"""Mooncake's Transfer Engine, as an `Engine`.

Only READs are used: a WRITE's end cannot be asked for without waiting, and whoever serves has one thread for all.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hawk.errors import NotViable
from hawk.extras import install
from hawk.observe.log import get as get_log
from hawk.transports._engine._seam import Engine, EngineFailed

if TYPE_CHECKING:
    from hawk.memory.region import I64
    from hawk.transports._engine._seam import Handle
    from hawk.transports.mooncake._config import MooncakeConfig

log = get_log("hawk.transports.mooncake")

_PEER = re.compile(rb"[A-Za-z0-9._:-]{1,253}:[1-9][0-9]{0,15}")

EXTRA = install("mooncake")


@functools.cache
def load(stall_timeout: int) -> Any:
    """The module with the engine, told to say little and to give up after so many seconds.

    Raises `NotViable` where it cannot be imported.
    """
    # All it is told goes by the environment, which it reads when it is loaded, or when an engine is made.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(stall_timeout))
    try:
        return importlib.import_module("mooncake.engine")
    except Exception as error:  # what its own libraries lack may be told in any way
        raise NotViable(
            "the Python package mooncake cannot be loaded",
            got=f"{type(error).__name__}: {error}",
            hint=f"{EXTRA}; it needs libibverbs1, libnuma1 and libcurl4",
        ) from error


@dataclass(eq=False, slots=True)
class _Transfer:
    """Rows on their way: those before `at` are there, and `flying` behind it are with the engine as `number`."""

    peer: str
    local: list[int]
    remote: list[int]
    nbytes: list[int]
    at: int = 0
    flying: int = 0
    number: int = 0
    failures: int = 0
    since: float = 0.0


def devices(topology: str) -> set[str]:
    """RDMA devices in what the engine says of its machine: for each kind of memory those that are near, and others.

    Raises `EngineFailed` for what cannot be read.
    """
    try:
        told = json.loads(topology)
        return {str(name) for lists in told.values() for names in lists for name in names}
    except (ValueError, TypeError, AttributeError) as error:
        raise EngineFailed(f"what it says of its devices cannot be read: {topology[:200]!r}") from error


class MooncakeEngine(Engine):
    """One engine; a broken one is replaced within, and what was registered is registered again.

    module    what stands for Mooncake's; for tests
    """

    def __init__(self, config: MooncakeConfig, *, module: Any = None) -> None:
        self._config = config
        self._module = module or load(max(1, math.ceil(config.stall_timeout)))
        self._registered: dict[int, int] = {}
        self._transfers: list[_Transfer] = []
        self._engine: Any = None
        self._make()

    def _make(self) -> None:
        engine = self._module.TransferEngine()
        host = self._config.advertise or self._config.host
        code = engine.initialize(host, "P2PHANDSHAKE", self._config.protocol, ",".join(self._config.devices))
        if code != 0:
            raise EngineFailed(f"it does not start: {code}")
        if self._config.protocol == "rdma":
            self._look_for_devices(engine)
        self._engine = engine
        for address, nbytes in self._registered.items():
            self._register(address, nbytes)

    def _look_for_devices(self, engine: Any) -> None:
        """Raises `EngineFailed` unless it has found the devices that it is to use.

        Without one it goes over TCP and says nothing; so it does where the environment tells it to.
        """
        if os.environ.get("MC_FORCE_TCP"):
            raise EngineFailed("MC_FORCE_TCP is set, so it would go over TCP and not over RDMA")
        found = devices(engine.get_local_topology())
        missing = [name for name in self._config.devices if name not in found]
        if missing:
            raise EngineFailed(
                f"it finds no RDMA device {', '.join(missing)} "
                f"(transport.mooncake.devices); there are {', '.join(sorted(found)) or 'none'}"
            )
        if not found:
            raise EngineFailed("it finds no RDMA device, and would go over TCP without a word")

    @property
    def description(self) -> bytes:
        """See `Engine.description`: where its own handshakes are; what is registered its peers ask it for."""
        return f"{self._config.advertise or self._config.host}:{self._engine.get_rpc_port()}".encode()

    def _register(self, address: int, nbytes: int) -> None:
        code = self._engine.register_memory(address, nbytes)
        if code != 0:
            raise EngineFailed(f"the memory cannot be registered: {code}")

    def register(self, address: int, nbytes: int, gpu: int = -1) -> None:
        """See `Engine.register`."""
        if gpu >= 0:
            raise EngineFailed(f"memory of cuda:{gpu} cannot be registered: {self.gpus}")
        if self._registered.get(address) != nbytes:
            self._register(address, nbytes)
            self._registered[address] = nbytes

    def forget(self, address: int, nbytes: int) -> None:
        """See `Engine.forget`."""
        if self._registered.get(address) == nbytes:
            del self._registered[address]
            code = self._engine.unregister_memory(address)
            if code != 0:
                raise EngineFailed(f"a registration does not end: {code}")

    def meet(self, description: bytes) -> object:
        """See `Engine.meet`; the peer is its host and port."""
        # The engine takes anything, fills in a port of its own, and writes to standard error what it could not find.
        if _PEER.fullmatch(description) is None:
            raise EngineFailed("the peer's description cannot be used")
        return description.decode("ascii")

    def part(self, peer: object) -> None:
        """See `Engine.part`: there is nothing that stands between transfers."""

    def post(
        self,
        peer: object,
        write: bool,
        local: I64,
        remote: I64,
        nbytes: I64,
        notice: bytes = b"",
        *,
        here: int = -1,
        there: int = -1,
    ) -> Handle:
        """See `Engine.post`."""
        if write or notice or here >= 0 or there >= 0:
            raise EngineFailed("this engine is not used for writing, nor for memory of GPUs")
        transfer = _Transfer(str(peer), local.tolist(), remote.tolist(), nbytes.tolist())
        self._transfers.append(transfer)
        self._submit(transfer)
        return transfer

    def _submit(self, transfer: _Transfer) -> None:
        """Hands the next rows to the engine, unless it has as many as it may have."""
        flying = sum(other.flying for other in self._transfers)
        batch = max(1, self._config.batch >> 2 * transfer.failures)
        rows = min(batch - flying, len(transfer.nbytes) - transfer.at)
        if rows <= 0:
            return
        taken = slice(transfer.at, transfer.at + rows)
        number = self._engine.batch_transfer_async_read(
            transfer.peer, transfer.local[taken], transfer.remote[taken], transfer.nbytes[taken]
        )
        if number in (0, -1):
            self._mend(transfer, "it takes no transfer")
            return
        transfer.number, transfer.flying, transfer.since = number, rows, time.monotonic()

    def poll(self, handle: Any) -> bool:
        """See `Engine.poll`; waits for what the engine has of this transfer, without Python's lock."""
        transfer: _Transfer = handle
        if not transfer.flying:
            self._submit(transfer)
            if not transfer.flying:
                return False
        code = self._engine.get_batch_transfer_status([transfer.number])
        if code != 0:
            if time.monotonic() - transfer.since > self._config.stall_timeout / 2:
                # It was waited for in vain, and whoever asks such a peer anything waits for a minute.
                raise EngineFailed(f"a transfer did not get on: {code}")
            self._mend(transfer, f"a transfer failed: {code}")
            return False
        transfer.at += transfer.flying
        transfer.flying = 0
        if transfer.at < len(transfer.nbytes):
            return False
        self._transfers.remove(transfer)
        return True

    def _mend(self, transfer: _Transfer, why: str) -> None:
        """A fresh engine that goes on with fewer rows at a time; raises `EngineFailed` where that is of no use."""
        if transfer.failures >= self._config.retries or self._engine.send_probe(transfer.peer) != 0:
            raise EngineFailed(why)
        transfer.failures += 1
        log.warning("the engine is made anew", reason=why, peer=transfer.peer, failures=transfer.failures)
        self._engine = None  # ends all that it has under way
        for each in self._transfers:
            each.flying = 0
        self._make()

    def notices(self) -> list[bytes]:
        """See `Engine.notices`: its own threads serve its peers."""
        return []

    def close(self) -> None:
        """See `Engine.close`: it joins its threads, which takes a second."""
        self._engine = None
        self._transfers.clear()
        self._registered.clear()
