"""Chunks like one before: launches that were worked out once, for a GPU whose tables stay where they are."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from hawk.bench.retile_cases import cases
from hawk.memory.cuda_driver import using
from hawk.plan.repeat import SourcePlans, TargetPlans
from hawk.plan.types import Chunk, Placement, Selection
from hawk.retile import cpu
from hawk.retile.cuda import launch, recipes, source
from hawk.retile.cuda.bases import Span, Spans
from hawk.retile.cuda.recipes import Recipes
from hawk.retile.cuda.shelf import Shelf
from tests.fake_cuda import FakeCuda
from tests.unit.retile.cuda.on_cpu import HEADER, RUN, aligned, span

LAYERS = 4
PAIRS = ["nhd > tiles", "nhd > words", "nhd > tiles:bfp8_b", "tiles > nhd", "flashinfer/nhd > tiles"]
CASES = {case.pair: case for case in cases(1, tokens=130, layers=LAYERS) if case.pair in PAIRS}


class Job:
    """Chunks of one layer each, of a source in one region or in one for each buffer."""

    def __init__(self, pair: str, regions: str = "many") -> None:
        case = CASES[pair]
        rng = np.random.default_rng(3)
        src, self.dst = case.source, case.target
        tables = [rng.permutation(side.shape.blocks).astype(np.int64) for side in (src, self.dst)]
        shape = (src.buffer_count, src.channels)
        number = np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape)
        if regions == "many":
            where = Placement(number.astype(np.int32), np.zeros(shape, np.int64))
            self.regions = [aligned(src.channel_bytes, rng=rng) for _ in range(number.size)]
        else:
            where = Placement(np.zeros(shape, np.int32), number * src.channel_bytes)
            self.regions = [aligned(src.channel_bytes * number.size, rng=rng)]
        selection = Selection(0, LAYERS, 5, case.tokens - 5)
        blocks = -(-case.tokens // self.dst.shape.block_size)
        into = TargetPlans(self.dst, tables[1], selection)
        out = SourcePlans(src, tables[0], where, self.dst, tables[1])
        self.planned = [into.plan(Chunk(layer, 1, 0, blocks)) for layer in range(LAYERS)]
        self.steps = [out.plan(one) for one in self.planned]

    def wanted(self, number: int) -> np.ndarray:
        want = aligned(self.planned[number].nbytes, 0xA5)
        for step in self.steps[number]:
            cpu.run_step(step, self.regions, want)
        return want


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    worked = recipes._worked
    monkeypatch.setattr(recipes, "_worked", lambda *a: found.append(1) or worked(*a))
    return found


@pytest.mark.parametrize("regions", ["many", "one"])
@pytest.mark.parametrize("pair", CASES)
def test_other_layers_are_the_same_launches_elsewhere(pair, regions, kernels, worked):
    job, kept = Job(pair, regions), Recipes()
    rests = []
    for number, steps in enumerate(job.steps):
        got = aligned(job.planned[number].nbytes, 0xA5)
        launches = kernels.bound(steps, job.regions, got, Shelf(), kept)
        rests.append([bound.rest for bound, *_ in launches])
        for one in launches:
            assert kernels.launch(*one) == 0, "an access outside, or not aligned"
        want = job.wanted(number)
        assert np.array_equal(got, want), np.flatnonzero(got != want)[:8]
    assert len(worked) == 1
    assert all(a is b for one in rests[1:] for a, b in zip(one, rests[0], strict=True))


def test_what_lies_worse_is_worked_out_anew(kernels, worked):
    job, kept, shelf = Job("nhd > tiles"), Recipes(), Shelf()
    spans, arena = [span(r) for r in job.regions], span(aligned(job.planned[0].nbytes, 0))

    def bind(number, spans=spans, arena=arena):
        return kept.bind(job.steps[number], job.steps[number].lies, spans, arena, shelf)

    bind(0), bind(1)
    assert len(worked) == 1
    odd = [Span(s.address + 2, s.nbytes) for s in spans]
    (bound,) = bind(2, odd)
    assert len(worked) == 2
    assert bound.specs[0].src_align == 2
    bind(3, odd)
    assert len(worked) == 2, "that is the kind that is known now"
    (bound,) = bind(3)
    assert bound.specs[0].src_align == 2, "which is right for what lies better, too"
    with pytest.raises(Exception, match="does not fit"):
        bind(2, [Span(s.address, s.nbytes // 2) for s in spans])
    with pytest.raises(Exception, match="no such region"):
        bind(2, spans[:1])


def test_pieces_that_do_not_lie_beside_each_other_any_more(kernels, worked):
    job, kept = Job("nhd > words"), Recipes()
    spans, arena = [span(r) for r in job.regions], span(aligned(job.planned[0].nbytes, 0))
    for number in (0, 1):
        kept.bind(job.steps[number], job.steps[number].lies, spans, arena)
    lies = job.steps[2].lies()
    apart = lies._replace(offset=lies.offset + np.arange(len(lies.offset))[:, None] * 16)
    steps = [
        replace(s, src_offset=tuple(o)) for s, o in zip(job.steps[2], apart.offset.tolist(), strict=True)
    ]
    larger = [Span(s.address, s.nbytes + 64) for s in spans]
    kept.bind(steps, lambda: apart, larger, arena)
    assert len(worked) == 2


class Compiled:
    """A kernel that a processor runs, as CuPy has it and as the driver starts it."""

    def __init__(self, driver: FakeCuda, run, spans: list) -> None:
        self.launched, self._run, self._spans = 0, run, spans
        self.kernel = SimpleNamespace(ptr=0x8000 + 16 * len(driver.functions))
        self.max_dynamic_shared_size_bytes = 0
        driver.functions[self.kernel.ptr] = self

    def run(self, blocks: int, arguments: bytes) -> None:
        given, spans = ctypes.create_string_buffer(arguments), np.array(self._spans, np.uint64)
        sizes = ctypes.c_uint32(blocks), ctypes.c_uint32(1), ctypes.c_uint32(48 << 10)
        assert self._run(given, *sizes, ctypes.c_void_p(spans.ctypes.data), ctypes.c_uint32(len(spans))) == 0


@pytest.fixture
def retiler(kernels, monkeypatch: pytest.MonkeyPatch):
    """The real one, whose compiler is the processor's."""
    driver, spans = FakeCuda(), []

    def module(code: str, options: object) -> object:
        text = code.replace(source.header("device.h"), HEADER) + RUN
        return SimpleNamespace(get_function=lambda name: Compiled(driver, kernels.compiled(text), spans))

    cupy = ModuleType("cupy")
    cupy.RawModule = module
    cupy.cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 1), Device=nullcontext)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with using(driver):
        driver.enter(0)
        yield driver, spans, launch.CudaRetiler(0)
        driver.leave()
    assert not driver.left()


def test_tables_stay_on_the_gpu(retiler):
    driver, spans, made = retiler
    job = Job("nhd > tiles")
    streams, event = [driver.stream(low=True) for _ in range(2)], driver.event()
    brought: dict[int, list[int]] = {stream: [] for stream in streams}
    for turn in range(2):
        for number, steps in enumerate(job.steps):
            stream = streams[number % 2]
            got = aligned(job.planned[number].nbytes, 0xA5)
            spans[:] = [span(got), *(span(r) for r in job.regions)]
            calls = made.calls(steps, Spans(spans[1:]), spans[0], stream, driver)
            brought[stream].append(sum(call[3] for call in calls.first))
            driver.run([*calls.first, *calls.then, ("record", event, stream), ("outwait", event)])
            if (turn, number) != (0, 1):
                calls.done()
            assert np.array_equal(got, job.wanted(number))
    one, other = brought.values()
    assert one[1] == one[2] == one[3] < one[0] / 4, "the bases alone"
    assert other == [one[0], one[0], one[1], one[1]], "nobody said that the first had been done"
    made.close(driver)
    for stream in streams:
        driver.drop_stream(stream)
    driver.drop_event(event)
