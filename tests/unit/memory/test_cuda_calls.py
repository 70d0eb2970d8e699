"""Calls of the driver that are made in one go: what a library is given, with the C core and without it."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hawk.memory import cuda_batch, cuda_lib
from hawk.memory.cuda_driver import CudaFault
from hawk.retile import native

LIBRARY = """
#include <stdint.h>
#include <unistd.h>
#include <string.h>

/* What was asked for, a row of words each: which function, then its arguments. */
uint64_t said[64][12];
int count, later, refuse, door = -1;

static int note(uint64_t which, const uint64_t *given, int n)
{
    said[count][0] = which;
    memcpy(&said[count++][1], given, n * 8);
    return 0;
}

int cuInit(unsigned flags) { return flags; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    uint64_t g[] = {(uint64_t)stream, (uint64_t)event, flags};
    return note(1, g, 3);
}
int cuMemcpyDtoHAsync_v2(void *host, uint64_t from, size_t n, void *stream)
{
    uint64_t g[] = {(uint64_t)host, from, n, (uint64_t)stream};
    return note(2, g, 4);
}
int cuMemsetD8Async(uint64_t at, unsigned char value, size_t n, void *stream)
{
    uint64_t g[] = {at, value, n, (uint64_t)stream};
    note(3, g, 4);
    return refuse;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **arguments, void **extra)
{
    uint64_t g[] = {(uint64_t)f, gx, gy, gz, bx, by, bz, shared, (uint64_t)stream, *(uint64_t *)arguments[0],
                    (uint64_t)extra};
    return note(4, g, 11);
}
int cuEventRecord(void *event, void *stream)
{
    uint64_t g[] = {(uint64_t)event, (uint64_t)stream};
    char c;
    if (door >= 0 && read(door, &c, 1) != 1)
        return 1;
    return note(5, g, 2);
}
int cuEventQuery(void *event)
{
    uint64_t g[] = {(uint64_t)event};
    if (later-- > 0)
        return 600;
    return note(6, g, 1);
}
int cuEventSynchronize(void *event)
{
    uint64_t g[] = {(uint64_t)event};
    return note(7, g, 1);
}
int cuGetErrorName(int code, const char **text)
{
    *text = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "other";
    return 0;
}
"""

CALLS = [
    ("wait", 0x1000, 0x2000),
    ("fill", 1 << 40, 7, 1 << 33, 0x1000),
    ("launch", 0x3000, 40_000, 64, struct.pack("<QI", 1 << 50, 3), 0x1000, 60_000),
    ("to_host", 1 << 41, 1 << 42, 4096, 0x1000),
    ("record", 0x2000, 0x1000),
    ("outwait", 0x2000),
]
SAID = [
    [1, 0x1000, 0x2000, 0],
    [3, 1 << 40, 7, 1 << 33, 0x1000],
    [4, 0x3000, 40_000, 1, 1, 64, 1, 1, 60_000, 0x1000, 1 << 50, 0],
    [2, 1 << 41, 1 << 42, 4096, 0x1000],
    [5, 0x2000, 0x1000],
    [6, 0x2000],
    [7, 0x2000],
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(LIBRARY)
    at = folder / "driver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", at, folder / "driver.c"], check=True)
    return at


@pytest.fixture(params=["c", "python"])
def lib(request: pytest.FixtureRequest, made: Path, monkeypatch: pytest.MonkeyPatch) -> cuda_lib.LibCuda:
    load = ctypes.CDLL
    monkeypatch.setattr(cuda_lib.ctypes, "CDLL", lambda name: load(str(made)))
    if request.param == "python":
        monkeypatch.setattr(native, "caller", lambda: None)
    elif native.caller() is None:
        pytest.skip("there is no C core")
    found = cuda_lib.LibCuda()
    for name in ("count", "later", "refuse"):
        ctypes.c_int.in_dll(found._lib, name).value = 0
    return found


def said(lib: cuda_lib.LibCuda) -> list[list[int]]:
    count = ctypes.c_int.in_dll(lib._lib, "count").value
    rows = np.ctypeslib.as_array((ctypes.c_uint64 * 12 * 64).in_dll(lib._lib, "said"))[:count].tolist()
    return [row[: len(want)] for row, want in zip(rows, SAID, strict=False)]


def test_the_library_is_given_what_was_listed(lib: cuda_lib.LibCuda) -> None:
    lib.run(CALLS)
    assert said(lib) == SAID


def test_the_first_that_fails_is_the_last_and_is_named(lib: cuda_lib.LibCuda) -> None:
    ctypes.c_int.in_dll(lib._lib, "refuse").value = 700
    with pytest.raises(CudaFault, match=r"cuMemsetD8Async: CUDA_ERROR_ILLEGAL_ADDRESS \(700\)") as caught:
        lib.run(CALLS)
    assert caught.value.sticky
    assert said(lib) == SAID[:2]


def test_an_event_is_asked_for_until_it_is_reached(lib: cuda_lib.LibCuda) -> None:
    ctypes.c_int.in_dll(lib._lib, "later").value = 3
    lib.outwait(0x2000)
    assert ctypes.c_int.in_dll(lib._lib, "count").value == 2
    assert ctypes.c_int.in_dll(lib._lib, "later").value < 0


def test_an_event_that_is_late_is_slept_for(lib: cuda_lib.LibCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_batch, "_NAPS", 200_000)
    ctypes.c_int.in_dll(lib._lib, "later").value = 1 << 30
    lib.outwait(0x2000)
    assert ctypes.c_int.in_dll(lib._lib, "count").value == 1, "that it was reached was never said"


def test_pauses_grow_with_the_wait(lib: cuda_lib.LibCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_SPIN", 0), ("_NAP", 1000), ("_NAPS", 20_000_000), ("_PART", 2)):
        monkeypatch.setattr(cuda_batch, name, value)
    later = ctypes.c_int.in_dll(lib._lib, "later")
    later.value = 1 << 30
    lib.outwait(0x2000)
    # Half of the wait again each time: 16 from a pause of the system's least to the end, and not some 350.
    assert (1 << 30) - later.value < 60


def test_pauses_are_no_shorter_than_said_and_no_longer_than_their_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    naps, now = [], 0

    def slept(seconds: float) -> None:
        nonlocal now
        naps.append(round(seconds * 1e9))
        now += naps[-1]

    monkeypatch.setattr(cuda_batch.time, "sleep", slept)
    monkeypatch.setattr(cuda_batch.time, "monotonic_ns", lambda: now)
    cuda_batch.until(lambda: False, 0, 50, 100_000, 4)
    before = np.cumsum([0, *naps[:-1]])
    assert naps == [max(50, b // 4) for b in before.tolist()]
    assert now >= 100_000 > before[-1]


WAITS = """
import ctypes, os, sys, threading
from hawk.memory import cuda_lib
from hawk.retile import native
load, near, far = ctypes.CDLL, *os.pipe()
cuda_lib.ctypes.CDLL = lambda name: load(sys.argv[1])
if sys.argv[2] == "python":
    native.caller = lambda: None
lib = cuda_lib.LibCuda()
ctypes.c_int.in_dll(lib._lib, "door").value = near
begun = threading.Event()
thread = threading.Thread(target=lambda: (begun.set(), getattr(lib, sys.argv[3])(*eval(sys.argv[4]))))
thread.start()
begun.wait()
os.write(far, b"x")  # never, if the call kept the lock
thread.join()
print("done")
"""


@pytest.mark.parametrize(
    ("core", "name", "given"), [("python", "record", "(1, 2)"), ("c", "run", "([('record', 1, 2)],)")]
)
def test_others_run_while_the_driver_waits(core: str, name: str, given: str, made: Path) -> None:
    """A launch waits where a stream is full, maybe for a callback that wants Python's lock."""
    command = [sys.executable, "-c", WAITS, str(made), core, name, given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == "done\n", done.stderr[-1000:]


def test_a_function_that_the_library_has_not_is_a_fault(lib: cuda_lib.LibCuda) -> None:
    with pytest.raises(CudaFault, match="cuMemcpyAsync"):
        lib.run([("across", 1, 2, 3, 4)])
