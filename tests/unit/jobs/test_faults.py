"""Faults that users of other systems reported, where the clock has to be the test's; docs/testing.md lists all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hawk.control.messages import Consumed, PeerMessage, Poll, Prepared
from hawk.errors import Aborted, LeaseExpired, RangeBusy
from tests.end_to_end import caches as c
from tests.unit.jobs import rig as rig_module
from tests.unit.jobs import world as world_module
from tests.unit.jobs.device import Device
from tests.unit.jobs.world import World


def world(lease: float = 5.0) -> World:
    made = World(fenced=True, arena=1 << 18, credit=1 << 17, lease=lease)
    made.offer(c.LAYERS)
    return made


def accepted(made: World) -> int:
    """A fetch that has heard Accepted and nothing after it."""
    number = made.fetch(0, 0, 30.0)
    made.deliver("p")
    made.deliver("d")
    assert made.books.wanted[number].states[-1] == "receiving"
    assert isinstance(made.frames["d"][0], Prepared)
    return number


def test_f6_a_consumer_that_starts_after_its_lease_reads_nothing() -> None:
    made = world(lease=0.1)
    number = accepted(made)
    made.frames["p"].clear()
    made.loop.advance(0.15)
    made.flow(100)
    made.check()
    assert isinstance(made.tasks[number].exception(), LeaseExpired)
    assert made.rig.transport.reading == 0
    assert not made.entered
    made.end()


def test_f6_with_heartbeats_it_succeeds() -> None:
    made = world(lease=0.1)
    number = accepted(made)
    held = [frame for frame in made.frames["d"] if isinstance(frame, Prepared)]
    for _ in range(15):  # only beats pass
        made.loop.advance(0.01)
        while made.frames["p"]:
            made.deliver("p")
        held += [frame for frame in made.frames["d"] if isinstance(frame, Prepared)]
        made.frames["d"] = [frame for frame in made.frames["d"] if not isinstance(frame, Prepared)]
        while made.frames["d"]:
            made.deliver("d")
    assert not made.entered
    made.frames["d"] += held
    made.flow(100)
    made.check()
    assert made.books.wanted[number].states[-1] == "ready", made.log
    made.end()


def test_f7_blocks_return_when_the_last_read_has_ended_and_the_next_owner_is_safe() -> None:
    """One chunk fails at once, one stalls for two seconds and heeds nobody, and the job is aborted meanwhile."""
    made = world()
    made.stubborn = True
    number = made.fetch(0, 0, 30.0)
    while len(made.reads) < 2:
        made.flow(1, reads=False)
    made.end_read(0, "badly")
    made.stop(number, "stop")
    made.loop.advance(2.0)
    made.check()
    assert not made.tasks[number].done()
    assert set(made.rig.target.quarantined) == {1, 3}
    refused = made.fetch(0, 0, 30.0)
    assert isinstance(made.tasks[refused].exception(), RangeBusy)
    made.end_read(0, "well")  # its bytes land, and only now is it over
    made.live(1.0)
    made.check()
    assert isinstance(made.tasks[number].exception(), Aborted)
    made.stubborn = False
    device = Device(made.rig)
    device.paint((3, 1))
    before = [region.array.copy() for region in made.rig.npu.regions]
    made.live(5.0)
    for region, canary in zip(made.rig.npu.regions, before, strict=True):
        assert np.array_equal(region.array, canary)
    made.end()


CHUNKS = 313
LATENCY = 0.04
"""Seconds for the way there and back of a frame."""


class Distant(World):
    """Frames take half of LATENCY each way; reads take no time.  `most` chunks were ever said and not yet consumed."""

    most = 0
    asked = 0

    def _asked(self, frame: PeerMessage) -> None:
        self.asked += not isinstance(frame, Consumed | Poll)
        self.books.asked(frame)
        self.loop.call_later(LATENCY / 2, self.rig.to_p.deliver, frame)

    def _said(self, frame: PeerMessage) -> None:
        self.books.said(frame, self.loop.now)
        self.most = max(self.most, len(self.rig.transport.grants))
        self.loop.call_later(LATENCY / 2, self.rig.to_d.deliver, frame)

    async def _read(self, key: bytes, segments: Any, regions: Any, *, timeout: float) -> None:
        self.device.bring(segments, regions)


def test_f9_chunks_are_pipelined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 313 chunks of 16 KiB with 40 ms between both sides none waits for the answer to the one before.

    The clock is the test's, and nothing but frames takes time: so what has passed is the number of round trips.
    """
    blocks = -(-CHUNKS // c.LAYERS)
    spec = c.target_spec(block_size=32, blocks=blocks)
    monkeypatch.setattr(rig_module, "SOURCE", c.source_spec(blocks=2 * blocks))
    monkeypatch.setattr(rig_module, "TARGET", spec)
    monkeypatch.setattr(rig_module, "CAPACITY", 6 << 20)
    for module in (rig_module, world_module):
        monkeypatch.setattr(module, "TOKENS", 32 * blocks)
    monkeypatch.setattr(world_module, "PAIRS", [tuple(range(blocks))])
    monkeypatch.setattr(Device, "paint", lambda self, pair: None)
    monkeypatch.setattr(Device, "is_right", lambda self, pair: True)
    made = Distant(fenced=True, arena=1 << 20, credit=1 << 20, lease=5.0)
    made.rig.room._per_peer = 1 << 20
    made.rig.context = replace(made.rig.context, chunk=19_000)
    made.offer(c.LAYERS)
    began = made.loop.now
    number = made.fetch(0, 0, 30.0)
    while not made.tasks[number].done():
        made.loop.advance(LATENCY / 8)
    made.tasks[number].result()
    turns = (made.loop.now - began) / LATENCY
    assert len(made.books.prepared) >= CHUNKS
    assert made.most > 32  # under way at once
    assert turns < CHUNKS / 10, turns
    assert made.asked == 2  # Fetch and Release: nothing was put twice
    moved = c.Moved(made.rig.source, np.arange(2 * blocks), range(blocks), 0, 32 * blocks)
    seen = type("Seen", (), {})()
    seen.channels = made.rig.npu.visible
    seen.offsets = [int(row[0]) for row in made.rig.target.placement.offset]
    seen.layout = made.rig.target.layout
    c.check(seen, spec, moved, guards=[seen])
    made.abandon()
