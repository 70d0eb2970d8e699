"""An agent beside an engine that ends and comes back: what is ordered meanwhile, and afterwards."""

import contextlib
import threading
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


@pytest.mark.parametrize(("role", "gone"), [("prefill", True), ("decode", False)])
def test_an_agent_that_comes_back_elsewhere_is_not_handed_over(
    role: str, gone: bool, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would be sent to where it was, and their requests fail; what is fetched needs no address of ours."""
    monkeypatch.setattr("hawk.integrations.keeping.AGAIN", 0.02)

    def agent(control: str) -> Engine:
        tables = {name: {"size": "1MiB"} for name in ("arena", "staging")} | {"jobs": {"chunk": "64KiB"}}
        local = {"agent": {"local": f"ipc://{short_path}/any.sock"}}
        extra = {"control": f"ipc://{short_path}/{control}"}
        made = Engine(read_settings({"hawk": {**tables, **local}, **extra}), name="a", role=role)
        made.start()
        return made

    beside = Engine(read_settings({"agent": f"ipc://{short_path}/a.sock"}), name="a", role=role)
    with contextlib.closing(beside):
        with contextlib.closing(agent("here")):
            beside.start()
            beside.register(caches()[0])
            lost = beside.client
        with contextlib.closing(agent("there")):
            limit = time.monotonic() + LIMIT
            while beside.client is lost or (beside.gone and not gone):
                assert time.monotonic() < limit
                beside.ended(set())
            looks = threading.Event()
            seen = beside.client
            assert seen is not None
            whole = seen.check_context

            def look() -> None:
                looks.set()
                whole()

            monkeypatch.setattr(seen, "check_context", look)
            assert looks.wait(LIMIT)  # it has come round once more
            assert beside.gone is gone
