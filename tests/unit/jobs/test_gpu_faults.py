"""Every call of the driver fails once while a chunk is made on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from hawk.errors import HawkError
from hawk.jobs.gpus import LANES, Gpus
from hawk.jobs.retilers import Portion
from hawk.memory import cuda_driver, cuda_marks
from hawk.memory.cuda import CudaMemory, DeviceRegion
from hawk.memory.cuda_arrays import CudaArray
from hawk.memory.region import Region
from hawk.retile.cuda.lanes import Calls
from tests.fake_cuda import FakeCuda

REFUSED = 801
CHUNK = 4096
BYTES = np.random.default_rng(1).integers(0, 256, CHUNK, np.uint8)


class Copies:
    """Kernels that bring the same bytes each time."""

    def __init__(self, driver: FakeCuda) -> None:
        self._driver = driver

    def calls(
        self, steps: object, regions: object, arena: tuple[int, int], stream: int, driver: FakeCuda
    ) -> Calls:
        work = lambda: ctypes.memmove(arena[0], BYTES.ctypes.data, CHUNK) and None  # noqa: E731
        return Calls(then=[("put", stream, work)])

    def close(self, driver: FakeCuda) -> None:
        pass


@pytest.fixture
def driver() -> Iterator[FakeCuda]:
    fake = FakeCuda(devices=2)
    with cuda_driver.using(fake):
        yield fake
    assert not fake.left()


class Offer(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("scrub", [True, False])
@pytest.mark.parametrize("shadow", [-1, 0, 1])
async def test_any_call_may_fail_once(
    driver: FakeCuda, monkeypatch: pytest.MonkeyPatch, pinned: bool, scrub: bool, shadow: int
) -> None:
    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: Copies(driver)))

    async def tried(call: str, at: int) -> dict[str, int]:
        arena = Region("arena", np.zeros(2 * CHUNK, np.uint8))
        memory = CudaMemory("shadow", capacity=2 * CHUNK, gpu=max(shadow, 0))
        beside = memory.regions[0] if shadow >= 0 else None
        places = [arena.array] + ([driver.at(memory.regions[0].address, 2 * CHUNK)] if beside else [])
        if not pinned:
            driver.fail = {("pin", driver.counts.get("pin", 0) + 1): REFUSED}
        gpus = Gpus(arena, CHUNK, scrub=scrub, on_lost=lambda *_: None)
        await gpus.open(0)
        there = gpus.of(0)
        cache = SimpleNamespace(regions=[DeviceRegion("kv", 4096, 4096, 0)], gpu=0)
        offer = Offer(cache=cache)
        gpus.behind(offer, 1, cuda_marks.mark(CudaArray(4096, 4096, 0, "uint8", 1, None)).number)
        portion = Portion(offer, 1, [], arena, CHUNK, CHUNK, beside, True)
        before = dict(driver.counts)
        driver.fail = {(call, before.get(call, 0) + at): REFUSED}
        try:
            await there.run(portion)
        except HawkError:
            for place in places:
                place[:] = 0xA5
            driver.advance()
            for place in places:
                assert (place == 0xA5).all(), f"{call} {at}: work was still under way"
        made = {name: n - before.get(name, 0) for name, n in driver.counts.items()}
        driver.fail = {}
        assert len(there._lanes) == LANES
        for place in places:
            place[:] = 0
        for _ in range(LANES):
            await there.run(portion)
        for place in places:
            assert np.array_equal(place[CHUNK:], BYTES)
            assert not place[:CHUNK].any()
        gpus.close()
        memory.close()
        return made

    for call, count in (await tried("", 0)).items():
        for at in range(1, count + 1):
            await tried(call, at)
            if call in {"drop_event", "drop_stream"}:  # nothing can be done about what stays then
                driver.forget_lost()
            assert not driver.left(), f"{call} {at}"
