"""Generated kernels on a GPU against the CPU's core: every pair, every codec, streams, graphs, many layers."""

from __future__ import annotations

from dataclasses import replace

import cupy
import numpy as np
import pytest

from hawk.errors import InvalidArgument
from hawk.memory.cuda import device
from hawk.memory.cuda_held import Held
from hawk.retile import cpu
from hawk.retile.cuda.bases import Span, Spans
from hawk.retile.cuda.launch import CudaRetiler, span
from tests.unit.retile import layouts as lay
from tests.unit.retile.cuda import test_recipes as recipes
from tests.unit.retile.cuda import test_through as rows
from tests.unit.retile.cuda.test_codecs import EVERY, FACTORS, layouts_for, step_of
from tests.unit.retile.cuda.test_pairs import CASES, planned


@pytest.fixture(scope="module")
def retiler():
    return CudaRetiler(0)


def moved(retiler, steps, regions, nbytes, at=0):
    """The arena as the CPU writes it, and as the GPU does; `at` shifts the GPU's memory off its alignment."""
    want = np.full(nbytes, 0xA5, np.uint8)
    for step in steps:
        cpu.run_step(step, regions, want, threads=4)
    held = [cupy.asarray(np.concatenate([np.zeros(at, np.uint8), r]))[at:] for r in regions]
    arena = cupy.full(nbytes + at, 0xA5, cupy.uint8)[at:]
    retiler.prepare(steps, [span(r) for r in held], span(arena)).launch()
    return want, arena.get()


@pytest.mark.parametrize("pair", CASES)
def test_every_pair(pair, retiler):
    case = CASES[pair]
    for token, tokens in ((5, 187), (0, case.tokens)):
        want, got = moved(retiler, *planned(case, token, tokens))
        assert np.array_equal(got, want), (token, np.flatnonzero(got != want)[:8])


def one(retiler, a, b, *, words=None, at=0, **kw):
    step, rng = step_of(a, b, **kw), np.random.default_rng(3)
    regions = [rng.integers(0, 256, a.channel_bytes, np.uint8) for _ in range(a.channels)]
    if words is not None:
        regions[0][:] = words.view(np.uint8)
    want, got = moved(retiler, [step], regions, b.channel_bytes * b.channels, at)
    assert np.array_equal(got, want), np.flatnonzero(got != want)[:8]


@pytest.mark.parametrize("target", EVERY)
def test_every_codec(target, retiler):
    shape = lay.shape_of(blocks=3, dim=64)
    for source in (*lay.CODECS.values(), *FACTORS):
        if source.group == 1 or EVERY[target].group == 1:
            one(
                retiler, layouts_for(source, shape, channels=2), layouts_for(EVERY[target], shape, channels=3)
            )
            one(retiler, lay.nhd(shape, source), layouts_for(EVERY[target], shape), token=3, tokens=71)


@pytest.mark.parametrize("target", EVERY)
@pytest.mark.parametrize("source", [lay.BF16, lay.FP16], ids=["bf16", "fp16"])
def test_all_words_of_sixteen_bits(source, target, retiler):
    shape = lay.shape_of(heads=1, dim=256, block_size=512, blocks=1, kvs=1)
    axes = [("slot", 1, 512), ("head", 1, 1), ("dim", 1, 256)]
    a, b = (
        lay.compiled("flat", shape, codec, [("block", 1, 1)], axes, buffers=("layer", "kv"))
        for codec in (source, EVERY[target])
    )
    words = np.arange(65536, dtype=np.uint16)
    for neighbour in (0x0000, 0x0001, 0x0080, 0x3F80, 0x4080, 0xC47F, 0x7F00, 0x7F80, 0xFFFF):
        beside = words.reshape(-1, 16).copy()
        beside[:, 5] = neighbour
        one(retiler, a, b, words=np.concatenate([words, beside.ravel()]))


@pytest.mark.parametrize("at", [1, 2, 4, 8])
def test_memory_may_begin_anywhere(at, retiler):
    shape = lay.shape_of(blocks=3, dim=64)
    for codec in (lay.BF16, lay.FP32, lay.BFP8):
        one(retiler, lay.nhd(shape), lay.tiles(shape, codec, channels=3), at=at)


def test_layers_in_a_graph_and_on_a_stream(retiler):
    shape = lay.shape_of(blocks=3, dim=64)
    a, b = lay.nhd(shape), lay.tiles(shape, channels=3)
    first, each = step_of(a, b), b.channel_bytes * b.channels
    steps = [
        replace(first, layer=i, src_region=(i,), dst_offset=tuple(o + i * each for o in first.dst_offset))
        for i in range(5)
    ]
    rng = np.random.default_rng(1)
    regions = [rng.integers(0, 256, a.channel_bytes, np.uint8) for _ in steps]
    want = np.full(5 * each, 0xA5, np.uint8)
    for step in steps:
        cpu.run_step(step, regions, want)
    held = [cupy.asarray(r) for r in regions]
    arena = cupy.full(5 * each, 0xA5, cupy.uint8)
    prepared = retiler.prepare(steps, [span(r) for r in held], span(arena))
    assert prepared.kernels == 1
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    prepared.launch(stream)
    stream.synchronize()
    assert np.array_equal(arena.get(), want)
    arena.fill(0xA5)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        prepared.launch(stream)
        graph = stream.end_capture()
    for _ in range(2):
        graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(arena.get(), want)


@pytest.mark.parametrize("pair", ["nhd > tiles", "nhd > words", "tiles > nhd", "nhd > tiles:bfp8_b"])
def test_chunk_after_chunk_on_a_stream_of_its_own(pair, retiler):
    """As jobs have it: chunks that differ in their layers, whose tables stay on the GPU."""
    job, there = recipes.Job(pair), device(0)
    held = [cupy.asarray(r) for r in job.regions]
    spans = Spans(span(r) for r in held)
    cupy.cuda.Device().synchronize()
    with there.current() as driver, Held(there) as taken:
        streams, event = [taken.stream(low=True) for _ in range(2)], taken.event()
        for turn in range(2):
            for number, steps in enumerate(job.steps):
                want = job.wanted(number)
                arena = cupy.full(len(want), 0xA5, cupy.uint8)
                cupy.cuda.Device().synchronize()
                stream = streams[(number + turn) % 2]
                calls = retiler.calls(steps, spans, span(arena), stream, driver)
                driver.run([*calls.first, *calls.then, ("record", event, stream), ("outwait", event)])
                calls.done()
                assert np.array_equal(arena.get(), want), (turn, number)
        retiler.close(driver)


def test_no_such_device():
    with pytest.raises(InvalidArgument, match="cuda:0"):
        CudaRetiler(99)


def test_a_tensor_of_any_framework_is_taken():
    array = cupy.zeros((3, 4), cupy.float16)
    assert span(array) == Span(array.data.ptr, 24)


class OnGpu:
    """What `tests.unit.retile.cuda.on_cpu.Kernels` is, on the GPU."""

    def __init__(self, retiler):
        self._retiler = retiler

    def run(self, steps, regions, arena):
        held, into = [cupy.asarray(r) for r in regions], cupy.asarray(arena)
        self._retiler.prepare(steps, [span(r) for r in held], span(into)).launch()
        arena[:] = into.get()


EVERY_RULE = [
    *rows.MADE,
    *((before, codec, after, codec) for before, codec, after in rows.SPREAD),
    *rows.RANGED,
    *rows.LEFT,
]


@pytest.mark.parametrize("case", EVERY_RULE)
def test_scales(case, retiler):
    """Bytes of every kind, NaNs and infinities of elements and of scales among them."""
    src, dst = rows.pair(*case)
    for seed in range(4):
        rows.check(OnGpu(retiler), src, dst, token=6, tokens=rows.scaled.TOKENS - 6, seed=seed)
