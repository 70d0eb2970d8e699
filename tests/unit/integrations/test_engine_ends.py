"""How offers and fetches end otherwise than well: who is told, when, and whose the blocks are until then."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hawk.errors import Busy, DeadlineExceeded
from hawk.integrations.orders import OfferEnd, release
from hawk.integrations.remote import digest
from tests.unit.integrations.test_engine import LIMIT, PROMPT, Pair, early, pair, rows, until

__all__ = ["pair"]


def test_an_early_fetch_follows_a_prefill_that_was_interrupted(pair: Pair) -> None:
    order, params = pair.prefill("r", list(range(10)))
    pair.d.fetch(pair.order("r", early(params), [1, 2, 3]))
    pair.p.offer(order, written=1)
    pair.p.withdraw(["r"])
    again = replace(order, attempt=1, blocks=tuple(range(20, 30)))
    pair.p.offer(again, written=3)  # waits for the first one's end
    assert until(pair.d, lambda e: bool(e.arrived)).why == {}
    assert np.array_equal(
        rows(pair.target, [1, 2, 3])[:, :40], rows(pair.source, list(range(20, 30)))[:, :40]
    )
    assert {end.ending for end in until(pair.p, lambda e: len(e.offers) == 2).offers} == {
        "withdrawn",
        "consumed",
    }


@pytest.mark.parametrize("offered", [True, False])
def test_who_waits_for_a_prefill_that_ends_badly_is_told(pair: Pair, offered: bool) -> None:
    params = {"do_remote_decode": True, "transfer_id": "t"}
    pair.books.prefill("r", params, len(PROMPT), digest(PROMPT))
    where = early({**pair.prefill("other", [0] * 10)[1], "transfer_id": "t"})
    pair.d.fetch(pair.order("r", where, [1, 2, 3]))
    if offered:
        pair.books.scheduled("r", range(10), anew=True, end=40)
        pair.p.offer(pair.books.take().offers[0], written=0)
    pair.books.finished("r", [[]], well=False)
    orders = pair.books.take()
    for forgone in orders.forgone:
        pair.p.forgo(forgone)
    pair.p.abandon(orders.abandon)
    got = until(pair.d, lambda e: bool(e.arrived))
    assert "it will not be offered" in got.why["r"]
    assert "the request ended before its prefill did" in got.why["r"]


@pytest.mark.parametrize("why", ["gone", "no workers", "a bug"])
def test_who_waits_for_what_cannot_be_handed_over_is_told(
    pair: Pair, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill is over and well, and its offer is taken back: nobody else is coming."""
    pair.books.prefill("r", {"transfer_id": "t"}, len(PROMPT), digest(PROMPT))
    where = early({**pair.prefill("other", [0] * 10)[1], "transfer_id": "t"})
    pair.d.fetch(pair.order("r", where, [1, 2, 3]))
    pair.books.scheduled("r", range(10), anew=True, end=40)
    pair.p.offer(pair.books.take().offers[0], written=0)
    if why == "gone":
        pair.books.gone.add(0)
    elif why == "no workers":
        pair.books.workers = []
    else:
        monkeypatch.setattr("hawk.integrations.remote.write", None)
    assert pair.books.finished("r", [[]], well=True) == (True, None)
    orders = pair.books.take()
    for forgone in orders.forgone:
        pair.p.forgo(forgone)
    pair.p.abandon(orders.abandon)
    assert "it will not be offered" in until(pair.d, lambda e: bool(e.arrived)).why["r"]


def test_an_end_that_is_told_twice_counts_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends between the order and its place in line: of several workers, one must not speak for two."""
    order, _ = pair.prefill("r", list(range(10)))

    def ends(*args: object, **more: object) -> bool:
        pair.p._none_left()
        return False

    monkeypatch.setattr(pair.p, "_post", ends)
    pair.p.offer(order, written=3)
    pair.d._none_left()
    assert pair.p.ended({"r"}).offers == [
        OfferEnd("r", 0, "offer_failed", "the connector was closed"),
    ]
    assert pair.p.take_stats()["offer_failed"] == 1


def test_what_frees_the_other_side_is_not_ended_with_the_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine lets go of a request whose fetch has just failed: the other side is to hear of it all the same."""
    order, params = pair.prefill("r", list(range(10)))
    pair.p.offer(order, written=3)
    stands, go = threading.Event(), threading.Event()

    async def late(*args: object) -> None:
        raise DeadlineExceeded("the fetch did not end in time")

    async def slow(*args: Any) -> None:
        stands.set()
        while not go.is_set():
            await asyncio.sleep(0)
        await release(*args)

    monkeypatch.setattr("hawk.integrations.engine.fetch", late)
    monkeypatch.setattr("hawk.integrations.engine.release", slow)
    pair.d.fetch(pair.order("r", params, [1, 2, 3]))
    entry = pair.d._fetches["r"]
    assert stands.wait(LIMIT)
    pair.d._post(entry.abort)
    pair.d._post(go.set)
    assert until(pair.p, lambda e: bool(e.sent), "r").sent == {"r"}
    assert pair.p.take_stats()["consumed"] == 1


def test_who_waits_for_an_offer_that_fails_is_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    order, params = pair.prefill("r", list(range(10)))
    pair.d.fetch(pair.order("r", early(params), [1, 2, 3]))
    client = pair.p.client
    assert client is not None

    async def full(*args: object, **more: object) -> None:
        raise Busy("this agent keeps at most 3 offers open", retry_after=0.5)

    monkeypatch.setattr(client, "offer", full)
    pair.p.offer(order, written=3)
    assert "at most 3 offers" in until(pair.d, lambda e: bool(e.arrived)).why["r"]
    (end,) = until(pair.p, lambda e: bool(e.offers), "r").offers
    assert (end.ending, "at most 3 offers" in end.why) == ("offer_failed", True)
    pair.d.fetch(pair.order("later", params, [1, 2, 3]))  # who comes later is told, too
    assert "at most 3 offers" in until(pair.d, lambda e: bool(e.arrived)).why["later"]


def test_a_fetch_that_fails_frees_the_other_side(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    order, params = pair.prefill("r", list(range(10)))
    pair.p.offer(order, written=3)

    async def late(*args: object) -> None:
        raise DeadlineExceeded("the fetch did not end in time")

    monkeypatch.setattr("hawk.integrations.engine.fetch", late)
    pair.d.fetch(pair.order("r", params, [1, 2, 3]))
    assert until(pair.d, lambda e: bool(e.arrived)).failed == {"r": (1, 2, 3)}
    assert until(pair.p, lambda e: bool(e.sent), "r").sent == {"r"}


def test_blocks_that_are_given_back_late_are_named_and_stay_held(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hawk.integrations.engine.LATE", -1.0)
    order, _ = pair.prefill("r", list(range(10)))
    stands, go = threading.Event(), threading.Event()

    async def stand_still() -> None:
        stands.set()
        go.wait(LIMIT)

    pair.p.offer(order, written=3)
    assert pair.p._line.loop is not None
    asyncio.run_coroutine_threadsafe(stand_still(), pair.p._line.loop)
    assert stands.wait(LIMIT)
    pair.p.withdraw(["r"])
    for _ in range(2):
        assert pair.p.ended(set()).offers == []
    assert pair.p.take_stats()["late"] == 1
    assert "request=r blocks=10" in caplog.text
    go.set()
    assert until(pair.p, lambda e: bool(e.offers)).offers == [OfferEnd("r", 0, "withdrawn")]
