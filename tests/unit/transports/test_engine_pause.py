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
    for _ in range(2):  # looks that moved bytes
        clock["at"] += 1e-3
        clock["spent"] += 1e-3
        pause.wait()
    assert len(slept) == 1
    clock["at"] += 5e-4
    assert pause.linger()


def test_one_slow_look_alone_keeps_nobody_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a sleep the processor's caches are cold, and interrupts count as the thread's: any look may be slow.

    Who is inside for long, and does nothing, must not have the serving side look at full speed because of it.
    """
    clock = {"at": 100.0, "spent": 1.0}
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock["at"] += seconds

    def yielded() -> None:
        clock["at"] += 1e-5

    monkeypatch.setattr(_pause.time, "monotonic", lambda: clock["at"])
    monkeypatch.setattr(_pause.time, "thread_time", lambda: clock["spent"])
    monkeypatch.setattr(_pause.time, "sleep", sleep)
    monkeypatch.setattr(_pause.os, "sched_yield", yielded)
    pause = Pause()
    pause._since -= 100
    looks = 0
    while clock["at"] < 101.0:
        before = len(slept)
        pause.wait()
        # Each tenth is very slow, but the one behind it is not; and each is, a little, that comes after a long sleep.
        looks += 1
        took = 1e-3 if looks % 10 == 0 else 7e-5 if len(slept) > before else 1e-5
        clock["spent"] += took
        clock["at"] += took
    assert min(slept) == 2e-3
    assert sum(slept) > 0.8


def test_what_comes_while_we_sleep_wakes_us_up_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"at": 100.0, "spent": 1.0}
    monkeypatch.setattr(_pause.time, "monotonic", lambda: clock["at"])
    monkeypatch.setattr(_pause.time, "thread_time", lambda: clock["spent"])
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock["at"] += seconds

    monkeypatch.setattr(_pause.time, "sleep", sleep)
    pause = Pause()
    pause._since -= 100
    came = clock["at"]
    for _ in range(4):  # 2 GB/s come, and a look takes in 4 GB/s
        pause.wait()
        took = max(1e-5, (clock["at"] - came) / 2)
        came = clock["at"]
        clock["spent"] += took
        clock["at"] += took
    assert slept == [2e-3]
    assert clock["at"] - pause._since < 1e-3


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
