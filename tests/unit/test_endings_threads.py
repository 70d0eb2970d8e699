"""Threads that never do what they did not take."""

from __future__ import annotations

import threading

import pytest

from hawk.endings import Threads


def none(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_was_refused_is_not_done_when_a_thread_comes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    with Threads(1) as pool:
        with monkeypatch.context() as full, pytest.raises(RuntimeError, match="new thread"):
            full.setattr(threading.Thread, "start", none)
            pool.submit(done.append, 1)
        pool.submit(done.append, 2).result()
    assert done == [2]


def test_what_another_thread_has_begun_has_ended_before_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool takes one more thread for work that waits, though those that it has would come to it."""
    busy, go_on, taken, done = threading.Event(), threading.Event(), threading.Event(), []

    def first() -> None:
        busy.set()
        go_on.wait(60)

    def second(number: int) -> int:
        taken.set()
        done.append(number)
        return number

    def late(thread: threading.Thread) -> None:
        go_on.set()
        taken.wait(60)  # by the first thread, from the list
        none(thread)

    with Threads(2) as pool:
        pool.submit(first)
        busy.wait(60)
        with monkeypatch.context() as full, pytest.raises(RuntimeError, match="new thread"):
            full.setattr(threading.Thread, "start", late)
            pool.submit(second, 1)
        assert pool.submit(second, 2).result() == 2
    assert done == [1, 2]
