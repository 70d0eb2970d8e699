"""Memory of a GPU on its way to another process, the driver made up."""

from __future__ import annotations

import numpy as np
import pytest

from hawk.errors import (
    InvalidArgument,
    RegistrationFailed,
)
from hawk.memory import cuda, cuda_share
from tests.descriptors import fds
from tests.fake_cuda import FakeCuda

ILLEGAL, NO_ROOM, REFUSED = 700, 2, 801


def test_a_plain_allocation_goes_by_handle_and_offset(driver: FakeCuda) -> None:
    memory = driver.tensor(np.arange(200, dtype=np.uint8))
    there = cuda.device(0)
    exported = cuda_share.export(there, memory.address + 40, 100)
    assert (exported.way, exported.offset, exported.fds) == ("legacy", 40, ())
    imported = cuda_share.Imported(there, exported)
    assert (imported.address, imported.nbytes) == (memory.address + 40, 100)
    imported.close()
    imported.close()
    assert not driver.opened
    with pytest.raises(RegistrationFailed, match=r"kv: the range reaches past its allocation; got 240 bytes"):
        cuda_share.export(there, memory.address + 40, 200, name="kv")
    far = cuda_share.Exported("legacy", 500, 40, exported.handle)
    with pytest.raises(RegistrationFailed, match="past its allocation"):
        cuda_share.Imported(there, far)
    stranger = cuda_share.Exported("legacy", 500, 40, bytes(64))
    with pytest.raises(RegistrationFailed, match=r"another process' memory cannot be opened"):
        cuda_share.Imported(there, stranger)
    assert not driver.opened


def test_mapped_memory_goes_by_descriptors(driver: FakeCuda) -> None:
    before = fds()
    first = driver.segments([4096, 8192, 4096])
    there = cuda.device(0)
    exported = cuda_share.export(there, first + 3000, 10000)
    assert (exported.way, exported.offset, exported.sizes) == ("fd", 3000, (4096, 8192, 4096))
    imported = cuda_share.Imported(there, exported)
    assert np.array_equal(driver.at(imported.address, 10000), driver.at(first + 3000, 10000))
    assert len(driver.opened) == 3
    imported.close()
    exported.close()
    assert not driver.opened
    assert not driver.reserved
    assert not driver.handles
    assert fds() == before
    inside = cuda_share.export(there, first + 5000, 100)
    assert (inside.offset, inside.sizes) == (5000 - 4096, (8192,))
    inside.close()


@pytest.mark.parametrize("call", ["export_fd", "retain"])
def test_mappings_that_cannot_be_passed_on(call: str, driver: FakeCuda) -> None:
    before = fds()
    first = driver.segments([4096, 4096])
    driver.fail[call, 2] = REFUSED
    with pytest.raises(
        RegistrationFailed, match=r"the memory's mappings cannot be passed on.*expandable_segments"
    ):
        cuda_share.export(cuda.device(0), first, 8192)
    assert not driver.handles
    assert fds() == before


@pytest.mark.parametrize("call", ["reserve", "import_fd", "map"])
def test_mappings_that_cannot_be_opened_leave_nothing(call: str, driver: FakeCuda) -> None:
    first = driver.segments([4096, 4096])
    there = cuda.device(0)
    exported = cuda_share.export(there, first, 8192)
    driver.fail[call, 1 if call == "reserve" else 2] = REFUSED
    with pytest.raises(RegistrationFailed, match=f"cannot be opened; got {call}"):
        cuda_share.Imported(there, exported)
    assert not driver.opened
    assert not driver.reserved
    assert not driver.handles
    exported.close()


def test_what_can_be_passed_on_in_no_way_is_refused_with_what_would_work(driver: FakeCuda) -> None:
    there = cuda.device(0)
    pool = driver.tensor(np.zeros(64, np.uint8), kind="pool")
    with pytest.raises(RegistrationFailed, match=r"memory of a pool without handles.*embedded.*hawk\.Agent"):
        cuda_share.export(there, pool.address, 64)
    with pytest.raises(RegistrationFailed, match="managed memory"):
        cuda_share.export(there, driver.tensor(np.zeros(64, np.uint8), kind="managed").address, 64)
    with pytest.raises(RegistrationFailed, match="not that GPU's"):
        cuda_share.export(there, driver.tensor(np.zeros(64, np.uint8), device=1).address, 64)
    with pytest.raises(InvalidArgument, match="no export"):
        cuda_share.Exported("fd", 10, 0, sizes=(4,))
    with pytest.raises(InvalidArgument, match="no export"):
        cuda_share.Exported("legacy", 10, 0, b"short")
