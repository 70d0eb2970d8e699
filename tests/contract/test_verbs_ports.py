"""verbs over several devices without hardware: which of them moves what, and one that dies."""

import asyncio
import dataclasses
import time
from collections import Counter
from typing import Any

import pytest

from hawk.memory.region import Segments
from hawk.transports.testing import LIMIT
from hawk.transports.verbs import VerbsTransport, _mend
from hawk.transports.verbs.testing import PORT, FakeDriver
from hawk.transports.verbs.testing._queue import FakeQueue
from tests.contract.test_verbs_breaking import ARENA, Pair, pair

TWO: dict[str, Any] = {"devices": ("a", "b"), "queue_pairs": 4}
FEW = Segments.of([(0, 0, 0, 4096)])


def two() -> FakeDriver:
    """Two cards, each on a node of its own."""
    ports = {name: [dataclasses.replace(PORT, numa=node)] for node, name in enumerate("ab")}
    return FakeDriver(["a", "b"], ports=ports)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, int]]:
    """Batches by the driver's device and the driver."""
    counted: Counter[tuple[str, int]] = Counter()
    post = FakeQueue.post

    def count(self: FakeQueue, batch: Any) -> None:
        if batch.nbytes:
            counted[self._device.name, id(self._device.faults)] += 1
        post(self, batch)

    monkeypatch.setattr(FakeQueue, "post", count)
    return counted


def of(side: VerbsTransport, moved: Counter[tuple[str, int]]) -> tuple[int, int]:
    """Batches that the two devices of one side posted."""
    faults = id(Pair.driver(side).faults)
    return moved["a", faults], moved["b", faults]


@pytest.mark.parametrize("node", [0, 1])
async def test_what_one_device_can_take_goes_by_the_nearest(
    node: int, moved: Counter[tuple[str, int]]
) -> None:
    async with pair(two(), two(), memory_nodes=(f"target0={node}",), **TWO) as it:
        for _ in range(3):
            await it.read(it.serving.grant(0, ARENA).key, FEW)
        assert of(it.reading, moved)[node] == 3
        assert of(it.reading, moved)[1 - node] == 0


@pytest.mark.parametrize("near", ["prefer", "only", "any"])
async def test_what_is_more_goes_by_the_others_if_it_may(near: str, moved: Counter[tuple[str, int]]) -> None:
    """Sixteen batches and more at once, of which a queue pair takes four."""
    async with pair(two(), two(), memory_nodes=("target0=1",), near=near, batch=64 << 10, **TWO) as it:
        await it.read(it.serving.grant(0, ARENA).key)
        far, nearest = of(it.reading, moved)
        assert far + nearest == ARENA // (64 << 10)
        assert (far == 0) == (near == "only")
        moved.clear()
        await it.read(it.serving.grant(0, ARENA).key, FEW)
        assert of(it.reading, moved) == ((1, 0) if near == "any" else (0, 1))


async def test_settings_say_where_a_device_is(moved: Counter[tuple[str, int]]) -> None:
    where = {"devices": ("a@1", "b@0"), "queue_pairs": 4, "memory_nodes": ("target0=1",)}
    async with pair(two(), two(), **where) as it:
        await it.read(it.serving.grant(0, ARENA).key, FEW)
        assert of(it.reading, moved) == (1, 0)


async def test_a_writer_sends_by_the_device_nearest_to_the_arena(moved: Counter[tuple[str, int]]) -> None:
    where = {"memory_nodes": ("contract-arena=1",), "direction": "push"}
    async with pair(two(), two(), **where, **TWO) as it:
        await it.read(it.serving.grant(0, ARENA).key, FEW)
        assert of(it.serving, moved) == (0, 1)
        assert of(it.reading, moved) == (0, 0)


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("near", ["prefer", "only"])
async def test_what_a_device_that_dies_had_under_way_goes_by_the_other(direction: str, near: str) -> None:
    """And comes back to it once it lives again."""
    where = {"memory_nodes": ("target0=1", "contract-arena=1"), "direction": direction, "near": near}
    async with pair(two(), two(), handshake_timeout=0.5, **where, **TWO) as it:
        moving = it.reading if direction == "pull" else it.serving
        faults = it.faults
        calls = 0

        def third(_: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                faults.dead.add("b")
                (device,) = [d for d in it.driver(it.reading).opened if d.name == "b"]
                for queue in list(device.queues.values()):
                    queue.fail()

        faults.on_step = third
        for _ in range(3):
            await it.read(it.serving.grant(0, ARENA).key)
        assert calls > 3
        assert moving.counts()["queue-pair-broken"] > 0
        faults.on_step = None
        faults.dead.clear()
        async with asyncio.timeout(LIMIT):
            while any(s.end is None for s in it.link._stripes):
                await asyncio.sleep(0.01)
        await it.read(it.serving.grant(0, ARENA).key)


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_a_device_that_has_been_dead_for_long_does_not_hurry_the_other(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is waited for is an end of the time without any queue pair, and not of that without this one."""
    monkeypatch.setattr(_mend, "pause", lambda failures: 0.0)
    async with pair(two(), two(), handshake_timeout=0.5, direction=direction, devices=("a", "b")) as it:
        it.faults.dead.add("b")
        alive, dying = it.driver(it.reading).opened
        for queue in list(dying.queues.values()):
            queue.fail()
        await it.read(it.serving.grant(0, ARENA).key)
        until = time.monotonic() + 0.6
        while time.monotonic() < until:
            await it.read(it.serving.grant(0, ARENA).key, FEW)
        for _ in range(5):
            for queue in list(alive.queues.values()):
                queue.fail()
            await it.read(it.serving.grant(0, ARENA).key)
            assert not it.link.broken
