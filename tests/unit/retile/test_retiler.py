"""The thread pool, the choice of a core, and plain segment copies."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from hawk.errors import InvalidArgument, MissingDependency
from hawk.retile import cpu, native, numpy_core
from hawk.retile.build import build_program
from tests.unit.retile import layouts as lay
from tests.unit.retile import slow

CORES = ("numpy", "c") if native.available() else ("numpy",)


@pytest.fixture(autouse=True)
def threads_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks here are small, and threads are what most tests are about."""
    monkeypatch.setattr(cpu, "INLINE_BYTES", 0)


@dataclass(frozen=True)
class Step:
    program: object
    pieces: object
    src_region: tuple[int, ...]
    src_offset: tuple[int, ...]
    dst_offset: tuple[int, ...]


def chunk(count=4):
    """`count` planes in one arena, the source's planes in two regions, and what the arena holds afterwards."""
    shape = lay.shape_of(blocks=4)
    a, b = lay.nhd(shape), lay.tiles(shape, lay.BFP8, channels=2)
    program = build_program(a, b, 1)
    pieces = slow.pieces_of(program, a, b, 1, 0, [2, 0, 3, 1], [0, 1, 2, 3], 0, 128)
    rng = np.random.default_rng(7)
    regions = [rng.integers(0, 256, 192 + a.channel_bytes, np.uint8) for _ in range(2)]
    size = b.channel_bytes
    steps, want = [], np.full(2 * count * size, 0x77, np.uint8)
    for i in range(count):
        offset = 64 * i % 192
        steps.append(Step(program, pieces, (i % 2,), (offset,), (i * size, (count + i) * size)))
        src = [regions[i % 2][offset:]]
        dst = [want[at : at + size] for at in steps[-1].dst_offset]
        for whole, part in zip(dst, slow.expected(program, pieces, src, dst), strict=True):
            whole[:] = part
    return steps, regions, want


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("threads", [1, 3])
async def test_a_chunk(core, threads, monkeypatch):
    monkeypatch.setitem(cpu.SLICE_BYTES, core, 5000)  # many slices
    steps, regions, want = chunk()
    arena = np.full(len(want), 0x77, np.uint8)
    with cpu.Retiler(threads) as retiler, native.using(core):
        await retiler.run_steps(steps, regions, arena)
        assert np.array_equal(arena, want)
        await retiler.run_steps([], regions, arena)


@pytest.mark.skipif(not native.available(), reason="numpy takes long enough to be worth a thread")
async def test_a_small_chunk_needs_no_thread(monkeypatch):
    monkeypatch.setattr(cpu, "INLINE_BYTES", 1 << 20)
    steps, regions, want = chunk()
    arena = np.full(len(want), 0x77, np.uint8)
    with cpu.Retiler(1) as retiler:
        monkeypatch.setattr(retiler, "_pool", None)
        with native.using("c"):
            await retiler.run_steps(steps, regions, arena)
        assert np.array_equal(arena, want)
        monkeypatch.undo()


async def test_errors_come_out_and_leave_the_pool_usable():
    steps, regions, want = chunk()
    arena = np.full(len(want), 0x77, np.uint8)
    bad = replace(steps[2].pieces, dst_page=steps[2].pieces.dst_page + (1 << 40))
    with cpu.Retiler(2) as retiler:
        with pytest.raises(InvalidArgument, match="dst_page"):
            await retiler.run_steps([*steps[:2], replace(steps[2], pieces=bad)], regions, arena)
        with pytest.raises(InvalidArgument, match=r"step\.src_region\[0\]"):
            await retiler.run_steps([replace(steps[0], src_region=(9,))], regions, arena)
        with pytest.raises(InvalidArgument, match=r"step\.dst_offset\[1\]"):
            await retiler.run_steps([replace(steps[0], dst_offset=(0, len(arena) + 1))], regions, arena)
        await retiler.run_steps(steps, regions, arena)
    assert np.array_equal(arena, want)
    with pytest.raises(InvalidArgument, match="threads"):
        cpu.Retiler(0)


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelling_waits_for_the_writer_and_no_longer(monkeypatch, times):
    """However often it is cancelled, `run_steps` ends when the running slices have ended, and begins no other."""
    steps, regions, want = chunk()
    arena = np.full(len(want), 0x77, np.uint8)
    monkeypatch.setitem(cpu.SLICE_BYTES, native.core_name(), 1)  # every piece a slice
    entered, leave, calls = threading.Event(), threading.Event(), []
    execute = cpu._Call.execute

    def held(self, begin, end):
        calls.append(begin)
        entered.set()
        assert leave.wait(30)
        execute(self, begin, end)

    monkeypatch.setattr(cpu._Call, "execute", held)
    with cpu.Retiler(1) as retiler:
        task = asyncio.ensure_future(retiler.run_steps(steps, regions, arena))
        assert await asyncio.to_thread(entered.wait, 30)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done(), "a thread still writes"
        leave.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert calls == [0]
        await retiler.run_steps(steps, regions, arena)
    assert np.array_equal(arena, want)


async def test_the_loop_runs_on_while_threads_work(monkeypatch):
    steps, regions, want = chunk()
    leave = threading.Event()
    execute = cpu._Call.execute
    monkeypatch.setattr(cpu._Call, "execute", lambda *a: (leave.wait(30), execute(*a)))
    with cpu.Retiler(2) as retiler:
        task = asyncio.ensure_future(retiler.run_steps(steps, regions, np.full(len(want), 0, np.uint8)))
        await asyncio.sleep(0)  # this coroutine runs: the loop is free
        leave.set()
        await task


def test_the_choice_of_a_core(monkeypatch, caplog):
    monkeypatch.setenv("HAWK_CORE", "fast")
    with pytest.raises(InvalidArgument, match="HAWK_CORE: no such core; got fast; expected auto, c or numpy"):
        native.core_name()
    monkeypatch.setattr(numpy_core, "_said", False)
    monkeypatch.setenv("HAWK_CORE", "numpy")
    with caplog.at_level(logging.WARNING, "hawk.retile"):
        assert native.core_name() == native.core_name() == "numpy"
    assert len(caplog.records) == 1
    monkeypatch.setattr(native, "_core", None)
    monkeypatch.setenv("HAWK_CORE", "c")
    with pytest.raises(MissingDependency, match="HAWK_CORE: the C core is not there"):
        native.core_name()
    monkeypatch.setenv("HAWK_CORE", "auto")
    monkeypatch.setattr(numpy_core, "_said", False)
    with caplog.at_level(logging.WARNING, "hawk.retile"):
        assert native.core_name() == "numpy"
    assert "the C core is not there" in caplog.records[-1].message


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("size", [1, 63, 200, 2048, 70_000])
def test_segments(core, size):
    """Shuffled, at odd addresses, some empty, into two regions; canaries between them stay."""
    rng = np.random.default_rng(size)
    n = max(4, min(200, (9 << 20) // size // 2))  # the largest go past the caches
    source = rng.integers(0, 256, n * (size + 3) + 64, np.uint8)
    regions = [np.full(n * (size + 5) + 64, 0xC3, np.uint8) for _ in range(2)]
    order = rng.permutation(n)
    region, nbytes = (np.arange(n) % 2).astype(np.int32), np.full(n, size, np.int64)
    nbytes[3] = 0
    local, remote = 1 + np.arange(n) * (size + 5), order * (size + 3)
    want = [r.copy() for r in regions]
    for r, at, s, length in zip(region, local, remote, nbytes, strict=True):
        want[r][at : at + length] = source[s : s + length]
    bases = np.array([r.ctypes.data for r in regions], np.int64)
    with native.using(core):
        native.copy_segments(bases, region, local, source.ctypes.data, remote, nbytes)
    assert all(np.array_equal(x, y) for x, y in zip(regions, want, strict=True))


@pytest.mark.parametrize("core", CORES)
def test_bad_segments_are_refused(core):
    one, zero = np.ones(1, np.int64), np.zeros(1, np.int32)
    with native.using(core):
        native.copy_segments(one, zero[:0], one[:0], 0, one[:0], one[:0])
        for region, local, remote, nbytes, field in (
            (zero + 1, one, one, one, "region"),
            (zero - 1, one, one, one, "region"),
            (zero, -one, one, one, "local"),
            (zero, one, -one, one, "remote"),
            (zero, one, one, -one, "nbytes"),
            (zero, one, one, one[:0], "nbytes"),
        ):
            with pytest.raises(InvalidArgument, match=field):
                native.copy_segments(one, region, local, 0, remote, nbytes)
