"""Windows that are kept ready: never bound on a queue pair that is younger than they are."""

from __future__ import annotations

import itertools
import threading
from typing import Any, cast

from hawk.transports.verbs._device import Window
from hawk.transports.verbs._windows import WindowPool
from hawk.transports.verbs._worker import Worker


class Made:
    """A window with a number, in the order of making."""

    def __init__(self, number: int, open_now: set[int]) -> None:
        self.number = number
        self._open = open_now
        open_now.add(number)

    def close(self) -> None:
        self._open.remove(self.number)


class Device:
    """Makes windows; once `held` is cleared, only when it is set again."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.held = threading.Event()
        self.held.set()
        self.making = threading.Event()
        self._numbers = itertools.count()

    def window(self) -> Window:
        number = next(self._numbers)
        self.making.set()
        assert self.held.wait(30)
        return Made(number, self.open)


def number(window: Window) -> int:
    return cast("Made", window).number


async def test_what_was_ready_before_a_queue_pair_was_made_is_given_back() -> None:
    device, worker = Device(), Worker()
    pool = WindowPool(cast("Any", device), worker)
    first = await pool.take()
    await pool._worker.call(pool._make)
    ready = {number(window) for _, window in pool._ready}
    assert ready
    pool.outdate()
    second = await pool.take()
    assert number(second) > max(ready)
    for window in (first, second):
        window.close()
    await pool.close()
    assert not device.open
    await worker.close()


async def test_one_that_was_being_made_meanwhile_is_given_back() -> None:
    device, worker = Device(), Worker()
    pool = WindowPool(cast("Any", device), worker)
    device.held.clear()
    pool._fill()
    await worker.call(device.making.wait, 30)
    pool.outdate()  # while the first one is half made
    device.held.set()
    while pool._filling or not pool._ready:
        await worker.call(device.held.wait, 0)
    taken = await pool.take()
    assert number(taken) > 0
    taken.close()
    await pool.close()
    assert not device.open
    await worker.close()
