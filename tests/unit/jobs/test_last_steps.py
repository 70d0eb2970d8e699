"""What is left to do when the last byte has landed: as little as can be, for somebody waits for it."""

from __future__ import annotations

import pytest

from hawk.control.messages import PeerMessage
from hawk.errors import HawkError
from hawk.jobs import serve
from hawk.jobs.offers import Claim
from hawk.memory.region import ByteRanges
from hawk.transports.base import Grant
from tests.unit.jobs.rig import rig


async def test_all_is_flushed_at_once_after_the_last_byte() -> None:
    async with rig() as made:
        flushed: list[tuple[int, int]] = []
        chunks: list[Grant] = []
        made.transport.expect = lambda grant, reader: chunks.append(grant)  # type: ignore[method-assign]
        before = made.npu.flush

        async def flush(ranges: ByteRanges) -> None:
            flushed.append((ranges.total, made.progress[-1][1]))
            await before(ranges)

        made.npu.flush = flush  # type: ignore[method-assign]
        result = await made.fetch(made.offer().claim).run()
        assert len(chunks) > 1
        assert flushed == [(result.nbytes, result.nbytes)]
        made.check_bytes()


async def test_the_consumer_hears_that_it_is_over_before_the_offer_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What giving it back takes, a GPU's events among others, is nothing that the consumer has to wait for."""
    async with rig() as made:
        seen: list[str] = []
        unclaim, send = made.offers.unclaim, serve.ServeJob._end

        def unclaimed(claim: Claim, *, consumed: bool) -> None:
            seen.append("given back")
            unclaim(claim, consumed=consumed)

        def end(job: serve.ServeJob, error: HawkError | None) -> None:
            say = job.send
            job.send = lambda message: (seen.append(type(message).__name__), say(message))[1]
            send(job, error)

        monkeypatch.setattr(made.offers, "unclaim", unclaimed)
        monkeypatch.setattr(serve.ServeJob, "_end", end)
        entry = made.offer()
        await made.fetch(entry.claim).run()
        assert seen == ["Released", "given back"]
        assert entry.ended.is_set()


async def test_an_answer_that_cannot_go_keeps_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said first; whatever becomes of it, the source's blocks are its owner's again."""
    async with rig() as made:
        entry = made.offer()
        broken: list[str] = []
        end = serve.ServeJob._end

        def ended(job: serve.ServeJob, error: HawkError | None) -> None:
            say = job.send

            def send(message: PeerMessage) -> None:
                if not broken:
                    broken.append(type(message).__name__)
                    raise RuntimeError("no such socket")
                say(message)

            job.send = send
            end(job, error)

        monkeypatch.setattr(serve.ServeJob, "_end", ended)
        await made.fetch(entry.claim).run()  # which asks again, and hears it then
        assert broken == ["Released"]
        assert entry.ended.is_set()
