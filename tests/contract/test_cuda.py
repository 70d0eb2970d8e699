"""cuda meets the contract over a driver that is made up, into memory of the host and into a GPU's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hawk.memory import cuda_driver
from hawk.memory.cuda import DeviceRegion, device
from hawk.memory.cuda_shared import SharedDeviceMemory
from hawk.transports.cuda import CudaConfig, CudaTransport
from hawk.transports.testing import SharedArena, Targets, TransportContract, _access, _ends, _moving, pattern
from tests.fake_cuda import FakeCuda

SMALL = {"chunk": 256 << 10, "piece": 1 << 20, "grace": 0.2}


class Seen(DeviceRegion):
    """Memory of the made-up GPU, which this process sees."""

    __slots__ = ()

    @property
    def array(self) -> np.ndarray:
        return device(self.gpu).driver.at(self.address, self.nbytes)


class Arena(SharedArena):
    """Memory of the first GPU that holds a pattern."""

    def __init__(self, nbytes: int) -> None:
        self._memory = SharedDeviceMemory(device(0), nbytes, "arena")
        self.region = Seen("arena", self._memory.region.address, nbytes, 0)
        self.region.array[:] = pattern(nbytes)

    def close(self) -> None:
        self._memory.close()


class OnGpus(Targets):
    """Targets that are on two GPUs and in memory of the host, by turns."""

    def __init__(self, sizes: list[int], fill: int = 0xA5) -> None:
        super().__init__(sizes, fill)
        self.regions = [
            region if i % 3 == 2 else Seen(region.name, region.address, region.nbytes, i % 3)
            for i, region in enumerate(self.regions)
        ]


@pytest.fixture
def driver(driver_with_rows: FakeCuda) -> Iterator[FakeCuda]:
    yield driver_with_rows
    assert not driver_with_rows.left()


@pytest.mark.usefixtures("driver")
class OverTheFake(TransportContract):
    large = 4 << 20

    def make(self) -> CudaTransport:
        if cuda_driver._known is None:  # in the process that a test of the contract starts
            cuda_driver._known = FakeCuda(devices=2)
        return CudaTransport(CudaConfig(**SMALL, streams=self.streams))

    def arena(self, nbytes: int) -> Arena:
        return Arena(nbytes)

    streams = 1


class TestIntoMemoryOfTheHost(OverTheFake):
    takes_turns = True


class TestIntoMemoryOfGpus(OverTheFake):
    streams = 3

    @pytest.fixture(autouse=True)
    def targets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (_access, _ends, _moving):
            monkeypatch.setattr(module, "Targets", OnGpus)
