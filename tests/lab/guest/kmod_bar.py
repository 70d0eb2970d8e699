"""A PCI device's window: owned once, mapped as page frames, exported only where buses allow it, taken away."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hawk.memory import npu_abi as abi
from hawk.memory.base import MoveSupport
from hawk.memory.npu_device import NpuDevice
from hawk.memory.region import ByteRanges
from tests.lab.guest import drivers, npu
from tests.lab.guest.drivers import DYNAMIC, NO_P2P, PINNED, STATIC, Importer, PeerCore
from tests.lab.guest.npu import PAGE, Device, clean, fails

__all__ = ["clean"]
pytestmark = pytest.mark.usefixtures("clean")

IVSHMEM = (0x1AF4, 0x1110)
HOST_BRIDGE = (0x8086, 0x29C0)
DRIVER = Path("/sys/bus/pci/drivers/hawk_npu")


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    """The name that `clean` asks for; here there is the window alone, and the buses are taken to carry everything."""
    with npu.module("bar_channels=4", "assume_p2p=1"):
        yield


@pytest.fixture
def path() -> str:
    return npu.device_path(abi.BAR)


@pytest.fixture
def nbytes(path: str) -> int:
    with Device(path) as device:
        return int(device.info().channel_bytes)


def test_a_channel_has_one_owner_and_begins_with_zeroes(path: str, nbytes: int) -> None:
    with Device(path) as one, Device(path) as other:
        info = one.info()
        assert (info.provider, info.channels, info.flags & abi.HAS_PAGES) == (abi.BAR, 4, 0)
        made = one.claim(1).map(1, nbytes)
        with fails(errno.EBUSY):
            other.claim(1)
        other.claim(0, 2)
        made[:5] = b"mine!"
        made[nbytes - 5 :] = b"to it"
        one.ask(abi.FLUSH, abi.Range(channel=1, offset=0, nbytes=nbytes))
        assert one.checksum(1, 0, 5) == npu.fnv1a(b"mine!")
        assert other.checksum(0, nbytes - 16, 16) == other.checksum(2, 0, 16) == npu.fnv1a(bytes(16))
        one.close()
        other.claim(1)
        assert other.checksum(1, 0, 5) == npu.fnv1a(bytes(5))


def test_page_frames_are_no_memory_to_register(path: str, nbytes: int) -> None:
    from pyverbs.pyverbs_error import PyverbsRDMAError

    from tests.lab.guest import rdma

    with Device(path).claim(0) as device:
        made = device.map(0, nbytes)
        made[0] = 1
        context, pd = rdma.open_device()
        with pytest.raises(PyverbsRDMAError) as caught:
            rdma.MR(pd, nbytes, rdma.ACCESS, address=npu.address_of(made))
        assert caught.value.error_code == errno.EFAULT
        pd.close()
        context.close()


def test_bytes_end_to_end(path: str, nbytes: int) -> None:
    with Device(path).claim(3) as device, Importer() as importer, Importer() as pinned:
        made = device.map(3, nbytes)
        fd = device.export(3, PAGE, 16 * PAGE)
        assert importer.attach(fd, DYNAMIC).peer2peer == 1
        assert pinned.attach(fd, PINNED).peer2peer == 1
        found = importer.map()
        assert (found.faults, found.nbytes) == (0, 16 * PAGE)
        assert pinned.map().faults == 0
        importer.write(PAGE - 2, b"across the bus")
        assert made[2 * PAGE - 2 :][:14] == b"across the bus"
        assert pinned.read(PAGE - 2, 14) == b"across the bus"
        with fails(errno.EBUSY):
            device.reset(3)
        pinned.detach()
        device.reset(3)
        assert importer.status() == (1, 0, 1)
        assert made[2 * PAGE - 2 :][:14] == bytes(14)
        os.close(fd)


def test_who_needs_pages_maps_nothing(path: str) -> None:
    with Device(path).claim(0) as device, Importer() as importer, Importer() as static:
        fd = device.export(0, 0, PAGE)
        assert importer.attach(fd, DYNAMIC, flags=NO_P2P).peer2peer == 0
        with fails(errno.EOPNOTSUPP):
            importer.map()
        with fails(errno.EOPNOTSUPP):
            static.attach(fd, STATIC)
        os.close(fd)


def test_where_buses_do_not_reach_nothing_is_mapped() -> None:
    """Neither the machine's own test device nor one on the root bus is let through by this machine's buses."""
    assert npu.rmmod("hawk_npu").returncode == 0
    try:
        assert npu.insmod(npu.MODULES["hawk_npu"], "bar_channels=4").returncode == 0
        with Device(npu.device_path(abi.BAR)).claim(0) as device, PeerCore() as core:
            for code in (0, npu.pci_code(npu.pci_devices(*HOST_BRIDGE)[0])):
                fd = device.export(0, 0, PAGE)
                with Importer() as importer:
                    assert importer.attach(fd, DYNAMIC, code).peer2peer == 0
                    with fails(errno.EOPNOTSUPP):
                        importer.map()
                os.close(fd)
                with fails(errno.EREMOTEIO):
                    core.register(npu.address_of(device.map(0, PAGE)), PAGE, code)
                assert core.failed == drivers.DMA_MAP
        npu.until_counts({})
    finally:
        npu.rmmod("hawk_npu")
        assert npu.insmod(npu.MODULES["hawk_npu"], "bar_channels=4", "assume_p2p=1").returncode == 0


@pytest.mark.parametrize("step", ["map", "map_table", "map_dma"])
def test_a_failure_at_each_step_leaves_nothing(path: str, step: str) -> None:
    with Device(path).claim(0) as device, Importer() as importer:
        fd = device.export(0, 0, PAGE)
        importer.attach(fd, DYNAMIC)
        npu.inject(step)
        with fails(errno.EIO if step == "map_dma" else errno.ENOMEM):
            importer.map()
        assert "mappings" not in npu.counts()
        assert importer.map().faults == 0
        os.close(fd)


def test_a_registration_by_the_peer_memory_client(path: str, nbytes: int) -> None:
    with PeerCore() as core:
        with Device(path).claim(2) as device:
            address = npu.address_of(device.map(2, nbytes))
            found = core.register(address + 100, 3 * PAGE)
            assert found.faults == 0
            core.write(found.id, 0, b"peer to peer")
            assert device.checksum(2, 100, 12) == npu.fnv1a(b"peer to peer")
        assert core.invalidated(found.id)
        core.deregister(found.id)


def _unbind() -> subprocess.Popen[str]:
    (address,) = npu.pci_devices(*IVSHMEM)
    return subprocess.Popen(["sh", "-c", f"echo {address} >{DRIVER}/unbind"], text=True)


def _bind() -> None:
    (address,) = npu.pci_devices(*IVSHMEM)
    # By one bare write: a file object tries again, as it is closed, what has failed.
    fd = os.open(DRIVER / "bind", os.O_WRONLY)
    try:
        os.write(fd, address.encode())
    finally:
        os.close(fd)


def test_removal_takes_everything_back_but_waits_for_pins(path: str, nbytes: int) -> None:
    ready, go = os.pipe(), os.pipe()
    with Device(path).claim(0, 1) as device, Importer() as moved, Importer() as pinned, PeerCore() as core:
        made = device.map(0, nbytes)
        made[0] = 1
        child = os.fork()
        if not child:
            faulthandler.disable()  # the signal is what is wanted, not a report of it
            made[1] = 1
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            made[2] = 2  # SIGBUS
            os._exit(0)
        os.read(ready[0], 1)
        fd = device.export(1, 0, PAGE)
        moved.attach(fd, DYNAMIC)
        moved.map()
        pinned.attach(fd, PINNED)
        pinned.map()
        found = core.register(npu.address_of(made), nbytes)
        removal = _unbind()
        end = time.monotonic() + npu.LIMIT
        while not core.invalidated(found.id) and time.monotonic() < end:
            time.sleep(0.05)
        assert core.invalidated(found.id)
        while moved.status() != (1, 0, 1) and time.monotonic() < end:
            time.sleep(0.05)
        assert moved.status() == (1, 0, 1)
        assert removal.poll() is None
        assert pinned.read(0, 4) == bytes(4)
        pinned.detach()
        assert removal.wait(npu.LIMIT) == 0
        os.write(go[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGBUS
        for gone in (device.checksum, device.claim, device.reset):
            with fails(errno.ENODEV):
                gone(0)
        with fails(errno.ENODEV):
            device.info()
        with fails(errno.ENODEV):
            device.map(0, PAGE)
        os.close(fd)
    for pipe_end in (*ready, *go):
        os.close(pipe_end)
    assert not Path(path).exists()
    npu.inject("probe")
    with fails(errno.ENOMEM):
        _bind()
    _bind()
    with Device(npu.device_path(abi.BAR)).claim(0, 1, 2, 3):
        pass


def keep_beginning(fd: int, over: threading.Event, begun: list[int], wrong: list[OSError]) -> None:
    """Attaches an importer to an export and maps it into this process, again and again, until it is refused."""
    while not over.is_set():
        try:
            with Importer() as importer:
                importer.attach(fd, DYNAMIC)
                importer.map()
                npu.mapped(fd, PAGE).close()
            begun[0] += 1
        except OSError as error:
            if error.errno != errno.ENODEV:
                wrong.append(error)
            return


def test_removal_while_others_begin() -> None:
    for _ in range(3):
        over, begun, wrong = threading.Event(), [0], []
        with Device(npu.device_path(abi.BAR)).claim(0) as device:
            fd = device.export(0, 0, PAGE)
            threads = [
                threading.Thread(target=keep_beginning, args=(fd, over, begun, wrong)) for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            while begun[0] < 4 and any(thread.is_alive() for thread in threads):
                over.wait(0.01)
            assert _unbind().wait(npu.LIMIT) == 0
            for thread in threads:
                thread.join(npu.LIMIT)
            over.set()
            assert not wrong
            assert begun[0] >= 4
            os.close(fd)
        npu.until_counts({})
        _bind()


async def test_hawks_memory_on_the_window(path: str) -> None:
    memory = NpuDevice("npu0", device=path)
    try:
        assert (memory.provider, memory.channels) == ("bar", 4)
        assert memory.move_support is MoveSupport.NONE
        memory.regions[3].array[64:72] = range(8)
        await memory.flush(ByteRanges(np.asarray([3], np.int32), np.asarray([64]), np.asarray([8])))
        assert memory.checksum(3, 64, 8) == npu.fnv1a(bytes(range(8)))
    finally:
        memory.close()
