"""Events that repeat are told once, then counted, and told again with their number; a job's always."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from hawk.observe.log import configure, get
from hawk.observe.repeats import MOST, WINDOW, Repeats
from tests.unit.observe.test_log import own_process

__all__ = ["own_process"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(level: int, what: str, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("hawk.test", level, "", 0, what, None, None)
    made.event = (what, fields)  # type: ignore[attr-defined]
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def repeats(clock: Clock) -> Repeats:
    return Repeats(lambda record: record.event, clock=clock)  # type: ignore[attr-defined]


def told(records: list[logging.LogRecord]) -> list[tuple[Any, Any]]:
    return [(r.event[1].get("n"), r.event[1].get("repeated")) for r in records]  # type: ignore[attr-defined]


def test_warnings_of_the_same_words_about_the_same_peer_are_alike(clock: Clock, repeats: Repeats) -> None:
    assert told(repeats.take(record(logging.WARNING, "bad frame", peer="p0", n=0))) == [(0, None)]
    for n in range(1, 50):
        assert repeats.take(record(logging.WARNING, "bad frame", peer="p0", n=n)) == []
    assert told(repeats.take(record(logging.WARNING, "bad frame", peer="p1", n=7))) == [(7, None)]
    assert repeats.waiting
    clock.now = WINDOW
    # The last of them, and how many they were; the first was told.
    assert told(repeats.take(record(logging.WARNING, "else"))) == [(49, 49), (None, None)]
    assert not repeats.waiting
    assert told(repeats.take(record(logging.WARNING, "bad frame", peer="p0", n=51))) == [(51, None)]


def test_informations_are_alike_only_if_they_say_the_same(repeats: Repeats) -> None:
    assert told(repeats.take(record(logging.INFO, "client left", n=1))) == [(1, None)]
    assert told(repeats.take(record(logging.INFO, "client left", n=2))) == [(2, None)]
    assert repeats.take(record(logging.INFO, "client left", n=1)) == []


@pytest.mark.parametrize("field", ["job", "request"])
def test_a_job_has_its_line_whatever_happens(repeats: Repeats, field: str) -> None:
    for _ in range(5):
        assert len(repeats.take(record(logging.WARNING, "serve ended", **{field: "same"}))) == 1


def test_one_repetition_is_told_as_it_is(clock: Clock, repeats: Repeats) -> None:
    repeats.take(record(logging.WARNING, "lost", n=0))
    repeats.take(record(logging.WARNING, "lost", n=1))
    clock.now = WINDOW
    assert told(repeats.due()) == [(1, None)]
    assert repeats.due() == []


def test_what_is_counted_is_bounded(repeats: Repeats) -> None:
    for n in range(MOST * 3):
        repeats.take(record(logging.WARNING, "bad frame", peer=f"stranger{n}"))
    assert len(repeats._seen) == MOST


@pytest.mark.usefixtures("own_process")
def test_an_agents_log_collapses_and_loses_nothing_at_the_end() -> None:
    out = io.StringIO()
    configure("info", "json", out)
    log = get("hawk.test")
    for n in range(100):
        log.warning("bad frame", peer="p0", reason=f"junk {n}")
    configure("info", "json", io.StringIO())  # ends the handler, as the end of the process does
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["reason"], line.get("repeated")) for line in lines] == [("junk 0", None), ("junk 99", 99)]
