"""Probes that are refused: each for its own reason, in words that are right at the agent that reads them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from hawk.config_schema import PROBED, Config
from hawk.control.messages import Abort, Ended, PeerMessage, Probe
from hawk.errors import Aborted, Busy, HawkError, from_wire
from hawk.jobs import probes
from hawk.memory.arena import Arena
from tests.unit.jobs.rig import PEER, rig


def test_an_arena_of_an_agent_that_sends_nothing_holds_all_probes() -> None:
    with contextlib.closing(Arena(PROBED)) as arena:
        for i in range(probes.MOST):
            assert arena.reserve(probes.NBYTES, str(i)) is not None


@pytest.mark.parametrize(
    ("role", "nbytes"), [("decode", PROBED), ("prefill", 256 << 20), ("both", 256 << 20)]
)
def test_who_sends_nothing_fills_no_arena(role: str, nbytes: int) -> None:
    config = Config()
    assert replace(config, agent=replace(config.agent, role=role)).arena_bytes == nbytes


async def test_why_a_probe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig() as made:
        heard: asyncio.Queue[PeerMessage] = asyncio.Queue()
        monkeypatch.setattr(made.serving.probes, "_send", lambda _, message: heard.put_nowait(message))

        async def refused(job: str) -> HawkError:
            answer = await asyncio.wait_for(heard.get(), 30)
            assert isinstance(answer, Ended)
            assert answer.job == job
            return from_wire(answer.error)

        taken = made.serving.probes
        assert taken.take(PEER, Probe("a" * 32, "none"))
        assert "the peer has no such transport" in str(await refused("a" * 32))
        monkeypatch.setattr(probes, "MOST", 0)
        assert taken.take(PEER, Probe("b" * 32, "tcp"))
        busy = await refused("b" * 32)
        assert isinstance(busy, Busy)
        assert "the peer serves at most 0 probes" in str(busy)
        assert taken.take(b"strange", Probe("c" * 32, "tcp"))
        fault = await refused("c" * 32)
        assert (fault.code, fault.message) == ("bad-frame", "the first word is hello")
        assert not taken.take(PEER, Abort("b" * 32, Aborted("over").to_wire()))
