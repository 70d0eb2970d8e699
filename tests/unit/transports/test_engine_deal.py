"""Rows are dealt out beside what arrives: nothing of that outlives its read, however the read ends."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from hawk.errors import TransferFailed
from hawk.transports._engine import _deal
from hawk.transports._engine._seam import EngineFailed
from hawk.transports.nixl._agent import NixlAgent
from hawk.transports.testing import Targets, scatter
from tests import fake_engines
from tests.unit.transports.test_engine_seam import nixl, rig

ROWS, SIZES = scatter([2048] * 400, 3, gap=0)


class Slow:
    """In the place of the copy: it is held until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        self._copied = _deal._copied
        monkeypatch.setattr(_deal, "_copied", self)

    def __call__(self, *rows: Any) -> None:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.may.wait(30.0)
        self._copied(*rows)


@pytest.mark.parametrize("direction", ["pull", "push"])
async def test_the_next_chunk_arrives_while_one_is_dealt_out(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    async with rig(nixl(direction), nixl(direction)) as r:
        arrived: list[int] = []
        second = asyncio.Event()
        loop = asyncio.get_running_loop()

        def step(done: int) -> None:
            arrived.append(done)
            if len(arrived) == 2:
                loop.call_soon_threadsafe(second.set)

        r.reading.on_step = step  # type: ignore[attr-defined]
        targets = Targets(SIZES)
        reading = asyncio.ensure_future(r.read(r.serving.grant(0, 1 << 20), ROWS, targets))
        await asyncio.wait_for(second.wait(), 30.0)
        assert targets.only(0xA5)
        slow.may.set()
        await reading
        targets.check(ROWS, r.source)
        assert any(name.startswith("hawk-engine-deal") for name in slow.threads)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
async def test_a_read_ends_after_what_it_has_begun_to_deal_out(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = threading.Event()

    class Failing(NixlAgent):
        def poll(self, handle: Any) -> bool:
            if fails.is_set():
                raise EngineFailed("made to fail")
            return super().poll(handle)

    slow = Slow(monkeypatch)
    async with rig(nixl(), nixl(make=lambda: Failing("tcp", package=fake_engines))) as r:
        targets = Targets(SIZES)
        reading = asyncio.ensure_future(r.read(r.serving.grant(0, 1 << 20), ROWS, targets))
        await asyncio.to_thread(slow.begun.wait, 30.0)
        if end == "cancelled":
            reading.cancel()
        else:
            fails.set()
        done, _ = await asyncio.wait({reading}, timeout=0.2)
        assert not done, "a thread can still write into its targets"
        slow.may.set()
        with pytest.raises(asyncio.CancelledError if end == "cancelled" else TransferFailed):
            await reading
        targets.fill(0x5A)
        await r.link.close()
        assert targets.only(0x5A)


async def test_without_a_thread_it_is_dealt_out_where_it_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: object, **more: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_deal, "ThreadPoolExecutor", none_left)
    async with rig(nixl(), nixl()) as r:
        targets = Targets(SIZES)
        await r.read(r.serving.grant(0, 1 << 20), ROWS, targets)
        targets.check(ROWS, r.source)
