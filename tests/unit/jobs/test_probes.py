"""Probes that are refused: each for its own reason, in words that are right at the agent that reads them."""

from __future__ import annotations

import asyncio

import pytest

from hawk.control.messages import Abort, Ended, PeerMessage, Probe
from hawk.errors import Aborted, Busy, HawkError, from_wire
from hawk.jobs import probes
from tests.unit.jobs.rig import PEER, rig


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
