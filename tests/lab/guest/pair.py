"""Two guests: they reach each other by network, and by RDMA as perftest does it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.lab.guest.meet import Meeting
from tests.lab.guest.perf import perftest
from tests.lab.guest.rdma import address, node

PORT = 18700


@pytest.fixture(scope="module")
def meeting() -> Iterator[Meeting]:
    with Meeting() as made:
        yield made


def test_the_other_guest_answers(meeting: Meeting) -> None:
    assert meeting.exchange(node()) == 3 - node()
    command = ["busybox", "ping", "-c", "2", "-W", "10", address(3 - node())]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert said.returncode == 0, said.stdout + said.stderr


def test_perftest_writes_from_one_to_the_other(meeting: Meeting) -> None:
    rate = perftest(meeting, "ib_write_bw", 65536, 50, PORT)
    assert node() == 1 or rate > 0
