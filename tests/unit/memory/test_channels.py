"""Host memory and the emulated device: channels, moves, flush, and nothing left after close."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from hawk.errors import Aborted, InvalidArgument, OutOfMemory
from hawk.memory import channels as channels_module
from hawk.memory import copying
from hawk.memory.available import available_memory
from hawk.memory.base import MoveSupport
from hawk.memory.host import HostMemory
from hawk.memory.npu import EmulatedNpu
from hawk.memory.region import ByteRanges, Moves
from tests.descriptors import fds

MIB = 1 << 20


def maps() -> int:
    with open("/proc/self/maps") as f:
        return sum("memfd:" in line for line in f)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    before = fds(), maps(), set(threading.enumerate())
    yield
    assert fds() <= before[0]
    assert maps() <= before[1]
    assert set(threading.enumerate()) <= before[2]  # one of an earlier test may end meanwhile


def moves(rows: list[tuple[int, int, int, int]]) -> Moves:
    table = np.asarray(rows, np.int64).reshape(-1, 4)
    return Moves(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy(), table[:, 3].copy())


def ranges(rows: list[tuple[int, int, int]]) -> ByteRanges:
    table = np.asarray(rows, np.int64).reshape(-1, 3)
    return ByteRanges(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy())


@pytest.fixture(params=["native or not", "memmove"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves run once with what is installed and once with the C library alone."""
    if request.param == "memmove":
        monkeypatch.setattr(copying, "_native", lambda: None)


@pytest.mark.parametrize("channels", [1, 7, 8, 12])
def test_channels(channels: int) -> None:
    npu = EmulatedNpu("npu0", capacity=3 * MIB, channels=channels)
    try:
        assert npu.kind == "emulated-npu"
        assert npu.channels == len(npu.regions) == channels
        assert npu.channel_bytes == 3 * MIB // channels // 64 * 64
        assert npu.capacity == npu.channel_bytes * channels
        assert [r.name for r in npu.regions] == [f"npu0/channel{c}" for c in range(channels)]
        assert len({r.fd for r in npu.regions}) == channels
        for r in npu.regions:
            assert r.nbytes == npu.channel_bytes
            assert os.fstat(r.fd).st_blocks * 512 >= r.nbytes
        a = npu.allocate(1000, "weights")
        assert (a.offset, a.channels) == (0, tuple(range(channels)))
        assert npu.free_bytes() == [npu.channel_bytes - 1024] * channels
        single = npu.allocate(64, "buffer", channels=[channels - 1])
        assert single.offset == 1024
        assert npu.allocate(64, "tensor").offset == 1088
        npu.free(a)
        with pytest.raises(InvalidArgument):
            npu.free(a)
        assert [x.owner for x in npu.allocations()] == ["buffer", "tensor"]
        with pytest.raises(OutOfMemory) as e:
            npu.allocate(npu.channel_bytes, "too much")
        assert {"channel", "free", "largest_piece"} <= e.value.facts.keys()
        assert e.value.field == f"npu0/channel{channels - 1}"
    finally:
        npu.close()


def test_close_twice_and_views_outlive() -> None:
    mapped = maps()
    npu = EmulatedNpu("npu0", capacity=MIB, channels=4)
    before = fds()
    region = npu.regions[2]
    npu.close()
    npu.close()
    assert fds() == before - 4
    assert npu.regions == ()
    region.array[:] = 3
    assert maps() == mapped + 1


def test_too_large_takes_nothing() -> None:
    with pytest.raises(OutOfMemory) as e:
        EmulatedNpu("npu0", capacity=available_memory() + 256 * MIB)
    assert e.value.field == "npu0"


def test_a_failure_half_way_closes_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = channels_module.alloc, []

    def alloc(nbytes: int, **kw: object) -> object:
        calls.append(nbytes)
        if len(calls) == 3:
            raise OutOfMemory("made up")
        return real(nbytes, **kw)  # type: ignore[arg-type]

    monkeypatch.setattr(channels_module, "alloc", alloc)
    before = fds()
    with pytest.raises(OutOfMemory, match="made up") as e:
        EmulatedNpu("npu0", capacity=MIB, channels=4)
    assert len(calls) == 3
    # Closed at once, not only when the traceback lets go of the half-made object.
    assert e.value.__traceback__ is not None
    assert fds() == before


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"capacity": MIB, "channels": 0}, "npu0.channels"),
        ({"capacity": MIB, "alignment": 0}, "npu0.alignment"),
        ({"capacity": 100}, "npu0.capacity"),
        ({"capacity": -1}, "npu0.capacity"),
    ],
)
def test_bad_figures(options: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidArgument) as e:
        EmulatedNpu("npu0", **options)
    assert e.value.field == field


async def test_host_memory() -> None:
    host = HostMemory("h", capacity=MIB)
    try:
        assert (host.kind, host.channels, host.channel_bytes) == ("host", 1, MIB)
        assert host.move_support is MoveSupport.HOST
        await host.flush(ranges([(0, 0, MIB)]))
        await host.flush(ByteRanges())
        with pytest.raises(InvalidArgument):
            await host.flush(ranges([(1, 0, 1)]))
    finally:
        host.close()


async def test_flush_goes_through_one_seam_and_is_counted() -> None:
    class Buffered(EmulatedNpu):
        seen: ByteRanges | None = None

        async def make_visible(self, ranges: ByteRanges) -> None:
            self.seen = ranges

    npu = Buffered("npu0", capacity=MIB, channels=4)
    try:
        some = ranges([(0, 0, 100), (3, 64, 1000)])
        await npu.flush(some)
        assert npu.seen is some
        await npu.flush(ByteRanges())
        assert (npu.flushes, npu.flushed_ranges, npu.flushed_bytes) == (2, 2, 1100)
        for bad in (
            (4, 0, 1),
            (-1, 0, 1),
            (0, -1, 1),
            (0, npu.channel_bytes, 1),
            (0, 0, 0),
            (0, 1 << 62, 1 << 62),
        ):
            with pytest.raises(InvalidArgument):
                await npu.flush(ranges([bad]))
        assert npu.flushes == 2
    finally:
        npu.close()


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("seed", range(3))
async def test_moves_against_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    npu = EmulatedNpu("npu0", capacity=7 * 96 * 1024, channels=7)
    try:
        expected = []
        for r in npu.regions:
            r.array[:] = rng.integers(0, 256, r.nbytes, np.uint8)
            expected.append(r.array.copy())
        rows = []
        # Sources in the lower half, targets in the upper: odd sizes, and runs that continue each other.
        source, target = np.zeros(7, np.int64), np.full(7, npu.channel_bytes // 2)
        for _ in range(2000):
            c, n = int(rng.integers(7)), int(rng.integers(1, 60))
            gap = int(rng.integers(0, 3))
            rows.append((c, int(source[c]), int(target[c]) + gap, n))
            expected[c][target[c] + gap : target[c] + gap + n] = expected[c][source[c] : source[c] + n]
            source[c] += n
            target[c] += n + gap
        rng.shuffle(rows)
        await npu.move(moves(rows))
        for r, want in zip(npu.regions, expected, strict=True):
            np.testing.assert_array_equal(r.array, want)
        await npu.move(moves([]))
    finally:
        npu.close()


@pytest.mark.usefixtures("core")
async def test_a_row_outside_its_channel_moves_nothing() -> None:
    npu = EmulatedNpu("npu0", capacity=4096, channels=4)
    try:
        for bad in (
            (0, 0, 1000, 25),
            (0, 1000, 0, 25),
            (4, 0, 64, 1),
            (-1, 0, 64, 1),
            (0, 0, 64, 0),
            (0, -1, 64, 1),
        ):
            npu.regions[0].array[:] = np.arange(1024, dtype=np.uint8)
            with pytest.raises(InvalidArgument) as e:
                await npu.move(moves([(0, 0, 512, 64), bad]))
            assert e.value.field == "moves[1]"
            np.testing.assert_array_equal(npu.regions[0].array, np.arange(1024, dtype=np.uint8))
    finally:
        npu.close()


class Gate:
    """Holds the mover's thread inside its first piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go, self.pieces = threading.Event(), threading.Event(), 0
        monkeypatch.setattr(channels_module, "MOVE_PIECE", 100)
        monkeypatch.setattr(channels_module, "copy_within", self)

    def __call__(self, *_: object) -> None:
        self.pieces += 1
        self.entered.set()
        assert self.go.wait(60)


async def test_a_cancelled_move_ends_only_when_nothing_is_copied_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    npu, gate = EmulatedNpu("npu0", capacity=4 * 64 * 1024, channels=4), Gate(monkeypatch)
    try:
        task = asyncio.create_task(npu.move(moves([(0, i * 100, 32768 + i * 100, 100) for i in range(20)])))
        await asyncio.to_thread(gate.entered.wait, 60)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()  # an impatient caller changes nothing
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        gate.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert gate.pieces == 1
    finally:
        npu.close()
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_moves_that_no_thread_was_had_for_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their job has failed, and its blocks are another's when the next moves come."""

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory = HostMemory("ram0", capacity=8192)
    bytes_there = memory.regions[0].array
    bytes_there[:64], bytes_there[64:] = 7, 0
    with monkeypatch.context() as full, pytest.raises(RuntimeError, match="new thread"):
        full.setattr(threading.Thread, "start", none)
        await memory.move(moves([(0, 0, 1024, 64)]))
    await memory.move(moves([(0, 0, 2048, 64)]))
    assert bytes_there[2048] == 7
    assert bytes_there[1024] == 0
    memory.close()


async def test_closing_ends_a_move_with_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    npu, gate = EmulatedNpu("npu0", capacity=4 * 64 * 1024, channels=4), Gate(monkeypatch)
    task = asyncio.create_task(npu.move(moves([(0, i * 100, 32768 + i * 100, 100) for i in range(20)])))
    await asyncio.to_thread(gate.entered.wait, 60)
    npu._closing.set()
    gate.go.set()
    npu.close()
    with pytest.raises(Aborted):
        await task
    assert gate.pieces == 1
    with pytest.raises(InvalidArgument, match="closed"):
        await npu.move(moves([(0, 0, 64, 1)]))
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_the_loop_runs_while_bytes_move(monkeypatch: pytest.MonkeyPatch) -> None:
    npu, gate = EmulatedNpu("npu0", capacity=MIB), Gate(monkeypatch)
    try:
        task = asyncio.create_task(npu.move(moves([(0, 0, 64, 1)])))
        await asyncio.to_thread(gate.entered.wait, 60)
        assert not task.done()  # and yet this line runs
        gate.go.set()
        await task
    finally:
        npu.close()
        await asyncio.get_running_loop().shutdown_default_executor()


def test_a_machine_without_the_core_still_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    copying._native.cache_clear()
    monkeypatch.setitem(sys.modules, "hawk.retile.native", None)
    try:
        assert copying._native() is None
    finally:
        copying._native.cache_clear()
