"""verbs over devices without hardware, where queue pairs break: who pays for it, and how the link comes back."""

import asyncio
import contextlib
import dataclasses
import errno
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest

from hawk.errors import AccessDenied, HawkError, PeerUnreachable, RegistrationFailed, TransferFailed
from hawk.memory.region import Segments
from hawk.transports.testing import LIMIT, SharedArena, Targets
from hawk.transports.verbs import VerbsConfig, VerbsTransport
from hawk.transports.verbs._link import VerbsLink
from hawk.transports.verbs.testing import LIMITS, FakeDriver

ARENA = 4 << 20
SMALL: dict[str, Any] = {"batch": 256 << 10, "message": 64 << 10, "depth": 16}
WHOLE = Segments.of([(0, 0, 0, ARENA)])


@dataclasses.dataclass
class Pair:
    serving: VerbsTransport
    reading: VerbsTransport
    arena: SharedArena
    link: VerbsLink

    @property
    def faults(self) -> Any:
        return self.driver(self.reading).faults

    @staticmethod
    def driver(transport: VerbsTransport) -> FakeDriver:
        assert isinstance(transport.driver, FakeDriver)
        return transport.driver

    async def read(self, key: bytes, segments: Segments = WHOLE, link: VerbsLink | None = None) -> Targets:
        targets = Targets([ARENA])
        await (link or self.link).read(key, segments, targets.regions, timeout=LIMIT)
        targets.check(segments, self.arena.region.array)
        return targets

    async def known(self) -> None:
        """The serving side has seen that this reader is who it says it is."""
        grant = self.serving.grant(0, ARENA)
        self.serving.expect(grant, self.reading.endpoint)
        await self.read(grant.key)
        dialogue = self.link._dialogue
        assert dialogue is not None
        assert not dialogue._announced, "before that it is told nothing that it does not ask for"

    def broken(self) -> list[int]:
        return [s.failures for s in self.link._stripes]


@contextlib.asynccontextmanager
async def pair(
    serving: FakeDriver | None = None, reading: FakeDriver | None = None, **config: Any
) -> AsyncIterator[Pair]:
    settings = VerbsConfig(**{**SMALL, "queue_pairs": 2, **config})
    sides = [VerbsTransport(settings, driver=d or FakeDriver()) for d in (serving, reading)]
    arena = SharedArena(ARENA)
    try:
        for side in sides:
            await side.start()
        sides[0].serve(arena.region)
        link = await sides[1].connect(sides[0].endpoint, timeout=LIMIT)
        assert isinstance(link, VerbsLink)
        yield Pair(sides[0], sides[1], arena, link)
    finally:
        for side in reversed(sides):
            await side.close()
        arena.close()
    for side in sides:
        assert all(d.closed and d.left == 0 for d in Pair.driver(side).opened)


# -- paths that fail -------------------------------------------------------------------------------------------


async def test_what_was_under_way_on_a_queue_pair_that_broke_is_read_again() -> None:
    async with pair() as it:
        calls = 0

        def third(_: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise ConnectionResetError("lost")

        it.faults.on_step = third
        await it.read(it.serving.grant(0, ARENA).key)
        assert calls > 3
        while any(s.end is None for s in it.link._stripes):
            await asyncio.sleep(0)
        it.faults.on_step = None
        await it.read(it.serving.grant(0, ARENA).key)
        assert it.broken() == [0, 0], "what works again counts as new"


async def test_a_path_that_stays_down_fails_the_read_and_nothing_lands() -> None:
    async with pair() as it:
        it.faults.cut = True
        targets = Targets([ARENA])
        with pytest.raises(TransferFailed, match=r"again and again|did not answer"):
            await it.link.read(it.serving.grant(0, ARENA).key, WHOLE, targets.regions, timeout=LIMIT)
        it.faults.cut = False
        assert not it.link.broken
        await it.read(it.serving.grant(0, ARENA).key)


async def test_a_peer_that_makes_no_queue_pairs_any_more_breaks_the_link() -> None:
    async with pair(handshake_timeout=0.3) as it:
        it.driver(it.serving).faults.queue = errno.ENOMEM
        it.faults.cut = True
        with pytest.raises(TransferFailed):
            await it.read(it.serving.grant(0, ARENA).key)
        async with asyncio.timeout(LIMIT):
            while not it.link.broken:
                await asyncio.sleep(0.01)


async def test_a_device_without_queue_pairs_is_told_at_once() -> None:
    async with pair() as it:
        for faults in (it.driver(it.serving).faults, it.faults):
            faults.queue = errno.ENOMEM
            with pytest.raises(PeerUnreachable, match="ibv_create_qp"):
                await it.reading.connect(it.serving.endpoint, timeout=LIMIT)
            faults.queue = 0
        await it.read(it.serving.grant(0, ARENA).key)


# -- keys ------------------------------------------------------------------------------------------------------


async def test_a_key_that_is_wrong_fails_its_own_read_only() -> None:
    """A reader that makes keys up breaks its queue pairs; its other reads are posted again on fresh ones."""
    async with pair() as it:
        good, bad = it.serving.grant(0, ARENA), it.serving.grant(0, ARENA)
        enter = it.link._enter

        def lie(work: Any, answer: Any) -> None:
            enter(work, answer)
            if work.key == bad.key:
                work.keys = [None if keys is None else keys ^ np.uint32(0x5500) for keys in work.keys]

        it.link._enter = lie  # type: ignore[method-assign]
        others = [asyncio.ensure_future(it.read(good.key)) for _ in range(3)]
        for _ in range(3):
            with pytest.raises(AccessDenied, match="remote access error"):
                await it.read(bad.key)
        await asyncio.gather(*others)
        await it.read(good.key)


async def test_a_remote_key_opens_its_range_on_its_queue_pair_alone() -> None:
    """What one link was given is of no use to another, nor for a byte beyond the grant."""
    async with pair(queue_pairs=1) as it:
        other = await it.reading.connect(it.serving.endpoint, timeout=LIMIT)
        assert isinstance(other, VerbsLink)
        grant = it.serving.grant(4096, 8192)
        answers: list[Any] = []
        mine, theirs = it.link._enter, other._enter

        def note(work: Any, answer: Any) -> None:
            answers.append(answer)
            mine(work, answer)

        it.link._enter = note  # type: ignore[method-assign]
        await it.read(grant.key, Segments.of([(0, 0, 4096, 8192)]))

        def steal(work: Any, answer: Any) -> None:
            theirs(work, msgspec.structs.replace(answer, keys=answers[0].keys))

        other._enter = steal  # type: ignore[method-assign]
        with pytest.raises(AccessDenied, match="remote access error"):
            await it.read(grant.key, Segments.of([(0, 0, 4096, 8192)]), other)

        def stretch(work: Any, answer: Any) -> None:
            mine(work, msgspec.structs.replace(answer, nbytes=answer.nbytes + 1))

        it.link._enter = stretch  # type: ignore[method-assign]
        with pytest.raises(AccessDenied, match="remote access error"):
            await it.read(grant.key, Segments.of([(0, 0, 4096, 8193)]))


async def test_when_a_revoke_returns_every_window_is_invalidated() -> None:
    async with pair() as it:
        grant, other = it.serving.grant(0, ARENA), it.serving.grant(0, 4096)
        await it.read(grant.key)
        await it.read(other.key, Segments.of([(0, 0, 0, 4096)]))
        (device,) = it.driver(it.serving).opened

        def open_now() -> list[int]:
            return sorted(w.nbytes for w in device.table.windows() if w.memory is not None)

        assert open_now() == [4096, 4096, ARENA, ARENA]
        invalidated: list[int] = []
        invalidate = device.table.invalidate

        def noted(key: int, queue: int) -> bool:
            invalidated.append(queue)
            return invalidate(key, queue)

        device.table.invalidate = noted  # type: ignore[method-assign]
        assert await it.serving.revoke(grant)
        assert sorted(invalidated) == sorted(device.queues), "by each queue pair that one is bound on"
        assert open_now() == [4096, 4096]
        assert it.broken() == [0, 0], "nobody was reading: nothing broke"


async def test_revoking_when_the_readers_queue_pairs_are_broken() -> None:
    async with pair() as it:
        grant = it.serving.grant(0, ARENA)
        await it.read(grant.key)
        (device,) = it.driver(it.serving).opened
        windows = [w for w in device.table.windows() if w.memory is not None]
        assert len(windows) == 2, "one on each queue pair"
        for queue in list(device.queues.values()):
            queue.fail()
        assert await it.serving.revoke(grant)
        assert all(w.memory is None for w in device.table.windows())
        await it.read(it.serving.grant(0, ARENA).key)


async def test_windows_are_gone_with_the_link() -> None:
    async with pair() as it:
        grant = it.serving.grant(0, ARENA)
        await it.read(grant.key)
        (device,) = it.driver(it.serving).opened
        await it.link.close()
        async with asyncio.timeout(LIMIT):
            while device.queues or any(w.memory is not None for w in device.table.windows()):
                await asyncio.sleep(0)
        assert await it.serving.revoke(grant)


# -- announcements ---------------------------------------------------------------------------------------------


async def test_a_grant_whose_reader_is_known_is_open_before_it_asks() -> None:
    async with pair() as it:
        await it.known()
        asked: list[Any] = []
        ask = it.link._ask

        async def noted(question: Any) -> Any:
            asked.append(question)
            return await ask(question)

        it.link._ask = noted  # type: ignore[method-assign]
        dialogue = it.link._dialogue
        assert dialogue is not None
        grant, other = it.serving.grant(0, ARENA), it.serving.grant(0, ARENA)
        it.serving.expect(other, it.serving.endpoint)  # another reader
        it.serving.expect(other, {})
        it.serving.expect(grant, it.reading.endpoint)
        async with asyncio.timeout(LIMIT):
            while not dialogue._announced:
                await asyncio.sleep(0)
        assert list(dialogue._announced) == [grant.key]
        await it.read(grant.key)
        assert asked == []
        await it.read(grant.key)
        assert len(asked) == 1, "an announcement is used once; later the key may be gone"
        await it.read(other.key)


async def test_an_announcement_that_is_out_of_date_harms_nobody() -> None:
    async with pair() as it:
        await it.known()
        dialogue = it.link._dialogue
        assert dialogue is not None
        grant, good = it.serving.grant(0, ARENA), it.serving.grant(0, ARENA)
        for each in (grant, good):
            it.serving.expect(each, it.reading.endpoint)
        async with asyncio.timeout(LIMIT):
            while len(dialogue._announced) < 2:
                await asyncio.sleep(0)
        assert await it.serving.revoke(grant)
        with pytest.raises(AccessDenied):
            await it.read(grant.key)
        # Queue pairs broke under it; what was said of the other grant was of the old ones.
        await it.read(good.key)


# -- limits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serving_side", [True, False])
async def test_the_lower_number_of_reads_counts(serving_side: bool) -> None:
    """A responder that is asked for more than it agreed to refuses, in the fake as in hardware."""
    few = FakeDriver(limits=dataclasses.replace(LIMITS, max_reads_in=2, max_reads_out=3))
    async with pair(*((few, None) if serving_side else (None, few))) as it:
        await it.read(it.serving.grant(0, ARENA).key)
        (device,) = it.driver(it.reading).opened
        paths = [q.path for q in device.queues.values()]
        assert {p.reads_out for p in paths if p is not None} == {2 if serving_side else 3}


@pytest.mark.parametrize("depth", [8, 9, 64])
async def test_queues_are_never_overrun(depth: int) -> None:
    """Thousands of requests through few slots: the fake refuses one too many, and loses a completion too many."""
    rng = np.random.default_rng(0)
    starts = np.sort(rng.choice(ARENA // 512, 3000, replace=False)) * 512
    segments = Segments.of([(0, int(at), int(at), 300) for at in starts])
    async with pair(depth=depth) as it:
        await asyncio.gather(*(it.read(it.serving.grant(0, ARENA).key, segments) for _ in range(2)))
        assert it.broken() == [0, 0]


# -- memory that cannot be registered ----------------------------------------------------------------------------


async def test_an_arena_that_cannot_be_registered_is_told() -> None:
    broken = FakeDriver()
    broken.faults.register = dict.fromkeys(range(4), errno.ENOMEM)
    async with pair(serving=broken) as it:
        with pytest.raises(TransferFailed, match=r"memlock|max_mr_size"):
            await it.read(it.serving.grant(0, ARENA).key)
        assert "contract-arena" in (it.serving.trouble() or "")
        broken.faults.register = {}
        await it.read(it.serving.grant(0, ARENA).key)
        assert it.serving.trouble() is None


async def test_a_target_that_cannot_be_registered_is_told() -> None:
    async with pair() as it:
        it.faults.register = {0: errno.EFAULT}
        with pytest.raises(RegistrationFailed, match="target0"):
            await it.read(it.serving.grant(0, ARENA).key)
        await it.read(it.serving.grant(0, ARENA).key)


# -- who fits ----------------------------------------------------------------------------------------------------


async def test_two_ports_share_a_link() -> None:
    two = FakeDriver(["a", "b"]), FakeDriver(["a", "b"])
    async with pair(*two, devices=("a", "b"), queue_pairs=4) as it:
        await it.read(it.serving.grant(0, ARENA).key)
        assert [len(d.queues) for d in it.driver(it.reading).opened] == [2, 2]
        assert [len(d.queues) for d in it.driver(it.serving).opened] == [2, 2]


async def test_what_does_not_fit_is_not_reachable() -> None:
    async with pair() as it:
        endpoint = it.serving.endpoint
        for change, words in (
            ({"link": "InfiniBand"}, "InfiniBand"),
            ({"family": "IPv6"}, "IPv6"),
            ({"net": "elsewhere"}, "another host"),
            ({"ports": "0"}, "no ports"),
            ({"token": "ff"}, "token"),
        ):
            verdict = it.reading.reachable({**endpoint, **change})
            assert not verdict.ok
            assert words in verdict.reason
            with pytest.raises(PeerUnreachable):
                await it.reading.connect({**endpoint, **change}, timeout=5)
        with pytest.raises(HawkError):
            await it.reading.connect({**endpoint, "token": "00" * 16}, timeout=LIMIT)
