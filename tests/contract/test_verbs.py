"""verbs meets the contract over devices without hardware: with windows and without, one queue pair and several."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from hawk.transports.base import Transport
from hawk.transports.testing import AccessContract, ContractBase, Gate, MovingContract, TransportContract
from hawk.transports.verbs import VerbsConfig, VerbsTransport
from hawk.transports.verbs.testing import LIMITS, FakeDriver
from tests.contract.verbs_keys import StaleKeys, StaleWriters

# Small batches: the same paths as with the defaults, at a size that keeps the tests quick.
SMALL: dict[str, Any] = {"batch": 1 << 20, "message": 256 << 10, "depth": 64}


class OverFakes(ContractBase):
    large = 12 << 20
    config = VerbsConfig()
    limits = LIMITS

    @pytest.fixture(autouse=True)
    def _nothing_left(self) -> Iterator[None]:
        self.drivers: list[FakeDriver] = []
        yield
        for driver in self.drivers:
            assert all(device.closed and device.left == 0 for device in driver.opened)

    def make(self) -> VerbsTransport:
        driver = FakeDriver(limits=self.limits)
        if hasattr(self, "drivers"):  # not in a child process
            self.drivers.append(driver)
        return VerbsTransport(self.config, driver=driver)

    def hold(self, reading: Transport, gate: Gate) -> bool:
        assert isinstance(reading, VerbsTransport)
        assert isinstance(reading.driver, FakeDriver)
        reading.driver.faults.on_step = gate
        return True


class TestOneQueuePair(OverFakes, TransportContract, StaleKeys):
    takes_turns = True
    config = VerbsConfig(queue_pairs=1, **SMALL)


class TestThreeQueuePairs(OverFakes, TransportContract):
    config = VerbsConfig(queue_pairs=3, **SMALL)


class TestWithoutWindows(OverFakes, AccessContract):
    config = VerbsConfig(queue_pairs=2, **SMALL)
    limits = dataclasses.replace(LIMITS, windows=False)


class Pushed(OverFakes):
    """Nobody writes what it has no credit for."""

    @pytest.fixture(autouse=True)
    def _nobody_starves(self) -> Iterator[None]:
        yield
        assert all(driver.faults.starved == 0 for driver in self.drivers)


class TestPush(Pushed, TransportContract, StaleWriters):
    config = VerbsConfig(direction="push", push_windows=256, queue_pairs=2, **SMALL)


class TestPushWithoutWindows(Pushed, AccessContract):
    config = VerbsConfig(direction="push", push_windows=256, queue_pairs=1, **SMALL)
    limits = dataclasses.replace(LIMITS, windows=False)


class TestPushOrPull(Pushed, MovingContract):
    """As most reads go: some by WRITEs, some by READs, over many registrations."""

    config = VerbsConfig(direction="auto", queue_pairs=2, slice=1 << 16, **SMALL)
    limits = dataclasses.replace(LIMITS, max_sge=4, max_sge_read=3)


class TestSlices(OverFakes, MovingContract):
    """Every region in many registrations, and every grant over many windows."""

    config = VerbsConfig(queue_pairs=2, slice=1 << 16, **SMALL)
    limits = dataclasses.replace(LIMITS, max_sge=4, max_sge_read=3)
