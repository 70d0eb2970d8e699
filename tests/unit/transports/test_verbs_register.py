"""Registering regions: off the loop, in slices, all or nothing, remembered while the memory lives."""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import os
import resource
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest

from hawk.errors import RegistrationFailed
from hawk.memory.region import Region
from hawk.transports.verbs import _register
from hawk.transports.verbs._device import LOCAL_WRITE, VerbsError
from hawk.transports.verbs._register import Registrations, cut, register
from hawk.transports.verbs._worker import Worker
from hawk.transports.verbs.testing import LIMITS, FakeDevice, FakeDriver

NOTSUPP = 524


def region(nbytes: int = 10_000, **facts: object) -> Region:
    return Region("npu0/channel3", np.zeros(nbytes, np.uint8), **facts)  # type: ignore[arg-type]


def device(driver: FakeDriver | None = None) -> FakeDevice:
    return (driver or FakeDriver()).open("fake0")


@contextlib.asynccontextmanager
async def registrations(*devices: FakeDevice, limit: int = 1 << 30) -> AsyncIterator[Registrations]:
    worker = Worker()
    made = Registrations(devices, worker, limit)
    try:
        yield made
    finally:
        await made.close()
        await worker.close()
        for each in devices:
            each.close()  # raises where anything of it is left


# -- slices ----------------------------------------------------------------------------------------------------


def test_slices_end_at_extents_and_at_the_limit() -> None:
    assert cut(region(), 1 << 30) == [(0, 10_000)]
    assert cut(region(), 4096) == [(0, 4096), (4096, 4096), (8192, 1808)]
    assert cut(region(extents=(0, 5000)), 4096) == [(0, 4096), (4096, 904), (5000, 4096), (9096, 904)]


def test_a_region_larger_than_a_registration_may_be_is_split() -> None:
    """F10: a size cap."""
    small = device(FakeDriver(limits=dataclasses.replace(LIMITS, max_mr_size=4096)))
    target = region()
    made = register([small], target, 1 << 30, LOCAL_WRITE)
    assert made.start.tolist() == [0, 4096, 8192]
    assert made.address.tolist() == [target.address + at for at in (0, 4096, 8192)]
    assert [r.nbytes for r in made.slices[0]] == [4096, 4096, 1808]
    assert len(set(made.keys(0).tolist())) == 3
    _register.close(made.slices[0])
    small.close()


def test_every_device_has_its_own_and_the_lowest_cap_counts() -> None:
    one = device(FakeDriver(limits=dataclasses.replace(LIMITS, max_mr_size=4096)))
    two = device()
    made = register([one, two], region(), 1 << 30, LOCAL_WRITE)
    assert [len(slices) for slices in made.slices] == [3, 3]
    assert one.table.counts() == two.table.counts() == (3, 0)
    for slices in made.slices:
        _register.close(slices)
    one.close()
    two.close()


# -- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT, NOTSUPP])
def test_what_was_registered_before_a_failure_is_rolled_back(nth: int, number: int) -> None:
    """F10: ENOMEM and errno 524 on the n-th."""
    driver = FakeDriver()
    failing = device(driver)
    driver.faults.register = {nth: number}
    with pytest.raises(RegistrationFailed) as caught:
        register([failing], region(), 4096, LOCAL_WRITE)
    assert caught.value.field == "npu0/channel3"
    assert f"errno {number}" in str(caught.value)
    assert failing.table.counts() == (0, 0)
    failing.close()


def test_the_second_device_failing_rolls_the_first_back() -> None:
    driver = FakeDriver()
    one, two = device(driver), device(driver)
    driver.faults.register = {4: errno.ENOMEM}
    with pytest.raises(RegistrationFailed):
        register([one, two], region(), 4096, LOCAL_WRITE)
    assert one.table.counts() == two.table.counts() == (0, 0)


@pytest.mark.parametrize(
    ("number", "memlock", "words"),
    [
        (errno.ENOMEM, 65536, ["memlock", "65536", "LimitMEMLOCK"]),
        (errno.ENOMEM, resource.RLIM_INFINITY, ["max_mr_size", "transport.verbs.slice"]),
        (errno.EPERM, 65536, ["memlock"]),
        (errno.EINVAL, 65536, ["max_mr_size", "transport.verbs.slice"]),
        (errno.EFAULT, 65536, ["dma-buf", "nvidia-peermem"]),
        (NOTSUPP, 65536, ["dma-buf", "driver"]),
        (errno.EOPNOTSUPP, 65536, ["dma-buf", "driver"]),
    ],
)
def test_the_error_names_what_to_do(
    number: int, memlock: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (memlock, memlock))
    error = _register.explain(VerbsError(number, "ibv_reg_mr"), region(), "address", None)
    assert all(word in str(error) for word in words), str(error)
    assert "nothing" not in (error.hint or "")


# -- dma-buf ---------------------------------------------------------------------------------------------------


@pytest.fixture
def dmabuf() -> object:
    fd = os.memfd_create("dmabuf")
    os.ftruncate(fd, 1 << 16)
    yield fd
    os.close(fd)


def test_a_dma_buf_comes_first(dmabuf: int) -> None:
    opened = device()
    made = register([opened], region(dmabuf=dmabuf, dmabuf_offset=4096), 4096, LOCAL_WRITE)
    assert made.address.tolist() == [4096, 8192, 12288], "work requests call it by its place in the dma-buf"
    _register.close(made.slices[0])
    opened.close()


def test_the_address_is_next_and_both_reasons_are_told(dmabuf: int) -> None:
    driver = FakeDriver()
    opened = device(driver)
    driver.faults.dmabuf = errno.EOPNOTSUPP
    target = region(dmabuf=dmabuf)
    made = register([opened], target, 1 << 20, LOCAL_WRITE)
    assert made.address.tolist() == [target.address]
    _register.close(made.slices[0])
    driver.faults.register = {0: errno.EFAULT}
    with pytest.raises(RegistrationFailed, match="dma-buf") as caught:
        register([opened], target, 1 << 20, LOCAL_WRITE)
    assert "nvidia-peermem" in str(caught.value)
    assert os.strerror(errno.EOPNOTSUPP) in str(caught.value) or "ibv_reg_dmabuf_mr" in str(caught.value)
    opened.close()


# -- remembered ------------------------------------------------------------------------------------------------


async def test_the_loop_goes_on_while_memory_is_registered() -> None:
    driver = FakeDriver()
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go.wait(30)

    driver.faults.on_register = hold
    async with registrations(device(driver)) as known:
        task = asyncio.get_running_loop().create_task(known.of(region(), LOCAL_WRITE))
        await asyncio.to_thread(held.wait, 30)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        go.set()
        await task


async def test_a_region_is_registered_once_for_each_kind_of_access() -> None:
    opened, target = device(), region()
    async with registrations(opened) as known:
        made = await asyncio.gather(*(known.of(target, LOCAL_WRITE) for _ in range(5)))
        assert all(each is made[0] for each in made)
        again = Region("the same", target.array)
        assert await known.of(again, LOCAL_WRITE) is made[0]
        assert await known.of(target, 0) is not made[0]
        assert opened.table.counts() == (2, 0)


async def test_it_ends_with_the_memory_and_is_never_taken_for_another() -> None:
    opened = device()
    async with registrations(opened) as known:
        target: Region | None = region()
        first = await known.of(target, LOCAL_WRITE)  # type: ignore[arg-type]
        key = next(iter(known._known))
        del target
        gc.collect()
        # Before the loop has heard of it, another array has the same identity.
        other = region()
        known._known[id(other.array), LOCAL_WRITE] = known._known[key]
        assert await known.of(other, LOCAL_WRITE) is not first
        while opened.table.counts() != (1, 0):
            await asyncio.sleep(0)


async def test_a_failure_is_not_remembered() -> None:
    driver = FakeDriver()
    driver.faults.register = {0: errno.ENOMEM}
    target = region()
    async with registrations(device(driver)) as known:
        with pytest.raises(RegistrationFailed):
            await known.of(target, LOCAL_WRITE)
        await known.of(target, LOCAL_WRITE)


async def test_a_failure_that_nobody_foresaw_is_not_remembered_and_does_not_keep_it_from_closing() -> None:
    driver, target, lost = FakeDriver(), region(), region()

    def fault() -> None:
        raise RuntimeError("a fault of ours")

    driver.faults.on_register = fault
    async with registrations(device(driver)) as known:
        with pytest.raises(RuntimeError):
            await known.of(target, LOCAL_WRITE)
        driver.faults.on_register = None
        await known.of(target, LOCAL_WRITE)
        driver.faults.on_register = fault
        given_up = asyncio.get_running_loop().create_task(known.of(lost, LOCAL_WRITE))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait({given_up})  # and nobody hears how it ended


async def test_a_cancelled_waiter_leaves_the_registration_to_the_others() -> None:
    driver, target = FakeDriver(), region()
    held, go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert go.wait(30)

    driver.faults.on_register = hold
    opened = device(driver)
    async with registrations(opened) as known:
        one, two = (asyncio.get_running_loop().create_task(known.of(target, LOCAL_WRITE)) for _ in range(2))
        await asyncio.to_thread(held.wait, 30)
        one.cancel()
        await asyncio.wait({one})
        go.set()
        await two
        assert opened.table.counts() == (1, 0)
