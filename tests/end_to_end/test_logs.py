"""What agents say of transfers: one line on each side, joined by one id, and loud where it went wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from hawk.errors import UnknownRequest
from tests.end_to_end import caches as c
from tests.end_to_end.harness import AgentProcess, Site, clients, npu, until
from tests.end_to_end.scene import idle


def lines(agent: AgentProcess, event: str) -> list[dict[str, Any]]:
    said = [json.loads(line) for line in agent.log().splitlines() if line.startswith("{")]
    return [line for line in said if line["event"] == event]


async def test_both_sides_of_a_transfer_name_it_alike(site: Site) -> None:
    prefill = site.start("p0", role="prefill")
    decode = site.start("d0", {"peers": {"p0": prefill.control}, "memory.npu0": npu(8)}, role="decode")
    async with clients(prefill, decode) as (hp, hd):
        cache = await hp.register(c.filled())
        device = await hd.allocate(c.target_spec(), memory="npu0")
        offer = await hp.offer("good", cache, np.arange(16), tokens=256)
        await hd.fetch(offer, into=device, blocks=[1, 2, 3, 4], timeout="20s")
        with pytest.raises(UnknownRequest):
            await hd.fetch(request="bad", source="p0", into=device, blocks=[1], timeout="20s")
        await until(hp, idle, "no job")
        fetched, served = lines(decode, "fetch ended"), lines(prefill, "serve ended")
    for side in fetched, served:
        assert [(line["request"], line["level"]) for line in side] == [("good", "info"), ("bad", "warning")]
    assert [line["attempt"] for line in fetched] == [line["job"] for line in served]
