"""A loop that stands still is seen from outside: by `/livez`, by `/readyz`, in the log."""

from __future__ import annotations

import asyncio
import http.client
import logging
import threading
from collections.abc import AsyncIterator

import pytest

from hawk.errors import ControlError
from hawk.observe.http import ObserveServer, split_address
from hawk.observe.metrics import Metrics
from hawk.observe.watchdog import LoopWatch, Watchdog

LIMIT = 0.5


def ask(server: ObserveServer, page: str) -> tuple[int, str]:
    """The page, asked without the event loop, which therefore stands still meanwhile."""
    host, port = split_address(server.address)
    connection = http.client.HTTPConnection(host, port, timeout=20)
    try:
        connection.request("GET", page)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
async def watched() -> AsyncIterator[tuple[LoopWatch, ObserveServer, Metrics]]:
    metrics = Metrics()
    watch = LoopWatch(LIMIT, metrics.loop_lag)
    watch.start()
    server = ObserveServer("127.0.0.1:0", metrics, lambda: "draining", alive=watch.trouble)
    dog = Watchdog(watch, server)
    await dog.start()
    yield watch, server, metrics
    await dog.close()
    await dog.close()
    watch.stop()
    assert not any(thread.name == "hawk-watchdog" for thread in threading.enumerate())


async def test_a_stuck_loop_is_told_while_it_is_stuck(
    watched: tuple[LoopWatch, ObserveServer, Metrics], caplog: pytest.LogCaptureFixture
) -> None:
    watch, server, metrics = watched
    with caplog.at_level(logging.WARNING, "hawk.observe.watchdog"):
        while (answer := ask(server, "/livez"))[0] == 200:
            pass
        assert "event loop has not run for" in answer[1]
        assert "event loop has not run for" in ask(server, "/readyz")[1]
        assert ask(server, "/metrics")[0] == 200
        while "stands still" not in caplog.text:
            ask(server, "/livez")
        # Where it is: here.
        assert any("test_watchdog.py" in place for place in watch.stack())
        assert "test_a_stuck_loop_is_told_while_it_is_stuck" in caplog.text
        loop = asyncio.get_running_loop()
        while (await loop.run_in_executor(None, ask, server, "/livez"))[0] != 200:
            pass
        while "runs again" not in caplog.text:
            await loop.run_in_executor(None, ask, server, "/livez")
    assert caplog.text.count("stands still") == 1
    assert (await loop.run_in_executor(None, ask, server, "/readyz")) == (503, "draining\n")
    assert metrics.value("hawk_loop_lag_seconds_sum") > LIMIT


async def test_a_port_in_use_is_told_to_who_starts_it(
    watched: tuple[LoopWatch, ObserveServer, Metrics],
) -> None:
    watch, server, metrics = watched
    second = Watchdog(watch, ObserveServer(server.address, metrics, lambda: None))
    with pytest.raises(ControlError, match="cannot listen"):
        await second.start()
    await second.close()


async def test_a_watch_that_was_stopped_says_nothing() -> None:
    watch = LoopWatch(0.0, lambda lag: None)
    assert watch.trouble() is None
    watch.start()
    watch.stop()
    watch.stop()
    assert watch.late() == 0.0


@pytest.mark.parametrize("alone", [True, False])
async def test_a_loop_that_nobody_looks_at_tells_afterwards_that_it_stood_still(
    alone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    watch = LoopWatch(0.2, lambda late: None, alone=alone)
    with caplog.at_level(logging.WARNING, "hawk.observe.watchdog"):
        watch.start()
        watch._due -= 5.0  # so long ago it was to have its turn
        watch._tick()
        watch.stop()
        assert ("stood still" in caplog.text) is alone
