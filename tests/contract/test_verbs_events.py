"""verbs over devices without hardware that say something by themselves: ports, queue pairs, devices."""

import asyncio
import dataclasses
import os
import threading
from collections import deque
from typing import Any

import pytest

from hawk.transports.testing import LIMIT
from hawk.transports.verbs import VerbsTransport, _device
from hawk.transports.verbs.testing import PORT, FakeDriver
from tests.contract.test_verbs_breaking import ARENA, Pair, pair

TWO: dict[str, Any] = {"devices": ("a", "b"), "queue_pairs": 4}


def two() -> FakeDriver:
    ports = {name: [dataclasses.replace(PORT, numa=node)] for node, name in enumerate("ab")}
    return FakeDriver(["a", "b"], ports=ports)


class Unheard(deque[Any]):
    """The work of a queue pair that is told of nothing: what is posted is never done."""

    def __bool__(self) -> bool:
        return False


async def becomes(transport: VerbsTransport, trouble: str | None) -> None:
    async with asyncio.timeout(LIMIT):
        while (transport.trouble() or "") != (trouble or ""):
            await asyncio.sleep(0)


@pytest.mark.parametrize("side", ["serving", "reading"])
async def test_an_agent_whose_only_port_is_down_says_so_until_it_is_up(side: str) -> None:
    async with pair() as it:
        transport = getattr(it, side)
        (device,) = it.driver(transport).opened
        assert transport.trouble() is None
        device.say(_device.PORT_ERROR, ports_active=False)
        await becomes(transport, "no RDMA port is active: fake0:1")
        device.say(_device.PORT_ACTIVE, ports_active=True)
        await becomes(transport, None)
        assert transport.counts()["port-down"] == 1
        await it.read(it.serving.grant(0, ARENA).key)


async def test_one_port_of_two_is_enough() -> None:
    async with pair(two(), two(), **TWO) as it:
        a, b = it.driver(it.serving).opened
        b.say(_device.PORT_ERROR, ports_active=False)
        async with asyncio.timeout(LIMIT):
            while not it.serving.counts()["port-down"]:
                await asyncio.sleep(0)
        assert it.serving.trouble() is None
        a.say(_device.DEVICE_FATAL)
        await becomes(it.serving, "the RDMA device failed, and only a restart opens it again: a:1, b:1")


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_queue_pairs_of_a_serving_device_that_failed_are_left_at_once(direction: str) -> None:
    """It may not say so of any of them: what was posted there would be waited for until the reader gives up."""
    async with pair(two(), two(), direction=direction, handshake_timeout=0.5, **TWO) as it:
        (device,) = [d for d in it.driver(it.serving).opened if d.name == "b"]
        await it.read(it.serving.grant(0, ARENA).key)
        # A reader that is written to has no use for those that it would read by, and does not learn of their end.
        used = [
            q
            for q in device.queues.values()
            if q.path is not None and (q.path.access == 0) == (direction == "push")
        ]
        before = {each.number for each in used}
        for each in used:
            each._work = Unheard(each._work)
        it.driver(it.serving).faults.dead.add("b")
        reading = asyncio.create_task(it.read(it.serving.grant(0, ARENA).key))
        device.say(_device.DEVICE_FATAL)
        await reading
        async with asyncio.timeout(LIMIT):
            while before & set(device.queues):
                await it.read(it.serving.grant(0, ARENA).key)
        assert it.serving.counts()["device-failed"] == 1


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_queue_pairs_of_a_device_that_failed_are_left_at_once(direction: str) -> None:
    async with pair(two(), two(), direction=direction, handshake_timeout=0.5, **TWO) as it:
        (device,) = [d for d in it.driver(it.reading).opened if d.name == "b"]
        it.faults.dead.add("b")
        before = set(device.queues)
        device.say(_device.DEVICE_FATAL)
        async with asyncio.timeout(LIMIT):
            while before & set(device.queues):
                await asyncio.sleep(0)
        assert it.reading.counts()["device-failed"] == 1
        assert it.reading.counts()["queue-pair-broken"] >= (2 if direction == "pull" else 4)
        await it.read(it.serving.grant(0, ARENA).key)


async def test_events_of_queue_pairs_are_counted_and_others_passed_over() -> None:
    async with pair() as it:
        (device,) = Pair.driver(it.serving).opened
        for kind in (_device.QUEUE_FATAL, 3, 18, 4711):
            device.say(kind)
        async with asyncio.timeout(LIMIT):
            while it.serving.counts()["queue-pair-event"] < 2:
                await asyncio.sleep(0)
        assert it.serving.trouble() is None
        await it.read(it.serving.grant(0, ARENA).key)


async def test_looks_that_take_long_do_not_overtake_each_other() -> None:
    """The first is still under way when the port is up again."""
    async with pair() as it:
        (device,) = it.driver(it.serving).opened
        go, looked, ports = threading.Event(), threading.Event(), device.ports

        def slow() -> Any:
            found = ports()
            if not looked.is_set():
                looked.set()
                assert go.wait(LIMIT)
            return found

        device.ports = slow  # type: ignore[method-assign]
        device.say(_device.PORT_ERROR, ports_active=False)
        await asyncio.to_thread(looked.wait, LIMIT)
        device.say(_device.PORT_ACTIVE, ports_active=True)
        watch = it.serving._watch
        assert watch is not None
        async with asyncio.timeout(LIMIT):
            while len(watch._tasks) < 2:
                await asyncio.sleep(0)
        for _ in range(3):  # time for a look that would overtake
            await watch._worker.call(ports)
        go.set()
        async with asyncio.timeout(LIMIT):
            while not it.serving.counts()["port-down"]:
                await asyncio.sleep(0)
        await becomes(it.serving, None)


async def test_a_descriptor_that_stays_readable_for_nothing_is_let_go() -> None:
    """As that of a device that was taken out of the machine; else the loop would spin for ever."""
    async with pair() as it:
        (device,) = it.driver(it.serving).opened
        asked = 0

        def nothing() -> None:
            nonlocal asked
            asked += 1

        device.take_event = nothing  # type: ignore[method-assign]
        os.eventfd_write(device.event_fd, 1)
        watch = it.serving._watch
        assert watch is not None
        async with asyncio.timeout(LIMIT):
            while watch._watched:
                await asyncio.sleep(0)
        before = asked
        await it.read(it.serving.grant(0, ARENA).key)
        assert asked == before == 100


async def test_a_device_that_failed_is_asked_nothing_more() -> None:
    async with pair() as it:
        (device,) = Pair.driver(it.serving).opened
        device.say(_device.DEVICE_FATAL)
        device.say(_device.QUEUE_FATAL)
        await becomes(it.serving, "the RDMA device failed, and only a restart opens it again: fake0:1")
        for _ in range(10):
            await asyncio.sleep(0)
        assert it.serving.counts()["queue-pair-event"] == 0
