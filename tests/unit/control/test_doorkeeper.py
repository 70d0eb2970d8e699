"""The door of the local socket is shut while descriptors run short, and opened again."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hawk.control.doorkeeper import Doorkeeper
from hawk.control.local import hidden, listen

CODE = """
import os, resource, socket, sys
from pathlib import Path
from hawk.control.doorkeeper import Doorkeeper
from hawk.control.local import hidden, listen
path = Path(sys.argv[1])
listener = listen(path, socket.SOCK_STREAM)
keeper = Doorkeeper(listener)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
assert 0 < keeper.look() <= 0.25
taken = []
while not keeper.shut:
    assert path.exists()
    taken.append(os.dup(0))
    assert keeper.look() > 0
    if keeper.shut:
        break
assert 450 < len(taken) < 520, len(taken)
assert keeper.look() == 0.005
assert not path.exists() and hidden(path).is_socket()
os.close(taken.pop())
keeper.look()
assert keeper.shut, "it swings"
for number in taken:
    os.close(number)
keeper.look()
assert not keeper.shut and path.exists() and not hidden(path).exists()
keeper.close()
keeper.close()
keeper.look()
listener.close()
assert not path.exists()
"""


def test_the_door_is_shut_before_the_limit_and_opened_again(tmp_path: Path) -> None:
    """In a process of its own, whose limit is its own."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "s")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_a_killed_process_had_hidden_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = listen(path, socket.SOCK_STREAM)
    first.hide()
    first.socket.close()
    os.close(first._lock)  # as the kernel does
    second = listen(path, socket.SOCK_STREAM)
    assert path.is_socket()
    assert not hidden(path).exists()
    second.hide()
    second.close()
    assert not path.exists()
    assert not hidden(path).exists()


@pytest.mark.parametrize("limit", [resource.RLIM_INFINITY, 1 << 20])
def test_a_limit_beyond_need_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: int
) -> None:
    listener = listen(tmp_path / "s", socket.SOCK_STREAM)
    keeper = Doorkeeper(listener)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert keeper.look() > 0
    assert not keeper.shut
    keeper.close()
    listener.close()
    assert Doorkeeper(None).look() > 0
