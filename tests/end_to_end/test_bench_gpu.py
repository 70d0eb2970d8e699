"""`hawk bench gpu`: the driver is made up, a processor runs the kernels, and CuPy is no more than what it asks for."""

from __future__ import annotations

import json
import sys
import time
import types
from collections.abc import Iterator

import numpy as np
import pytest
from click.testing import CliRunner

from hawk.cli.bench import bench
from hawk.jobs.gpus import Gpus
from hawk.memory import cuda_driver
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_parts import Kernels
from tests.unit.retile.cuda.on_cpu import Kernels as Compiled


class Device:
    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def use(self) -> None:
        return None

    def synchronize(self) -> None:
        return None


class Event:
    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        return None


class Numbers:
    """Those that a prefill multiplies."""

    def astype(self, kind: object) -> Numbers:
        return self

    def __mul__(self, other: object) -> Numbers:
        return self


def little_cupy(driver: FakeCuda) -> types.ModuleType:
    class Stream(Device):
        def __init__(self, **_: object) -> None:
            self.ptr = driver.make_stream()

    def zeros(nbytes: int, kind: object) -> object:
        made = driver.tensor(np.zeros(nbytes, np.uint8), kind="test")
        return types.SimpleNamespace(data=types.SimpleNamespace(ptr=made.address))

    kept: list[np.ndarray] = []

    def locked(nbytes: int) -> object:
        kept.append(np.zeros(nbytes, np.uint8))
        return types.SimpleNamespace(ptr=kept[-1].ctypes.data)

    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda number: {"name": b"made up"},
        memcpyAsync=lambda *_: None,
    )
    module = types.ModuleType("cupy")
    module.__dict__.update(
        cuda=types.SimpleNamespace(
            Device=Device,
            Stream=Stream,
            Event=Event,
            runtime=runtime,
            get_elapsed_time=lambda a, b: (b.at - a.at) * 1e3,
            alloc_pinned_memory=locked,
        ),
        random=types.SimpleNamespace(standard_normal=lambda *_: Numbers()),
        uint8=np.uint8,
        float16=np.float16,
        float32=np.float32,
        zeros=zeros,
        empty=lambda *_: None,
        asarray=lambda buffer: driver.tensor(buffer, kind="test"),
        matmul=lambda *_, **__: None,
    )
    return module


@pytest.fixture
def driver() -> Iterator[FakeCuda]:
    fake = FakeCuda()
    with cuda_driver.using(fake):
        yield fake


def test_whole_jobs_from_a_gpu(
    driver: FakeCuda, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Kernels(driver, Compiled(tmp_path_factory.mktemp("kernels")))
    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: made))
    monkeypatch.setitem(sys.modules, "cupy", little_cupy(driver))
    done = CliRunner().invoke(bench, ["gpu", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    (size,) = told["sizes"]
    assert told["correct"]
    assert [(job["source"], job["transport"]) for job in size["jobs"]] == [("gpu", "shm"), ("host", "shm")]
    assert all(job["seconds"] > 0 for job in size["jobs"])
    assert size["copies"].keys() == {"locked", "ordinary"}
    (overlap,) = size["overlap"]
    assert overlap["tail"] > 0
    assert overlap["alone"] > 0
    assert made.launched >= 3
    assert not driver.pinned


def test_what_is_missing_is_said() -> None:
    done = CliRunner().invoke(bench, ["gpu", "--device", "npu0"])
    assert done.exit_code != 0
    assert "no such device" in str(done.output) + str(done.exception)
