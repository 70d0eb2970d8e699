"""Every call of the driver fails once in a read over cuda: what is told, what is left, whether the next read works."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hawk.errors import HawkError, InternalError
from hawk.memory.cuda import CudaMemory
from hawk.memory.region import Region, Segments
from hawk.transports.cuda import CudaConfig, CudaTransport
from tests.descriptors import fds
from tests.fake_cuda import FakeCuda

GIVE_BACK = {"release", "drop_event"}
"""Calls after whose failure something stays: nothing can be done about that."""

REFUSED = 801
SIZE = 1 << 16


@pytest.fixture
def driver(driver_with_rows: FakeCuda) -> FakeCuda:
    return driver_with_rows


async def reads(driver: FakeCuda, call: str = "", at: int = 0) -> dict[str, int]:
    """A read into memory of a GPU and of the host, in which one call fails, and another in which none does; how often
    the first one made each call."""
    serving, reading = CudaTransport(), CudaTransport(CudaConfig(gpu=1, streams=1, chunk=SIZE // 2))
    await serving.start()
    await reading.start()
    serving.serve(Region("arena", np.zeros(SIZE, np.uint8)))
    memory = CudaMemory("gpu", capacity=SIZE, gpu=1)
    try:
        assert serving.shadow is not None
        there = driver.at(serving.shadow.address, SIZE)
        there[:] = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
        host = np.zeros(SIZE, np.uint8)
        on_gpu = driver.at(memory.regions[0].address, SIZE)
        regions = [memory.regions[0], Region("host", host)]
        grant = serving.grant(0, SIZE)
        rows = [(i % 2, i * 1024, i * 1024, 1024) for i in range(SIZE // 1024)]
        segments = Segments.of(rows)
        link = await reading.connect(serving.endpoint, timeout=5.0)
        before = dict(driver.counts)
        if call:
            driver.fail[call, before.get(call, 0) + at] = REFUSED
        try:
            await link.read(grant.key, segments, regions, timeout=5.0)
        except InternalError:
            raise
        except HawkError:
            # However it ended, no byte lands after that.
            on_gpu[:], host[:] = 0xA5, 0xA5
            driver.advance()
            assert (on_gpu == 0xA5).all()
            assert (host == 0xA5).all()
        made = {name: n - before.get(name, 0) for name, n in driver.counts.items()}
        on_gpu[:], host[:] = 0, 0
        await link.read(grant.key, segments, regions, timeout=5.0)
        for region, local, remote, nbytes in rows:
            into = host if region else on_gpu
            assert np.array_equal(into[local : local + nbytes], there[remote : remote + nbytes])
        assert await serving.revoke(grant)
    finally:
        memory.close()
        await reading.close()
        await serving.close()
    return made


async def test_any_call_may_fail_once(driver: FakeCuda) -> None:
    before = fds()
    calls = await reads(driver)
    assert not driver.left()
    for call, count in calls.items():
        for at in range(1, count + 1):
            await reads(driver, call, at)
            if call in GIVE_BACK:
                driver.forget_lost()
                while driver.handles:
                    os.close(driver.handles.popitem()[1])  # type: ignore[arg-type]
            assert not driver.left(), f"{call} {at}"
    assert fds() == before
