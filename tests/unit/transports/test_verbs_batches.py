"""Work requests built from segments: every byte once, in the interface's own layout, within every limit."""

import ctypes

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.memory.region import Segments
from hawk.transports import _pieces
from hawk.transports.verbs import _abi
from hawk.transports.verbs._abi import Places, Shape


def followed(batch: _abi.Batch) -> list[tuple[np.void, list[tuple[int, int, int]]]]:
    """The requests and pieces of a batch, read as hardware reads them: by address."""
    found = []
    at = int(batch.wr.ctypes.data)
    while at:
        wr = np.frombuffer(ctypes.string_at(at, _abi.SEND_WR.itemsize), _abi.SEND_WR)[0]
        raw = ctypes.string_at(int(wr["sg_list"]), int(wr["num_sge"]) * _abi.SGE.itemsize)
        found.append((wr, [tuple(map(int, row)) for row in np.frombuffer(raw, _abi.SGE)]))
        at = int(wr["next"])
    return found


def test_the_layout_is_that_of_the_header() -> None:
    """Offsets of `struct ibv_send_wr` and `struct ibv_sge` in infiniband/verbs.h, by a C declaration of our own."""

    class Sge(ctypes.Structure):
        _fields_ = [("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32)]

    class Atomic(ctypes.Structure):
        _fields_ = [
            ("remote_addr", ctypes.c_uint64),
            ("compare_add", ctypes.c_uint64),
            ("swap", ctypes.c_uint64),
            ("rkey", ctypes.c_uint32),
        ]

    class Rdma(ctypes.Structure):
        _fields_ = [("remote_addr", ctypes.c_uint64), ("rkey", ctypes.c_uint32)]

    class Wr(ctypes.Union):
        _fields_ = [("rdma", Rdma), ("atomic", Atomic)]

    class BindInfo(ctypes.Structure):
        _fields_ = [
            ("mr", ctypes.c_void_p),
            ("addr", ctypes.c_uint64),
            ("length", ctypes.c_uint64),
            ("mw_access_flags", ctypes.c_uint),
        ]

    class BindMw(ctypes.Structure):
        _fields_ = [("mw", ctypes.c_void_p), ("rkey", ctypes.c_uint32), ("bind_info", BindInfo)]

    class SendWr(ctypes.Structure):
        _fields_ = [
            ("wr_id", ctypes.c_uint64),
            ("next", ctypes.c_void_p),
            ("sg_list", ctypes.c_void_p),
            ("num_sge", ctypes.c_int),
            ("opcode", ctypes.c_int),
            ("send_flags", ctypes.c_uint),
            ("imm_data", ctypes.c_uint32),
            ("wr", Wr),
            ("remote_srqn", ctypes.c_uint32),
            ("bind_mw", BindMw),
        ]

    assert ctypes.sizeof(SendWr) == _abi.SEND_WR.itemsize
    assert ctypes.sizeof(Sge) == _abi.SGE.itemsize
    fields = _abi.SEND_WR.fields
    assert fields is not None
    for ours, theirs in {"flags": "send_flags", "extra": "imm_data"}.items():
        assert fields[ours][1] == getattr(SendWr, theirs).offset
    for name in ("wr_id", "next", "sg_list", "num_sge", "opcode"):
        assert fields[name][1] == getattr(SendWr, name).offset
    for name in ("remote_addr", "rkey"):
        assert fields[name][1] == SendWr.wr.offset + getattr(Rdma, name).offset


@st.composite
def cases(draw: st.DrawFn) -> tuple[Segments, list[int], Places, Shape]:
    sizes = draw(st.lists(st.integers(1, 400), min_size=1, max_size=4))
    begin = np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(np.int64)
    starts: list[int] = []
    addresses: list[int] = []
    for i, size in enumerate(sizes):
        slice_ = draw(st.integers(1, 400))
        for at in range(0, size, slice_):
            starts.append(int(begin[i]) + at)
            # Registrations of one region need not follow each other in the device's eyes.
            addresses.append(10_000 * len(starts))
    rows, remote = [], draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 30))):
        region = draw(st.integers(0, len(sizes) - 1))
        local = draw(st.integers(0, sizes[region] - 1))
        nbytes = draw(st.integers(1, sizes[region] - local))
        rows.append((region, local, remote, nbytes))
        remote += nbytes + draw(st.sampled_from([0, 0, 0, 1, 7]))
    step = draw(st.integers(1, 500))
    windows = np.arange(0, remote, step, dtype=np.int64)
    shape = Shape(
        max_sge=draw(st.integers(1, 5)),
        message=draw(st.integers(2, 600)),
        batch_wrs=draw(st.integers(1, 6)),
        batch_bytes=draw(st.integers(1, 900)),
        opcode=draw(st.sampled_from([_abi.READ, _abi.WRITE])),
    )
    bases = np.asarray([draw(st.integers(10_000, 1_000_000)) for _ in windows], np.int64)
    places = Places(begin, np.asarray(starts, np.int64), np.asarray(addresses, np.int64), windows, bases)
    return Segments.of(rows), sizes, places, shape


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_byte_once_and_within_the_limits(case: tuple[Segments, list[int], Places, Shape]) -> None:
    segments, _, places, shape = case
    got: list[tuple[int, int]] = []
    total = 0
    for piece in _pieces.cut(segments, 1 << 40, 7):
        for batch in _abi.batches(_pieces.join(piece), places, shape):
            assert 0 < len(batch) <= shape.batch_wrs
            keys = np.arange(100, 100 + len(places.start), dtype=np.uint32)
            remote_keys = np.arange(500, 500 + len(places.windows), dtype=np.uint32)
            batch.address(keys, remote_keys, 40)
            requests = followed(batch)
            assert len(requests) == len(batch)
            assert [int(wr["wr_id"]) for wr, _ in requests] == list(range(40, 40 + len(requests)))
            assert [int(wr["flags"]) for wr, _ in requests] == [0] * (len(requests) - 1) + [_abi.SIGNALED]
            nbytes = 0
            for wr, pieces in requests:
                assert int(wr["opcode"]) == shape.opcode
                assert 0 < len(pieces) <= shape.max_sge
                length = sum(n for _, n, _ in pieces)
                assert length <= shape.message
                nbytes += length
                window = int(wr["rkey"]) - 500
                remote = int(wr["remote_addr"]) - int(places.remote[window])
                stop = places.windows[window + 1] if window + 1 < len(places.windows) else 1 << 40
                assert places.windows[window] <= remote
                assert remote + length <= stop
                for address, n, key in pieces:
                    mr = key - 100
                    line = int(places.start[mr]) + address - int(places.address[mr])
                    stop = places.start[mr + 1] if mr + 1 < len(places.start) else 1 << 40
                    assert places.start[mr] <= line
                    assert line + n <= stop
                    got += zip(range(line, line + n), range(remote, remote + n), strict=True)
                    remote += n
            assert nbytes == batch.nbytes
            total += nbytes
    wanted = []
    for region, local, remote, n in zip(
        *(c.tolist() for c in (segments.region, segments.local, segments.remote, segments.nbytes)),
        strict=True,
    ):
        line = int(places.begin[region]) + local
        wanted += zip(range(line, line + n), range(remote, remote + n), strict=True)
    assert total == segments.total
    assert got == wanted


def test_neighbours_share_a_request() -> None:
    """What follows each other in the arena is one request up to the limits, wherever it goes."""
    n, page = 64, 2048
    rows = [(i % 2, (n - i) * page, i * page, page) for i in range(n)]
    places = Places(
        np.asarray([0, 1 << 20]),
        np.asarray([0, 1 << 20]),
        np.asarray([1 << 30, 1 << 31]),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
    )
    (piece,) = _pieces.cut(Segments.of(rows), 1 << 40, 1 << 20)
    batches = list(_abi.batches(piece, places, Shape(16, 1 << 20, 64, 1 << 30)))
    assert [len(b) for b in batches] == [n // 16]
    batches = list(_abi.batches(piece, places, Shape(30, 1 << 20, 64, 1 << 30)))
    assert sum(len(b) for b in batches) == 3
