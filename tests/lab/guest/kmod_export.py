"""The dma-buf exporter, driven by the importer module: addresses, bytes, revocation, pins, failures at each step."""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hawk.memory import npu_abi as abi
from hawk.memory.windows import is_dmabuf, map_window
from tests.lab.guest import npu
from tests.lab.guest.drivers import BOUNCES, DAWDLES, DYNAMIC, PINNED, SLOW, STATIC, Importer
from tests.lab.guest.npu import BEGINS, CHANNEL, ENDS, PAGE, READS, WRITES, Device, clean, emulated, fails

__all__ = ["clean", "emulated"]
pytestmark = pytest.mark.usefixtures("clean")

EVERY = pytest.mark.parametrize("how", [STATIC, DYNAMIC, PINNED, SLOW])


@contextmanager
def exported(offset: int = 0, nbytes: int = CHANNEL) -> Iterator[tuple[Device, int]]:
    with Device().claim(1) as device:
        fd = device.export(1, offset, nbytes)
        try:
            yield device, fd
        finally:
            os.close(fd)


@EVERY
@pytest.mark.parametrize(("offset", "nbytes"), [(0, CHANNEL), (3 * PAGE, 5 * PAGE)])
def test_bytes_end_to_end(how: int, offset: int, nbytes: int) -> None:
    with exported(offset, nbytes) as (device, fd), Importer() as importer:
        importer.attach(fd, how)
        found = importer.map()
        assert (found.nbytes, found.faults) == (nbytes, 0)
        assert found.entries >= 1
        made = device.map(1)
        made[offset + PAGE - 2 : offset + PAGE + 2] = b"down"
        assert importer.read(PAGE - 2, 4) == b"down"
        data = os.urandom(3 * PAGE)
        importer.write(PAGE + 1, data)
        assert made[offset + PAGE + 1 :][: len(data)] == data
        # From the kernel's side: nothing before or after the range was touched.
        assert device.checksum(1, 0, offset + 1) == npu.fnv1a(bytes(offset + 1))
        assert device.checksum(1, offset + PAGE + 1, len(data)) == npu.fnv1a(data)
        expected = {"attachments": 1, "mappings": 1} | ({"pins": 1} if how in (STATIC, PINNED) else {})
        assert npu.counts().items() >= expected.items()
        importer.unmap()
        importer.detach()


@pytest.mark.parametrize("flags", [0, BOUNCES])
def test_processors_and_devices_take_turns(flags: int) -> None:
    """Two devices have the same pages: what one side wrote is the other's once the access has begun or ended."""
    with exported(PAGE, 4 * PAGE) as (device, fd), Importer() as first, Importer() as second:
        made = device.map(1)
        made[PAGE : PAGE + 5] = b"early"
        try:
            first.attach(fd, DYNAMIC, flags=flags)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            pytest.skip("this kernel has no devices with DMA operations of their own")
        second.attach(fd, PINNED)
        first.map()
        second.map()
        assert first.read(0, 5) == second.read(0, 5) == b"early"
        npu.access(fd, BEGINS | READS | WRITES)
        made[PAGE : PAGE + 5] = b"later"
        npu.access(fd, ENDS | READS | WRITES)
        assert first.read(0, 5) == second.read(0, 5) == b"later"
        first.write(7, b"begun")
        npu.access(fd, BEGINS | READS)
        assert made[PAGE + 7 : PAGE + 12] == b"begun"
        # Who only read gives the device nothing: what it wrote meanwhile stays.
        first.write(7, b"BEGUN")
        npu.access(fd, ENDS | READS)
        assert first.read(7, 5) == b"BEGUN"
        first.write(20, b"summed")
        assert device.checksum(1, PAGE + 20, 6) == npu.fnv1a(b"summed")
        first.write(30, b"flushed")
        device.flush(1, PAGE + 30, 7)
        assert made[PAGE + 30 : PAGE + 37] == b"flushed"
        first.write(40, b"unmapped")
        first.unmap()
        assert made[PAGE + 40 : PAGE + 48] == b"unmapped"


def test_who_can_be_moved_is_told_and_lets_go() -> None:
    with exported() as (device, fd), Importer() as importer:
        importer.attach(fd, DYNAMIC)
        importer.map()
        device.revoke(1)
        assert importer.status() == (1, 0, 1)
        with fails(errno.ENODEV):
            importer.map()
        with fails(errno.ENODEV):
            importer.read(0, 1)
        with Importer() as late, fails(errno.ENODEV):
            late.attach(fd, DYNAMIC)
        # What is exported anew can be mapped; the old one never again.
        again = device.export(1)
        with Importer() as second:
            second.attach(again, DYNAMIC)
            second.map()
        os.close(again)


def test_who_lets_go_late_keeps_the_memory_until_then() -> None:
    with exported() as (device, fd), Importer() as importer:
        importer.attach(fd, SLOW)
        importer.map()
        with fails(errno.EBUSY):
            device.reset(1)
        assert importer.status() == (1, 1, 1)
        importer.write(0, b"still")
        importer.unmap()
        device.reset(1)
        assert device.checksum(1, 0, 5) == npu.fnv1a(bytes(5))


def test_an_export_is_closed_while_it_is_being_revoked() -> None:
    """Exports end newest first: one shows that it has begun, one dawdles, and meanwhile the oldest one goes."""
    with Device().claim(1) as device, Importer() as importer:
        oldest, slow, first = (device.export(1) for _ in range(3))
        importer.attach(slow, DYNAMIC, flags=DAWDLES)
        importer.map()
        before = npu.events("revocations")
        revoking = threading.Thread(target=device.revoke, args=(1,))
        revoking.start()
        end = time.monotonic() + npu.LIMIT
        while npu.events("revocations") == before and time.monotonic() < end:
            time.sleep(0.01)
        os.close(oldest)
        revoking.join(npu.LIMIT)
        assert npu.events("revocations") == before + 3
        assert importer.status() == (1, 0, 1)
        os.close(slow)
        os.close(first)


@pytest.mark.parametrize("how", [PINNED, STATIC])
def test_a_pin_refuses_reset_and_nothing_has_ended(how: int) -> None:
    with exported() as (device, fd), Importer() as importer, Importer() as other:
        importer.attach(fd, how)
        importer.map()
        other.attach(fd, DYNAMIC)
        other.map()
        for refused in (device.reset, device.revoke):
            with fails(errno.EBUSY):
                refused(1)
        assert other.status() == (1, 1, 0)
        importer.write(7, b"kept")
        importer.detach()
        device.reset(1)
        assert other.status() == (1, 0, 1)


@pytest.mark.parametrize("how", [PINNED, STATIC])
def test_memory_that_is_pinned_outlives_its_owner(how: int) -> None:
    with Importer() as importer:
        with exported() as (device, fd):
            device.map(1)[:6] = b"pinned"
            importer.attach(fd, how)
            importer.map()
        npu.until_counts(
            {"regions": 1, "pages": CHANNEL // PAGE, "exports": 1, "attachments": 1, "pins": 1, "mappings": 1}
        )
        assert importer.read(0, 6) == b"pinned"
        # The next owner gets other memory.
        with Device().claim(1) as second:
            canary = second.map(1)
            canary[:] = b"\x5a" * CHANNEL
            importer.write(0, b"stray!" * 100)
            assert canary[:] == b"\x5a" * CHANNEL
        importer.unmap()
        assert npu.counts()["regions"] == 1
        importer.detach()


def test_closing_ends_what_can_be_ended() -> None:
    with Importer() as importer, Importer() as late:
        with exported() as (_, fd):
            importer.attach(fd, DYNAMIC)
            importer.map()
            late.attach(fd, DYNAMIC)
            kept = os.dup(fd)
        assert importer.status() == (1, 0, 1)
        npu.until_counts({"exports": 1, "attachments": 2})
        with fails(errno.ENODEV):
            late.map()
        with Importer() as new, fails(errno.ENODEV):
            new.attach(kept, DYNAMIC)
        os.close(kept)


def test_an_owner_killed_while_others_hold_on() -> None:
    ours, theirs = npu.pair()

    def owns() -> object:
        device = Device().claim(1)
        device.map(1)[:3] = b"mem"
        socket.send_fds(theirs, [b"x"], [device.export(1)])
        return device

    with ours, theirs, Importer() as pinned, Importer() as moved:
        with npu.killed(owns):
            fd = npu.receive(ours)
            pinned.attach(fd, PINNED)
            pinned.map()
            moved.attach(fd, DYNAMIC)
            moved.map()
            os.close(fd)
        assert moved.status() == (1, 0, 1)
        assert pinned.read(0, 3) == b"mem"


def test_a_process_maps_the_bytes_without_the_device() -> None:
    with exported() as (device, fd):
        assert is_dmabuf(fd)
        window = map_window(fd, CHANNEL)
        window.array[10:14] = (1, 2, 3, 4)
        assert device.checksum(1, 10, 4) == npu.fnv1a(b"\1\2\3\4")
        window.close()
        npu.until_counts({"opens": 1, "regions": 1, "pages": CHANNEL // PAGE, "exports": 1})


def test_a_mapped_window_ends_with_the_export() -> None:
    ready, go = os.pipe(), os.pipe()
    with exported() as (device, fd):
        child = os.fork()
        if not child:
            faulthandler.disable()  # the signal is what is wanted, not a report of it
            made = npu.mapped(fd, CHANNEL)
            made[0] = 1
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            made[0] = 2  # SIGBUS
            os._exit(0)
        os.read(ready[0], 1)
        device.revoke(1)
        os.write(go[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGBUS
        assert device.checksum(1, 0, 1) == npu.fnv1a(b"\1")
    for end in (*ready, *go):
        os.close(end)


@pytest.mark.parametrize("step", ["attach", "pin", "map", "map_table", "map_dma"])
@EVERY
def test_a_failure_at_each_step_leaves_nothing(step: str, how: int) -> None:
    before = npu.events("injected")
    npu.inject(step)
    with exported() as (_, fd):
        with Importer() as importer:
            code = 0
            try:
                importer.attach(fd, how)
                importer.map()
            except OSError as error:
                code = error.errno or 0
            if code:
                assert code in (errno.ENOMEM, errno.EIO)
                assert npu.events("injected") == before + 1
            else:  # a kernel that pins only who asks for it
                assert step == "pin"
                assert how in (DYNAMIC, SLOW)
        npu.until_counts({"opens": 1, "regions": 1, "pages": CHANNEL // PAGE, "exports": 1})
        npu.inject("none")
        with Importer() as importer:
            importer.attach(fd, how)
            assert importer.map().faults == 0


def test_a_window_is_adopted_and_is_only_an_address() -> None:
    path = npu.device_path(abi.DMABUF)
    with exported(PAGE, 4 * PAGE) as (_, fd), Device(path) as adopter:
        with fails(errno.EOPNOTSUPP):
            adopter.claim(0)
        found = adopter.adopt(fd)
        assert (found.channel, found.nbytes) == (0, 4 * PAGE)
        assert adopter.adopt(fd).channel == 1
        for refused in (adopter.checksum, adopter.reset, adopter.export):
            with fails(errno.EOPNOTSUPP):
                refused(0, *([0, PAGE] if refused != adopter.reset else []))
        with fails(errno.EINVAL):
            adopter.adopt(adopter.fd)
        with fails(errno.EBADF):
            adopter.adopt(-1)
        child = os.fork()
        if not child:
            faulthandler.disable()  # the signal is what is wanted, not a report of it
            made = adopter.map(0, PAGE)
            made[0] = 1  # SIGBUS
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGBUS
        # A channel whose number cannot be told is not adopted: the request can be read, and not written.
        for _ in range(2):
            with fails(errno.EFAULT):
                npu.ask_readonly(adopter.fd, abi.ADOPT, abi.Adopt(fd=fd))
        assert npu.counts()["adopted"] == 2
        assert adopter.adopt(fd).channel == 2
        npu.inject("adopt")
        with fails(errno.ENOMEM):
            adopter.adopt(fd)
