"""A hundred thousand calls at random: the module answers each, complains of none and keeps nothing."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
from collections.abc import Iterator

import pytest

from hawk.memory import npu_abi as abi
from tests.lab.guest import npu
from tests.lab.guest.npu import PAGE, Device, clean

__all__ = ["clean"]

CHANNEL = 16 * PAGE
CALLS = int(os.environ.get("HAWK_LAB_FUZZ", "100000"))
EXPECTED = {
    errno.EACCES,
    errno.EBADF,
    errno.EBUSY,
    errno.EFAULT,
    errno.EINVAL,
    errno.ENOMEM,
    errno.ENOTTY,
    errno.EOPNOTSUPP,
    errno.ENOSPC,
}
REQUESTS = (
    abi.INFO,
    abi.CLAIM,
    abi.EXPORT,
    abi.REVOKE,
    abi.RESET,
    abi.FLUSH,
    abi.CHECKSUM,
    abi.ADOPT,
)


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    """What `clean` asks for: channels so small that zeroing them is not what takes the time."""
    with npu.module("emulated=1", "channels=4", f"channel_kib={CHANNEL >> 10}", "adopt=1"):
        yield


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("clean")
def test_calls_at_random() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    libc = ctypes.CDLL(None, use_errno=True)
    paths = [npu.device_path(abi.EMULATED), npu.device_path(abi.DMABUF)]
    odd = (0, 1, 4, PAGE, CHANNEL - PAGE, CHANNEL, CHANNEL + PAGE, (1 << 63), (1 << 64) - PAGE, (1 << 64) - 1)
    files: list[Device] = []
    exports: list[int] = []
    maps: list[mmap.mmap] = []
    buffer = ctypes.create_string_buffer(64)
    answered: dict[str, int] = {}
    for i in range(CALLS):
        if i % 2000 == 0:
            _drop(files, exports, maps)
            files = [Device(dice.choice(paths) if n else paths[0]) for n in range(3)]
        device = dice.choice(files)
        kind = dice.random()
        code = 0
        if kind < 0.05:
            try:
                at = (
                    dice.choice((0, 1, 3, 4, 63, 64, 1 << 20)) << abi.MAP_SHIFT
                    | dice.choice(odd) & 0xFFFFFFFFF000
                )
                flags = dice.choice((mmap.MAP_SHARED, mmap.MAP_PRIVATE))
                maps.append(npu.mapped(device.fd, dice.choice((PAGE, 4 * PAGE, CHANNEL)), at, flags=flags))
            except (OSError, OverflowError) as error:
                code = getattr(error, "errno", 0) or errno.EINVAL
        else:
            request = dice.choice(REQUESTS)
            if kind < 0.15:
                request ^= 1 << dice.randrange(32)
            words = [dice.choice(odd) if dice.random() < 0.8 else dice.getrandbits(64) for _ in range(8)]
            # The first word is a channel and flags, or a descriptor: mostly ones that are there.
            first = dice.randrange(5) if dice.random() < 0.9 else dice.getrandbits(32)
            if request == abi.ADOPT and exports:
                first = dice.choice(exports)
            words[0] = first | (dice.getrandbits(32) << 32 if dice.random() < 0.05 else 0)
            if request == abi.CHECKSUM and words[2] > 4 * PAGE:
                words[2] = min(words[2], 4 * PAGE) if dice.random() < 0.98 else words[2]
            ctypes.memmove(buffer, (ctypes.c_uint64 * 8)(*words), 64)
            argument = ctypes.addressof(buffer) if dice.random() < 0.97 else dice.getrandbits(47)
            if libc.ioctl(device.fd, ctypes.c_ulong(request & 0xFFFFFFFF), ctypes.c_void_p(argument)) < 0:
                code = ctypes.get_errno()
            elif request == abi.EXPORT:
                exports.append(ctypes.c_int32.from_buffer(buffer, abi.Export.fd.offset).value)
                if len(exports) > 50:
                    os.close(exports.pop(dice.randrange(50)))
        name = errno.errorcode.get(code, str(code)) if code else "done"
        answered[name] = answered.get(name, 0) + 1
        assert not code or code in EXPECTED, (i, name)
    _drop(files, exports, maps)
    assert answered["done"] > CALLS // 20, answered
    print(answered)


def _drop(files: list[Device], exports: list[int], maps: list[mmap.mmap]) -> None:
    for made in maps:
        made.close()
    for fd in exports:
        os.close(fd)
    for device in files:
        device.close()
    for some in (files, exports, maps):
        some.clear()


@pytest.mark.usefixtures("clean")
def test_every_number_there_could_be() -> None:
    with Device() as device:
        for request in range(256):
            for direction in range(4):
                number = direction << 30 | 24 << 16 | abi.IOC_MAGIC << 8 | request
                code = 0
                try:
                    fcntl.ioctl(device.fd, number, bytearray(64), True)
                except OSError as error:
                    code = error.errno or 0
                assert not code or code in EXPECTED
