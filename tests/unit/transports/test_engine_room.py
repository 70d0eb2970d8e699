"""How many agents a link through shared memory has where the peer has little room."""

from __future__ import annotations

import threading

import pytest

from hawk.errors import PeerUnreachable
from hawk.transports.nixl import NixlConfig, NixlTransport, _vram
from hawk.transports.testing import Targets, scatter
from tests.unit.transports.test_engine_seam import SMALL, Counting, nixl, rig


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_a_peer_with_room_for_fewer_agents_is_read_by_one(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_vram, "foreseen", lambda tls: "no driver")
    counting = type("CountingHere", (Counting,), {"made": [], "stalled": threading.Event()})
    reading = NixlTransport(NixlConfig(tls="", copiers=2, **SMALL), opener=counting)
    async with rig(nixl("pull", max_connections=room), reading) as r:
        grant = r.serving.grant(0, 1 << 20)
        segments, sizes = scatter([2048] * 300, 3, gap=0)
        again = [] if room < 3 else [await reading.connect(r.serving.endpoint, timeout=30.0)]
        for link in (r.link, *again):
            targets = Targets(sizes)
            await r.read(grant, segments, targets, link=link)
            targets.check(segments, r.source)
        if room < 3:
            with pytest.raises(PeerUnreachable):
                await reading.connect(r.serving.endpoint, timeout=30.0)
