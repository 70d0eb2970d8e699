"""Memory of a GPU, with the driver's answers made up: what is allocated, moved, given back and lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import numpy as np
import pytest

from hawk.errors import (
    DeviceLost,
    HawkMemoryError,
    InvalidArgument,
    OutOfMemory,
    RegistrationFailed,
)
from hawk.memory import cuda, cuda_driver, registry
from hawk.memory.base import MoveSupport
from hawk.memory.cuda import CudaConfig, CudaMemory, DeviceRegion, Pinned
from hawk.memory.cuda_driver import Attribute, CudaFault
from hawk.memory.region import ByteRanges, Moves
from tests.descriptors import fds
from tests.fake_cuda import FakeCuda

ILLEGAL, NO_ROOM, REFUSED = 700, 2, 801


# -- the driver itself ----------------------------------------------------------------------------------------


def test_without_a_driver_it_is_said_what_is_missing() -> None:
    code = (
        "import sys\n"
        "from hawk.memory import cuda_driver, cuda_lib\n"
        "def absent(name): raise OSError(name + sys.argv[1])\n"
        "cuda_lib.ctypes.CDLL = absent\n"
        "try: cuda_driver.load()\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    said = {}
    for why in (": cannot open shared object file: No such file or directory", ": wrong ELF class"):
        done = subprocess.run([sys.executable, "-c", code, why], capture_output=True, text=True, check=False)
        said[why] = done.stdout
    plain, odd = said.values()
    assert plain.startswith("MissingDependency no CUDA driver on this machine. "), said
    assert "libcuda" not in plain
    assert odd.startswith(
        "MissingDependency no CUDA driver on this machine; got libcuda.so.1: wrong ELF class"
    ), said


class Answers:
    """A library whose calls return what they are told to."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.asked = codes, []

    def __getattr__(self, name: str) -> object:
        if name == "cuMemGetHandleForAddressRange":
            raise AttributeError(name)  # a driver of before dma-bufs

        def call(*arguments: object) -> int:
            self.asked.append(name)
            return self.codes.get(name, 0)

        self.__dict__[name] = call
        return call


def test_the_library_is_called_by_name_and_its_results_become_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    from hawk.memory import cuda_lib

    answers = Answers(cuEventQuery=600, cuMemAlloc_v2=2, cuPointerGetAttribute=1, cuDeviceGetAttribute=1)
    monkeypatch.setattr(cuda_lib.ctypes, "CDLL", lambda name: answers)
    monkeypatch.setattr(cuda_lib.native, "caller", lambda: None)  # which needs functions that are a library's
    lib = cuda_lib.LibCuda()
    assert answers.asked == ["cuInit"]
    assert not lib.reached(5)
    assert lib.pointer(4096).device == -1
    assert lib.attribute(0, Attribute.DMABUF) == 0
    with pytest.raises(CudaFault, match="cuMemAlloc_v2: unknown") as caught:
        lib.allocate(1)
    assert not caught.value.sticky
    with pytest.raises(CudaFault, match="500"):
        lib.dmabuf(0, 4096)
    answers.codes["cuEventSynchronize"] = ILLEGAL
    with pytest.raises(CudaFault) as caught:
        lib.synchronise(5)
    assert caught.value.sticky
    # Everything that the protocol names is there.
    named = [name for name in vars(cuda_driver.Driver) if not name.startswith("_")]
    assert all(callable(getattr(lib, name)) and callable(getattr(FakeCuda(), name)) for name in named)


# -- a memory -------------------------------------------------------------------------------------------------


def ranges(*rows: tuple[int, int, int]) -> ByteRanges:
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    return ByteRanges(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy())


def test_it_is_allocated_once_and_given_back(driver: FakeCuda) -> None:
    before = fds()
    config = CudaConfig(capacity=8 << 20, gpu=1, channels=4)
    memory = registry.create("cuda", "gpu1", config)
    assert driver.counts["allocate"] == 1
    assert [r.nbytes for r in memory.regions] == [2 << 20] * 4
    assert [r.address - memory.regions[0].address for r in memory.regions] == [
        i * (2 << 20) for i in range(4)
    ]
    assert [r.dmabuf_offset for r in memory.regions] == [i * (2 << 20) for i in range(4)]
    assert {r.gpu for r in memory.regions} == {1}
    assert len({r.dmabuf for r in memory.regions}) == 1
    os.fstat(memory.regions[0].dmabuf)
    taken = memory.allocate(4096, "job")
    assert taken.channels == (0, 1, 2, 3)
    memory.free(taken)
    with pytest.raises(RegistrationFailed, match=r"gpu1/channel2: the memory is a GPU's and cannot be read"):
        _ = memory.regions[2].array
    memory.close()
    memory.close()
    assert not driver.left()
    assert fds() == before


@pytest.mark.parametrize("call", ["enter", "allocate", "stream", "event", "attribute"])
def test_what_fails_while_it_is_made_leaves_nothing(call: str, driver: FakeCuda) -> None:
    before = fds()
    driver.fail[call, 1] = REFUSED
    with pytest.raises(HawkMemoryError, match=f"cuda:0: the CUDA driver refused a call; got {call}"):
        CudaMemory("gpu0", capacity=4 << 20)
    driver.fail = {("allocate", driver.counts.get("allocate", 0) + 1): NO_ROOM}
    with pytest.raises(OutOfMemory, match="cuda:0: the GPU has too little free memory"):
        CudaMemory("gpu0", capacity=4 << 20)
    assert not driver.left()
    assert fds() == before


def test_bad_options(driver: FakeCuda) -> None:
    with pytest.raises(
        InvalidArgument, match=r"gpu0.gpu: no such device; got cuda:9; expected cuda:0..cuda:1"
    ):
        CudaMemory("gpu0", capacity=4096, gpu=9)
    with pytest.raises(InvalidArgument, match="no number of a GPU"):
        CudaConfig(capacity=4096, gpu=-1)
    with pytest.raises(InvalidArgument, match="no alignment"):
        CudaConfig(capacity=4096, alignment=3)
    driver.devices = 0
    with pytest.raises(InvalidArgument, match="a machine with a GPU"):
        CudaMemory("gpu0", capacity=4096, gpu=5)


@pytest.mark.parametrize(
    ("attributes", "exports", "flushes"),
    [
        ({Attribute.DMABUF: 1, Attribute.WRITES_ORDERING: 0, Attribute.FLUSH_OPTIONS: 1}, True, 1),
        ({Attribute.DMABUF: 1, Attribute.WRITES_ORDERING: 100, Attribute.FLUSH_OPTIONS: 1}, True, 0),
        ({Attribute.DMABUF: 1, Attribute.WRITES_ORDERING: 200, Attribute.FLUSH_OPTIONS: 0}, True, 0),
        ({Attribute.DMABUF: 1, Attribute.WRITES_ORDERING: 0, Attribute.FLUSH_OPTIONS: 0}, False, 0),
        ({Attribute.DMABUF: 0, Attribute.WRITES_ORDERING: 0, Attribute.FLUSH_OPTIONS: 1}, False, 0),
    ],
)
async def test_it_flushes_where_the_gpu_keeps_no_order(
    attributes: dict[int, int], exports: bool, flushes: int, driver: FakeCuda
) -> None:
    driver.attributes = attributes
    memory = CudaMemory("gpu0", capacity=4 << 20)
    try:
        assert (memory.regions[0].dmabuf >= 0) == exports == (not memory.why_no_dmabuf)
        await memory.flush(ranges((0, 0, 4096)))
        await memory.flush(ranges())
        assert driver.counts.get("flush_writes", 0) == flushes
        with pytest.raises(InvalidArgument, match="outside its channel"):
            await memory.flush(ranges((0, 4 << 20, 1)))
    finally:
        memory.close()


async def test_moves_are_done_when_it_says_so(driver: FakeCuda) -> None:
    memory = CudaMemory("gpu0", capacity=2 << 20, channels=2)
    region = memory.regions[1]
    there = driver.at(region.address, region.nbytes)
    there[:] = np.arange(len(there), dtype=np.uint32).astype(np.uint8)
    columns = [np.array(c) for c in ([1, 1], [16, 64], [4096, 8192], [32, 16])]
    assert memory.move_support is MoveSupport.DEVICE
    await memory.move(Moves(columns[0].astype(np.int32), *columns[1:]))
    assert np.array_equal(there[4096:4128], there[16:48])
    assert np.array_equal(there[8192:8208], there[64:80])
    driver.fail["across", driver.counts["across"] + 1] = ILLEGAL
    with pytest.raises(
        DeviceLost, match=r"cuda:0: the GPU's context in this process has failed.*ILLEGAL_ADDRESS"
    ):
        await memory.move(Moves(columns[0].astype(np.int32), *columns[1:]))
    memory.close()


@pytest.mark.parametrize("bytes_at_once", [256 << 20, 100_000])
async def test_rows_are_moved_by_a_kernel_some_at_a_time(
    driver_with_rows: FakeCuda, monkeypatch: pytest.MonkeyPatch, bytes_at_once: int
) -> None:
    driver = driver_with_rows
    monkeypatch.setattr(cuda, "MOVED_AT_ONCE", bytes_at_once)
    monkeypatch.setattr(cuda, "MOVES_AT_ONCE", 150)
    memory = CudaMemory("gpu0", capacity=8 << 20, channels=2)
    rng = np.random.default_rng(1)
    for region in memory.regions:
        driver.at(region.address, region.nbytes)[:] = rng.integers(0, 256, region.nbytes, np.uint8)
    before = [driver.at(region.address, region.nbytes).copy() for region in memory.regions]
    nbytes = np.array([1, 2048, 40_000, 120_000] * 3)
    channel, source = (np.arange(12) % 2).astype(np.int32), np.cumsum(nbytes) - nbytes
    moves = Moves(channel, source, np.arange(12)[::-1] * 130_001 + (1 << 20), nbytes)
    await memory.move(moves)
    columns = (moves.channel, moves.source, moves.target, moves.nbytes)
    for c, source, to, n in zip(*(column.tolist() for column in columns), strict=True):
        got = driver.at(memory.regions[c].address, memory.regions[c].nbytes)
        assert np.array_equal(got[to : to + n], before[c][source : source + n])
    assert "across" not in driver.counts
    assert driver.counts["launch"] == (1 if bytes_at_once > 1 << 20 else 6)
    memory.close()
    assert not driver.left()


# -- what is lost ---------------------------------------------------------------------------------------------


async def test_a_lost_device_is_told_once_and_costs_nothing_else(driver: FakeCuda) -> None:
    memory, other = CudaMemory("gpu0", capacity=2 << 20), CudaMemory("gpu1", capacity=2 << 20, gpu=1)
    told: list[DeviceLost] = []
    memory.device.on_lost.append(told.append)
    with pytest.raises(DeviceLost) as caught, memory.device.current() as calls:
        driver.fail["synchronise", 1] = ILLEGAL
        calls.synchronise(calls.event())
    assert caught.value.hint
    driver.lost = 0  # the driver would answer again; this process does not ask it any more
    for _ in range(2):
        with pytest.raises(DeviceLost, match="ILLEGAL_ADDRESS"), memory.device.current():
            raise AssertionError("not reached")
    with pytest.raises(DeviceLost):
        await memory.flush(ranges((0, 0, 16)))
    assert len(told) == 1
    with other.device.current():
        pass
    other.close()
    memory.close()
    assert cuda.device(0) is memory.device
    assert "lost" in repr(memory.device)


def test_pinned_memory_and_why_it_is_not(driver: FakeCuda) -> None:
    array = np.zeros(8192, np.uint8)
    pinned = Pinned(cuda.device(0), array.ctypes.data, array.nbytes)
    assert driver.pinned == {array.ctypes.data: 8192}
    pinned.close()
    pinned.close()
    assert not driver.pinned
    driver.fail["pin", 2] = REFUSED
    assert "pin" in Pinned(cuda.device(0), array.ctypes.data, array.nbytes).why


def test_a_region_of_a_gpu_is_a_region(driver: FakeCuda) -> None:
    region = DeviceRegion("kv/buffer0", 0x7F0000000000, 1 << 40, 1)
    assert (region.address, region.nbytes, region.gpu, region.fd, region.dmabuf) == (
        0x7F0000000000,
        1 << 40,
        1,
        -1,
        -1,
    )
    assert region.extents == (0,)
    with pytest.raises(AttributeError):
        region.fd = 3  # type: ignore[misc]


def test_nothing_of_it_blocks_the_event_loop(driver: FakeCuda) -> None:
    async def scene() -> None:
        driver.attributes[Attribute.WRITES_ORDERING] = 0
        memory = CudaMemory("gpu0", capacity=2 << 20)
        done = asyncio.ensure_future(memory.flush(ranges((0, 0, 16))))
        await asyncio.sleep(0)
        assert not done.done()
        await done
        memory.close()

    asyncio.run(scene())
