"""How long to wait between two looks at an engine."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from hawk.transports._engine import _pause
from hawk.transports._engine._pause import Pause


def test_what_takes_long_is_an_event_unless_others_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"at": 100.0, "spent": 1.0}
    slept: list[float] = []
    monkeypatch.setattr(_pause.time, "monotonic", lambda: clock["at"])
    monkeypatch.setattr(_pause.time, "thread_time", lambda: clock["spent"])
    monkeypatch.setattr(_pause.time, "sleep", slept.append)
    pause = Pause()
    clock["at"] += 1.0  # a look of a second, in which others ran
    clock["spent"] += 1e-5
    pause.wait()
    assert len(slept) == 1
    assert not pause.linger()
    clock["at"] += 1.0
    clock["spent"] += 1e-3  # a look that moved bytes
    pause.wait()
    assert len(slept) == 1
    assert pause.linger()


def test_a_pause_ends_with_what_a_descriptor_has_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[tuple[int, int]] = []
    ppoll = _pause._ppoll

    def seen(there: Any, count: int, until: Any, mask: None) -> int:
        found = ppoll(there, count, until, mask)
        waited.append((found, until._obj.nanoseconds))
        return int(found)

    monkeypatch.setattr(_pause, "_ppoll", seen)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for ready in (0, 1):
            pause = Pause()
            pause._since -= 100
            pause.wait(ours.fileno())
            assert waited.pop() == (ready, 2_000_000)
            theirs.send(b"x")


def test_pauses_grow_with_the_quiet() -> None:
    pause = Pause()
    assert pause.seconds() == 0.0
    pause._since -= 0.4
    assert 5e-4 < pause.seconds() < 2e-3
    pause._since -= 100
    assert pause.seconds() == 2e-3
    pause.touch()
    assert pause.seconds() == 0.0
