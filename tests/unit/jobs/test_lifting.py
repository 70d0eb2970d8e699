"""Bytes on their way up to a GPU: every call of the driver fails once; reads that are cancelled; no room on the GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from hawk.errors import HawkError, OutOfMemory
from hawk.jobs import lifting
from hawk.jobs.lifting import SLOTS, Landings, lift
from hawk.memory import cuda_driver, scrub
from hawk.memory.cuda import CudaMemory
from hawk.memory.cuda_driver import Attribute
from hawk.memory.region import ByteRanges, Moves, Region, Segments
from hawk.transports.base import Capabilities, Link
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_parts import fake_rows

REFUSED, FULL = 801, 2
SIZE = 1 << 16
FAR = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
MARK = np.repeat(np.array([0x5A, 0xA5], np.uint8), SIZE // 2)
OVER_HOST = Capabilities(can_fence=True, same_host=True)


GIVE_BACK = {"drop_stream", "drop_event", "free", "free_host"}
"""Calls after whose failure something stays: nothing can be done about that."""


class Strict(FakeCuda):
    """A driver whose dropped streams go on by themselves, as real ones do: nothing may be left on them."""

    def drop_stream(self, stream: int) -> None:
        assert not self.streams[stream], "work was still under way"
        super().drop_stream(stream)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = Strict()
    monkeypatch.setattr(lifting, "SLOT", SIZE // 2)
    monkeypatch.setattr(lifting, "_LONG", SIZE // 2)
    fake_rows(monkeypatch, fake)
    with cuda_driver.using(fake):
        yield fake
    assert not fake.left()


class Copying(Link):
    """A link to memory of this process."""

    async def read(
        self, key: bytes, segments: Segments, regions: Sequence[Region], *, timeout: float
    ) -> None:
        columns = (segments.region, segments.local, segments.remote, segments.nbytes)
        for region, local, remote, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            regions[region].array[local : local + nbytes] = FAR[remote : remote + nbytes]

    @property
    def broken(self) -> bool:
        return False

    async def close(self) -> None:
        """Nothing to close."""


class Straight(Copying):
    """One that knows memory of GPUs, and is seen only after a flush."""

    def __init__(self, driver: FakeCuda) -> None:
        self._driver = driver
        self.flushes = 0
        self.straight = False

    def into(self, gpu: int) -> bool:
        return True

    async def read(
        self, key: bytes, segments: Segments, regions: Sequence[Region], *, timeout: float
    ) -> None:
        self.straight = all(r.gpu >= 0 for r in regions)
        seen = [r if r.gpu < 0 else Region(r.name, self._driver.at(r.address, r.nbytes)) for r in regions]
        await super().read(key, segments, seen, timeout=timeout)
        self.flushes = self._driver.counts.get("flush_writes", 0)


async def _read(
    driver: FakeCuda, memory: CudaMemory, landings: Landings, link: Copying | None = None
) -> None:
    for count in (1, SIZE // 1024):  # a copy, and the kernel
        each = SIZE // count
        rows = [(0, i * each, i * each, each) for i in range(count)]
        through = await landings.through(link or Copying(), OVER_HOST, 0)
        await through.read(b"", Segments.of(rows), memory.regions, timeout=10.0)
        if isinstance(link, Straight) and link.straight:
            assert driver.counts["flush_writes"] > link.flushes, "the GPU may not see what arrived"
        assert np.array_equal(driver.at(memory.regions[0].address, SIZE), FAR)


async def _read_straight(driver: FakeCuda, memory: CudaMemory, landings: Landings) -> None:
    driver.attributes[Attribute.WRITES_ORDERING] = 0
    await _read(driver, memory, landings, Straight(driver))


async def _lift(driver: FakeCuda, memory: CudaMemory, landings: Landings) -> None:
    await lift(Region("arena", FAR), memory.regions[0], 0, SIZE)
    assert np.array_equal(driver.at(memory.regions[0].address, SIZE), FAR)


async def _zero(driver: FakeCuda, memory: CudaMemory, landings: Landings) -> None:
    ranges = ByteRanges(np.zeros(1, np.int32), np.zeros(1, np.int64), np.full(1, SIZE, np.int64))
    await scrub.zero(memory.regions, ranges)
    assert not driver.at(memory.regions[0].address, SIZE).any()


async def _move(driver: FakeCuda, memory: CudaMemory, landings: Landings) -> None:
    there = driver.at(memory.regions[0].address, SIZE)
    half = SIZE // 2
    there[:half] = FAR[:half]
    rows = np.arange(0, half, 1024)
    moves = Moves(np.zeros(len(rows), np.int32), rows, rows + half, np.full(len(rows), 1024))
    await memory.move(moves)
    assert np.array_equal(there[half:], FAR[:half])


@pytest.mark.parametrize("what", [_read, _read_straight, _lift, _zero, _move])
async def test_any_call_may_fail_once(driver: FakeCuda, what: Callable[..., object]) -> None:
    async def tried(call: str, at: int) -> dict[str, int]:
        landings, memory = Landings(), CudaMemory("gpu", capacity=SIZE)
        there = driver.at(memory.regions[0].address, SIZE)
        there[:] = MARK
        before = dict(driver.counts)
        driver.fail = {(call, before.get(call, 0) + at): REFUSED}
        try:
            await what(driver, memory, landings)  # type: ignore[misc]
        except HawkError:
            # However it ended, no byte lands after that: they may be another's by now.
            there[:] = MARK
            driver.advance()
            assert np.array_equal(there, MARK), f"{call} {at}: work was still under way"
        made = {name: n - before.get(name, 0) for name, n in driver.counts.items()}
        driver.fail = {}
        await what(driver, memory, landings)  # type: ignore[misc]
        landings.close()
        memory.close()
        return made

    for call, count in (await tried("", 0)).items():
        for at in range(1, count + 1):
            await tried(call, at)
            if call in GIVE_BACK:
                driver.forget_lost()
            assert not driver.left(), f"{call} {at}"


async def test_slots_that_cannot_all_be_made_take_nothing(driver: FakeCuda) -> None:
    landings = Landings()
    for at in range(1, 3 * SLOTS):
        before = driver.left()
        driver.fail = {("allocate", driver.counts.get("allocate", 0) + 3): FULL}
        with pytest.raises(OutOfMemory):
            await landings.through(Copying(), OVER_HOST, 0)
        assert driver.left() == before, at
    landings.close()


async def test_whoever_is_cancelled_leaves_the_slots_to_the_next(driver: FakeCuda) -> None:
    landings = Landings()
    opening = asyncio.ensure_future(landings.through(Copying(), OVER_HOST, 0))
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await landings.through(Copying(), OVER_HOST, 0)
    assert driver.left()["streams"] == SLOTS
    landings.close()


async def test_a_gpu_that_could_not_see_what_arrived_gets_all_by_way_of_the_host(driver: FakeCuda) -> None:
    driver.attributes[Attribute.WRITES_ORDERING] = driver.attributes[Attribute.FLUSH_OPTIONS] = 0
    landings, memory = Landings(), CudaMemory("gpu", capacity=SIZE)
    await _read(driver, memory, landings, Straight(driver))
    assert driver.counts["to_device"] > 0
    landings.close()
    memory.close()
