"""What one GPU's retiler refuses, and what it gives back when it cannot be made."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from hawk.errors import (
    DeviceLost,
    HawkMemoryError,
    InvalidArgument,
    MissingDependency,
    OutOfMemory,
)
from hawk.jobs.gpus import LANES, Gpus
from hawk.jobs.retilers import Portion
from hawk.memory import cuda, cuda_marks
from hawk.memory.cuda import DeviceRegion
from hawk.memory.cuda_arrays import CudaArray
from hawk.memory.region import Region
from hawk.retile.cuda.lanes import Calls
from tests.fake_cuda import FakeCuda

CHUNK = 1 << 16


@pytest.fixture(autouse=True)
def nothing_is_left(driver: FakeCuda) -> Iterator[None]:
    yield
    assert not driver.left()


@pytest.fixture
async def gpus(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: Nothing()))
    arena = Region("arena", np.zeros(1 << 18, np.uint8))
    made = Gpus(arena, CHUNK, scrub=False, on_lost=lambda gpu, error: None)
    yield made
    made.close()
    made.close()


class Offer(SimpleNamespace):
    """Something of an offer that a retiler asks for."""

    __hash__ = object.__hash__


def offer(gpu: int = 0) -> Offer:
    layout = SimpleNamespace(codec=SimpleNamespace(name="int8"))
    return Offer(cache=SimpleNamespace(regions=[DeviceRegion("kv", 4096, 4096, gpu)], layout=layout, gpu=gpu))


def portion(gpus: Gpus, steps: list, nbytes: int = 4096) -> Portion:
    return Portion(offer(), 1, steps, gpus._arena, 0, nbytes)


async def test_chunks_that_are_too_large_are_refused(gpus: Gpus) -> None:
    await gpus.open(0)
    there = gpus.of(0)
    for _ in range(3):  # and every lane is there again
        with pytest.raises(
            OutOfMemory, match=f"jobs.chunk: the chunk is larger than its room on the GPU; got {CHUNK + 1}"
        ):
            await there.run(portion(gpus, [], CHUNK + 1))


@pytest.mark.parametrize(
    ("call", "at"), [("allocate", 1), ("stream", 1), ("stream", 2), ("stream", 3), ("event", 2), ("event", 3)]
)
async def test_what_cannot_be_made_leaves_nothing_and_may_be_tried_again(
    call: str, at: int, gpus: Gpus, driver: FakeCuda
) -> None:
    driver.fail = {(call, at): 801}
    with pytest.raises(HawkMemoryError):
        await gpus.open(0)
    assert not driver.left()
    driver.fail = {}
    await gpus.open(0)
    assert len(driver.pinned) == 1


async def test_pages_that_cannot_be_locked_are_copied_to_all_the_same(gpus: Gpus, driver: FakeCuda) -> None:
    driver.fail = {("pin", 1): 801, ("allocate_host", 2): 801}
    with pytest.raises(HawkMemoryError, match="allocate_host"):
        await gpus.open(0)
    assert not driver.left()
    driver.fail = {("pin", 2): 801}
    await gpus.open(0)
    assert not driver.pinned
    assert len(driver.locked) == LANES


async def test_without_the_kernels_library(driver: FakeCuda) -> None:
    made = Gpus(Region("arena", np.zeros(4096, np.uint8)), 4096, scrub=False, on_lost=lambda *_: None)
    with pytest.raises(MissingDependency, match="CuPy"):
        await made.open(0)
    made.close()


async def test_marks_of_strangers_and_of_other_gpus(gpus: Gpus, driver: FakeCuda) -> None:
    await gpus.open(0)
    with pytest.raises(InvalidArgument, match="no mark of this process"):
        gpus.behind(offer(), 1, 12345)
    elsewhere = cuda_marks.mark(CudaArray(4096, 4096, 1, "uint8", 1, None))
    with pytest.raises(InvalidArgument, match="got cuda:1; expected cuda:0"):
        gpus.behind(offer(), 1, elsewhere.number)
    often = offer()
    for _ in range(5):
        gpus.behind(often, 3, cuda_marks.mark(CudaArray(4096, 4096, 0, "uint8", 1, None)).number)
    events = len(driver.events)
    gpus.forget(often)
    assert len(driver.events) == events - 1
    lost = cuda_marks.mark(CudaArray(4096, 4096, 0, "uint8", 1, None))
    gpus.behind(one := offer(), 1, lost.number)
    cuda.device(0).lose("a test")
    with pytest.raises(DeviceLost):
        gpus.of(0)
    with pytest.raises(DeviceLost):
        await gpus.open(0)
    gpus.forget(one)
    driver.forget_lost()


async def test_marks_that_nobody_claims_are_bounded(
    driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_marks, "MOST_WAITING", 3)
    array = CudaArray(4096, 4096, 0, "uint8", 1, None)
    made = [cuda_marks.mark(array) for _ in range(5)]
    assert len(driver.events) == 3
    for mark in made:
        cuda_marks.drop(mark)
    assert not driver.events


async def test_marks_of_an_offer_are_given_back_together(driver: FakeCuda) -> None:
    array = CudaArray(4096, 4096, 0, "uint8", 1, None)

    def claimed() -> list[cuda_marks.Mark]:
        return [cuda_marks.claim(cuda_marks.mark(array).number) for _ in range(3)]

    first = claimed()
    entered = driver.counts.get("enter", 0)
    driver.fail["drop_event", driver.counts.get("drop_event", 0) + 1] = 400
    cuda_marks.close_all(first)
    assert list(driver.events) == [first[0].event]  # one that fails keeps no other
    assert driver.counts.get("enter", 0) - entered <= 1
    first[0].close()
    assert not driver.events
    second = claimed()
    driver.fail["drop_event", driver.counts["drop_event"] + 1] = 700
    cuda_marks.close_all(second)
    assert cuda.device(0).lost is not None
    driver.forget_lost()


async def test_a_gpu_without_room_for_rows_says_so(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def calls(self, *_: object) -> object:
            raise MemoryError("out of memory allocating 512 bytes")

        def close(self, driver: FakeCuda) -> None:
            pass

    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: Full()))
    gpus = Gpus(Region("arena", np.zeros(1 << 16, np.uint8)), CHUNK, scrub=False, on_lost=lambda *_: None)
    await gpus.open(0)
    with pytest.raises(OutOfMemory, match=r"cuda:0: the GPU has too little free memory for rows and tables"):
        await gpus.of(0).run(portion(gpus, []))
    gpus.close()


class Nothing:
    """Kernels that write nothing."""

    def calls(self, *_: object) -> Calls:
        return Calls()

    def close(self, driver: FakeCuda) -> None:
        pass


@pytest.mark.parametrize(("scrub", "left"), [(True, 0), (False, 0xEE)])
async def test_what_no_kernel_writes_is_nobodys(
    scrub: bool, left: int, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: Nothing()))
    arena = Region("arena", np.full(1 << 17, 0x55, np.uint8))
    gpus = Gpus(arena, CHUNK, scrub=scrub, on_lost=lambda gpu, error: None)
    await gpus.open(0)
    await gpus.of(0).run(Portion(offer(), 1, [], arena, 4096, 512))
    gpus.close()
    assert set(arena.array[4096 : 4096 + 512].tolist()) == {left}
    assert set(np.delete(arena.array, range(4096, 4096 + 512)).tolist()) == {0x55}
