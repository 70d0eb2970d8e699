"""Simulations in other processes: these end with whoever asked for them."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hawk.serving.sweep import spread

HOURS = 7200.0

ASKS = f"""
import multiprocessing, time
from hawk.serving.sweep import spread

def tell(done, of):
    print(*[one.pid for one in multiprocessing.active_children()], flush=True)

if __name__ == "__main__":
    spread(time.sleep, [0.0, {HOURS}, {HOURS}], workers=2, progress=tell)
"""


def test_who_gives_up_waits_for_nobody() -> None:
    def enough(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spread(time.sleep, [0.0, HOURS, HOURS, HOURS], workers=2, progress=enough)


def test_workers_end_with_who_started_them(tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(ASKS)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        workers = [os.pidfd_open(int(pid)) for pid in asking.stdout.readline().split()]
        try:
            assert workers
            asking.send_signal(signal.SIGKILL)
            for one in workers:
                assert select.select([one], [], [], 90)[0]  # readable when its process has ended
        finally:
            for one in workers:
                signal.pidfd_send_signal(one, signal.SIGKILL) if not select.select([one], [], [], 0)[
                    0
                ] else None
                os.close(one)
