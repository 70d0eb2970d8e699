"""`hawk bench overlap`: the driver is made up, a processor runs the kernels, and the prefill computes nothing."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from hawk.bench import overlap, prefill
from hawk.bench.overlap_result import Result, Row, Size
from hawk.cli.bench import bench
from hawk.demo import scenario
from hawk.errors import MissingDependency
from hawk.jobs.gpus import Gpus
from hawk.memory import cuda_driver
from tests.end_to_end.test_bench_gpu import little_cupy
from tests.end_to_end.test_between import Here
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_parts import FakeArray, Kernels, fake_rows
from tests.unit.retile.cuda.on_cpu import Kernels as Compiled


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    load = scenario.load

    def fewer_layers(tokens: int) -> scenario.Scenario:
        made = load(tokens)
        return replace(made, source=made.source.replace(layers=2), target=made.target.replace(layers=2))

    monkeypatch.setattr(scenario, "load", fewer_layers)
    monkeypatch.setattr(overlap, "PAUSE", 0)
    with cuda_driver.using(fake):
        yield fake


class Buffers:
    """One allocation, and its parts."""

    def __init__(self, driver: FakeCuda, content: np.ndarray) -> None:
        self._driver, self._whole = driver, driver.tensor(content, kind="test")

    def reshape(self, count: int, _: int) -> list[FakeArray]:
        each = self._whole.shape[0] // count
        return [
            FakeArray(self._driver, self._whole.address + i * each, np.dtype(np.uint8), (each,))
            for i in range(count)
        ]


def idle(driver: FakeCuda) -> type:
    class Prefill:
        """Events that are recorded, and nothing else."""

        def __init__(self, gpu: int, tokens: int, layers: int) -> None:
            self.layers, self.ended = layers, 0.0
            self.stream = driver.make_stream()
            self.events = [
                types.SimpleNamespace(cuda_event=driver.make_event(self.stream)) for _ in range(layers)
            ]

        def launch(self, *, graph: bool, told: Callable[[int], None] | None = None) -> float:
            for number in range(self.layers if told is not None else 0):
                told(number + 1)
            return 1e-3

        def wait(self) -> float:
            driver.advance()
            return 1e-3

        def settle(self) -> float:
            driver.advance()
            return 1e-4

    return Prefill


def test_a_transfer_beside_a_prefill(
    driver: FakeCuda, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Kernels(driver, Compiled(tmp_path_factory.mktemp("kernels")))
    cupy = little_cupy(driver)
    cupy.asarray = lambda content: Buffers(driver, content)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: made))
    monkeypatch.setattr(prefill, "CudaRetiler", lambda number: made)
    monkeypatch.setattr(overlap, "Prefill", idle(driver))
    done = CliRunner().invoke(bench, ["overlap", "--quick", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    (size,) = told["sizes"]
    assert told["correct"]
    assert size["alone"]["embedded"] > 0
    assert [(row["agent"], row["launch"], row["beside"]) for row in size["rows"]] == [
        *(("none", "graphs", beside) for beside in ("nothing", "kernels", "copies", "kernels and copies")),
        *(
            ("embedded", launch, beside)
            for launch in ("kernels", "graphs")
            for beside in ("nothing", "told", "job")
        ),
    ]
    assert all(row["after"] > 0 for row in size["rows"] if row["beside"] == "job")
    assert made.launched > 8
    assert not driver.pinned
    out = io.StringIO()
    (rows,) = [[Row(**row) for row in size["rows"]]]
    found = Result("made up", 1, 1 << 20, True, [Size(size["tokens"], size["nbytes"], size["alone"], rows)])
    overlap.render(found, Console(file=out, width=200))
    assert "under MPS" in out.getvalue()


def test_into_another_gpu_over_a_slower_link(
    driver: FakeCuda, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.devices = 2
    made = Kernels(driver, Compiled(tmp_path_factory.mktemp("kernels")))
    cupy = little_cupy(driver)
    cupy.asarray = lambda content: Buffers(driver, content)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: made))
    fake_rows(monkeypatch, driver)
    monkeypatch.setattr(overlap, "CudaRetiler", lambda number: types.SimpleNamespace(device=number))
    monkeypatch.setattr(overlap, "Prefill", idle(driver))
    found = overlap.run(tokens=(64,), runs=1, into="cuda:1", start=Here)
    (size,) = found.sizes
    assert size.alone["embedded, 25 GB/s"] >= size.nbytes / 25e9
    assert [(row.launch, row.beside) for row in size.rows] == [
        (launch, beside) for launch in ("kernels", "graphs") for beside in ("nothing", "told", "job")
    ]


def test_what_is_missing_is_said(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependency, match="a prefill is computed by torch"):
        prefill.Prefill(0, 128, 1)
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(is_available=lambda: False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(MissingDependency, match="torch finds no GPU"):
        prefill.Prefill(0, 128, 1)
    done = CliRunner().invoke(bench, ["overlap", "--device", "npu0"])
    assert "no such device" in str(done.output) + str(done.exception)
