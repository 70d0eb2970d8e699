"""One writer for each byte of a chip, over all processes of a machine."""

import asyncio
import fcntl
import os
import struct
import sys
from pathlib import Path

import pytest

from hawk.errors import InvalidArgument
from hawk.memory.tenstorrent import Reservation, Tenstorrent, TenstorrentConfig, kmd
from hawk.memory.tenstorrent.claim import Claim
from tests.child import child
from tests.fake_tenstorrent import MIB, fake_umd

BASE = 0x100080

OTHER = """
import sys
from hawk.memory.tenstorrent import Reservation
from hawk.memory.tenstorrent.claim import Claim
held = Claim(sys.argv[1], Reservation((0,), int(sys.argv[2]), int(sys.argv[3]), 8), "npu0")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device file that is a file; chips are tt-umd's stand-in."""
    monkeypatch.setattr(kmd, "DEVICES", str(tmp_path))
    monkeypatch.setitem(sys.modules, "tt_umd", fake_umd(channel_bytes=16 * MIB))
    path = tmp_path / "0"
    path.touch()
    return path


def over(name: str, address: int, nbytes: int = MIB) -> Tenstorrent:
    return Tenstorrent.from_config(name, TenstorrentConfig(address, nbytes, 8, way="host"))


async def test_what_another_process_has_is_refused_by_name_until_it_ends(device: Path) -> None:
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    async with child(sys.executable, "-c", OTHER, device, str(BASE), str(MIB), **pipes) as other:
        assert other.stdout is not None
        assert await asyncio.wait_for(other.stdout.readline(), 60) == b"held\n"
        for address, nbytes in ((BASE, MIB), (BASE + MIB - 64, MIB), (BASE - 64, 128)):
            with pytest.raises(InvalidArgument) as refused:
                over("npu1", address, nbytes)
            said = str(refused.value)
            assert refused.value.field == "memory.npu1.address"
            assert f"{BASE:#x} to {BASE + MIB:#x}, which process {other.pid} (" in said
        over("npu1", BASE + MIB).close()  # beside it
        other.kill()
        await other.wait()
        over("npu1", BASE).close()


def test_what_is_closed_is_free_and_what_was_refused_holds_nothing(device: Path) -> None:
    first = over("npu0", BASE)
    here = Claim(str(device), Reservation((0,), BASE + MIB, MIB, 8), "npu1")
    with pytest.raises(InvalidArgument, match=rf"process {os.getpid()} "):
        over("npu2", BASE + 2 * MIB - 64)
    first.close()
    over("npu2", BASE).close()
    here.close()
    here.close()
    over("npu2", BASE + 2 * MIB - 64).close()


def test_a_child_that_is_forked_holds_nothing_back(device: Path) -> None:
    ended, keeps = os.pipe()
    first = over("npu0", BASE)
    child = os.fork()
    if child == 0:
        os.close(keeps)
        os.read(ended, 1)  # for as long as the test runs
        os._exit(0)
    try:
        with pytest.raises(InvalidArgument, match=f"which process {os.getpid()} "):
            Claim(str(device), Reservation((0,), BASE, MIB, 8), "npu1")
        first.close()
        over("npu1", BASE).close()
    finally:
        os.close(keeps)
        os.close(ended)
        os.waitpid(child, 0)


def test_whoever_has_locked_all_of_the_file_is_named(device: Path) -> None:
    with device.open("r+b") as file:
        everything = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, everything)
        with pytest.raises(InvalidArgument, match=f"none of 0x0 to the end, which process {os.getpid()} "):
            over("npu0", BASE)
    over("npu0", BASE).close()


def test_without_a_device_file_there_is_nothing_to_claim(device: Path) -> None:
    device.unlink()
    over("npu0", BASE).close()
