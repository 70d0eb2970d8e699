"""The NPU's module, as far as the outside of the guest is needed: the PCI device's memory is a file there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from vmlab import Lab

pytestmark = pytest.mark.timeout(400)

CHANNELS, CHANNEL, AT, PAGE = 4, 2, 12345, 4096

WRITE = """\
import fcntl, mmap, os
from hawk.memory import npu_abi as abi
fd = os.open("/dev/hawk_npu0", os.O_RDWR)
fcntl.ioctl(fd, abi.CLAIM, abi.Channel(channel={channel}))
with mmap.mmap(fd, 8 * {page}, offset={channel} << abi.MAP_SHIFT) as window:
    window[{at} : {at} + {n}] = bytes(range({n}))
    fcntl.ioctl(fd, abi.FLUSH, abi.Range(channel={channel}, offset={at}, nbytes={n}))
"""


def test_what_is_written_to_a_window_is_in_the_devices_memory(lab: Lab) -> None:
    (guest, *_) = lab.guests()
    assert guest.bar is not None
    module = lab.built("kmod") / "plain" / "hawk_npu.ko"
    root = Path(__file__).resolve().parents[2]
    n = 200
    nbytes = guest.bar.stat().st_size
    share = nbytes // CHANNELS
    with guest.bar.open("r+b") as memory:  # in place: the emulator has it mapped
        memory.write(b"\xee" * nbytes)
    code = WRITE.format(channel=CHANNEL, at=AT, n=n, page=PAGE)
    done = guest.run(
        f"insmod {module} bar_channels={CHANNELS} && PYTHONPATH={root} {sys.executable} - <<'E'\n{code}E\n"
        "status=$?; rmmod hawk_npu && exit $status",
        timeout=120,
    )
    assert done.status == 0, done.output
    found = guest.bar.read_bytes()
    mine = bytearray(share)
    mine[AT : AT + n] = range(n)
    assert found[CHANNEL * share : (CHANNEL + 1) * share] == mine, "zeroed at the claim, then written"
    others = found[: CHANNEL * share] + found[(CHANNEL + 1) * share :]
    assert others == b"\xee" * len(others), "nothing outside the claimed channel was touched"
