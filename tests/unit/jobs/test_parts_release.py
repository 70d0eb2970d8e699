"""The end of a request in parts: all of its offers are used up and it is ready, or none is and it is not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hawk.control.messages import Abort, Ended, PeerMessage, Release, Released
from hawk.errors import Aborted, DeadlineExceeded, HawkError, LeaseExpired, PeerLost, UnknownRequest
from hawk.jobs import dialogue
from hawk.jobs.offers import OfferEntry
from hawk.jobs.past import Outcome
from hawk.jobs.request import Source
from hawk.jobs.states import State
from tests.unit.jobs import clock
from tests.unit.jobs.rig import Rig, rig
from tests.unit.jobs.test_loss import FAULTS
from tests.unit.jobs.test_part_jobs import fetch, offers, over, source

pytestmark = pytest.mark.usefixtures("impatient")

Change = Callable[[PeerMessage], tuple[PeerMessage, ...]]


def until_confirmed(made: Rig, then: Callable[[], None], *, held: bool, number: int = 3) -> Change:
    """Calls `then` as the so-manieth confirmation (that an offer is held, or that it is given up) leaves P."""
    seen = 0

    def change(message: PeerMessage) -> tuple[PeerMessage, ...]:
        nonlocal seen
        if isinstance(message, Released) and message.held is held:
            seen += 1
            if seen == number:
                then()
        return (message,)

    return change


async def test_a_lease_that_is_lost_at_the_very_end_leaves_every_offer() -> None:
    """Two parts are held, and the third says that its lease ran out: nothing was used up, and all can be had again."""
    async with rig() as made:
        found = offers(made)
        holds = 0

        def change(message: PeerMessage) -> tuple[PeerMessage, ...]:
            nonlocal holds
            if isinstance(message, Release) and message.hold:
                holds += 1
                if holds == 3:
                    for claim in found[2].claims.values():
                        assert claim.stop is not None
                        claim.stop(LeaseExpired("the lease ran out"))
                    return ()
            return (message,)

        made.to_p.change = change
        with pytest.raises(LeaseExpired):
            await fetch(made, [source(entry) for entry in found]).run()
        await made.serving.idle()
        await over(found, None)
        made.to_p.change = lambda message: (message,)
        await fetch(made, [source(entry) for entry in found]).run()
        made.check_bytes()
        await over(found, Outcome.CONSUMED)


@pytest.mark.parametrize("what", ["abort", "time", "lost", "ended"])
async def test_once_all_are_held_nothing_ends_the_fetch(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(lease=0.5) as made:
        monkeypatch.setattr(dialogue, "SILENCE", 0.1)
        found = offers(made)
        job = fetch(made, [source(entry) for entry in found])

        def change(message: PeerMessage) -> tuple[PeerMessage, ...]:
            """The Releases of the first part are lost for ever; the first of them brings the mishap."""
            if not isinstance(message, Release) or message.hold:
                return (message,)
            if job.parts[0].result.attempt == message.job:
                if what == "abort":
                    job.stop(Aborted("too late"))
                elif what == "time":
                    assert job._clock is not None
                    assert job._clock.when() is None
                elif what == "lost":
                    made.peer.lose(PeerLost("gone"))
                else:
                    for claim in found[0].claims.values():
                        assert claim.stop is not None
                        claim.stop(UnknownRequest("withdrawn"))
                return ()
            return (message,)

        made.to_p.change = change
        assert (await job.run()).parts == 3
        assert job.state is State.READY
        made.check_bytes()
        await made.serving.idle()
        assert found[0].outcome is None  # as if it had not been fetched, and nobody holds it
        assert found[0].claims == {}


@pytest.mark.parametrize("what", ["abort", "time", "lost"])
async def test_until_all_are_held_everything_does(what: str) -> None:
    async with rig() as made:
        found = offers(made)
        job = fetch(made, [source(entry) for entry in found])

        def mishap() -> None:
            if what == "abort":
                job.stop(Aborted("enough"))
            elif what == "time":
                assert job._clock is not None
                job._clock.reschedule(0)  # long ago
            else:
                made.peer.lose(PeerLost("gone"))

        made.to_d.change = until_confirmed(made, mishap, held=True)
        with pytest.raises({"abort": Aborted, "time": DeadlineExceeded, "lost": PeerLost}[what]):
            await job.run()
        await made.serving.idle()
        await over(found, None)


async def test_a_peer_that_gives_up_at_once_does_no_harm() -> None:
    """One of this protocol version that does not know the first step yet passes over the word, and releases."""
    async with rig() as made:
        found = offers(made)
        made.to_p.change = lambda m: (Release(m.job),) if isinstance(m, Release) else (m,)
        await fetch(made, [source(entry) for entry in found]).run()
        made.check_bytes()
        await made.serving.idle()
        await over(found, Outcome.CONSUMED)
        assert made.seen.count("release") == 3


async def test_a_request_of_one_part_needs_one_step() -> None:
    async with rig() as made:
        sent: list[PeerMessage] = []
        made.to_p.change = lambda m: (sent.append(m), (m,))[1]
        entry = made.offer()
        await made.fetch(entry.claim).run()
        assert [m.hold for m in sent if isinstance(m, Release)] == [False]
        await made.serving.idle()


async def test_an_abort_that_is_lost_is_said_again() -> None:
    """What repeats another part is given back, and can be had by the next who asks by name, long before a lease."""
    async with rig(
        lease=60.0, faults={("abort", 0): "drop", ("abort", 1): "drop", ("ended", 0): "drop"}
    ) as made:
        first = offers(made, range(2), consumers=("d0",))
        made.offers._open["r"], hidden = [], made.offers._open["r"]
        rest = offers(made, range(2), range(2, 3), consumers=("d0",))
        made.offers._open["r"] = hidden + made.offers._open["r"]
        assert (await fetch(made, [Source("p0")] * 3).run()).parts == 2
        await asyncio.wait_for(made.serving.idle(), 10)
        assert [str(entry.outcome) for entry in (*first, *rest)].count("None") == 1
        made.offers.add(OfferEntry("r", rest[1].cache, rest[1].blocks, rest[1].tokens, b"", 1, ("d0",)), 60.0)
        assert (await fetch(made, [Source("p0")] * 2).run()).parts == 2
        made.check_bytes()
        await made.serving.idle()
        assert made.seen.count("abort drop") == 2


async def test_an_abort_is_not_said_for_ever() -> None:
    async with rig(lease=0.3) as made:
        found = offers(made, layers=0)
        made.to_p.change = lambda m: () if isinstance(m, Abort) else (m,)
        made.to_d.change = lambda m: () if isinstance(m, Ended) else (m,)
        job = fetch(made, [source(entry) for entry in found])
        task = asyncio.get_running_loop().create_task(job.run())
        while "accepted" not in made.seen:
            await asyncio.sleep(0)
        job.stop(Aborted("enough"))
        with pytest.raises(Aborted):
            await task
        # The rig waits until the session has no job any more.


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=FAULTS, deaf=st.integers(0, 60), stop=st.integers(0, 150), withdrawn=st.integers(0, 150))
@example(faults={("released", 2): "late"}, deaf=0, stop=23, withdrawn=17)
def test_all_or_none(faults: dict[tuple[str, int], str], deaf: int, stop: int, withdrawn: int) -> None:
    """Frames are lost, repeated and late, P hears nothing any more after some of them, the fetch is ended after so many
    turns of the loop, an offer is withdrawn after others: whoever fails has used up no offer, and can have all again.
    """

    async def run() -> None:
        async with rig(faults=faults, lease=0.3) as made:
            clock.without_threads(made)
            found = offers(made)
            heard = 0

            def change(message: PeerMessage) -> tuple[PeerMessage, ...]:
                nonlocal heard
                heard += 1
                return () if deaf and heard > deaf else (message,)

            made.to_p.change = change
            job = fetch(made, [source(entry) for entry in found], timeout=3.0)
            task = asyncio.get_running_loop().create_task(job.run())
            for turn in range(150):
                await asyncio.sleep(0)
                if turn == stop:
                    job.stop(HawkError("enough"))
                if turn == withdrawn:
                    made.offers.end(found[1], Outcome.WITHDRAWN, UnknownRequest("withdrawn"))
            await asyncio.wait({task})
            made.to_p.change = lambda message: (message,)
            await made.serving.idle()
            outcomes = {entry.outcome for entry in found} - {Outcome.WITHDRAWN}
            if task.exception() is None:
                made.check_bytes()
                return
            assert outcomes <= {None}, (task.exception(), outcomes)
            if found[1].outcome is None:
                await fetch(made, [source(entry) for entry in found]).run()
                made.check_bytes()
                await over(found, Outcome.CONSUMED)

    clock.run(run())
