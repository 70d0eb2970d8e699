"""verbs over devices without hardware, pushing: who decides it, what a push is made of, and queue pairs that break."""

import asyncio
import dataclasses
import errno
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from hawk.errors import AccessDenied, RegistrationFailed, TransferFailed
from hawk.memory.region import Segments
from hawk.transports.testing import CANARY, LIMIT, Targets
from hawk.transports.verbs import VerbsConfig, VerbsTransport, _abi, _wire
from hawk.transports.verbs._inlet import Inlet, mark_of
from hawk.transports.verbs.testing import LIMITS, FakeDriver
from hawk.transports.verbs.testing._queue import FakeQueue
from tests.contract.test_verbs_breaking import ARENA, WHOLE, Pair, pair
from tests.contract.test_verbs_strangers import cut_off, dial, hello, queue, reads, serving
from tests.contract.test_verbs_strangers import frame as framed
from tests.contract.verbs_keys import outlet_of

PUSH: dict[str, Any] = {"direction": "push"}


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Requests that queue pairs took, by their opcode."""
    counted: Counter[int] = Counter()
    post = FakeQueue.post

    def count(self: FakeQueue, batch: Any) -> None:
        counted.update(batch.wr["opcode"].tolist())
        post(self, batch)

    monkeypatch.setattr(FakeQueue, "post", count)
    return counted


def inlet_of(it: Pair) -> Inlet:
    assert it.link._inlet is not None
    return it.link._inlet


async def fit(it: Pair) -> None:
    """All queue pairs are there again, and are as good as new."""
    async with asyncio.timeout(LIMIT):
        while not all(way.up for way in inlet_of(it).ways):
            await asyncio.sleep(0)
    await it.read(it.serving.grant(0, ARENA).key)


# -- who decides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("serving_side", "reading_side", "pushed"),
    [
        ("pull", "push", False),
        ("push", "pull", False),
        ("push", "push", True),
        ("auto", "push", True),
        ("push", "auto", False),
    ],
)
async def test_both_sides_have_to_want_it(
    serving_side: Any, reading_side: Any, pushed: bool, posted: Counter[int]
) -> None:
    """Of one stretch, which a READ takes in as few requests as a WRITE."""
    async with pair(direction=serving_side) as it:
        settings = VerbsConfig(direction=reading_side)
        other = VerbsTransport(settings, driver=FakeDriver())
        await other.start()
        link = await other.connect(it.serving.endpoint, timeout=LIMIT)
        await it.read(it.serving.grant(0, ARENA).key, link=link)  # type: ignore[arg-type]
        await other.close()
    assert set(posted) == ({_abi.WRITE, _abi.WRITE_IMM} if pushed else {_abi.READ})


async def test_a_peer_that_has_never_heard_of_it_is_read_from(posted: Counter[int]) -> None:
    async with pair(**PUSH) as it:
        endpoint = {name: text for name, text in it.serving.endpoint.items() if name != "push"}
        link = await it.reading.connect(endpoint, timeout=LIMIT)
        await it.read(it.serving.grant(0, ARENA).key, link=link)  # type: ignore[arg-type]
        assert set(posted) == {_abi.READ}


async def test_completions_that_do_not_tell_immediate_data_are_not_waited_for(posted: Counter[int]) -> None:
    old = FakeDriver(limits=dataclasses.replace(LIMITS, immediates=False))
    async with pair(reading=old, **PUSH) as it:
        await it.read(it.serving.grant(0, ARENA).key)
        assert set(posted) == {_abi.READ}


async def test_of_both_the_one_with_fewer_requests_is_taken(posted: Counter[int]) -> None:
    """Pages that lie apart in the arena and together in the target, and the other way round."""
    n, page = 40, 4096
    apart, together = np.arange(n) * 2 * page, np.arange(n) * page
    some, every = np.zeros(n, np.int32), np.full(n, page)
    async with pair(direction="auto", message=1 << 20, depth=256) as it:
        key = it.serving.grant(0, ARENA).key
        await it.read(key, Segments(some, together, apart, every))
        marks = posted.pop(_abi.WRITE_IMM)
        assert (dict(posted), marks) == ({_abi.WRITE: 2}, 2), "30 pieces to a request"
        posted.clear()
        await it.read(key, Segments(some, apart, together, every))
        assert dict(posted) == {_abi.READ: 2}


async def test_a_target_of_more_stretches_than_may_be_opened_is_pulled(posted: Counter[int]) -> None:
    rows = [(0, 2 * i * 512, i * 512, 512) for i in range(33)]
    async with pair(**PUSH) as it:
        await it.read(it.serving.grant(0, ARENA).key, Segments.of(rows))
        assert set(posted) == {_abi.READ}
        posted.clear()
        await it.read(it.serving.grant(0, ARENA).key, Segments.of(rows[:-1]))
        assert posted[_abi.WRITE] == 32
        assert posted[_abi.READ] == 0


# -- what it is made of --------------------------------------------------------------------------------------------


async def test_thousands_of_rows_go_in_portions(posted: Counter[int]) -> None:
    rng = np.random.default_rng(0)
    n = 5000
    places = rng.permutation(n) * 300
    segments = Segments(np.zeros(n, np.int32), places, np.arange(n) * 500, np.full(n, 300))
    async with pair(**PUSH) as it:
        await asyncio.gather(*(it.read(it.serving.grant(0, ARENA).key, segments) for _ in range(7)))
        assert posted[_abi.READ] == 0
        assert posted[_abi.WRITE_IMM] == 7 * 3 * 2, "a mark on each queue pair for each of three portions"
        assert inlet_of(it).dropped == it.faults.starved == 0


async def test_marks_of_what_is_over_or_never_was_are_dropped() -> None:
    async with pair(**PUSH) as it:
        outlet, inlet = outlet_of(it.serving), inlet_of(it)
        await it.read(it.serving.grant(0, ARENA).key)
        for mark in (mark_of(15, 1), mark_of(15, 255), mark_of(3, 1), 0, (1 << 32) - 1):
            for stripe in outlet._stripes:
                assert stripe.end is not None
                batch = _abi.marker(mark, 4096)
                batch.wr["wr_id"] = stripe.end.take_ids(1)
                stripe.end.post(batch)
        await it.read(it.serving.grant(0, ARENA).key)
        assert inlet.dropped == 10
        for _ in range(40):  # each took a receive, and none is missing
            await it.read(it.serving.grant(0, ARENA).key)
        assert it.faults.starved == 0


async def test_marks_of_a_slots_use_before_do_not_end_the_next() -> None:
    """They come before the bytes do; who took them for those of now would be done without any."""
    async with pair(depth=64, **PUSH) as it:  # with room beside what the pushes post
        outlet, inlet = outlet_of(it.serving), inlet_of(it)
        answer = outlet.push

        def early(asked: _wire.Push) -> Any:
            slot = asked.mark & 0xFF
            for stripe in outlet._stripes:
                assert stripe.end is not None
                batch = _abi.marker(mark_of(slot, inlet._uses[slot] - 1), 4096)
                batch.wr["wr_id"] = stripe.end.take_ids(1)
                stripe.end.post(batch)
            return answer(asked)

        outlet.push = early  # type: ignore[method-assign]
        for n in range(1, 5):
            await it.read(it.serving.grant(0, ARENA).key)
            assert inlet.dropped == 2 * n
        assert it.broken() == [0, 0]


def test_a_mark_reads_the_same_from_both_ends() -> None:
    marks = {mark_of(slot, use) for slot in range(_wire.PUSHES) for use in range(256)}
    assert len(marks) == _wire.PUSHES * 256
    assert all(mark.to_bytes(4, "little") == mark.to_bytes(4, "big") for mark in marks)


async def test_no_window_is_open_once_a_read_has_ended() -> None:
    async with pair(**PUSH) as it:
        (device,) = it.driver(it.reading).opened
        seen: list[int] = []

        def look(_: int) -> None:
            seen.append(sum(w.memory is not None for w in device.table.windows()))

        it.faults.on_step = look
        await it.read(it.serving.grant(0, ARENA).key)
        assert max(seen) == 2
        assert not any(w.memory is not None for w in device.table.windows())
        assert {q.path.access for q in device.queues.values() if q.path is not None} == {0, 2}


# -- what breaks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["reading", "serving"])
async def test_a_push_under_which_a_queue_pair_broke_is_asked_for_again(side: str) -> None:
    async with pair(**PUSH) as it:
        (device,) = it.driver(getattr(it, side)).opened
        writers = {
            s.peer if side == "reading" else s.end.queue.number
            for s in outlet_of(it.serving)._stripes
            if s.end
        }
        calls = 0

        def third(_: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                device.queues[min(writers)].fail()

        it.faults.on_step = third
        await it.read(it.serving.grant(0, ARENA).key)
        it.faults.on_step = None
        assert calls > 3
        await fit(it)


async def test_a_path_that_stays_down_fails_the_read_and_nothing_lands() -> None:
    async with pair(**PUSH) as it:
        it.driver(it.serving).faults.cut = True
        targets = Targets([ARENA])
        with pytest.raises(TransferFailed, match="again and again"):
            await it.link.read(it.serving.grant(0, ARENA).key, WHOLE, targets.regions, timeout=LIMIT)
        assert targets.only(CANARY)
        it.driver(it.serving).faults.cut = False
        await fit(it)


async def test_a_queue_pair_that_is_not_made_anew_is_done_without() -> None:
    async with pair(**PUSH) as it:
        it.driver(it.serving).faults.queue = errno.ENOMEM
        (device,) = it.driver(it.serving).opened
        stripe = outlet_of(it.serving)._stripes[0]
        assert stripe.end is not None
        device.queues[stripe.end.queue.number].fail()
        for _ in range(3):
            await it.read(it.serving.grant(0, ARENA).key)
        it.driver(it.serving).faults.queue = 0
        await fit(it)


async def test_memory_that_cannot_be_opened_is_told() -> None:
    async with pair(windows="off", **PUSH) as it:
        grant = it.serving.grant(0, ARENA)
        await it.read(grant.key)
        it.faults.register = {1: errno.ENOMEM}  # the targets' own is the first
        with pytest.raises(RegistrationFailed, match="to a writer"):
            await it.read(grant.key)
        await it.read(grant.key)


async def test_a_key_that_does_not_cover_the_rows_is_refused() -> None:
    async with pair(**PUSH) as it:
        grant = it.serving.grant(4096, 8192)
        for row in ((0, 0, 4095, 100), (0, 0, 12200, 100)):
            with pytest.raises(AccessDenied):
                await it.read(grant.key, Segments.of([row]))
        with pytest.raises(AccessDenied):
            await it.read(bytes(32), Segments.of([(0, 0, 4096, 100)]))
        await it.read(grant.key, Segments.of([(0, 0, 4096, 8192)]))


# -- readers that lie ----------------------------------------------------------------------------------------------


def push(key: bytes = bytes(32), **changes: Any) -> _wire.Push:
    rows = np.asarray([[0, 10, 100]], "<i8").tobytes()
    facts = {
        "seq": 1,
        "key": key,
        "mark": 1,
        "windows": [0],
        "bases": [1 << 20],
        "keys": [[5]],
        "queues": [5],
    }
    return _wire.Push(**{**facts, "rows": rows, **changes})


def rows(*of: tuple[int, int, int]) -> bytes:
    return np.asarray(of, "<i8").tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": b""},
        {"rows": bytes(23)},
        {"rows": rows(*[(0, 10, 1)] * (_wire.PUSH_ROWS + 1))},
        {"rows": rows((0, 10, 0))},
        {"rows": rows((-1, 10, 5))},
        {"rows": rows((0, 10, (1 << 63) - 1))},
        {"rows": rows(((1 << 63) - 1, 10, 5))},
        {"rows": rows((0, -10, 5))},
        {"windows": []},
        {"windows": [20]},
        {"windows": [-1]},
        {"windows": [0, 0], "bases": [0, 0], "keys": [[1, 2]]},
        {"bases": []},
        {"bases": [-(1 << 61)]},
        {"bases": [1 << 63]},
        {"keys": [[]]},
        {"keys": [[1 << 32]]},
        {"keys": [[1, 2]]},
        {"keys": [[1], [1]]},
        {"queues": []},
        {"mark": 1 << 32},
        {"bases": [-5]},
    ],
)
async def test_a_push_that_nobody_could_do_ends_its_connection(changes: dict[str, Any]) -> None:
    async with serving(direction="push") as (transport, key):
        reader, writer = await dial(transport)
        writer.write(hello(transport, inlets=[queue(number=6)]) + framed(push(key, **changes)))
        said = await cut_off(reader)
        assert b"welcome" in said
        assert b"pushed" not in said
        writer.close()
        reading = VerbsTransport(VerbsConfig(direction="push"), driver=FakeDriver())
        await reading.start()
        await reads(reading, transport, key)
        await reading.close()


async def test_what_is_asked_of_who_does_not_push_ends_the_connection() -> None:
    async with serving() as (transport, key):
        reader, writer = await dial(transport)
        writer.write(hello(transport, inlets=[queue(number=6)]) + framed(push(key)))
        said = msgspec.msgpack.decode((await cut_off(reader))[4:])
        assert (said["type"], said["outlets"]) == ("welcome", [])
        writer.close()


async def test_more_pushes_than_there_are_credits_for_end_the_connection() -> None:
    async with pair(**PUSH) as it:
        outlet = outlet_of(it.serving)
        asked = [outlet.push(push(seq=i, keys=[[5], [5]], queues=[1, 2])) for i in range(_wire.PUSHES)]
        with pytest.raises(_wire.BadWire):
            outlet.push(push(seq=99, keys=[[5], [5]], queues=[1, 2]))
        for each in asked:
            assert isinstance(await each, _wire.Refused)
