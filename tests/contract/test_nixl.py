"""nixl meets the contract over an agent that is made up, pulled and pushed; `scripts/test engines` has the real one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from hawk.memory.cuda import DeviceRegion, device
from hawk.transports.nixl import NixlConfig, NixlTransport
from hawk.transports.nixl._agent import NixlAgent
from hawk.transports.testing import (
    AccessContract,
    EndsContract,
    MovingContract,
    SharedArena,
    Targets,
    TransportContract,
    _access,
    _ends,
    _moving,
    pattern,
)
from tests import fake_engines
from tests.fake_cuda import FakeCuda

SMALL = {"chunk": 256 << 10, "piece": 1 << 20, "grace": 0.2, "tls": "tcp,cuda_copy"}


class Made(NixlTransport):
    def __init__(self, direction: str) -> None:
        config = NixlConfig(direction=direction, **SMALL)
        super().__init__(
            config, opener=lambda: NixlAgent("tcp", package=fake_engines, gpus_why=lambda tls: "")
        )

    def _asks(self, endpoint: Mapping[str, str]) -> bool:
        asks = super()._asks(endpoint)
        assert asks == (self.config.direction == "push")
        return asks


class TestPull(TransportContract):
    takes_turns = True
    large = 4 << 20

    def make(self) -> Made:
        return Made("pull")


class TestPush(MovingContract, AccessContract):
    takes_turns = True
    large = 4 << 20

    # What else ends is for the real one: the made-up one's notices stay in their process.
    _use = EndsContract._use
    test_no_memory_waits_for_a_collector = EndsContract.test_no_memory_waits_for_a_collector
    test_nothing_is_left_behind = EndsContract.test_nothing_is_left_behind

    def make(self) -> Made:
        return Made("push")


# -- memory of GPUs


class Seen(DeviceRegion):
    """Memory of a made-up GPU, which this process sees."""

    __slots__ = ()

    @property
    def array(self) -> np.ndarray:
        return device(self.gpu).driver.at(self.address, self.nbytes)


class Arena(SharedArena):
    """Memory of the second GPU that holds a pattern."""

    def __init__(self, driver: FakeCuda, nbytes: int) -> None:
        block = driver._block(nbytes, 1, "test")
        self.region = Seen("arena", block.first, nbytes, 1)
        self.region.array[:] = pattern(nbytes)

    def close(self) -> None:
        pass


def on_gpus(driver: FakeCuda) -> type[Targets]:
    """Targets that are on two GPUs and in memory of the host, by turns."""

    class OnGpus(Targets):
        def __init__(self, sizes: list[int], fill: int = 0xA5) -> None:
            super().__init__(sizes, fill)
            for i, region in enumerate(self.regions):
                if i % 3 == 2:
                    continue
                block = driver._block(region.nbytes + 2 * self.PAD, i % 3, "test")
                block.array[:] = fill
                self._whole[i] = block.array
                self.regions[i] = Seen(region.name, block.first + self.PAD, region.nbytes, i % 3)

    return OnGpus


class OverMemoryOfGpus(MovingContract, AccessContract):
    large = 4 << 20
    direction: str

    @pytest.fixture(autouse=True)
    def gpus(self, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = driver
        for module in (_access, _ends, _moving):
            monkeypatch.setattr(module, "Targets", on_gpus(driver))

    def make(self) -> Made:
        return Made(self.direction)

    def arena(self, nbytes: int) -> Arena:
        return Arena(self.driver, nbytes)


class TestPullIntoGpus(OverMemoryOfGpus):
    direction = "pull"


class TestPushIntoGpus(OverMemoryOfGpus):
    direction = "push"
