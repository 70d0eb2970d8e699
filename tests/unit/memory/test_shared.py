"""Shared buffers: what is refused, what is left open, what another process sees."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from hawk.errors import BadFrame, HawkMemoryError, InvalidArgument, OutOfMemory, RegistrationFailed
from hawk.memory import shared
from hawk.memory.available import available_memory
from hawk.memory.mapping import find
from hawk.memory.shared import alloc, map_fd, recv_fds, send_fds
from tests.descriptors import fds

PAGE = mmap.PAGESIZE


def maps() -> int:
    with open("/proc/self/maps") as f:
        return sum("memfd:" in line for line in f)


@pytest.fixture(autouse=True)
def nothing_left_open() -> Iterator[None]:
    gc.collect()
    before = fds(), maps()
    yield
    gc.collect()
    assert (fds(), maps()) == before


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with a, b:
        yield a, b


@pytest.mark.parametrize("nbytes", [1, PAGE, 3 * PAGE + 17])
def test_alloc_gives_sealed_zeroed_pages_that_are_there(nbytes: int) -> None:
    with alloc(nbytes, name="cache") as b:
        assert b.array.dtype == np.uint8
        assert b.array.shape == (nbytes,)
        assert b.array.flags.writeable
        assert not b.array.any()
        assert os.fstat(b.fd).st_size == nbytes
        assert os.fstat(b.fd).st_blocks * 512 >= nbytes
        assert not os.get_inheritable(b.fd)
        for size in (0, nbytes + PAGE):
            with pytest.raises(PermissionError):
                os.ftruncate(b.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(b.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        b.array[:] = 7
        assert os.pread(b.fd, nbytes, 0) == b"\x07" * nbytes


def test_huge_pages_are_only_a_hint() -> None:
    with alloc(4 << 20, huge_pages=True) as b:
        b.array[:] = 1
        assert int(b.array.sum()) == 4 << 20


def test_kernel_without_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MADV_POPULATE_WRITE", 9999)
    with alloc(3 * PAGE + 1) as b, map_fd(b.fd, b.nbytes) as m:
        b.array[-1] = 5
        assert m.array[-1] == 5


def test_views_outlive_the_buffer() -> None:
    before, mapped = fds(), maps()
    b = alloc(2 * PAGE)
    view = b.array[PAGE:]
    region = b.region("r")
    b.close()
    b.close()
    assert fds() == before  # the descriptor is gone at once
    view[:] = 9
    assert region.array[PAGE] == 9
    assert maps() == mapped + 1  # the pages are not
    del region
    assert view[0] == 9
    del view
    gc.collect()
    assert maps() == mapped
    with pytest.raises(InvalidArgument, match="closed"):
        _ = b.array
    with pytest.raises(InvalidArgument, match="closed"):
        _ = b.fd


def test_a_forgotten_buffer_closes_itself() -> None:
    before = fds()
    alloc(PAGE)
    gc.collect()
    assert fds() == before


def found(address: int, nbytes: int) -> tuple[int, int] | None:
    """Descriptor and offset of what is found there."""
    got = find(address, nbytes)
    return None if got is None else (got[0].fd, got[1])


def test_any_view_leads_back_to_its_buffer() -> None:
    with alloc(4 * PAGE) as a, alloc(PAGE) as b, map_fd(a.fd, 2 * PAGE) as m:
        view = a.array[PAGE:].view(np.float32).reshape(2, -1)
        assert found(view.ctypes.data, view.nbytes) == (a.fd, PAGE)
        assert found(b.array.ctypes.data, PAGE) == (b.fd, 0)
        assert found(m.array.ctypes.data + 5, 10) == (m.fd, 5)
        end = b.array.ctypes.data + PAGE
        assert found(end - 1, 2) is None
        assert found(b.array.ctypes.data - 1, 1) != (b.fd, -1)
        ordinary = np.zeros(PAGE, np.uint8)
        assert found(ordinary.ctypes.data, PAGE) is None
        kept = b.array
        b.close()
        assert found(kept.ctypes.data, PAGE) is None  # no descriptor to give any more


def test_an_array_whose_buffer_was_forgotten_leads_back_too() -> None:
    before, mapped = fds(), maps()
    kept = alloc(2 * PAGE).array[PAGE:]
    gc.collect()
    got = find(kept.ctypes.data, PAGE)
    assert got is not None
    with map_fd(got[0].fd, 2 * PAGE) as other:
        kept[:] = 7
        assert other.array[PAGE:].tolist() == [7] * PAGE
    assert fds() == before + 1
    del kept, got
    gc.collect()
    assert fds() == before
    assert maps() == mapped


@pytest.mark.parametrize("nbytes", [0, -1, True, 1.5, "1", None])
def test_bad_sizes(nbytes: object) -> None:
    with pytest.raises(InvalidArgument):
        alloc(nbytes)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        map_fd(0, nbytes)  # type: ignore[arg-type]


def test_more_than_there_is_fails_before_anything_is_taken() -> None:
    with pytest.raises(OutOfMemory) as e:
        alloc(available_memory() + (64 << 20), name="cache")
    assert isinstance(e.value, MemoryError)
    assert e.value.field == "cache"
    assert int(e.value.facts["asked"]) > int(e.value.facts["available"])
    assert e.value.hint


def test_headroom_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "available_memory", lambda: (100 << 20) + PAGE)
    with pytest.raises(OutOfMemory):
        alloc((100 << 20) - (16 << 20))
    with alloc(PAGE):
        pass


def test_the_kernels_no_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # The check is passed and the system still refuses: a file size limit stands for a lack of pages.
    monkeypatch.setattr(shared, "available_memory", lambda: 1 << 62)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OutOfMemory):
            alloc(2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_descriptors_left(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    available = available_memory()
    monkeypatch.setattr(shared, "available_memory", lambda: available)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(HawkMemoryError) as e:
            alloc(PAGE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(e.value, OutOfMemory)


# -- mapping what a peer sent ------------------------------------------------------------------------------


def memfd(nbytes: int, *, seals: int = 0, fill: bool = True) -> int:
    fd = os.memfd_create("peer", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    if fill:
        os.posix_fallocate(fd, 0, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def refused(fd: int, nbytes: int, match: str, *, writable: bool = True) -> None:
    try:
        before = fds()
        with pytest.raises(RegistrationFailed, match=match) as e:
            map_fd(fd, nbytes, writable=writable, name="cache-7")
        assert e.value.field == "cache-7"
        assert fds() == before
        os.fstat(fd)  # still the caller's
    finally:
        os.close(fd)


def test_too_small() -> None:
    refused(memfd(PAGE, seals=fcntl.F_SEAL_SHRINK), PAGE + 1, "too small")


def test_can_shrink() -> None:
    refused(memfd(PAGE), PAGE, "can be shrunk")
    refused(memfd(PAGE, seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), PAGE, "can be shrunk")


def test_never_allocated() -> None:
    refused(memfd(64 * PAGE, seals=fcntl.F_SEAL_SHRINK, fill=False), 64 * PAGE, "never allocated")


def test_punched() -> None:
    fd = memfd(64 * PAGE, seals=fcntl.F_SEAL_SHRINK)
    keep_size, punch_hole = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    assert libc.fallocate(fd, keep_size | punch_hole, 0, 16 * PAGE) == 0
    refused(fd, 64 * PAGE, "never allocated")


def test_no_memfd() -> None:
    with tempfile.TemporaryFile() as f:
        f.truncate(PAGE)
        refused(os.dup(f.fileno()), PAGE, "memfd|shrunk")
    r, w = os.pipe()
    os.close(w)
    refused(r, PAGE, "no memfd")


@pytest.mark.parametrize("fd", [-1, 1 << 20, 1 << 40, "x"])
def test_no_descriptor(fd: object) -> None:
    with pytest.raises(RegistrationFailed, match="not open"):
        map_fd(fd, PAGE)  # type: ignore[arg-type]


def test_sealed_against_writing_maps_for_reading_only() -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE
    refused(memfd(PAGE, seals=seals), PAGE, "cannot be mapped")
    fd = memfd(PAGE, seals=seals)
    with map_fd(fd, PAGE, writable=False) as m:
        assert not m.array.flags.writeable
    os.close(fd)


def test_read_only_descriptor() -> None:
    with alloc(PAGE) as b:
        refused(os.open(f"/proc/self/fd/{b.fd}", os.O_RDONLY), PAGE, "does not allow writing")
        fd = os.open(f"/proc/self/fd/{b.fd}", os.O_RDONLY)
        with map_fd(fd, PAGE, writable=False) as m:
            b.array[3] = 4
            assert m.array[3] == 4
            with pytest.raises(ValueError, match="read-only"):
                m.array[0] = 1
            with pytest.raises(ValueError, match="WRITEABLE"):
                m.array.flags.writeable = True
        os.close(fd)


# -- descriptors over a socket -----------------------------------------------------------------------------

CHILD = """
import socket, sys
from hawk.memory.shared import map_fd, recv_fds, send_fds, alloc
sock = socket.socket(fileno=int(sys.argv[1]))
payload, (fd,) = recv_fds(sock, 64, 1)
with map_fd(fd, int(payload)) as m:
    assert m.array[0] == 42, m.array[0]
    m.array[-1] = 43
mine = alloc(8192)
mine.array[:] = 44
send_fds(sock, b"8192", [mine.fd])
assert sock.recv(1) == b"!"
"""


def test_another_process_sees_the_same_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env=env,
    )
    theirs.close()
    ours.settimeout(60)
    try:
        with alloc(3 * PAGE) as b:
            b.array[0] = 42
            send_fds(ours, str(b.nbytes).encode(), [b.fd])
            payload, received = recv_fds(ours, 64, 4)
            assert b.array[-1] == 43
        assert not os.get_inheritable(received[0])
        with map_fd(received[0], int(payload)) as m:
            os.close(received[0])
            ours.send(b"!")
            assert child.wait(60) == 0
            assert (m.array == 44).all()  # the maker is gone, its pages are not
    finally:
        child.kill()
        child.wait()


def test_too_many_descriptors_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    with alloc(PAGE) as b:
        before = fds()
        socket.send_fds(theirs, [b"x"], [b.fd] * 5)
        with pytest.raises(BadFrame, match="too many descriptors"):
            recv_fds(ours, 10, 2)
        assert fds() == before


def test_too_many_bytes(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    with alloc(PAGE) as b:
        before = fds()
        send_fds(theirs, b"x" * 100, [b.fd])
        with pytest.raises(BadFrame, match="too many bytes"):
            recv_fds(ours, 10, 2)
        assert fds() == before


def test_bounds_of_sending(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    with pytest.raises(InvalidArgument):
        send_fds(ours, b"", [0])
    with pytest.raises(InvalidArgument):
        send_fds(ours, b"x", [0] * (shared.MAX_FDS + 1))
    send_fds(ours, b"x", [])
    assert recv_fds(theirs, 10) == (b"x", [])
    ours.close()
    assert recv_fds(theirs, 10) == (b"", [])


def test_a_stream_takes_the_rest_of_a_long_payload() -> None:
    a, b = socket.socketpair()
    with a, b, alloc(PAGE) as m:
        send_fds(a, b"y" * 50_000, [m.fd])
        a.close()
        got, received = recv_fds(b, 1 << 16, 1)
        while chunk := b.recv(1 << 16):
            got += chunk
        assert got == b"y" * 50_000
        assert len(received) == 1
        os.close(received[0])
