"""An agent beside an engine that ends and comes back: what is ordered meanwhile, and afterwards."""

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from hawk.integrations.engine import Engine
from hawk.integrations.settings import read_settings
from tests.unit.integrations.test_engine import LIMIT, Pair, caches, rows, until


def test_an_agent_that_comes_back_is_found_again(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hawk.integrations.keeping.AGAIN", 0.02)
    with contextlib.closing(Pair(short_path)) as pair, contextlib.ExitStack() as agents:

        def agent() -> Engine:
            """One with nothing to do: its agent is what the other engine is beside."""
            made = Engine(pair.d.settings, name="p", role="prefill")
            made.start()
            agents.callback(made.close)
            return made

        first = agent()
        beside = read_settings({"agent": f"ipc://{short_path}/p.sock", "timeout": "20s"})
        pair.p = Engine(beside, name="p", role="prefill")
        pair.start(*caches())
        assert pair.p.worker == first.worker
        order, _ = pair.prefill("a", list(range(10)))
        pair.p.offer(order, written=1)
        gone = pair.p.client
        first.close()
        until(pair.p, lambda e: bool(e.sent), "a")
        order, _ = pair.prefill("b", list(range(10)))
        pair.p.offer(order, written=3)
        until(pair.p, lambda e: bool(e.sent), "b")
        assert pair.p.take_stats()["offer_failed"] == 2
        agent()
        limit = time.monotonic() + LIMIT
        while pair.p.client is gone:
            assert time.monotonic() < limit
            pair.p.ended(set())
        order, params = pair.prefill("c", list(range(10)))
        pair.p.offer(order, written=3)
        pair.d.fetch(pair.order("c", params, [1, 2, 3]))
        assert until(pair.d, lambda e: bool(e.arrived)).failed == {}
        assert np.array_equal(
            rows(pair.target, [1, 2, 3])[:, :40], rows(pair.source, list(range(10)))[:, :40]
        )
        until(pair.p, lambda e: bool(e.sent), "c")
        pair.p.close()
