"""A hundred thousand calls at random: the module answers each, complains of none and keeps nothing."""

from __future__ import annotations

import errno
import fcntl
import random
import subprocess
from collections.abc import Iterator

import pytest

from hawk.memory import npu_abi as abi
from tests.lab.guest import npu
from tests.lab.guest.npu import PAGE, Device, clean

__all__ = ["clean"]

CALLS = 100_000
EXPECTED = {
    errno.EACCES,
    errno.EBUSY,
    errno.EFAULT,
    errno.EINVAL,
    errno.ENOTTY,
    errno.EOPNOTSUPP,
    errno.EBADF,
}


@pytest.fixture(scope="module")
def emulated() -> Iterator[None]:
    """What `clean` asks for: channels so small that zeroing them is not what takes the time."""
    with npu.module("emulated=1", "channels=4", f"channel_kib={16 * PAGE >> 10}", "adopt=1"):
        yield


@pytest.mark.usefixtures("clean")
def test_calls_at_random() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    program = npu.BUILD / "tests" / "hawk_npu_fuzz"
    paths = [npu.device_path(abi.EMULATED), npu.device_path(abi.DMABUF)]
    done = subprocess.run(
        [program, str(seed), str(CALLS), *paths],
        capture_output=True,
        text=True,
        check=False,
        timeout=200 * npu.PATIENCE,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
    answers = {name: int(count) for name, count in (line.split(": ") for line in done.stdout.splitlines())}
    assert sum(answers.values()) == CALLS
    assert answers["done"] > CALLS // 20, answers
    assert len(answers) >= 7, answers


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
