"""verbs over devices without hardware, pushing: readers that want much, and peers that end, or never do."""

import asyncio
import errno
import gc
import weakref
from collections import Counter

import pytest

from hawk.errors import AccessDenied, TransferFailed
from hawk.memory.region import Segments
from hawk.transports.testing import LIMIT, Targets
from hawk.transports.verbs import _abi, _wire
from hawk.transports.verbs._device import RECEIVED, SUCCESS, Completion
from hawk.transports.verbs._inlet import mark_of
from hawk.transports.verbs._ways import RECEIVES
from hawk.transports.verbs._work import written
from tests.contract.test_verbs_breaking import ARENA, WHOLE, pair
from tests.contract.test_verbs_push import PUSH, inlet_of, posted, push, rows
from tests.contract.test_verbs_strangers import queue
from tests.contract.verbs_keys import outlet_of

__all__ = ["posted"]


async def test_bytes_that_are_wanted_twice_are_written_twice() -> None:
    """As they are read twice; a grant says which bytes, and not how often."""
    async with pair(**PUSH) as it:
        grant = it.serving.grant(0, 4096)
        await it.read(grant.key, Segments.of([(0, 0, 0, 4096), (0, 8192, 0, 4096)]))


async def test_what_is_to_be_written_is_built_a_little_at_a_time() -> None:
    """However small the messages of a peer are; else the requests for one row would fill the writer's memory."""
    async with pair(**PUSH) as it:
        (served,) = [await it.serving._server.registered()]  # type: ignore[union-attr]
        shape = _abi.Shape(30, _wire.LEAST_MESSAGE, 4, 1 << 20, _abi.WRITE)
        one = push(rows=rows((0, 10, 1 << 40)), keys=[[5]], queues=[1])
        first = next(written(one, _wire.rows_of(one), served, shape))
        assert first.wr.base is not None
        assert len(first.wr.base) <= _abi.BUILD_ROWS
        with pytest.raises(_wire.BadWire):
            _wire.check(queue(message=1), 1)


async def test_what_does_not_go_into_one_frame_is_not_asked_for(posted: Counter[int]) -> None:
    """Many windows for many queue pairs, and all the rows that a Push can have; the peer would cut the link off."""
    some = Segments.of([(0, 16384 * i + 4 * j, 16384 * i + 8 * j, 4) for i in range(255) for j in range(12)])
    async with pair(push_windows=256, queue_pairs=20, **PUSH) as it:
        await it.read(it.serving.grant(0, ARENA).key, some)
        assert not it.link.broken
        assert posted[_abi.WRITE_IMM] == 0
    assert _wire.asks(256, 8)
    assert not _wire.asks(256, 9)


async def test_a_peer_that_makes_no_queue_pairs_to_write_by_any_more_breaks_the_link() -> None:
    async with pair(handshake_timeout=0.3, **PUSH) as it:
        it.driver(it.serving).faults.queue = errno.ENOMEM
        (device,) = it.driver(it.serving).opened
        for stripe in outlet_of(it.serving)._stripes:
            assert stripe.end is not None
            device.queues[stripe.end.queue.number].fail()
        with pytest.raises(TransferFailed):
            await it.read(it.serving.grant(0, ARENA).key)
        assert it.link.broken


async def test_immediate_data_without_end_leave_the_loop_to_others() -> None:
    async with pair(**PUSH) as it:
        end = next(way.end for way in inlet_of(it).ways if way.end is not None)
        assert end.end._completions is not None
        there = 1_000_000

        def poll(most: int) -> list[Completion]:
            nonlocal there
            there -= 1
            return [Completion(RECEIVED, SUCCESS, 0)] if there > 0 else []

        end.receive = lambda count: None  # type: ignore[method-assign]
        taken = end.end._completions.poll
        end.end._completions.poll = poll  # type: ignore[method-assign]
        end.end._take()
        end.end._completions.poll = taken  # type: ignore[method-assign]
        assert there > 900_000


async def test_a_push_that_failed_keeps_no_memory() -> None:
    async with pair(**PUSH) as it:
        targets = Targets([ARENA])
        array = weakref.ref(targets.regions[0].array)
        with pytest.raises(AccessDenied):
            await it.link.read(bytes(32), WHOLE, targets.regions, timeout=LIMIT)
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(AccessDenied):
                await it.link.read(bytes(32), WHOLE, targets.regions, timeout=LIMIT)
            del targets
            await asyncio.sleep(0)
            assert array() is None
        finally:
            gc.enable()


async def test_a_writer_that_says_marks_without_credits_loses_its_queue_pair() -> None:
    async with pair(**PUSH) as it:
        inlet, stripe = inlet_of(it), outlet_of(it.serving)._stripes[0]
        way, end = inlet.ways[0], stripe.end
        assert end is not None
        before = way.end
        for said in range(1, 2 * RECEIVES):
            batch = _abi.marker(mark_of(15, said), 4096)
            batch.wr["wr_id"] = end.take_ids(1)
            end.post(batch)
            async with asyncio.timeout(LIMIT):
                while inlet.dropped < said and way.end is before:
                    await asyncio.sleep(0)
            if way.end is not before:
                break
        assert said == RECEIVES + 1
        async with asyncio.timeout(LIMIT):
            while not way.up:
                await asyncio.sleep(0)
        for _ in range(2 * RECEIVES):
            await it.read(it.serving.grant(0, ARENA).key, Segments.of([(0, 0, 0, 4096)]))
        assert it.reading.counts()["queue-pair-broken"] == 1
