"""Who owns which block, and which offer is whose."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from hawk.agent import fetching, outbox
from hawk.agent.outbox import Outbox
from hawk.control.messages import Done, Progress
from hawk.errors import (
    Aborted,
    AlreadyClaimed,
    AlreadyOffered,
    Busy,
    HawkError,
    InvalidArgument,
    LeaseExpired,
    RangeBusy,
    UnknownCache,
    UnknownRequest,
)
from hawk.jobs import offers
from hawk.jobs.caches import CacheBook, CacheEntry, compile_descr
from hawk.jobs.offers import Claim, OfferBook, OfferEntry
from hawk.jobs.past import Outcome
from hawk.jobs.states import State
from hawk.plan.types import Placement
from tests.end_to_end import caches as c
from tests.unit.jobs import clock

DESCR = c.source_spec().descr()


def cache(session: bytes = b"s" * 16, closed: list[str] | None = None) -> CacheEntry:
    nowhere = Placement(np.zeros((3, 1), np.int32), np.zeros((3, 1), np.int64))
    gone = closed if closed is not None else []
    return CacheEntry(
        DESCR, compile_descr(DESCR), nowhere, (), session, on_close=lambda: gone.append("closed")
    )


# -- blocks ----------------------------------------------------------------------------------------------


def test_blocks_are_taken_all_or_none() -> None:
    entry = cache()
    entry.own(np.array([1, 2]), "a")
    with pytest.raises(RangeBusy) as caught:
        entry.own(np.array([3, 2]), "b")
    assert (caught.value.field, caught.value.got, caught.value.facts["holder"]) == ("blocks[1]", "2", "a")
    assert entry.owners == {1: "a", 2: "a"}
    entry.quarantine("a")
    assert (entry.owners, entry.quarantined) == ({}, {1: "a", 2: "a"})
    with pytest.raises(RangeBusy):
        entry.own(np.array([1]), "b")
    entry.disown("a")
    entry.own(np.array([1, 2, 3]), "b")


def test_what_is_read_is_not_written_and_the_other_way_round() -> None:
    entry = cache()
    entry.lend(np.array([1, 2]))
    entry.lend(np.array([2, 3]))  # two offers may share a prefix
    with pytest.raises(RangeBusy, match="open offer") as caught:
        entry.own(np.array([0, 2]), "a")
    assert caught.value.field == "blocks[1]"
    entry.take_back(np.array([1, 2]))
    entry.own(np.array([1]), "a")
    with pytest.raises(RangeBusy):
        entry.own(np.array([2]), "b")
    with pytest.raises(RangeBusy):
        entry.lend(np.array([4, 1]))
    assert 4 not in entry.lent
    entry.take_back(np.array([2, 3]))
    assert not entry.lent
    entry.own(np.array([2, 3]), "b")


def test_a_cache_goes_with_its_last_user() -> None:
    closed: list[str] = []
    book, entry = CacheBook(limit=1), cache(closed=closed)
    book.add(entry)
    with pytest.raises(Busy):
        book.add(cache())
    assert book.get(entry.id, b"s" * 16) is entry
    for wrong in ((entry.id, b"t" * 16), ("0" * 32, b"s" * 16)):
        with pytest.raises(UnknownCache):
            book.get(*wrong)
    book.use(entry)
    book.use(entry)
    book.close(entry)
    with pytest.raises(UnknownCache):
        book.get(entry.id, b"s" * 16)
    book.done(entry)
    assert not closed
    book.done(entry)
    book.close(entry)
    assert closed == ["closed"]
    assert entry.gone.is_set()
    assert len(book) == 0


# -- offers ----------------------------------------------------------------------------------------------


def offer(
    request: str = "r",
    *,
    consumers: tuple[str, ...] = (),
    count: int = 1,
    layers: int = 3,
    entry: CacheEntry | None = None,
) -> OfferEntry:
    return OfferEntry(request, entry or cache(), np.arange(4), 64, b"", layers, consumers, count)


async def claim(
    book: OfferBook, entry: OfferEntry, job: str = "j", who: str = "d0", wait: bool = False
) -> Claim:
    return await book.claim(entry.request, entry.claim, who, job, wait=wait)


async def test_an_offer_is_claimed_once() -> None:
    ended: list[OfferEntry] = []
    book, entry = OfferBook(4, ended.append), offer()
    book.add(entry, 60)
    with pytest.raises(AlreadyOffered):
        book.add(offer(), 60)
    held = await claim(book, entry)
    assert held.offer is entry
    with pytest.raises(AlreadyClaimed):
        await claim(book, entry, job="k")
    with pytest.raises(AlreadyClaimed):
        await claim(book, entry)  # repeated frames never come as far as this
    book.unclaim(held, consumed=False)
    assert (entry.claims, entry.taken, entry.outcome) == ({}, [], None)
    book.unclaim(await claim(book, entry, job="k"), consumed=True)
    assert ended == [entry]
    with pytest.raises(AlreadyClaimed, match="consumed"):
        await claim(book, entry)
    past = book.past(entry.claim)
    assert past is not None
    assert (past.outcome, past.taken) == (Outcome.CONSUMED, ("d0",))
    book.add(offer(), 60)
    with pytest.raises(AlreadyClaimed, match="consumed"):
        await claim(book, entry)  # the ticket of old, while the request is offered anew


@pytest.mark.parametrize(
    ("consumer", "who", "right", "error", "said"),
    [
        ("", "d0", "", UnknownRequest, r"offered without consumer=.*with consumer=\"d0\""),
        ("", "d0", "0" * 32, UnknownRequest, "ticket: .*no offer that is open"),
        ("d1", "d0", None, AlreadyClaimed, "another consumer"),
        ("d1", "d1", "0" * 32, UnknownRequest, "ticket: .*no offer that is open"),
    ],
)
async def test_claims_that_are_refused(
    consumer: str, who: str, right: str | None, error: type, said: str
) -> None:
    book, entry = OfferBook(4, lambda entry: None), offer(consumers=(consumer,) if consumer else ())
    book.add(entry, 60)
    with pytest.raises(error, match=said):
        await book.claim("r", entry.claim if right is None else right, who, "j", wait=False)
    assert not entry.claims


async def test_as_many_endings_are_known_as_offers_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "_REMEMBERED", 2)
    book = OfferBook(5, lambda entry: None)
    made = [offer(f"r{i}") for i in range(6)]
    for entry in made:
        book.add(entry, 60)
        book.end(entry, Outcome.WITHDRAWN, HawkError("enough"))
    assert [book.past(entry.claim) is not None for entry in made] == [False, *[True] * 5]


async def test_the_named_consumer_needs_no_ticket() -> None:
    book, entry = OfferBook(4, lambda entry: None), offer(consumers=("d0",))
    book.add(entry, 60)
    assert (await book.claim("r", "", "d0", "j", wait=False)).offer is entry


async def test_early_claims_wait_and_leave_nothing_when_they_go() -> None:
    book, entry = OfferBook(4, lambda entry: None), offer(consumers=("d0",))
    loop = asyncio.get_running_loop()
    first, second, third = (loop.create_task(book.claim("r", "", "d0", str(i), wait=True)) for i in range(3))
    await asyncio.sleep(0)
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    assert len(book._waiting["r"]) == 2
    book.add(entry, 60)
    assert (await first).offer is entry
    with pytest.raises(AlreadyClaimed):
        await second
    assert not book._waiting
    lone = loop.create_task(book.claim("x", "", "d0", "j", wait=True))
    await asyncio.sleep(0)
    lone.cancel()
    await asyncio.gather(lone, return_exceptions=True)
    assert not book._waiting


async def test_who_waits_for_what_will_not_be_offered_is_told_why() -> None:
    book, entry = OfferBook(4, lambda entry: None), offer()
    waits = asyncio.get_running_loop().create_task(book.claim("r", entry.claim, "d0", "j", wait=True))
    other = asyncio.get_running_loop().create_task(book.claim("r", "ab" * 16, "d0", "k", wait=True))
    await asyncio.sleep(0)
    book.forgo("r", entry.claim, b"s", "no room")
    with pytest.raises(UnknownRequest, match=r"it will not be offered.*no room") as told:
        await waits
    assert told.value.facts["outcome"] == "forgone"
    with pytest.raises(UnknownRequest, match="no room"):  # who comes later, too
        await book.claim("r", entry.claim, "d0", "l", wait=True)
    assert not other.done()
    other.cancel()
    made = offer(request="s")
    book.add(made, 60)
    book.forgo("s", made.claim, b"s", "too late")  # what was made stays as it is
    assert (await claim(book, made)).offer is made


async def test_the_next_offer_is_waited_for_while_the_one_before_is_still_read() -> None:
    book, entry, following = OfferBook(4, lambda entry: None), offer(), offer()
    book.add(entry, 60)
    held = await claim(book, entry)
    book.end(entry, Outcome.WITHDRAWN, Aborted("preempted"))
    waits = asyncio.get_running_loop().create_task(book.claim("r", following.claim, "d0", "k", wait=True))
    await asyncio.sleep(0)
    assert not waits.done()
    book.unclaim(held, consumed=False)
    await asyncio.sleep(0)
    book.add(following, 60)
    assert (await waits).offer is following


async def test_a_claim_waits_for_a_holder_that_is_leaving() -> None:
    book, entry = OfferBook(4, lambda entry: None), offer()
    book.add(entry, 60)
    held = await claim(book, entry)
    held.leaving = True
    tasks = [asyncio.get_running_loop().create_task(claim(book, entry, job=str(i))) for i in range(2)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    book.unclaim(held, consumed=False)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [Claim, AlreadyClaimed]
    held = entry.claims["0"]
    held.leaving = True
    late = asyncio.get_running_loop().create_task(claim(book, entry, job="late"))
    await asyncio.sleep(0)
    book.unclaim(held, consumed=True)
    with pytest.raises(AlreadyClaimed, match="consumed"):
        await late


async def test_times_that_run_out() -> None:
    ended: list[OfferEntry] = []
    book, idle, held = OfferBook(4, ended.append), offer("idle"), offer("held")
    book.add(idle, 0.01)
    book.add(held, 0.01)
    made = await claim(book, held)
    await asyncio.wait_for(idle.ended.wait(), 10)
    assert idle.outcome is Outcome.EXPIRED
    with pytest.raises(LeaseExpired):
        await claim(book, idle)
    while not held.overdue:
        await asyncio.sleep(0)
    assert held.outcome is None
    book.unclaim(made, consumed=False)
    assert held.outcome is Outcome.EXPIRED
    assert len(ended) == 2


async def test_withdrawing_stops_the_holder_first() -> None:
    ended: list[OfferEntry] = []
    book, entry = OfferBook(4, ended.append), offer()
    book.add(entry, 60)
    held = await claim(book, entry)
    stopped: list[object] = []
    held.stop = stopped.append
    book.end(entry, Outcome.WITHDRAWN, Aborted("gone"))
    book.end(entry, Outcome.EXPIRED, Aborted("again"))
    assert len(stopped) == 1
    assert not ended
    with pytest.raises(UnknownRequest, match="withdrawn"):
        await claim(book, entry, job="k")
    book.unclaim(held, consumed=False)
    assert ended == [entry]
    assert entry.outcome is Outcome.WITHDRAWN


async def test_bounds_and_layers() -> None:
    book = OfferBook(2, lambda entry: None)
    entry = offer("a", layers=0)
    book.add(entry, 60)
    book.add(offer("b"), 60)
    with pytest.raises(Busy):
        book.add(offer("c"), 60)
    waiting = asyncio.get_running_loop().create_task(entry.until_layers(2))
    book.layers_ready(entry, 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    book.layers_ready(entry, 3)
    await asyncio.wait_for(waiting, 10)
    for layers in (2, 4):
        with pytest.raises(InvalidArgument):
            book.layers_ready(entry, layers)


# -- answers ---------------------------------------------------------------------------------------------


async def test_answers_wait_for_a_client_that_does_not_read() -> None:
    sent: list[object] = []
    full = SimpleNamespace(now=False)

    def send(message: object) -> None:
        if full.now:
            raise Busy("full", retry_after=0.01)
        sent.append(message)

    box = Outbox(send, lambda: pytest.fail("not that many"))
    progress = Progress("0" * 32, "receiving", 1, 2)
    box.put(progress)
    full.now = True
    box.put(progress)
    assert (sent, len(box)) == ([progress], 0)  # what is not the latest need not arrive
    for i in range(3):
        box.put(Done(i))
    box.put(progress)
    assert len(box) == 3
    full.now = False
    async with asyncio.timeout(10):
        while len(box):
            await asyncio.sleep(0.005)
    assert sent[1:] == [Done(0), Done(1), Done(2)]


async def test_a_client_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MOST", 3)
    given_up: list[bool] = []

    def send(message: object) -> None:
        raise Busy("full", retry_after=60)

    box = Outbox(send, lambda: given_up.append(True))
    for i in range(4):
        box.put(Done(i))
    assert given_up == [True]
    assert len(box) == 0


def test_a_client_hears_of_bytes_at_once_and_of_states_that_last() -> None:
    async def run() -> None:
        heard: list[object] = []
        told = fetching._Told("0" * 32, heard.append)
        told.progress(State.CONNECTING, 0, 0)
        told.progress(State.REQUESTED, 0, 0)
        await asyncio.sleep(fetching.STATE_AFTER / 2)
        assert not heard
        await asyncio.sleep(fetching.STATE_AFTER)
        assert heard == [Progress("0" * 32, "requested", 0, 0)]
        told.progress(State.RECEIVING, 1, 9)
        told.progress(State.RECEIVING, 3, 9)
        told.progress(State.RECEIVING, 5, 9)
        assert heard[1:] == [Progress("0" * 32, "receiving", 1, 9)]
        await asyncio.sleep(0)
        assert heard[2:] == [Progress("0" * 32, "receiving", 5, 9)]
        told.progress(State.RELEASING, 5, 9)
        told.progress(State.READY, 5, 9)
        told.end(Done(1))
        await asyncio.sleep(2 * fetching.STATE_AFTER)
        assert heard[3:] == [Done(1)]

    clock.run(run())
