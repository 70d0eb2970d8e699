"""perftest's programs, from one guest to the other."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.lab.guest.meet import Meeting
from tests.lab.guest.rdma import DEVICE, address, gid_index, node, open_device

LIMIT = 120.0
"""Seconds for one run."""


def perftest(meeting: Meeting, program: str, size: int, count: int, port: int) -> float:
    """MB/s that the program says of `count` messages of `size` bytes over one queue pair; 0 in the guest that serves.

    Called in both guests at the same time; the second is the client.
    """
    context, _ = open_device()
    command = [program, "-d", DEVICE, "-x", str(gid_index(context)), "-p", str(port), "-F"]
    command += ["-s", str(size), "-q", "1", "-n", str(count)]
    context.close()
    if node() == 1:
        _serve(meeting, command, port)
        return 0.0
    assert meeting.hear() == "listening"
    done = subprocess.run([*command, address(1)], capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if line.strip().startswith(str(size))]
    return float(row[3]) * 2**20 / 1e6  # the mean, in its megabytes of 2^20


def _serve(meeting: Meeting, command: list[str], port: int) -> None:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        while not _listening(port):
            assert server.poll() is None, server.communicate()[0]
            time.sleep(0.05)
        meeting.tell("listening")
        said, _ = server.communicate(timeout=LIMIT)
        assert server.returncode == 0, said


def _listening(port: int) -> bool:
    """Whether somebody listens on a TCP port (state 0A), as the kernel's table has it."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)
