"""A request in three parts, each a layer: read together, flushed once, released together, and ended together."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pytest

from hawk.control.messages import Release
from hawk.errors import (
    Aborted,
    AlreadyClaimed,
    HawkError,
    PartsMismatch,
    PeerLost,
    RangeBusy,
    TransferFailed,
    VersionMismatch,
)
from hawk.jobs.caches import CacheEntry, compile_descr, part_of
from hawk.jobs.chunks import fewest_heads
from hawk.jobs.fetch import FetchJob
from hawk.jobs.offers import OfferEntry
from hawk.jobs.past import Outcome
from hawk.jobs.request import Source
from hawk.jobs.verify import Verifier
from hawk.layouts import CacheShape, Layout, load
from hawk.plan.types import Placement, Selection
from tests.end_to_end import caches as c
from tests.unit.jobs.rig import SOURCE, TOKENS, Rig, rig
from tests.unit.jobs.test_verify import flip, tampering

pytestmark = pytest.mark.usefixtures("impatient")


def offers(
    made: Rig, *stages: range, layers: int | None = None, consumers: tuple[str, ...] = ()
) -> list[OfferEntry]:
    """An offer of each of these stretches of layers, from a cache of its own over the rig's source."""
    found = []
    for stage in stages or [range(i, i + 1) for i in range(c.LAYERS)]:
        descr = SOURCE.shard(layers=stage).descr()
        entry = CacheEntry(
            descr=descr,
            layout=compile_descr(descr),
            placement=Placement(
                np.arange(len(stage), dtype=np.int32).reshape(-1, 1), np.zeros((len(stage), 1), np.int64)
            ),
            regions=tuple(made.source_entry.regions[i] for i in stage),
            session=b"p" * 16,
        )
        ready = len(stage) if layers is None else layers
        found.append(OfferEntry("r", entry, np.arange(8), TOKENS, b"", ready, consumers))
        made.offers.add(found[-1], 60.0)
    return found


def source(entry: OfferEntry, *, named: bool = False) -> Source:
    return Source("p0") if named else Source("p0", "", "", entry.claim, part_of(entry.cache.descr))


def fetch(made: Rig, sources: list[Source], **options: object) -> FetchJob:
    job = made.fetch(sources[0].claim, **options)  # type: ignore[arg-type]
    request = replace(job.request, part=sources[0].part, others=tuple(sources[1:]))
    progress = lambda state, done, total: made.progress.append((state.value, done, total))  # noqa: E731
    return FetchJob(made.context, request, progress)


async def over(found: list[OfferEntry], outcome: Outcome | None) -> None:
    """The offers are as they should be, and nobody reads their caches."""
    if outcome is not None:
        for entry in found:
            await asyncio.wait_for(entry.ended.wait(), 10)
    assert [(entry.outcome, entry.claims, entry.cache.users) for entry in found] == [(outcome, {}, 0)] * len(
        found
    )


FRAMES = ("fetch", "accepted", "prepared", "consumed", "release", "released")


@pytest.mark.parametrize("fault", ["none", "drop", "twice", "late"])
async def test_three_parts_are_one(fault: str) -> None:
    """The first frames of every kind are lost, repeated or late, and every byte is right all the same."""
    faults = {(frame, i): fault for frame in FRAMES for i in range(3)} if fault != "none" else {}
    async with rig(faults=faults) as made:
        flushes: list[int] = []
        real = made.npu.make_visible

        async def flush(ranges: object) -> None:
            flushes.append(sum(kind.startswith("release") for kind in made.seen))
            assert made.transport.reading == 0
            await real(ranges)  # type: ignore[arg-type]

        made.npu.make_visible = flush  # type: ignore[method-assign]
        found = offers(made)
        result = await fetch(made, [source(e) for e in (*found, found[1])]).run()
        made.check_bytes()
        assert (result.parts, result.tokens, result.transport) == (3, TOKENS, "tcp")
        assert set(flushes) == {0}  # all before the first release
        states = [state for state, _, _ in made.progress]
        assert states.index("releasing") > states.index("receiving")
        done = [nbytes for _, nbytes, _ in made.progress]
        assert done == sorted(done)
        assert made.progress[-1] == ("ready", result.nbytes, result.nbytes)
        await made.serving.idle()
        await over(found, Outcome.CONSUMED)


async def test_one_ticket_twice_is_one_part_though_it_says_nothing_of_parts() -> None:
    async with rig() as made:
        entry = made.offer()
        ticket = Source("p0", "", "", entry.claim)
        assert (await fetch(made, [ticket, ticket]).run()).parts == 1
        made.check_bytes()
        await made.serving.idle()
        assert entry.taken == ["d0"]


async def test_by_name_each_gets_another_part_and_what_repeats_is_let_go() -> None:
    async with rig() as made:
        job = fetch(made, [Source("p0")] * 4, wait=True)
        task = asyncio.get_running_loop().create_task(job.run())
        while made.serving.jobs < 4:
            await asyncio.sleep(0)
        found = offers(made, range(1), consumers=("d0",))
        while not made.progress or made.progress[-1][1] == 0:
            await asyncio.sleep(0)
        found += offers(made, range(1, 3), consumers=("d0",))
        result = await task
        made.check_bytes()
        assert result.parts == 2  # the two that still waited were not needed, and have ended
        await made.serving.idle()
        await over(found, Outcome.CONSUMED)


async def test_what_repeats_another_agents_part_stays_on_offer() -> None:
    """Two claims of one part cannot come from one agent; here the book lets them, as two agents would."""
    async with rig() as made:
        first = offers(made, range(2), consumers=("d0",))
        made.offers._open["r"], hidden = [], made.offers._open["r"]
        rest = offers(made, range(2), range(2, 3), consumers=("d0",))
        made.offers._open["r"] = hidden + made.offers._open["r"]
        assert (await fetch(made, [Source("p0")] * 3).run()).parts == 2
        made.check_bytes()
        await made.serving.idle()
        ended = [entry.outcome for entry in (*first, *rest)]
        assert sorted(map(str, ended)) == ["None", "consumed", "consumed"]


async def test_one_that_fails_ends_the_others_and_blocks_return_when_all_have_drained() -> None:
    """F7: one part fails at once, one stalls and cannot be stopped, the job is aborted meanwhile."""
    async with rig(arena=1 << 20) as made:
        found = offers(made)
        stalled, go = asyncio.Event(), asyncio.Event()
        count = 0

        async def hold() -> None:
            nonlocal count
            count += 1
            if count == 1:
                await stalled.wait()
                raise TransferFailed("broken")
            stalled.set()
            while not go.is_set():  # a read that returns only when no byte can land any more
                with contextlib.suppress(asyncio.CancelledError):
                    await go.wait()

        made.transport.hold = hold
        job = fetch(made, [source(entry) for entry in found])
        task = asyncio.get_running_loop().create_task(job.run())
        await stalled.wait()
        while not made.target.quarantined:
            await asyncio.sleep(0)
        job.stop(Aborted("enough"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        assert set(made.target.quarantined) == {1, 3}
        with pytest.raises(RangeBusy):
            made.target.own(np.array([1]), "the next")
        go.set()
        with pytest.raises(HawkError):
            await task
        # The next owner's bytes stay as they are.
        made.target.own(np.array([1, 3]), "the next")
        for region in made.npu.regions:
            region.array[:] = c.CANARY
        await made.serving.idle()
        assert all((region.array == c.CANARY).all() for region in made.npu.regions)
        made.target.disown("the next")
        await over(found, None)
        made.transport.hold = None
        await fetch(made, [source(entry) for entry in found]).run()
        made.check_bytes()


async def test_the_first_error_is_told_with_its_part() -> None:
    async with rig() as made:
        found = offers(made)
        found[1].count = 0  # as if others had taken it
        with pytest.raises(AlreadyClaimed) as caught:
            await fetch(made, [source(entry) for entry in found]).run()
        assert caught.value.facts["part"] == "heads 0..1 of 2, layers 1 of 3"
        assert caught.value.facts["source"] == "p0"
        await made.serving.idle()
        await over(found, None)


async def test_a_peer_that_is_lost_while_its_part_waits_for_the_others() -> None:
    async with rig() as made:
        found = offers(made, range(1), range(1, 3), layers=1)
        task = asyncio.get_running_loop().create_task(fetch(made, [source(e) for e in found]).run())
        while not any(kind == "consumed" for kind in made.seen):
            await asyncio.sleep(0)
        made.peer.lose(PeerLost("gone"))
        with pytest.raises(PeerLost):
            await task
        made.offers.layers_ready(found[1], 2)
        await made.serving.idle()
        await over(found, None)


async def test_nothing_is_released_before_all_are_there() -> None:
    async with rig() as made:
        found = offers(made, range(1), range(1, 3), layers=1)
        sent: list[object] = []
        made.to_p.change = lambda message: (sent.append(message), (message,))[1]
        task = asyncio.get_running_loop().create_task(fetch(made, [source(e) for e in found]).run())
        while made.progress[-1:] == [] or made.progress[-1][1] == 0:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not any(isinstance(message, Release) for message in sent)
        assert [entry.outcome for entry in found] == [None, None]
        made.offers.layers_ready(found[1], 2)
        await task
        made.check_bytes()
        assert [message.hold for message in sent if isinstance(message, Release)] == [
            True,
            True,
            False,
            False,
        ]


async def test_gaps_overlaps_and_other_tokens_are_refused() -> None:
    async with rig() as made:
        found = offers(made, range(1), range(2, 3), consumers=("d0",))
        with pytest.raises(PartsMismatch, match="missing") as caught:
            await fetch(made, [source(entry) for entry in found]).run()
        assert caught.value.got == "nothing for heads 0..1 of layers 1"
        assert "fetch" not in made.seen
        with pytest.raises(PartsMismatch, match="missing"):
            await fetch(made, [Source("p0")] * 2).run()
        await made.serving.idle()
        odd = offers(made, range(1, 2))
        odd[0].tokens -= 1
        for entries in (found[:1] + odd + found[1:], odd + found):
            job = fetch(made, [source(entry) for entry in entries])
            job.request = replace(job.request, tokens=0)
            with pytest.raises(PartsMismatch, match="other tokens"):
                await FetchJob(made.context, job.request, lambda *_: None).run()
        await made.serving.idle()
        await over(found + odd, None)


async def test_one_part_that_arrived_wrong_is_fetched_again_while_the_others_hold() -> None:
    async with rig() as made:
        verifier = Verifier("full", retries=1)
        made.context = replace(made.context, verifier=verifier)
        tampering(made, flip)
        found = offers(made)
        result = await fetch(made, [source(entry) for entry in found]).run()
        made.check_bytes()
        assert result.parts == 3
        assert made.seen.count("abort") == 1  # the attempt that was wrong, and no other
        assert made.metrics.value("hawk_verify_mismatches_total") == 1
        await made.serving.idle()
        await over(found, Outcome.CONSUMED)
        verifier.close()


async def test_a_peer_of_version_1_is_asked_for_no_part() -> None:
    async with rig() as made:
        found = offers(made)
        made.peer.version = 1
        with pytest.raises(VersionMismatch, match="parts"):
            await fetch(made, [source(entry) for entry in found]).run()
        assert "fetch" not in made.seen
        whole = made.offer(request="whole")
        await made.fetch(whole.claim, request="whole").run()
        made.check_bytes()


def test_the_least_that_an_offer_brings_is_a_head_or_what_one_scale_covers() -> None:
    wanted = Selection(layer=0, layers=2, token=0, tokens=10)
    for name, heads in (("vllm/nhd", 1), ("tenstorrent/kv", 1), (ONE_SCALE, 0)):
        layout = name if isinstance(name, Layout) else load(name)
        compiled = layout.compile(CacheShape(layers=2, heads=4, dim=64, block_size=32, blocks=2))
        assert fewest_heads(compiled, wanted).heads == heads


ONE_SCALE = Layout.from_toml(
    """
    name = "one/scale"
    codec = "fp8_e4m3fn"
    buffers = "layer kv"
    [[piece]]
    order = "block | slot head dim"
    [scale]
    place = "page"
    dtype = "fp32"
    order = "block | slot"
    """,
    origin="a test",
)
"""Fp8 with one scale for all heads of a token."""
