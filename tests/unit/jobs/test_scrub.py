"""What a job leaves in pools is zero before the next owner has it, however the job ended."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest

from hawk.errors import Aborted, DeviceReset, HawkError, TransferFailed
from hawk.jobs.scrub import wipe_cache
from hawk.jobs.staging import Staging
from hawk.memory import scrub
from hawk.memory.region import ByteRanges, Region, Segments
from hawk.plan.check import entries
from hawk.plan.segments import touched
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Selection
from tests.end_to_end import caches as c
from tests.unit.jobs.rig import TOKENS, Rig, rig

pytestmark = pytest.mark.usefixtures("impatient")


def scrubbing(made: Rig, *, targets: bool = False) -> None:
    made.arena.scrub = True
    made.context = dataclasses.replace(made.context, scrub=True, scrub_targets=targets)


def breaking(made: Rig, at: int = 2) -> None:
    """Read number `at` fails after all its bytes came."""
    real, count = made.transport.read, 0

    async def read(key: bytes, segments: Segments, regions: Any, *, timeout: float) -> None:
        nonlocal count
        await real(key, segments, regions, timeout=timeout)
        count += 1
        if count == at + 1:
            raise TransferFailed("on purpose")

    made.transport.read = read  # type: ignore[method-assign]


def holding(made: Rig) -> asyncio.Event:
    """Every read but the first never begins; the event says that one was asked for."""
    held, count = asyncio.Event(), 0

    async def hold() -> None:
        nonlocal count
        count += 1
        if count > 1:
            held.set()
            await asyncio.Event().wait()

    made.transport.hold = hold
    return held


def whole_arena(made: Rig) -> np.ndarray:
    """The arena as whoever reserves all of it finds it."""
    taken = made.arena.reserve(made.arena.region.nbytes, "next")
    assert taken is not None
    array = made.arena.region.array.copy()
    made.arena.free(taken)
    return array


@pytest.mark.parametrize("scrubbed", [True, False])
@pytest.mark.parametrize("fails", [False, True], ids=["ready", "failed"])
async def test_the_arena_is_zero_for_its_next_owner(fails: bool, scrubbed: bool) -> None:
    async with rig() as made:
        if scrubbed:
            scrubbing(made)
        if fails:
            breaking(made)
        job = made.fetch(made.offer().claim)
        if fails:
            with pytest.raises(TransferFailed):
                await job.run()
        else:
            await job.run()
            made.check_bytes()
        await made.serving.idle()
        assert whole_arena(made).any() != scrubbed


async def test_a_range_out_of_quarantine_is_zero() -> None:
    async with rig(can_fence=False) as made:
        scrubbing(made)
        fenced = asyncio.Event()
        made.transport.after_revoke = lambda grant: fenced.is_set()
        made.to_p.change = lambda message: (
            () if type(message).__name__ in ("Consumed", "Abort") else (message,)
        )
        held = holding(made)
        job = made.fetch(made.offer().claim)
        task = asyncio.get_running_loop().create_task(job.run())
        await asyncio.wait_for(held.wait(), 20)
        serve = next(iter(made.serving._jobs.values()))
        serve.stop(Aborted("on purpose"))
        with pytest.raises(HawkError):
            await task
        await made.serving.idle()
        kept = made.arena.allocator.quarantined()
        assert kept
        assert all(part(made, r.offset, r.nbytes).any() for r, _ in kept), "a reader may still be inside"
        fenced.set()
        while len(made.quarantine):
            await asyncio.sleep(0.01)
        assert not whole_arena(made).any()


def part(made: Rig, offset: int, nbytes: int) -> np.ndarray:
    return made.arena.region.array[offset : offset + nbytes]


@pytest.mark.parametrize("scrubbed", [True, False])
@pytest.mark.parametrize("ending", ["ready", "failed", "aborted"])
async def test_staging_is_zero_for_its_next_owner(ending: str, scrubbed: bool) -> None:
    async with rig(mode="staged") as made:
        if scrubbed:
            scrubbing(made)
        real, used = made.npu.allocate, []

        def allocate(nbytes: int, owner: str, **kwargs: Any) -> Any:
            used.append(real(nbytes, owner, **kwargs))
            return used[-1]

        made.npu.allocate = allocate  # type: ignore[method-assign]
        job = made.fetch(made.offer().claim)
        if ending == "failed":
            breaking(made)
        if ending == "aborted":
            held = holding(made)
        task = asyncio.get_running_loop().create_task(job.run())
        if ending == "aborted":
            await asyncio.wait_for(held.wait(), 20)
            job.stop(Aborted("on purpose"))
        if ending == "ready":
            await task
        else:
            with pytest.raises(HawkError):
                await task
        nexts = []
        for staging in tuple(used):
            after = made.npu.allocate(staging.nbytes, "next", brief=True)
            assert (after.offset, after.channels) == (staging.offset, staging.channels)
            place = slice(after.offset, after.offset + after.nbytes)
            for channel in after.channels:
                for seen in (made.npu.regions[channel].array, made.npu.visible[channel]):
                    assert bool((seen[place] == 0).all()) == scrubbed
            nexts.append(after)
        for after in nexts:
            made.npu.free(after)
        await made.serving.idle()


async def test_zeros_reach_the_device_though_whoever_wipes_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, real = threading.Event(), scrub._zero

    def slowly(*arguments: Any) -> None:
        go_on.wait(20)
        real(*arguments)

    monkeypatch.setattr(scrub, "_zero", slowly)
    async with rig() as made:
        task = asyncio.create_task(wipe_cache(made.target))
        await asyncio.sleep(0)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        place = made.target.placement
        for row in range(len(place.offset)):
            for channel in range(made.target.layout.channels):
                begin = int(place.offset[row, channel])
                end = begin + made.target.layout.buffer_bytes[row]
                assert not made.npu.visible[int(place.region[row, channel])][begin:end].any()


async def test_staging_is_given_back_though_the_device_takes_no_zeros() -> None:
    async with rig() as made:
        free = made.npu.free_bytes()
        staging = Staging(made.npu, 4096)
        for _ in range(3):
            staging._taken.append(made.npu.allocate(4096, "staging", brief=True))

        async def reset(ranges: ByteRanges) -> None:
            del ranges
            raise DeviceReset("the chip was reset", field="npu0")

        made.npu.flush = reset  # type: ignore[method-assign]
        with pytest.raises(DeviceReset):
            await staging.free(scrub=True)
        assert made.npu.free_bytes() == free


@pytest.mark.parametrize("scrubbed", [True, False])
async def test_what_was_read_in_vain_is_zero(scrubbed: bool) -> None:
    """A read at once has brought its bytes, does not count, and the fetch ends before it is tried again."""
    async with rig() as made:
        scrubbing(made, targets=scrubbed)
        made.transport.at_once = True
        job, real = made.fetch(made.offer().claim), made.transport.read_now

        def read(key: bytes, segments: Segments, regions: Any) -> bool:
            assert real(key, segments, regions)
            job.stop(Aborted("enough"))
            return False

        made.transport.read_now = read  # type: ignore[method-assign]
        with pytest.raises(Aborted):
            await job.run()
        await made.serving.idle()
        left = {int(b) for region in made.npu.regions for b in np.unique(region.array)} - {0, c.CANARY}
        assert bool(left) != scrubbed


@pytest.mark.parametrize("mode", ["direct", "staged"])
@pytest.mark.parametrize("scrubbed", [True, False])
async def test_what_a_failed_fetch_wrote_is_zero_and_its_neighbours_are_as_they_were(
    mode: str, scrubbed: bool
) -> None:
    first = 37
    async with rig(mode=mode) as made:
        scrubbing(made, targets=scrubbed)
        breaking(made)
        job = made.fetch(made.offer().claim)
        job.request = dataclasses.replace(job.request, first=first, tokens=TOKENS - first)
        with pytest.raises(TransferFailed):
            await job.run()
        await made.serving.idle()
        layout = made.target.layout
        wanted = Selection(0, layout.shape.layers, first, TOKENS - first)
        begin, end = entries(layout, wanted)
        planned = target_chunk(
            layout, job.request.blocks, wanted, Chunk(0, layout.shape.layers, begin, end - begin)
        )
        ours = [np.zeros(region.nbytes, bool) for region in made.npu.regions]
        ranges = touched(planned, made.target.placement)
        for r, at, n in zip(
            ranges.region.tolist(), ranges.start.tolist(), ranges.nbytes.tolist(), strict=True
        ):
            ours[r][at : at + n] = True
        written = 0
        for region, own in zip(made.npu.regions, ours, strict=True):
            for base in (int(row[0]) for row in made.target.placement.offset):
                place = slice(base, base + layout.channel_bytes)
                mine, left = region.array[place][own[place]], region.array[place][~own[place]]
                assert (left == c.CANARY).all(), "a neighbour's byte"
                assert not scrubbed or set(np.unique(mine)) <= {0, c.CANARY}
                written += int((mine != c.CANARY).sum())
        assert written, "something had come"


async def test_a_new_cache_of_a_device_is_zero_and_nothing_else() -> None:
    async with rig() as made:
        for region in made.npu.regions:
            region.array[:] = c.CANARY
        await wipe_cache(made.target)
        zeros = sum(made.target.layout.buffer_bytes)
        for region, seen in zip(made.npu.regions, made.npu.visible, strict=True):
            assert int((region.array == 0).sum()) == zeros
            np.testing.assert_array_equal(seen, region.array)
            for base in (int(row[0]) for row in made.target.placement.offset):
                assert not region.array[base : base + made.target.layout.channel_bytes].any()


# -- zeroing itself --------------------------------------------------------------------------------------------


async def test_only_the_ranges_become_zero() -> None:
    regions = [Region(f"r{i}", np.full(1000, 7, np.uint8)) for i in range(2)]
    ranges = ByteRanges(np.asarray([1, 0, 1], np.int32), np.asarray([0, 10, 990]), np.asarray([5, 1, 10]))
    await scrub.zero(regions, ranges)
    expected = [np.full(1000, 7, np.uint8) for _ in range(2)]
    expected[1][:5] = expected[0][10] = expected[1][990:] = 0
    for region, right in zip(regions, expected, strict=True):
        np.testing.assert_array_equal(region.array, right)
    await scrub.zero(regions, ByteRanges())


async def test_a_cancelled_zeroing_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun = threading.Event(), threading.Event()
    real = scrub._zero

    def slowly(*arguments: Any) -> None:
        begun.set()
        go.wait(20)
        real(*arguments)

    monkeypatch.setattr(scrub, "_zero", slowly)
    region = Region("r", np.full(100, 7, np.uint8))
    ranges = ByteRanges(np.zeros(1, np.int32), np.zeros(1, np.int64), np.asarray([100]))
    task = asyncio.get_running_loop().create_task(scrub.zero([region], ranges))
    await asyncio.to_thread(begun.wait, 20)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not region.array.any()
