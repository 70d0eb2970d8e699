"""The module is loaded, unloaded and loaded again; what it says of itself; who may own what."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import pytest

from hawk.memory import npu_abi as abi
from hawk.memory.base import MoveSupport
from hawk.memory.npu_device import NpuDevice
from tests.lab.guest import checkers, npu
from tests.lab.guest.npu import CHANNEL, PAGE, SMALL, Device, clean, emulated, fails

__all__ = ["clean", "emulated"]


def test_which_checkers_watch(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        for name, there in checkers.present().items():
            print(f"\n{name}: {'present' if there else 'not checked'}", end="")


@pytest.mark.parametrize(
    "parameters", [(), SMALL, ("emulated=2", "channels=64", "channel_kib=4", "adopt=1"), ("channels=64",)]
)
def test_loading_and_unloading(parameters: tuple[str, ...]) -> None:
    with npu.module(*parameters):
        devices = sorted(Path("/dev").glob("hawk_npu[0-9]*"))
        assert all(oct(path.stat().st_mode & 0o777) == "0o600" for path in devices)
        assert len(devices) >= ("emulated=2" in parameters) * 3
    assert not list(Path("/dev").glob("hawk_npu*"))


@pytest.mark.parametrize(
    "bad",
    [
        ("emulated=1", "channels=0"),
        ("emulated=1", "channels=65"),
        ("emulated=17",),
        ("emulated=1", "channel_kib=3"),
        ("emulated=1", f"channel_kib={(1 << 30) + 4}"),  # beyond what mmap's offsets reach
        ("bar_index=6",),
        ("bar_channels=0",),
        ("inject=nothing",),
        ("inject=map:0",),
    ],
)
def test_parameters_that_make_no_device_are_refused(bad: tuple[str, ...]) -> None:
    assert npu.insmod(npu.MODULES["hawk_npu_peer_core"]).returncode == 0
    try:
        assert npu.insmod(npu.MODULES["hawk_npu"], *bad).returncode != 0
        assert not npu.loaded("hawk_npu")
        assert not list(Path("/dev").glob("hawk_npu[0-9]*"))
    finally:
        npu.rmmod("hawk_npu")  # one that was loaded after all is in nobody else's way
        assert npu.rmmod("hawk_npu_peer_core").returncode == 0


def test_without_the_interface_the_client_is_off_and_says_so() -> None:
    line = len(npu.dmesg())
    assert npu.insmod(npu.PLAIN, *SMALL).returncode == 0
    try:
        assert "peer-memory client: off" in npu.said(line)
        with Device() as device:
            assert device.info().flags == abi.CAN_EXPORT | abi.HAS_PAGES
    finally:
        assert npu.rmmod("hawk_npu").returncode == 0


@pytest.mark.usefixtures("clean")
def test_what_a_device_says() -> None:
    with Device() as device:
        info = device.info()
        assert (info.abi_version, info.provider, info.channels) == (abi.ABI_VERSION, abi.EMULATED, 4)
        assert (info.channel_bytes, info.page_bytes) == (CHANNEL, PAGE)
        assert info.flags == abi.CAN_EXPORT | abi.HAS_PAGES | abi.PEER_CLIENT | abi.PEER_REVOKES
        assert npu.counts() == {"opens": 1}
        assert "in use" in npu.rmmod("hawk_npu").stderr


@pytest.mark.usefixtures("clean")
def test_an_open_owns_what_it_claimed() -> None:
    with Device() as one, Device() as other:
        one.claim(0, 3)
        with fails(errno.EBUSY):
            one.claim(0)
        with fails(errno.EINVAL):
            one.claim(4)
        for refused in (one.checksum, one.revoke, one.reset, one.export, one.map):
            with fails(errno.EACCES):
                refused(1)
            with fails(errno.EINVAL):
                refused(64)
        with fails(errno.EACCES):
            other.checksum(0)
        # Another's claim of the channel is other memory.
        other.claim(0)
        mine, theirs = one.map(0), other.map(0)
        mine[:8] = b"\1" * 8
        assert theirs[:8] == bytes(8)
        assert npu.counts() == {"opens": 2, "regions": 3, "pages": 3 * CHANNEL // PAGE, "vmas": 2}


@pytest.mark.usefixtures("clean")
def test_who_may_only_read_owns_nothing() -> None:
    with Device(flags=os.O_RDONLY) as device, Device(npu.device_path(abi.DMABUF), os.O_RDONLY) as adopter:
        assert device.info().channels == 4
        with fails(errno.EBADF):
            device.claim(0)
        with Device().claim(0) as owner:
            fd = owner.export(0)
            with fails(errno.EBADF):
                adopter.adopt(fd)
            os.close(fd)


@pytest.mark.usefixtures("clean")
def test_bounds() -> None:
    with Device().claim(2) as device:
        for offset, nbytes in [(0, CHANNEL + PAGE), (PAGE, CHANNEL), (CHANNEL, PAGE)]:
            with fails(errno.EINVAL):
                device.map(2, nbytes, offset)
            with fails(errno.EINVAL):
                device.export(2, offset, nbytes)
        for offset, nbytes in [
            (0, 0),
            (0, CHANNEL + 1),
            (CHANNEL, 1),
            (1 << 63, 1 << 63),
            (8, (1 << 64) - 4),
        ]:
            with fails(errno.EINVAL):
                device.checksum(2, offset, nbytes)
            with fails(errno.EINVAL):
                device.flush(2, offset, nbytes)
        with fails(errno.EINVAL):
            device.map(2, flags=mmap.MAP_PRIVATE)
        with fails(errno.EINVAL):
            device.export(2, 512, PAGE)
        with fails(errno.EINVAL):
            device.ask(abi.CLAIM, abi.Channel(channel=0, flags=1))
        with fails(errno.EOPNOTSUPP):
            device.adopt(0)
        with fails(errno.ENOTTY):
            device.ask(abi.IOC_MAGIC << 8 | 0x7F)


@pytest.mark.usefixtures("clean")
def test_bytes_are_what_the_kernel_sees() -> None:
    with Device().claim(0, 1) as device:
        assert device.checksum(0, 0, 64) == npu.fnv1a(bytes(64))
        made = device.map(1)
        made[PAGE - 3 : PAGE + 5] = b"ABCDEFGH"
        part = device.map(1, 2 * PAGE, PAGE)
        assert part[:5] == b"DEFGH"
        assert device.checksum(1, PAGE - 4, 16) == npu.fnv1a(b"\0ABCDEFGH" + bytes(7))
        device.flush(1)
        device.reset(1)
        assert made[PAGE - 3 : PAGE + 5] == bytes(8)


@pytest.mark.usefixtures("clean")
def test_mappings_are_counted_through_fork() -> None:
    with Device().claim(0) as device:
        made = device.map(0)
        child = os.fork()
        if not child:
            made[0] = 7
            os._exit(0 if npu.counts()["vmas"] == 2 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert made[0] == 7
        assert npu.counts()["vmas"] == 1


@pytest.mark.usefixtures("clean")
def test_a_mapping_keeps_what_its_descriptor_claimed() -> None:
    device = Device().claim(0)
    made = device.map(0)
    os.close(device.fd)
    made[5] = 5
    assert npu.counts()["regions"] == 1
    device.fd = -1
    device.close()


@pytest.mark.usefixtures("clean")
def test_an_owner_who_is_killed_leaves_nothing() -> None:
    def owns() -> object:
        device = Device().claim(0, 1, 2, 3)
        device.map(2)[:4] = b"1234"
        return device, device.export(1)

    with npu.killed(owns):
        assert npu.counts()["regions"] == 4


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    "step", ["open", "region", "claim", "page", "page:100", "mmap", "export", "export_fd"]
)
def test_a_failure_at_each_step_leaves_nothing(step: str) -> None:
    before = npu.events("injected")

    def go() -> None:
        with Device() as device:
            device.claim(0).map(0)
            os.close(device.export(0))

    npu.inject(step)
    with fails(errno.EMFILE if step == "export_fd" else errno.ENOMEM):
        go()
    npu.until_counts({})
    assert npu.events("injected") == before + 1
    go()


@pytest.mark.usefixtures("clean")
async def test_hawks_memory_on_the_device() -> None:
    memory = NpuDevice("npu0", channels=3)
    try:
        assert (memory.channels, memory.channel_bytes, memory.provider) == (3, CHANNEL, "emulated")
        assert memory.move_support is MoveSupport.HOST
        memory.regions[2].array[100:108] = range(8)
        assert memory.checksum(2, 100, 8) == npu.fnv1a(bytes(range(8)))
    finally:
        memory.close()


@pytest.mark.usefixtures("clean")
def test_nothing_was_lost() -> None:
    checkers.assert_unleaked("hawk_npu")
