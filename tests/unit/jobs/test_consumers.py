"""Offers that several consumers take: each once, nobody else, and the source is held until the last has released it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from hawk.arguments import consumer_names
from hawk.errors import Aborted, AlreadyClaimed, InvalidArgument, LeaseExpired
from hawk.jobs.caches import write_part
from hawk.jobs.offers import Claim, OfferBook, OfferEntry
from hawk.jobs.past import Outcome
from tests.unit.jobs.rig import rig
from tests.unit.jobs.test_books import cache


def offer(*consumers: str, count: int = 1) -> OfferEntry:
    return OfferEntry("r", cache(), np.arange(4), 64, b"", 3, consumers, count)


async def claim(book: OfferBook, entry: OfferEntry, who: str, job: str, claim: str | None = None) -> Claim:
    return await book.claim("r", entry.claim if claim is None else claim, who, job, wait=False)


async def test_named_consumers_claim_once_each() -> None:
    ended: list[OfferEntry] = []
    book, entry = OfferBook(4, ended.append), offer("d0", "d1", "d1")
    book.add(entry, 60)
    first = await claim(book, entry, "d0", "a", claim="")  # by name, without the ticket
    for who in ("d0", "d2"):
        with pytest.raises(AlreadyClaimed) as caught:
            await claim(book, entry, who, "b")
    assert (caught.value.got, caught.value.expected) == ("d2", "d0 or d1")
    second = await claim(book, entry, "d1", "c")
    with pytest.raises(AlreadyClaimed, match="before"):
        await claim(book, entry, "d1", "c")
    book.unclaim(first, consumed=True)
    with pytest.raises(AlreadyClaimed, match="no claim of the offer is left") as caught:
        await claim(book, entry, "d0", "d")
    assert caught.value.facts == {"taken": "d0"}
    third = await claim(book, entry, "d1", "e")
    book.unclaim(second, consumed=True)
    assert not ended
    book.unclaim(third, consumed=True)
    assert ended == [entry]
    past = book.past(entry.claim)
    assert past is not None
    assert (past.outcome, past.taken) == (Outcome.CONSUMED, ("d0", "d1", "d1"))


async def test_a_count_of_consumers_is_whoever_comes_first() -> None:
    book, entry = OfferBook(4, lambda entry: None), offer(count=2)
    book.add(entry, 60)
    held = [await claim(book, entry, f"d{i}", str(i)) for i in range(2)]
    with pytest.raises(AlreadyClaimed, match="others") as caught:
        await claim(book, entry, "d2", "2")
    assert caught.value.facts == {"holder": "0, 1"}
    book.unclaim(held[0], consumed=False)
    await claim(book, entry, "d2", "2")
    assert sorted(entry.claims) == ["1", "2"]
    book.unclaim(held[1], consumed=True)
    with pytest.raises(AlreadyClaimed, match="no claim of the offer is left") as caught:
        await claim(book, entry, "d3", "3")
    assert caught.value.facts == {"holder": "2", "taken": "d1"}


async def test_who_failed_may_come_again_and_waits_for_its_old_job_only() -> None:
    book, entry = OfferBook(4, lambda entry: None), offer("d0", "d1")
    book.add(entry, 60)
    old, other = await claim(book, entry, "d0", "a"), await claim(book, entry, "d1", "b")
    other.leaving = True
    with pytest.raises(AlreadyClaimed):
        await claim(book, entry, "d0", "c")  # what d1 leaves is not for d0
    old.leaving = True
    late = asyncio.get_running_loop().create_task(claim(book, entry, "d0", "c"))
    await asyncio.sleep(0)
    assert not late.done()
    book.unclaim(old, consumed=False)
    assert (await late).job == "c"


async def test_who_waits_by_name_is_not_given_what_its_consumer_has_just_declined() -> None:
    """Two fetches of one consumer wait for two parts; the first offer is one that the consumer has from elsewhere."""
    book, repeated = OfferBook(4, lambda entry: None), offer("d0")
    heads = repeated.part.of_heads
    half = write_part(replace(repeated.part, of_heads=2 * heads))
    repeated.cache.descr = msgspec.structs.replace(repeated.cache.descr, part=half)
    loop = asyncio.get_running_loop()
    waiting = [loop.create_task(book.claim("r", "", "d0", job, wait=True)) for job in ("a", "b")]
    await asyncio.sleep(0)
    book.add(repeated, 60)
    first = await waiting[0]
    first.leaving = first.declined = True
    book.unclaim(first, consumed=False)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting[1].done()
    # Who comes later begins anew, and may want it.
    again = await book.claim("r", "", "d0", "c", wait=True)
    assert again.offer is repeated
    book.unclaim(again, consumed=True)
    waiting[1].cancel()


async def test_time_that_runs_out_lets_holders_end_and_nobody_begin() -> None:
    book, entry = OfferBook(4, lambda entry: None), offer(count=3)
    book.add(entry, 0.01)
    first, second = await claim(book, entry, "d0", "a"), await claim(book, entry, "d1", "b")
    while not entry.overdue:
        await asyncio.sleep(0)
    with pytest.raises(LeaseExpired):
        await claim(book, entry, "d2", "c")
    book.unclaim(first, consumed=True)
    assert entry.outcome is None
    book.unclaim(second, consumed=True)
    assert entry.outcome is Outcome.EXPIRED
    assert entry.ended.is_set()


async def test_withdrawing_stops_every_holder() -> None:
    ended: list[OfferEntry] = []
    book, entry = OfferBook(4, ended.append), offer(count=2)
    book.add(entry, 60)
    held = [await claim(book, entry, "d0", str(i)) for i in range(2)]
    stopped: list[object] = []
    for one in held:
        one.stop = stopped.append
    book.end(entry, Outcome.WITHDRAWN, Aborted("gone"))
    assert len(stopped) == 2
    book.unclaim(held[0], consumed=True)
    assert not ended
    book.unclaim(held[1], consumed=False)
    assert (entry.outcome, ended) == (Outcome.WITHDRAWN, [entry])


async def test_two_jobs_read_one_offer_and_the_second_ends_it() -> None:
    """The rig has one target: its two jobs come one after the other, and a third finds nothing left."""
    async with rig() as made:
        entry = made.offer(consumers=("d0", "d0"))
        await made.fetch(entry.claim).run()
        made.check_bytes()
        assert entry.outcome is None
        await made.serving.idle()
        assert entry.taken == ["d0"]
        await made.fetch("").run()
        made.check_bytes()
        await entry.ended.wait()
        assert entry.outcome is Outcome.CONSUMED
        with pytest.raises(AlreadyClaimed):
            await made.fetch(entry.claim).run()


async def test_a_repeated_fetch_has_the_same_reservation() -> None:
    """Every question comes twice, and an offer for two is still claimed once by one job."""
    async with rig(faults={("fetch", 0): "twice", ("release", 0): "twice"}) as made:
        entry = made.offer(count=2)
        await made.fetch(entry.claim).run()
        made.check_bytes()
        await made.serving.idle()
        assert (entry.taken, entry.claims, entry.outcome) == (["d0"], {}, None)


@pytest.mark.parametrize("wrong", [0, -1, 4097, True, "d0", [], [""], ["d0", 3], ["x" * 129], None])
def test_consumers_that_cannot_be(wrong: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        consumer_names(wrong)
    assert str(caught.value.field).startswith("consumers")


def test_consumers_that_can_be() -> None:
    assert consumer_names(np.int64(3)) == ([], 3)
    assert consumer_names(("d0", "d1", "d0")) == (["d0", "d1", "d0"], 3)
