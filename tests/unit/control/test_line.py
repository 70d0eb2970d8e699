"""What is made of a connection's events: why there is none, and when it is made anew."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hawk.control import line as module
from hawk.control.line import SILENT, Line
from hawk.control.monitor import BROKE, LATE, REFUSED, UNLIKE
from hawk.control.sockets import Limits
from tests.unit.jobs.clock import ClockLoop

LIMITS = Limits(handshake=5.0, reconnect_most=1.0)


class Wire:
    """A line whose events are the test's, in a loop whose time is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[object] = []
        self.loop = ClockLoop()
        self.connected: Callable[[], None]
        self.shaken: Callable[[], None]
        self.down: Callable[[str], None]

        def monitor(_: object, *events: Any) -> SimpleNamespace:
            self.connected, self.shaken, self.down = events
            return SimpleNamespace(start=lambda: None, close=lambda: None)

        monkeypatch.setattr(module, "Monitor", monitor)
        endpoint: Any = SimpleNamespace(limits=LIMITS, reconnect=lambda: self.said.append("anew"))
        self.line = Line(endpoint, lambda: self.said.append("up"), self.said.append, lambda: None)
        self.loop.do(self.line.start)

    def tell(self, *whys: str) -> None:
        """A handshake that failed so, or a connection that did, and its end."""
        for why in whys:
            self.loop.do(lambda why=why: self.down(why))  # type: ignore[misc]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Wire(monkeypatch)
    yield made
    made.line.close()
    made.loop.close()
    assert made.loop.faults == []


def test_who_took_the_connection_is_there(wire: Wire) -> None:
    assert wire.line.reason == ""
    wire.loop.do(wire.connected)
    assert wire.line.reason == SILENT
    wire.loop.do(wire.shaken)
    assert (wire.line.reason, wire.said) == (SILENT, ["up"])
    wire.tell(BROKE)
    assert (wire.line.reason, wire.said) == (BROKE, ["up", False])


@pytest.mark.parametrize(
    ("seconds", "why", "reason"),
    [
        (0.0, UNLIKE, UNLIKE),
        (0.0, REFUSED, REFUSED),
        (4.9, REFUSED, REFUSED),
        # The far side's clock of the same five seconds ended it: it did not come to answering.
        (4.9, UNLIKE, SILENT),
        # Our own did, and what it waited for before may have been handled late here.
        (0.0, LATE, SILENT),
        (0.0, BROKE, BROKE),
    ],
)
def test_why_a_handshake_came_to_nothing(wire: Wire, seconds: float, why: str, reason: str) -> None:
    wire.loop.do(wire.connected)
    wire.loop.advance(seconds)
    wire.tell(why, BROKE)
    assert wire.line.trouble == reason
    assert wire.said == [why == REFUSED, False]


@pytest.mark.parametrize(("why", "seconds"), [(UNLIKE, 1.0), (REFUSED, 1.0), (LATE, 6.0), (BROKE, 6.0)])
def test_what_zeromq_mends_has_the_time_of_a_handshake(wire: Wire, why: str, seconds: float) -> None:
    wire.loop.do(wire.connected)
    wire.tell(why, BROKE)
    wire.loop.advance(seconds - 0.1)
    assert "anew" not in wire.said
    wire.loop.advance(0.2)
    assert wire.said.count("anew") == 1
    wire.loop.advance(5.7)
    assert wire.said.count("anew") == 1
    wire.loop.advance(0.3)
    assert wire.said.count("anew") == 2
    wire.loop.do(wire.shaken)
    wire.loop.advance(60.0)
    assert wire.said.count("anew") == 2


def test_an_attempt_of_zeromqs_own_is_not_cut_short(wire: Wire) -> None:
    """The far side's program stands still: each handshake takes its whole time and is begun again by ZeroMQ."""
    for _ in range(5):
        wire.loop.do(wire.connected)
        wire.loop.advance(5.0)
        wire.tell(LATE, BROKE)
        wire.loop.advance(0.5)
    assert "anew" not in wire.said


def test_its_story_is_told_in_seconds(wire: Wire) -> None:
    wire.loop.do(wire.connected)
    wire.loop.advance(5.0)
    wire.tell(LATE)
    wire.loop.advance(1.0)

    async def story() -> str:
        return wire.line.story()

    assert wire.loop.await_(story()) == f"begun 6.0 s ago, connected 6.0 s ago, {SILENT} 1.0 s ago"


def test_a_story_has_an_end(wire: Wire) -> None:
    for _ in range(100):
        wire.loop.do(wire.connected)

    async def story() -> str:
        return wire.line.story()

    assert wire.loop.await_(story()).count("connected") == 12
