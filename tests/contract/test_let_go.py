"""However a read ends in its middle, nothing keeps the memory of either side once both have closed."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from hawk.errors import HawkError
from hawk.memory.region import Segments
from hawk.transports.base import Transport
from hawk.transports.shm import ShmConfig, ShmTransport
from hawk.transports.tcp import TcpConfig, TcpTransport
from hawk.transports.testing import ContractBase, Gate, Rig, Targets
from hawk.transports.verbs import VerbsConfig, VerbsTransport
from hawk.transports.verbs.testing import FakeDriver

NBYTES = 2 << 20
WHOLE = Segments.of([(0, 0, 0, NBYTES)])


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Over(ContractBase):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def make(self) -> Transport:
        if self.kind == "tcp":
            return TcpTransport(TcpConfig(host="127.0.0.1", chunk=64 << 10))
        if self.kind == "shm":
            return ShmTransport(ShmConfig(chunk=64 << 10))
        small = {"batch": 64 << 10, "message": 32 << 10, "depth": 64, "queue_pairs": 1}
        config: dict[str, Any] = {**small, "direction": self.kind, "push_windows": 256}
        return VerbsTransport(VerbsConfig(**config), driver=FakeDriver())

    def hold(self, reading: Transport, gate: Gate) -> bool:
        if isinstance(reading, VerbsTransport):
            for driver in (reading.driver, *self.others):
                assert isinstance(driver, FakeDriver)
                driver.faults.on_step = gate
            return True
        return super().hold(reading, gate)

    others: tuple[object, ...] = ()
    """Drivers of those who write, where that is the serving side."""

    async def use(self, how: str) -> list[weakref.ref[Any]]:
        """Ends a read in its middle; the memory of both sides, which are closed."""
        async with self.rig(NBYTES) as rig:
            if self.kind == "push":
                assert isinstance(rig.serving, VerbsTransport)
                self.others = (rig.serving.driver,)
            targets = Targets([NBYTES])
            memory = [weakref.ref(region.array) for region in (rig.arena, *targets.regions)]
            await self._ended(how, rig, targets)
        return memory

    async def _ended(self, how: str, rig: Rig, targets: Targets) -> None:
        grant = rig.serving.grant(0, NBYTES)
        task, gate = await self.held(rig, lambda: rig.read(grant, WHOLE, targets))
        ending: asyncio.Future[Any] | None = None
        if how == "cancelled":
            task.cancel()
        elif how == "revoked":
            ending = asyncio.ensure_future(rig.serving.revoke(grant))
        elif how == "the link closes":
            ending = asyncio.ensure_future(rig.link.close())
        elif how == "the server closes":
            ending = asyncio.ensure_future(rig.serving.close())
        else:
            gate.open()
            await rig.outcome(task)
            with contextlib.suppress(HawkError):
                await rig.link.read(grant.key, WHOLE, targets.regions, timeout=0.001)
        await asyncio.sleep(0)
        gate.open()
        if ending is not None:
            await ending
        await rig.outcome(task)


WAYS = ["cancelled", "revoked", "the link closes", "the server closes", "late"]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ["pull", "push", "tcp", "shm"])
def test_memory_is_let_go(kind: str, how: str) -> None:
    memory = asyncio.run(Over(kind).use(how))
    assert [found() is None for found in memory] == [True, True]
