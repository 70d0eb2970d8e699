"""The pure parts of the transports: cutting, joining, scattering, copying, and the test device."""

import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.errors import InvalidArgument
from hawk.memory.region import ByteRanges, Region, Segments
from hawk.transports import _copy, _pieces
from hawk.transports._vectors import Vectors
from hawk.transports.testing import CANARY, HoldingMemory, Targets, pattern, scatter

Row = tuple[int, int, int, int]


def byte_map(rows: Segments | _pieces.Piece) -> list[tuple[int, int, int]]:
    """(region, local, remote) of every byte in order."""
    columns = (rows.region, rows.local, rows.remote, rows.nbytes)
    return [
        (r, lo + i, re + i)
        for r, lo, re, n in zip(*(c.tolist() for c in columns), strict=True)
        for i in range(n)
    ]


@st.composite
def batches(draw: st.DrawFn) -> Segments:
    rows: list[Row] = []
    remote, places = 0, [0, 0]
    for _ in range(draw(st.integers(1, 30))):
        region = draw(st.integers(0, 1))
        remote += draw(st.sampled_from([0, 0, 1, 5]))
        places[region] += draw(st.sampled_from([0, 0, 3]))
        nbytes = draw(st.integers(1, 40))
        rows.append((region, places[region], remote, nbytes))
        remote += nbytes
        places[region] += nbytes
    return Segments.of(rows)


@settings(deadline=None)
@given(batches(), st.integers(1, 100), st.integers(1, 10))
def test_pieces_are_the_same_bytes_in_bounds(segments: Segments, limit: int, max_rows: int) -> None:
    pieces = list(_pieces.cut(segments, limit, max_rows))
    assert [b for p in pieces for b in byte_map(p)] == byte_map(segments)
    for piece in pieces:
        assert piece.total == int(piece.nbytes.sum()) <= limit
        assert 0 < len(piece.nbytes) <= max_rows
        assert int(piece.nbytes.min()) > 0


@settings(deadline=None)
@given(batches())
def test_joining_keeps_the_bytes_and_leaves_no_neighbours(segments: Segments) -> None:
    (whole,) = _pieces.cut(segments, 1 << 40, 1 << 30)
    joined = _pieces.join(whole)
    assert byte_map(joined) == byte_map(segments)
    again = _pieces.join(joined)
    assert len(again.nbytes) == len(joined.nbytes)
    offset, length = joined.ranges()
    assert [o + i for o, n in zip(offset.tolist(), length.tolist(), strict=True) for i in range(n)] == [
        r for _, _, r in byte_map(segments)
    ]
    assert (offset[:-1] + length[:-1] != offset[1:]).all()
    assert joined.low == min(r for _, _, r in byte_map(segments))
    assert joined.high == max(r for _, _, r in byte_map(segments)) + 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 20000), st.integers(1, 20000))
def test_vectors_scatter_and_gather(lengths: list[int], send_limit: int, receive_limit: int) -> None:
    segments, sizes = scatter(lengths, 3, seed=len(lengths))
    source = pattern(int((segments.remote + segments.nbytes).max()))
    targets = Targets(sizes)
    bases = _pieces.bases(targets.regions)
    gather = Vectors(segments.remote + source.ctypes.data, segments.nbytes)
    spread = Vectors(bases[segments.region] + segments.local, segments.nbytes)
    here, there = socket.socketpair()
    with here, there:

        def send() -> None:
            while gather.done < gather.total:
                gather.send(here, send_limit)

        thread = threading.Thread(target=send)
        thread.start()
        while spread.done < spread.total:
            spread.receive(there, receive_limit)
        thread.join()
    targets.check(segments, source)


def test_vectors_report_a_far_side_that_ends_early() -> None:
    target = np.zeros(100, np.uint8)
    vectors = Vectors(np.asarray([target.ctypes.data]), np.asarray([100]))
    here, there = socket.socketpair()
    with there:
        with here:
            here.send(b"abc")
        vectors.receive(there, 100)
        assert vectors.done == 3
        with pytest.raises(ConnectionResetError):
            vectors.receive(there, 100)
    with pytest.raises(OSError, match="Bad file descriptor"):
        vectors.receive(there, 100)
    assert bytes(target[:4]) == b"abc\x00"


def test_regions_that_cannot_be_written_are_named() -> None:
    good = Region("good", np.zeros(8, np.uint8))
    fixed = np.zeros(8, np.uint8)
    fixed.flags.writeable = False
    for bad in (fixed, np.zeros(16, np.uint8)[::2], np.zeros(8, np.int8)):
        with pytest.raises(InvalidArgument, match=r"regions\[1\]"):
            _pieces.bases([good, Region("bad", bad)])


@pytest.mark.parametrize("copy", [_copy.plain, _copy.kernel, _copy.best()], ids=["plain", "kernel", "best"])
def test_copies(copy: _copy.Copy) -> None:
    lengths = np.random.default_rng(0).integers(1, 9000, 2500).tolist()
    segments, sizes = scatter(lengths, 4)
    source = pattern(int((segments.remote + segments.nbytes).max()))
    targets = Targets(sizes)
    bases = _pieces.bases(targets.regions)
    copy(bases, segments.region, segments.local, source.ctypes.data, segments.remote, segments.nbytes)
    targets.check(segments, source)


def test_where_the_kernel_may_not_copy_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for refusing in (None, lambda *_: -1, lambda *_: 0):
        monkeypatch.setattr(_copy, "_process_vm_readv", lambda refusing=refusing: refusing)
        test_copies(_copy.kernel)


async def test_a_holding_memory_shows_nothing_before_the_flush() -> None:
    memory = HoldingMemory(3, 4096)
    memory.regions[1].array[100:200] = 7
    assert all((channel == CANARY).all() for channel in memory.visible)
    ranges = ByteRanges(np.asarray([1], np.int32), np.asarray([150]), np.asarray([20]))
    await memory.flush(ranges)
    assert (memory.visible[1][150:170] == 7).all()
    assert (np.delete(memory.visible[1], np.s_[150:170]) == CANARY).all()
    assert memory.flushes == 1
    memory.close()


def test_importing_the_registry_loads_no_transport() -> None:
    code = "import sys, hawk.transports.registry; print([m for m in sys.modules if m.startswith('hawk.transports.')])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    listed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert "'hawk.transports.registry'" in listed.stdout
    assert "tcp" not in listed.stdout
    assert "shm" not in listed.stdout
