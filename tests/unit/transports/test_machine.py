"""What says that two processes share a machine must not depend on how many files one of them has open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = """
import resource
from hawk.transports import _machine
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
print(_machine.boot_id(), _machine.network(), _machine.mounts())
"""


def test_a_process_without_descriptors_knows_its_machine() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    own, network, mounts = done.stdout.split()
    assert own == boot
    assert network.startswith(f"{boot}:")
    assert mounts.startswith(f"{boot}:")
