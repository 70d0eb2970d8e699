"""The module hawk_npu inside a guest: loading it, its counts, its devices, and other processes that hold them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pytest

from hawk.memory import npu_abi as abi
from hawk.memory.npu_abi import U64, ioctl_number

BUILD = Path(os.environ["HAWK_LAB_BUILD_KMOD"])
PATIENCE = float(os.environ["HAWK_LAB_PATIENCE"])
LIMIT = 60.0 * PATIENCE
PAGE = mmap.PAGESIZE
CHANNEL = 1 << 20
SMALL = ("emulated=1", "channels=4", f"channel_kib={CHANNEL >> 10}")

MODULES = {
    "hawk_npu_peer_core": BUILD / "tests" / "hawk_npu_peer_core.ko",
    "hawk_npu_importer": BUILD / "tests" / "hawk_npu_importer.ko",
    "hawk_npu": BUILD / "hawk_npu.ko",
}
"""In the order in which they are loaded."""

PLAIN = BUILD / "plain" / "hawk_npu.ko"
"""The module without a peer-memory client."""


def insmod(path: Path, *parameters: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["insmod", str(path), *parameters], capture_output=True, text=True, check=False, timeout=LIMIT
    )


def rmmod(name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["rmmod", name], capture_output=True, text=True, check=False, timeout=LIMIT)


def loaded(name: str) -> bool:
    return Path("/sys/module", name).exists()


def said(since: int) -> str:
    """What the kernel printed from that line on."""
    return "\n".join(dmesg()[since:])


def dmesg() -> list[str]:
    return subprocess.run(
        ["dmesg"], capture_output=True, text=True, check=True, timeout=LIMIT
    ).stdout.splitlines()


def numbers(which: str) -> dict[str, int]:
    text = Path("/sys/kernel/debug/hawk_npu", which).read_text()
    return {name: int(value) for name, value in (line.split() for line in text.splitlines())}


def counts() -> dict[str, int]:
    """Those that are not zero."""
    return {name: value for name, value in numbers("counts").items() if value}


def events(name: str) -> int:
    return numbers("events")[name]


def until_counts(expected: dict[str, int]) -> None:
    """Waits for what the module does on its own: giving memory back, looking at pages that were kept."""
    end = time.monotonic() + LIMIT
    while counts() != expected and time.monotonic() < end:
        time.sleep(0.05)
    found = counts()
    assert found == expected, f"{found}, and not {expected}"


def inject(step: str) -> None:
    Path("/sys/module/hawk_npu/parameters/inject").write_text(step)


@contextmanager
def module(*parameters: str, peers: bool = True) -> Iterator[None]:
    """The module loaded; all counts are zero at the end, and unloading leaves nothing behind.

    peers    with the peer-memory client, and the two test modules; without, it is what is built where no OFED is
    """
    line = len(dmesg())
    files = [*MODULES.values()] if peers else [PLAIN]
    try:
        for path in files:
            done = insmod(path, *(parameters if path.stem == "hawk_npu" else ()))
            assert done.returncode == 0, done.stderr
        yield
        until_counts({})
    finally:
        outcomes = [rmmod(path.stem) for path in reversed(files)]
    assert not any(o.returncode for o in outcomes), [o.stderr for o in outcomes]
    assert " left\n" not in said(line) + "\n"


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    """A small emulated device for all tests of a file."""
    with module(*SMALL, "adopt=1"):
        yield


@pytest.fixture
def clean(emulated: None) -> Iterator[None]:
    """Every test ends with all counts at zero."""
    assert counts() == {}
    yield
    inject("none")
    until_counts({})


def device_path(provider: int) -> str:
    """The device of that provider."""
    for path in sorted(Path("/dev").glob("hawk_npu[0-9]*")):
        with Device(str(path)) as device:
            if device.info().provider == provider:
                return str(path)
    raise AssertionError(f"no device with provider {provider}")


class fails:  # noqa: N801  # reads as a verb: with fails(errno.EBUSY)
    """The block fails with that errno."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> bool:
        wanted = errno.errorcode[self._number]
        assert isinstance(value, OSError), f"{wanted} expected, and not {value!r}"
        assert errno.errorcode.get(value.errno or 0, value.errno) == wanted
        return True


class Opened:
    """A device file that is closed at the end of the block, and sometimes before."""

    def __init__(self, path: str, flags: int = os.O_RDWR) -> None:
        self.fd = os.open(path, flags | os.O_CLOEXEC)

    def ask(self, request: int, argument: Any = 0) -> Any:
        fcntl.ioctl(self.fd, request, argument)
        return argument

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Device(Opened):
    """One open of a device of the module."""

    def __init__(self, path: str = "/dev/hawk_npu0", flags: int = os.O_RDWR) -> None:
        super().__init__(path, flags)
        self.maps: list[mmap.mmap] = []

    def info(self) -> abi.Info:
        return self.ask(abi.INFO, abi.Info())

    def claim(self, *channels: int) -> Self:
        for channel in channels:
            self.ask(abi.CLAIM, abi.Channel(channel=channel))
        return self

    def map(self, channel: int, nbytes: int = CHANNEL, offset: int = 0, **more: Any) -> mmap.mmap:
        at = channel << abi.MAP_SHIFT | offset
        made = mapped(self.fd, nbytes, at, **more)
        self.maps.append(made)
        return made

    def export(self, channel: int, offset: int = 0, nbytes: int = CHANNEL) -> int:
        return int(self.ask(abi.EXPORT, abi.Export(channel=channel, offset=offset, nbytes=nbytes)).fd)

    def checksum(self, channel: int, offset: int = 0, nbytes: int = CHANNEL) -> int:
        argument = abi.Checksum(channel=channel, offset=offset, nbytes=nbytes)
        return int(self.ask(abi.CHECKSUM, argument).value)

    def flush(self, channel: int, offset: int = 0, nbytes: int = CHANNEL) -> None:
        self.ask(abi.FLUSH, abi.Range(channel=channel, offset=offset, nbytes=nbytes))

    def revoke(self, channel: int) -> None:
        self.ask(abi.REVOKE, abi.Channel(channel=channel))

    def reset(self, channel: int) -> None:
        self.ask(abi.RESET, abi.Channel(channel=channel))

    def adopt(self, fd: int) -> abi.Adopt:
        return self.ask(abi.ADOPT, abi.Adopt(fd=fd))

    def close(self) -> None:
        """The descriptor and the mappings: the module's release comes with the last of them."""
        for made in self.maps:
            made.close()
        self.maps.clear()
        super().close()


def mapped(fd: int, nbytes: int, offset: int = 0, **more: Any) -> mmap.mmap:
    return mmap.mmap(fd, nbytes, offset=offset, **({"flags": mmap.MAP_SHARED} | more))


BEGINS, ENDS = 0, 4
READS, WRITES = 1, 2


def access(fd: int, what: int) -> None:
    """Tells a dma-buf's exporter that a processor's access begins or ends (DMA_BUF_IOCTL_SYNC)."""
    fcntl.ioctl(fd, ioctl_number(1, 0, U64, 0x62), U64(what))


def address_of(made: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(made)
    try:
        return ctypes.addressof(view)
    finally:
        del view


def address_of_readonly(made: mmap.mmap) -> int:
    """The same of a mapping without PROT_WRITE, of which ctypes makes no view."""
    return int(np.frombuffer(made, np.uint8).ctypes.data)


def ask_readonly(fd: int, request: int, argument: ctypes.Structure) -> None:
    """An ioctl whose answer cannot be written where it belongs."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, PAGE) as page:
        page[: ctypes.sizeof(argument)] = bytes(argument)
        at = ctypes.c_void_p(address_of(page))
        assert libc.mprotect(at, ctypes.c_size_t(PAGE), mmap.PROT_READ) == 0
        if libc.ioctl(fd, ctypes.c_ulong(request), at) < 0:
            raise OSError(ctypes.get_errno(), "ioctl")


def fnv1a(data: bytes) -> int:
    """What HAWK_NPU_CHECKSUM says of these bytes."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


# -- other processes --------------------------------------------------------------------------------------


@contextmanager
def killed(body: Callable[[], object]) -> Iterator[None]:
    """Another process does something, and keeps what that returns until it is killed at the end of the block."""
    ready, done = os.pipe()
    child = os.fork()
    if not child:
        try:
            kept = body()  # noqa: F841  # held until the end
            os.write(done, b"x")
            while True:
                signal.pause()
        except BaseException:  # noqa: BLE001  # this is another process, and ends here
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(done)
    try:
        assert os.read(ready, 1) == b"x", "it ended"
        yield
    finally:
        os.close(ready)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def receive(end: socket.socket) -> int:
    end.settimeout(LIMIT)
    return socket.recv_fds(end, 1, 1)[1][0]


# -- PCI --------------------------------------------------------------------------------------------------


def pci_devices(vendor: int, device: int) -> list[str]:
    """Addresses (0000:00:03.0) of PCI devices with that id."""
    return sorted(
        path.name
        for path in Path("/sys/bus/pci/devices").iterdir()
        if int((path / "vendor").read_text(), 16) == vendor
        and int((path / "device").read_text(), 16) == device
    )


def pci_code(address: str) -> int:
    """How the test modules name a PCI device."""
    domain, bus, rest = address.split(":")
    slot, function = rest.split(".")
    return int(domain, 16) << 16 | int(bus, 16) << 8 | int(slot, 16) << 3 | int(function, 16)
