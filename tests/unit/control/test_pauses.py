"""A channel whose own loop stood still does not take that for the server's silence."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hawk.control import channel as module
from hawk.control.beat import PONG
from hawk.control.channel import Channel
from hawk.control.frames import Header, Kind, Pong, encode_header
from hawk.control.sockets import Limits
from hawk.errors import PeerUnreachable
from tests.unit.control.ends import CODEC, Text
from tests.unit.jobs.clock import ClockLoop

ANSWER = [encode_header(Header(2, Kind.PONG, 9, 0)), PONG.encode(Pong(1))]


@pytest.fixture
def loop() -> Iterator[ClockLoop]:
    made = ClockLoop()
    yield made
    made.close()
    assert made.faults == []


@pytest.fixture
def channel(loop: ClockLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Channel[Text]]:
    """One whose socket is the test's."""
    quiet = SimpleNamespace(
        start=lambda: None, stop=lambda: None, poke=lambda: None, behind=lambda: False,
        close=lambda: None, note=lambda what: None, heard=lambda: None, trouble="", reason="", story=lambda: "",
    )  # fmt: skip
    monkeypatch.setattr(module, "ReceiveLoop", lambda *_, **__: quiet)
    monkeypatch.setattr(module, "Line", lambda *_: quiet)
    endpoint: Any = SimpleNamespace(
        raw=None, limits=Limits(), address="tcp://there:1", send=lambda frames: None, close=lambda: None
    )
    made: Channel[Text] = Channel(
        endpoint, CODEC, lambda *_: None, on_lost=lambda _: None, on_restarted=lambda *_: None
    )
    loop.do(made.start)
    yield made
    made.close()


def test_what_was_said_during_a_pause_counts(loop: ClockLoop, channel: Channel[Text]) -> None:
    waiting = loop.create_task(channel.up(10.0))
    loop.settle()
    loop.now += 40.0  # no turn of the loop in all that time: its timers come first, and then its sockets
    loop.do(lambda: None)
    assert not waiting.done()
    loop.do(lambda: channel._take(b"", ANSWER))
    assert waiting.done()
    assert waiting.exception() is None


@pytest.mark.parametrize("pause", [0.0, 40.0])
def test_nothing_said_is_a_silence_all_the_same(
    loop: ClockLoop, channel: Channel[Text], pause: float
) -> None:
    waiting = loop.create_task(channel.up(10.0))
    loop.settle()
    loop.now += pause
    loop.advance(10.1)
    assert waiting.done()
    assert isinstance(waiting.exception(), PeerUnreachable)
