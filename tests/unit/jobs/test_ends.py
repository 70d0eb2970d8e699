"""How jobs end on both sides: leases, deadlines, deaths, readers that cannot be shut out, shares of a peer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hawk.control.messages import Poll, Release
from hawk.errors import (
    Aborted,
    AlreadyClaimed,
    Busy,
    DeadlineExceeded,
    Draining,
    HawkError,
    LeaseExpired,
    PeerLost,
    RangeBusy,
)
from hawk.jobs import dialogue, part
from hawk.jobs.admission import Admission
from hawk.jobs.past import Outcome
from hawk.jobs.receive import DEPTH
from hawk.transports.base import Grant
from tests.end_to_end import caches as c
from tests.unit.jobs import clock
from tests.unit.jobs.rig import ENDPOINT, PEER, rig

pytestmark = pytest.mark.usefixtures("impatient")


async def test_what_is_not_flushed_is_not_seen() -> None:
    """The device of these tests would notice a job that is called ready without a flush."""
    async with rig() as made:
        made.npu.make_visible = _nothing  # type: ignore[method-assign]
        entry = made.offer()
        await made.fetch(entry.claim).run()
        with pytest.raises(AssertionError, match="wrong bytes"):
            made.check_bytes()


async def _nothing(ranges: object) -> None:
    return


async def test_a_transport_is_told_who_will_read_each_chunk() -> None:
    async with rig() as made:
        told: list[tuple[Grant, object]] = []
        made.transport.expect = lambda grant, reader: told.append((grant, reader))  # type: ignore[method-assign]
        entry = made.offer()
        await made.fetch(entry.claim).run()
        assert len({grant.key for grant, _ in told}) == len(told) > 1
        assert all(reader == ENDPOINT for _, reader in told)


async def test_silence_ends_both_sides() -> None:
    async with rig(lease=0.15) as made:
        entry = made.offer(layers=1)
        job = made.fetch(entry.claim)
        task = asyncio.get_running_loop().create_task(job.run())
        await made.reach("receiving")
        made.to_p.change = made.to_d.change = lambda message: ()
        with pytest.raises(LeaseExpired):
            await task
        await made.serving.idle()
        assert entry.outcome is None
        assert not entry.claims
        assert not entry.taken


async def test_a_lease_that_ran_out_is_not_revived_by_a_late_release() -> None:
    async with rig(lease=0.15) as made:
        entry = made.offer()
        kept: list[object] = []

        def hold_back(message: object) -> tuple[object, ...]:
            if isinstance(message, Release | Poll):
                kept.append(message)
                return ()
            return (message,)

        made.to_p.change = hold_back  # type: ignore[assignment]
        with pytest.raises(LeaseExpired):
            await made.fetch(entry.claim).run()
        await made.serving.idle()
        assert any(isinstance(message, Release) for message in kept)
        assert entry.outcome is None


async def test_a_deadline_at_every_state() -> None:
    for state, layers, claim in (("requested", 0, ""), ("receiving", 1, None)):
        async with rig() as made:
            entry = made.offer(layers=layers)
            job = made.fetch(
                entry.claim if claim is None else "",
                timeout=0.1,
                wait=True,
                request="r" if claim is None else "x",
            )
            with pytest.raises(DeadlineExceeded) as caught:
                await job.run()
            assert caught.value.facts["state"] == state
            await made.serving.idle()


@pytest.mark.parametrize("state", ["connecting", "requested", "receiving", "releasing"])
@pytest.mark.parametrize("how", ["stop", "cancel", "peer lost"])
@clock.timeless
async def test_an_end_in_every_state(state: str, how: str) -> None:
    async with rig(lease=0.3) as made:
        clock.without_threads(made)
        entry = made.offer(layers=c.LAYERS if state == "releasing" else 1)
        if state == "requested":
            made.to_d.change = lambda message: ()
        elif state == "releasing":
            made.to_p.change = lambda message: () if isinstance(message, Release) else (message,)
        job = made.fetch(entry.claim)
        task = asyncio.get_running_loop().create_task(job.run())
        await made.reach(state)
        if how == "stop":
            job.stop(Aborted("enough"))
            assert made.target.owners == {}
            assert len(made.target.quarantined) == 2  # until it has ended
            with pytest.raises(Aborted, match="enough"):
                await task
        elif how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            while not made.peer.jobs:
                await asyncio.sleep(0)
            made.peer.lose(PeerLost("gone"))
            with pytest.raises(PeerLost, match="gone"):
                await task
        assert made.target.owners == made.target.quarantined == {}
        await made.serving.idle()
        assert entry.outcome is None


async def test_a_consumer_that_is_gone() -> None:
    async with rig() as made:
        entry = made.offer(layers=1)
        task = asyncio.get_running_loop().create_task(made.fetch(entry.claim, timeout=0.5).run())
        await made.reach("receiving")
        made.server.on_gone(type("P", (), {"identity": PEER})(), PeerLost("silent"))
        with pytest.raises(PeerLost, match="consumer is gone"):
            await task
        await made.serving.idle()
        assert made.arena.allocator.owned() == {}


async def test_a_reader_inside_keeps_its_range_in_quarantine() -> None:
    async with rig(can_fence=False) as made:
        made.transport.after_revoke = lambda grant: made.transport.reading == 0
        go = asyncio.Event()

        async def hold() -> None:
            waiting = asyncio.get_running_loop().create_task(go.wait())
            try:
                await asyncio.shield(waiting)
            except asyncio.CancelledError:
                await waiting  # a thread in the middle of a copy heeds nobody
                raise

        made.transport.hold = hold
        entry = made.offer()
        job = made.fetch(entry.claim)
        task = asyncio.get_running_loop().create_task(job.run())
        while not made.transport.reading:
            await asyncio.sleep(0)
        made.to_p.change = lambda message: ()  # no word of the reader's reaches the other side
        made.offers.end(entry, Outcome.WITHDRAWN, Aborted("withdrawn"))
        await entry.ended.wait()
        await made.serving.idle()
        assert made.arena.allocator.quarantined_bytes > 0
        await asyncio.sleep(0.03)  # several looks of the watcher
        kept = made.arena.allocator.quarantined_bytes
        assert kept > 0
        assert len(made.target.owners) + len(made.target.quarantined) == 2
        assert not task.done()
        go.set()
        with pytest.raises(HawkError):
            await task
        assert made.target.owners == made.target.quarantined == {}


async def test_a_second_fetch_waits_for_one_on_its_way_out() -> None:
    async with rig() as made:
        entry = made.offer(layers=1)
        first = made.fetch(entry.claim)
        task = asyncio.get_running_loop().create_task(first.run())
        await made.reach("receiving")
        with pytest.raises(RangeBusy):
            await made.fetch(entry.claim).run()
        first.stop(Aborted("enough"))
        with pytest.raises(Aborted):
            await task
        # The other side has not even heard of it.
        second = asyncio.get_running_loop().create_task(made.fetch(entry.claim).run())
        await asyncio.sleep(0)
        made.offers.layers_ready(entry, c.LAYERS)
        await second
        made.check_bytes()
        with pytest.raises(AlreadyClaimed):
            await made.fetch(entry.claim).run()


async def test_a_withdrawal_at_the_last_moment_tells_the_truth() -> None:
    """Withdrawn while the release is being answered: whoever was told ready was a consumer."""
    async with rig() as made:
        entry = made.offer()

        def withdraw(grant: object) -> bool:
            if made.progress and made.progress[-1][0] == "releasing":
                made.offers.end(entry, Outcome.WITHDRAWN, Aborted("withdrawn"))
            return True

        made.transport.after_revoke = withdraw
        made.to_p.change = lambda message: () if type(message).__name__ == "Consumed" else (message,)
        await made.fetch(entry.claim).run()
        await entry.ended.wait()
        assert entry.outcome is Outcome.CONSUMED


async def test_a_draining_agent_takes_nobody_new() -> None:
    async with rig() as made:
        waiting = asyncio.get_running_loop().create_task(made.fetch("", wait=True, request="early").run())
        while not made.serving.jobs:
            await asyncio.sleep(0)
        entry = made.offer()
        made.serving.drain()
        with pytest.raises(Draining):
            await waiting
        with pytest.raises(Draining):
            await made.fetch(entry.claim).run()


async def test_more_jobs_than_are_served() -> None:
    async with rig() as made:
        made.serving.admission = Admission(working=0, queued=0, early=0, what="serves")
        entry = made.offer()
        with pytest.raises(Busy) as caught:
            await made.fetch(entry.claim).run()
        assert caught.value.retry_after > 0


async def test_closing_ends_every_job() -> None:
    async with rig() as made:
        entry = made.offer(layers=1)
        task = asyncio.get_running_loop().create_task(made.fetch(entry.claim).run())
        await made.reach("receiving")
        await made.serving.close()
        assert made.arena.allocator.owned() == {}
        with pytest.raises(Aborted, match="stopping"):
            await task


@clock.timeless
async def test_beats_alone_keep_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue, "NUDGE", 60.0)  # no question is put again, so nothing else renews it
    async with rig(lease=0.4) as made:
        clock.without_threads(made)
        entry = made.offer(layers=1)
        task = asyncio.get_running_loop().create_task(made.fetch(entry.claim).run())
        while made.seen.count("alive") < 14:  # each a quarter of a lease after the other
            await asyncio.sleep(0.01)
            assert not task.done(), task.exception()
        made.offers.layers_ready(entry, c.LAYERS)
        await task
        made.check_bytes()


async def test_no_more_chunks_are_read_at_once_than_that() -> None:
    async with rig(arena=1 << 20) as made:
        made.context = replace(made.context, credit=1 << 20)
        made.room._per_peer = 1 << 20
        most, go = [0], asyncio.Event()

        async def hold() -> None:
            most[0] = max(most[0], made.transport.reading)
            await go.wait()

        made.transport.hold = hold
        entry = made.offer()
        task = asyncio.get_running_loop().create_task(made.fetch(entry.claim).run())
        while made.seen.count("prepared") < 3:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0.001)
        go.set()
        await task
        assert most == [DEPTH]


async def test_jobs_of_one_peer_share_what_it_may_have_prepared() -> None:
    async with rig(arena=1 << 20) as made:
        made.context = replace(made.context, credit=1 << 20)
        go = asyncio.Event()
        made.transport.hold = go.wait
        most = [0]
        whole = made.transport.grant

        def grant(offset: int, nbytes: int) -> Grant:
            made_grant = whole(offset, nbytes)
            most[0] = max(most[0], sum(g.nbytes for g in made.transport.grants.values()))
            return made_grant

        made.transport.grant = grant  # type: ignore[method-assign]
        entry = made.offer()
        task = asyncio.get_running_loop().create_task(made.fetch(entry.claim).run())
        while made.seen.count("prepared") < 2:
            await asyncio.sleep(0)
        # A third chunk would be more than the peer may have; an end in this state leaves none of it taken.
        made.offers.end(entry, Outcome.WITHDRAWN, Aborted("withdrawn"))
        with pytest.raises(HawkError):
            await task
        await made.serving.idle()
        assert most[0] <= 1 << 17
        assert made.room.used("peer d0") == 0


async def test_an_end_while_the_arena_is_full_leaves_nothing_taken() -> None:
    async with rig(arena=1 << 17) as made:
        whole = made.arena.reserve(1 << 17, "somebody else")
        assert whole is not None
        entry = made.offer()
        task = asyncio.get_running_loop().create_task(made.fetch(entry.claim).run())
        while not made.room.waiting:
            await asyncio.sleep(0)
        made.offers.end(entry, Outcome.WITHDRAWN, Aborted("withdrawn"))
        with pytest.raises(Aborted):
            await task
        await made.serving.idle()
        assert made.room.used("peer d0") == 0
        made.arena.free(whole)


async def test_bytes_out_are_those_that_were_read_and_not_those_that_were_prepared() -> None:
    async with rig() as made:
        entry = made.offer()
        reads = 0

        async def hold() -> None:
            nonlocal reads
            reads += 1
            if reads > 1:
                await asyncio.Event().wait()

        made.transport.hold = hold
        job = made.fetch(entry.claim)
        task = asyncio.get_running_loop().create_task(job.run())
        while "consumed" not in made.seen or made.seen.count("prepared") < 2:
            await asyncio.sleep(0)
        job.stop(Aborted("enough"))
        with pytest.raises(Aborted):
            await task
        await made.serving.idle()
        before = made.metrics.value("hawk_bytes_total", direction="out", transport="tcp")
        made.transport.hold = None
        whole = await made.fetch(entry.claim).run()
        await made.serving.idle()
        assert 0 < before < whole.nbytes
        out = made.metrics.value("hawk_bytes_total", direction="out", transport="tcp")
        assert out == before + whole.nbytes


async def test_who_is_there_is_told_when_this_agent_is_to_be_read_in_another_way() -> None:
    async with rig() as made:
        for identity in (PEER, b"a stranger"):
            made.server.peers[identity] = SimpleNamespace(identity=identity, generation=0, name="", version=2)
        made.serving.guests.greet()
        assert made.seen == ["welcome", "welcome"]  # the first when it came


async def test_a_link_that_comes_late_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "CONNECT_TIMEOUT", 0.2)
    async with rig() as made:
        entry = made.offer()
        given = []

        async def busy(session: object, transport: str, *, timeout: float) -> object:
            given.append(timeout)
            if len(given) < 3:
                raise DeadlineExceeded("the peer did not answer", timeout=timeout)
            return made.transport

        monkeypatch.setattr(made, "get", busy)
        await made.fetch(entry.claim).run()
        assert given == [0.2] * 3
        # A peer that is gone is not waited for.
        given.clear()
        made.peer.state = "lost"
        with pytest.raises(DeadlineExceeded, match="the peer did not answer"):
            await made.fetch(made.offer(request="s").claim, request="s").run()
        assert len(given) == 1
