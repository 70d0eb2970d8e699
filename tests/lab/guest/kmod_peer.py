"""The peer-memory client, driven by the core's side of the interface: order of calls, scatter lists, invalidation."""

from __future__ import annotations

import errno
import mmap
import os
import threading

import pytest

from hawk.memory import npu_abi as abi
from tests.lab.guest import drivers, npu
from tests.lab.guest.drivers import PINNED, Importer, PeerCore
from tests.lab.guest.npu import CHANNEL, PAGE, SMALL, Device, clean, emulated, fails

__all__ = ["clean", "emulated"]
pytestmark = pytest.mark.usefixtures("clean")

ORDERS = pytest.mark.parametrize(
    "order", [drivers.UNMAP_PUT, drivers.PUT_UNMAP, drivers.TWICE, drivers.RELEASE_ONLY]
)
HELD = {"peers": 1, "peer_pins": 1, "mappings": 1}


@ORDERS
@pytest.mark.parametrize(
    ("start", "nbytes", "pages"), [(0, CHANNEL, 256), (5, 1, 1), (PAGE - 1, 2, 2), (PAGE + 100, 3 * PAGE, 4)]
)
def test_a_registration_covers_whole_pages_around_it(order: int, start: int, nbytes: int, pages: int) -> None:
    with Device().claim(2) as device, PeerCore() as core:
        made = device.map(2)
        found = core.register(npu.address_of(made) + start, nbytes)
        assert (found.faults, found.page_bytes) == (0, PAGE)
        assert 1 <= found.entries <= pages
        assert npu.counts().items() >= HELD.items()
        data = os.urandom(min(nbytes, 2 * PAGE))
        core.write(found.id, 0, data)
        assert made[start : start + len(data)] == data
        assert device.checksum(2, start, len(data)) == npu.fnv1a(data)
        assert core.read(found.id, 0, len(data)) == data
        with fails(errno.EINVAL):
            core.read(found.id, pages * PAGE - start % PAGE, 1)
        core.deregister(found.id, order)
        assert "peers" not in npu.counts()


def test_what_is_not_ours_is_left_to_others() -> None:
    with Device().claim(0, 1) as device, PeerCore() as core, mmap.mmap(-1, PAGE) as anonymous:
        made = device.map(0, 2 * PAGE)
        address = npu.address_of(made)
        wrong = [
            (npu.address_of(anonymous), PAGE),
            (address, 2 * PAGE + 1),
            (address + 2 * PAGE - 1, 2),
            (address - 1, 2),
            (address, 0),
            (address, (1 << 64) - 1),
            ((1 << 64) - PAGE, PAGE),
            (0, PAGE),
        ]
        for where, nbytes in wrong:
            with fails(errno.ENOENT):
                core.register(where, nbytes)
            assert core.failed == drivers.ACQUIRE


def test_what_may_not_be_written_is_not_registered_for_writing() -> None:
    """The core's side asks for a registration that a peer writes to, as nearly all are."""
    with Device().claim(0) as device, PeerCore() as core:
        made = device.map(0, prot=mmap.PROT_READ)
        with fails(errno.EFAULT):
            core.register(npu.address_of_readonly(made), PAGE)
        assert core.failed == drivers.GET_PAGES


def test_a_registration_belongs_to_the_channel_and_not_to_the_mapping() -> None:
    with Device().claim(0) as device, PeerCore() as core:
        made = device.map(0)
        found = core.register(npu.address_of(made), CHANNEL)
        device.maps.remove(made)
        made.close()
        core.write(found.id, 3, b"through")
        assert device.checksum(0, 3, 7) == npu.fnv1a(b"through")


@ORDERS
def test_closing_invalidates(order: int) -> None:
    with PeerCore() as core:
        with Device().claim(0, 1) as device:
            made = device.map(0)
            found = core.register(npu.address_of(made), CHANNEL)
            second = core.register(npu.address_of(made) + PAGE, PAGE)
        assert core.invalidated(found.id)
        assert core.invalidated(second.id)
        with fails(errno.ENODEV):
            core.read(found.id, 0, 1)
        npu.until_counts({"peers": 2})
        assert "in use" in npu.rmmod("hawk_npu").stderr
        core.deregister(found.id, order)
        core.deregister(second.id, order)


def test_reset_invalidates_and_zeroes() -> None:
    with Device().claim(0) as device, PeerCore() as core:
        made = device.map(0)
        found = core.register(npu.address_of(made), CHANNEL)
        core.write(found.id, 0, b"secret")
        device.reset(0)
        assert core.invalidated(found.id)
        assert made[:6] == bytes(6)
        again = core.register(npu.address_of(made), CHANNEL)
        core.write(again.id, 0, b"fresh")
        assert made[:5] == b"fresh"


def keep_registering(address: int, over: threading.Event, done: list[int], wrong: list[OSError]) -> None:
    with PeerCore() as core:
        while not over.is_set():
            try:
                found = core.register(address, 64 * PAGE)
                for _ in range(3):
                    core.write(found.id, 0, b"load" * 1000)
                core.deregister(found.id)
                done[0] += 1
            except OSError as error:
                if error.errno not in (errno.ENODEV, errno.ENOENT):
                    wrong.append(error)
                return


def test_an_end_under_load() -> None:
    """Four threads register, write and deregister, and the owner closes in the midst of it."""
    for _ in range(5):
        device = Device().claim(0)
        address = npu.address_of(device.map(0))
        over = threading.Event()
        done, wrong = [0], []
        threads = [
            threading.Thread(target=keep_registering, args=(address + i * PAGE, over, done, wrong))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        while done[0] < 8 and any(thread.is_alive() for thread in threads):
            over.wait(0.01)
        device.close()
        over.set()
        for thread in threads:
            thread.join(npu.LIMIT)
        assert not wrong
        assert done[0] >= 8
        npu.until_counts({})


def test_an_owner_killed_with_registrations_alive() -> None:
    def owns() -> object:
        device, core = Device().claim(0), PeerCore()
        core.register(npu.address_of(device.map(0)), CHANNEL)
        return device, core

    with npu.killed(owns):
        assert npu.counts().items() >= HELD.items()


@pytest.mark.parametrize(
    ("step", "failed", "number"),
    [
        ("peer_acquire", drivers.ACQUIRE, errno.ENOENT),
        ("peer_pin", drivers.GET_PAGES, errno.ENOMEM),
        ("peer_map", drivers.DMA_MAP, errno.ENOMEM),
        ("map", drivers.DMA_MAP, errno.ENOMEM),
        ("map_table", drivers.DMA_MAP, errno.ENOMEM),
        ("map_dma", drivers.DMA_MAP, errno.EIO),
    ],
)
def test_a_failure_at_each_step_leaves_nothing(step: str, failed: int, number: int) -> None:
    with Device().claim(0) as device, PeerCore() as core:
        address = npu.address_of(device.map(0))
        before = npu.counts()
        npu.inject(step)
        with fails(number):
            core.register(address, CHANNEL)
        assert core.failed == failed
        assert npu.counts() == before
        core.register(address, CHANNEL)


@pytest.mark.parametrize("step", ["", "adopt_attach", "attach", "pin", "map", "map_table", "map_table:2"])
def test_an_adopted_window_is_registered(step: str) -> None:
    path = npu.device_path(abi.DMABUF)
    with Device().claim(3) as owner, Device(path) as adopter, PeerCore() as core:
        fd = owner.export(3, 2 * PAGE, 8 * PAGE)
        adopter.adopt(fd)
        os.close(fd)
        address = npu.address_of(adopter.map(0, 8 * PAGE))
        if step:
            npu.inject(step)
            with fails(errno.ENOMEM):
                core.register(address + 3 * PAGE, 2 * PAGE)
            assert "mappings" not in npu.counts()
            npu.inject("none")
        found = core.register(address + 3 * PAGE, 2 * PAGE)
        assert found.faults == 0
        core.write(found.id, PAGE - 2, b"over there")
        assert owner.checksum(3, 6 * PAGE - 2, 10) == npu.fnv1a(b"over there")
        assert npu.counts()["pins"] == 1
        with fails(errno.EBUSY):
            owner.reset(3)
        adopter.close()
        assert core.invalidated(found.id)
        owner.reset(3)
        core.deregister(found.id)


def test_without_invalidation_the_memory_stays_reserved() -> None:
    # A load of its own: the fixture's module asks for invalidation.
    for name in ("hawk_npu",):
        assert npu.rmmod(name).returncode == 0
    try:
        assert npu.insmod(npu.MODULES["hawk_npu"], *SMALL, "peer_invalidate=0").returncode == 0
        with PeerCore() as core:
            with Device().claim(0) as device:
                assert not device.info().flags & abi.PEER_REVOKES
                found = core.register(npu.address_of(device.map(0)), CHANNEL)
                with fails(errno.EBUSY):
                    device.reset(0)
            npu.until_counts(HELD | {"regions": 1, "pages": CHANNEL // PAGE})
            core.write(found.id, 0, b"nobody else's")
            with Device().claim(0) as second:
                assert second.checksum(0, 0, 13) == npu.fnv1a(bytes(13))
            core.deregister(found.id)
        npu.until_counts({})
    finally:
        npu.rmmod("hawk_npu")
        assert npu.insmod(npu.MODULES["hawk_npu"], *SMALL, "adopt=1").returncode == 0


def test_pins_and_registrations_side_by_side() -> None:
    with Device().claim(0) as device, PeerCore() as core, Importer() as importer:
        found = core.register(npu.address_of(device.map(0)), CHANNEL)
        fd = device.export(0)
        importer.attach(fd, PINNED)
        importer.map()
        os.close(fd)
        with fails(errno.EBUSY):
            device.revoke(0)
        assert not core.invalidated(found.id)
        core.write(found.id, 0, b"one memory")
        assert importer.read(0, 10) == b"one memory"
        importer.detach()
        device.revoke(0)
        assert core.invalidated(found.id)
