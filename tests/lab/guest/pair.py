"""Two guests: they reach each other by network, and by RDMA as perftest does it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.guest.meet import Meeting
from tests.lab.guest.rdma import DEVICE, address, gid_index, node, open_device

PORT = 18700
LIMIT = 60


@pytest.fixture(scope="module")
def meeting() -> Iterator[Meeting]:
    with Meeting() as made:
        yield made


def test_the_other_guest_answers(meeting: Meeting) -> None:
    assert meeting.exchange(node()) == 3 - node()
    command = ["busybox", "ping", "-c", "2", "-W", "10", address(3 - node())]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr


def listening(port: int) -> bool:
    """Whether somebody listens on a TCP port (state 0A), as the kernel's table has it."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


def test_perftest_writes_from_one_to_the_other(meeting: Meeting) -> None:
    context, _ = open_device()
    index = str(gid_index(context))
    command = ["ib_write_bw", "-d", DEVICE, "-x", index, "-p", str(PORT), "-s", "65536", "-n", "50", "-F"]
    if node() == 1:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
            while not listening(PORT):
                assert server.poll() is None, server.communicate()[0]
                time.sleep(0.1)
            meeting.tell("listening")
            said, _ = server.communicate(timeout=LIMIT)
            assert server.returncode == 0, said
    else:
        assert meeting.hear() == "listening"
        done = subprocess.run(
            [*command, address(1)], capture_output=True, text=True, check=False, timeout=LIMIT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        print(done.stdout)
        (row,) = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("65536")]
        assert float(row[3]) > 0, row
