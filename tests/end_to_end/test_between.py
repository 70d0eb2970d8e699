"""`hawk bench transfer --devices` over a driver that is made up: whether it works, checks and tells what it says."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hawk.bench import between, between_naive
from hawk.bench.between_far import Far, _Pool
from hawk.bench.between_process import Process
from hawk.demo import scenario
from hawk.errors import HawkMemoryError, InternalError, InvalidArgument
from hawk.jobs.gpus import Gpus
from hawk.memory import cuda_driver, cuda_rows
from hawk.memory.cuda_held import Held
from hawk.retile.cpu import run_step
from hawk.retile.cuda.lanes import Calls
from hawk.transports.cuda._client import CudaLane
from tests.descriptors import fds
from tests.fake_cuda import FakeCuda
from tests.fake_cuda_parts import fake_rows


class Retiler:
    """A processor in the kernels' place."""

    def __init__(self, driver: FakeCuda) -> None:
        self._driver = driver

    def calls(self, steps: list, regions: list, arena: Any, stream: int, driver: Any) -> Calls:
        arrays, into = [self._driver.at(*span) for span in regions], self._driver.at(*arena)

        def work() -> None:
            for step in steps:
                run_step(step, arrays, into)

        return Calls(then=[("put", stream, work)])

    def close(self, driver: Any) -> None:
        pass


class Here(between.Decode):
    """The decode side in this process."""

    def __init__(self, config: Path, number: int) -> None:
        self._far = Far(str(config), number)

    async def open(self) -> None:
        await self._far.open()

    async def ask(self, name: str, *arguments: object) -> Any:
        answer = await getattr(self._far, name)(*json.loads(json.dumps(arguments)))
        return json.loads(json.dumps(answer))

    async def close(self) -> None:
        await self._far.close()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda(devices=2)
    fake_rows(monkeypatch, fake)
    monkeypatch.setattr(Gpus, "make", staticmethod(lambda number: Retiler(fake)))
    monkeypatch.setattr(between, "_CHUNK", 256 << 10)
    monkeypatch.setattr(between_naive, "SOCKETS", (1, 2))
    load = scenario.load

    def fewer_layers(tokens: int) -> scenario.Scenario:
        made = load(tokens)
        return replace(made, source=made.source.replace(layers=2), target=made.target.replace(layers=2))

    monkeypatch.setattr(scenario, "load", fewer_layers)
    with cuda_driver.using(fake):
        yield fake
    assert not fake.left()


def test_every_way_arrives_and_is_told(driver: FakeCuda) -> None:
    result = between.run("cuda:0,cuda:1", sizes=(1_000_000,), runs=1, pace=1e9, start=Here)
    told = result.to_dict()
    assert told["correct"]
    assert told["channels"] == "regions in GPU memory: no BAR, no NPU"
    assert not told["one_gpu"]
    (size,) = told["sizes"]
    assert set(size["ways"]) == {"GG-Direct", "GN-HAWK", "GG-Host", "GN-Host, overlapped", "GN-Host"}
    assert set(size["ways"]["GN-HAWK"]) == {"full", "paced"}
    assert set(size["baselines"]) == {"down", "up", "sockets", "tile"}
    assert set(size["naive_ratio"]) == {"down", "up", "sockets", "tile"}
    for ways in size["ways"].values():
        for way in ways.values():
            assert 0 < way["control"] <= way["seconds"]
    assert size["ways"]["GN-HAWK"]["paced"]["seconds"] >= size["bytes"] / 1e9
    json.dumps(told)
    out = io.StringIO()
    between.render(result, Console(file=out, width=200))
    assert "regions in GPU memory: no BAR, no NPU" in out.getvalue()


@pytest.mark.parametrize("kind", ["pages", "channels"])
def test_a_wrong_byte_is_an_error(driver: FakeCuda, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _Pool.seen

    def spoilt(self: _Pool, stack: Any) -> Any:
        found = seen(self, stack)
        if len(found.channels) == (1 if kind == "pages" else 8):
            base = found.offsets[1] + found.layout.channel_bytes // 2
            found.channels[0][base : base + 1] ^= np.uint8(1)
        return found

    monkeypatch.setattr(_Pool, "seen", spoilt)
    monkeypatch.setattr(between, "GROUPS", between.GROUPS[:1])
    with pytest.raises(InternalError, match="a byte is wrong after the job"):
        between.run(sizes=(1_000_000,), runs=1, start=Here)


@pytest.mark.parametrize("says", ["", '{"error": "no"}', '{"value": null}'])
async def test_a_decode_side_that_ends_is_told_of_and_leaves_nothing(says: str, tmp_path: Path) -> None:
    before = fds()
    far = Process(tmp_path / "none.toml", 0)
    far._arguments = [sys.executable, "-c", f"print({says!r})" if says else ""]
    with pytest.raises(InternalError, match="the decode side"):
        await far.open()
        far._process.wait()
        await far.ask("fetch", "pages", "ticket")
    if "value" in says:
        await far.close()
    assert far._process.returncode == 0
    assert fds() == before


def test_memory_of_the_host_stands_in_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between_naive, "SOCKETS", (1,))
    monkeypatch.setattr(between, "GROUPS", between.GROUPS[3:])
    before = Gpus.make, cuda_driver._known, cuda_rows.make
    result = between.run("host,host", sizes=(8_000_000,), runs=1)
    assert (Gpus.make, cuda_driver._known, cuda_rows.make) == before
    assert not result.one_gpu
    assert set(result.sizes[0].naive_ratio) == {"down", "up", "sockets", "tile"}


@pytest.mark.parametrize("devices", ["cuda:0", "cuda:0,cpu", "cuda:0,cuda:1,cuda:2", "cuda:x,cuda:1", ""])
def test_what_is_not_two_gpus(devices: str) -> None:
    with pytest.raises(InvalidArgument, match="devices: not two GPUs"):
        between.run(devices)


@pytest.mark.parametrize("call", ["allocate", "stream", "event", "rows"])
def test_a_naive_way_that_cannot_be_made_leaves_nothing(
    driver: FakeCuda, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Held, *_: object) -> int:
        raise HawkMemoryError("no")

    init = between_naive.Naive.__init__

    def made(self: between_naive.Naive, *arguments: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Held, call, refused)
            init(self, *arguments)

    monkeypatch.setattr(between_naive.Naive, "__init__", made)
    monkeypatch.setattr(between, "GROUPS", between.GROUPS[3:])
    with pytest.raises(HawkMemoryError, match="no"):
        between.run(sizes=(1_000_000,), runs=1, start=Here)
    assert not driver.left()


def test_ways_that_are_compared_take_turns_in_who_is_first(
    driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    class Noting(Here):
        async def ask(self, name: str, *arguments: object) -> Any:
            if name == "fetch":
                fetched.append(str(arguments[0]))
            return await super().ask(name, *arguments)

    monkeypatch.setattr(between, "GROUPS", between.GROUPS[:1])
    with pytest.raises(KeyError):  # what the other groups would have measured
        between.run(sizes=(1_000_000,), runs=2, start=Noting).to_dict()
    assert fetched == ["pages", "channels", "channels", "pages", "pages", "channels"]


def test_bytes_of_the_run_before_are_not_taken_for_those_of_the_last(
    driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = 0

    class Counting(Here):
        async def ask(self, name: str, *arguments: object) -> Any:
            nonlocal fetched
            fetched += name == "fetch"
            return await super().ask(name, *arguments)

    copy = CudaLane._copy

    def lazy(self: CudaLane, *arguments: Any) -> None:
        if fetched <= 2:  # each way's first run
            copy(self, *arguments)

    monkeypatch.setattr(CudaLane, "_copy", lazy)
    monkeypatch.setattr(between, "GROUPS", between.GROUPS[:1])
    with pytest.raises(InternalError, match="a byte is wrong after the job"):
        between.run(sizes=(1_000_000,), runs=1, start=Counting)
