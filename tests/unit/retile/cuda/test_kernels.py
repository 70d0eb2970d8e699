"""What holds for all kernels: barriers count, layers share tables, addresses may be odd, errors name the field."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from hawk.errors import InvalidArgument, MissingDependency
from hawk.memory.cuda_driver import using
from hawk.retile import cpu
from hawk.retile.cuda import bases, launch, source, tables
from hawk.retile.cuda.bases import Span
from hawk.retile.cuda.launch import CudaRetiler, span
from hawk.retile.cuda.shelf import Shelf
from hawk.retile.cuda.tables import MAX_PARTS, bind, split
from hawk.retile.rows import RowsStep
from tests.fake_cuda import FakeCuda
from tests.unit.retile import layouts as lay
from tests.unit.retile.cuda import on_cpu
from tests.unit.retile.cuda.on_cpu import Kernels, aligned
from tests.unit.retile.cuda.test_codecs import same, step_of

SHAPE = lay.shape_of(blocks=3, dim=64)
PAIRS = {
    "into tiles": (lay.nhd(SHAPE), lay.tiles(SHAPE, channels=3)),
    "into block floats": (lay.nhd(SHAPE), lay.tiles(SHAPE, lay.BFP8, channels=3)),
    "out of tiles": (lay.tiles(SHAPE, lay.BFP8, channels=2), lay.nhd(SHAPE)),
    "turned": (lay.nhd(SHAPE), lay.dim_major(SHAPE)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_kernel_without_its_barrier_is_wrong(pair, tmp_path):
    def without(text):
        assert text.count("\nBARRIER\n") == 1
        return text.replace("\nBARRIER\n", "\n")

    broken = Kernels(tmp_path, without)
    with pytest.raises(AssertionError, match="access"):
        same(broken, *PAIRS[pair])
    assert broken.known, "it did compile"


@pytest.mark.parametrize("pair", PAIRS)
def test_the_order_of_blocks_and_threads_changes_nothing(pair, kernels):
    for seed in (3, 17):
        same(kernels, *PAIRS[pair], seed=seed)


@pytest.mark.parametrize("at", [1, 2, 8])
@pytest.mark.parametrize("pair", PAIRS)
def test_memory_may_begin_anywhere(pair, at, kernels):
    """Vectors shrink with what addresses are multiples of."""
    same(kernels, *PAIRS[pair], at=at)


@pytest.mark.parametrize(
    "change", [{"dim": 80}, {"dim": 48, "block_size": 24}, {"block_size": 40}, {"heads": 3}]
)
def test_padding(change, kernels):
    shape = lay.shape_of(**change)
    for codec in (lay.BF16, lay.BFP8):
        same(kernels, lay.nhd(shape), lay.tiles(shape, codec, channels=2), token=3, tokens=30)
        same(kernels, lay.tiles(shape, codec, channels=2), lay.hnd(shape))


def layers_of(count, a, b, regions, room):
    """One step a layer, each with buffers of its own, on the same pieces."""
    first = step_of(a, b)
    each = b.channel_bytes * b.channels
    steps = [
        replace(first, layer=i, src_region=(i,), dst_offset=tuple(o + i * each for o in first.dst_offset))
        for i in range(count)
    ]
    return steps, regions(count, a.channel_bytes), room(count * each)


def test_layers_are_one_launch_and_share_their_tables(kernels):
    a, b = PAIRS["into tiles"]
    rng = np.random.default_rng(1)
    steps, regions, want = layers_of(
        5, a, b, lambda n, size: [aligned(size, rng=rng) for _ in range(n)], lambda n: aligned(n, 0xA5)
    )
    got = aligned(len(want), 0xA5)
    for step in steps:
        cpu.run_step(step, regions, want)
    spans = [on_cpu.span(r) for r in regions]
    (bound,) = bind(steps, spans, on_cpu.span(got))
    (one,) = bind(steps[:1], spans, on_cpu.span(got))
    assert bound.blocks == 5 * one.blocks
    assert len(bound.table) - len(one.table) < 5 * 64
    kernels.run(steps, regions, got)
    assert np.array_equal(got, want)


def test_bases_at_once_are_those_one_by_one():
    a, b = PAIRS["into tiles"]
    steps, regions, _ = layers_of(
        4, a, b, lambda n, size: [aligned(size, 0) for _ in range(n)], lambda n: aligned(n, 0)
    )
    steps = [replace(step, src_offset=(8 * i,)) for i, step in enumerate(steps)]
    spans, arena = [on_cpu.span(r) for r in regions], Span(1 << 40, 4 * b.channel_bytes * b.channels)
    at_once, one_by_one = bases.bases_of(steps, spans, arena), bases._one_by_one(steps, spans, arena)
    assert np.array_equal(at_once[0], one_by_one[0])
    assert at_once[1] == one_by_one[1]
    for change, field in (
        ({"src_region": (9,)}, "src_region"),
        ({"src_region": (-1,)}, "src_region"),
        ({"src_region": (0, 0)}, "src_offset"),
        ({"src_offset": (-8,)}, "src_offset"),
        ({"src_offset": (1 << 50,)}, "src_offset"),
        ({"dst_offset": (1 << 50, 0, 0)}, "dst_offset"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            bases.bases_of([*steps[:2], replace(steps[2], **change)], spans, arena)


def test_the_same_pieces_are_worked_out_once(monkeypatch):
    a, b = PAIRS["into tiles"]
    rng, shelf = np.random.default_rng(1), Shelf(most=2)
    steps, regions, _ = layers_of(
        2, a, b, lambda n, size: [aligned(size, rng=rng) for _ in range(n)], lambda n: aligned(n, 0xA5)
    )
    spans, got = [on_cpu.span(r) for r in regions], on_cpu.span(aligned(2 * b.channel_bytes * b.channels, 0))
    again = [replace(step, src_region=(1 - i,)) for i, step in enumerate(steps)]
    worked = []
    part = tables._part
    monkeypatch.setattr(tables, "_part", lambda *a: worked.append(1) or part(*a))
    for chosen in (steps, again, steps[:1]):
        (kept,), (fresh,) = bind(chosen, spans, got, shelf), bind(chosen, spans, got)
        assert kept.specs == fresh.specs
        assert kept.blocks == fresh.blocks
        assert np.array_equal(kept.table, fresh.table)
        assert np.array_equal(kept.parts, fresh.parts)
    assert len(worked) == 1 + 3
    # Other alignment is another kernel, and less memory has to be checked anew.
    odd = [Span(s.address + 2, s.nbytes - 2) for s in spans]
    (kept,), (fresh,) = bind(steps[:1], odd, got, shelf), bind(steps[:1], odd, got)
    assert kept.specs == fresh.specs
    with pytest.raises(InvalidArgument, match="does not fit"):
        bind(steps, [Span(s.address, 64) for s in spans], got, shelf)
    for i in range(5):
        bind([replace(steps[0], pieces=replace(steps[0].pieces))], spans, got, shelf)
        assert len(shelf) <= 2, i


def test_many_programs_are_several_launches(kernels):
    a = lay.nhd(SHAPE)
    targets = [lay.tiles(SHAPE, c) for c in (lay.BF16, lay.FP16, lay.FP32, lay.BFP8, lay.BFP4)]
    rng, at, steps = np.random.default_rng(2), 0, []
    for target in targets:
        step = step_of(a, target)
        steps.append(replace(step, dst_offset=(at,)))
        at += target.channel_bytes
    regions = [aligned(a.channel_bytes, rng=rng)]
    want, got = aligned(at, 0xA5), aligned(at, 0xA5)
    for step in steps:
        cpu.run_step(step, regions, want)
    assert len(bind(steps, [on_cpu.span(r) for r in regions], on_cpu.span(got))) == -(
        -len(steps) // MAX_PARTS
    )
    kernels.run(steps, regions, got)
    assert np.array_equal(got, want)


def test_no_steps_are_no_launch():
    assert bind([], [], Span(0, 0)) == []


def test_large_pieces_are_cut(kernels, monkeypatch):
    for most in (256, 512, 4096):
        monkeypatch.setattr("hawk.retile.cuda.tables.UNIT_BYTES", most)
        for pair in PAIRS.values():
            step = step_of(*pair, token=3, tokens=70)
            program, pieces, every = split(step.program, step.pieces)
            assert len(pieces) == len(step.pieces) * every
            assert np.prod([p.ext for p in program.loops]) * every == np.prod(
                [p.ext for p in step.program.loops]
            )
            same(kernels, *pair, token=3, tokens=70)


@pytest.mark.parametrize("pair", PAIRS)
def test_memory_too_large_for_narrow_words(pair, kernels, monkeypatch):
    a, b = PAIRS[pair]
    monkeypatch.setattr("hawk.retile.cuda.tables.NARROW", 1)
    spans = [Span(1 << 20, a.channel_bytes)] * a.channels
    (bound,) = bind([step_of(a, b)], spans, Span(1 << 30, b.channel_bytes * b.channels))
    assert bound.specs[0].wide
    same(kernels, a, b)


def test_errors_name_the_field():
    a, b = PAIRS["into tiles"]
    step = step_of(a, b)
    region, arena = Span(1 << 20, a.channel_bytes), Span(1 << 30, b.channel_bytes * b.channels)
    for change, field in (
        ({"src_region": (1,)}, r"src_region\[0\]"),
        ({"src_offset": (-1,)}, r"src_offset\[0\]"),
        ({"src_offset": ()}, "src_offset"),
        ({"dst_offset": (0, arena.nbytes + 1, 0)}, r"dst_offset\[1\]"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            bind([replace(step, **change)], [region], arena)
    with pytest.raises(InvalidArgument, match=r"pieces\[\d+\]\.src_page"):
        bind([step], [Span(region.address, region.nbytes // 4)], arena)
    with pytest.raises(InvalidArgument, match="through rows"):
        bind([RowsStep(0, 0, 1, 0, (), ())], [region], arena)


def test_without_cupy_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with using(FakeCuda()), pytest.raises(MissingDependency, match="CuPy") as caught:
        CudaRetiler()
    assert "[cuda]" in str(caught.value)


def test_without_a_driver_nobody_is_sent_for_cupy(monkeypatch):
    def absent():
        raise MissingDependency("no CUDA driver on this machine")

    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(launch, "load", absent)
    with pytest.raises(MissingDependency, match="no CUDA driver"):
        CudaRetiler()


def test_memory_of_a_gpu_is_taken_by_its_interface():
    class Array:
        def __init__(self, shape, strides=None):
            self.__cuda_array_interface__ = {
                "typestr": "<u2", "shape": shape, "strides": strides, "data": (4096, False), "version": 3,
            }  # fmt: skip

    assert span(Array((3, 5))) == Span(4096, 30)
    assert span(Array((3, 1, 5), (10, 999, 2))) == Span(4096, 30)
    with pytest.raises(InvalidArgument, match="gaps"):
        span(Array((3, 5), (16, 2)))
    with pytest.raises(InvalidArgument, match="__cuda_array_interface__"):
        span(np.zeros(3))


COMPILERS = [c for c in ("nvcc",) if shutil.which(c)]


@pytest.mark.parametrize("compiler", COMPILERS or ["cc"])
def test_the_text_compiles(compiler, tmp_path):
    """By nvcc where there is one; by cc in any case."""
    a, b = PAIRS["into block floats"]
    (bound,) = bind(
        [step_of(a, b)], [Span(1 << 20, a.channel_bytes)], Span(1 << 30, b.channel_bytes * b.channels)
    )
    if compiler == "cc":
        Kernels(tmp_path).function(bound)
        return
    (tmp_path / "kernel.cu").write_text(source.text(bound.specs))
    command = [compiler, "-arch=sm_90", "-std=c++17", "-cubin", "-Werror", "all-warnings"]
    done = subprocess.run(
        [*command, "-diag-suppress", "177", "-o", tmp_path / "kernel.cubin", tmp_path / "kernel.cu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:4000]
