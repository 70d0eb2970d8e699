"""What verbs adds to the contract of keys: a reader that goes on with a key that was taken back.

Over fakes (test_verbs.py) and over a real device (tests/lab/guest/verbs_contract.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

from hawk.errors import AccessDenied
from hawk.memory.region import Segments
from hawk.transports.testing import CANARY, LIMIT, ContractBase, Targets, on_a_loop, refused
from hawk.transports.verbs._link import VerbsLink


class StaleKeys(ContractBase):
    """Of a transport with memory windows and one queue pair to a link, which all of its jobs share."""

    @on_a_loop
    async def test_a_revoked_key_fails_its_own_job_alone(self) -> None:
        """The device refuses the key and breaks the queue pair; the other job is read on, over a fresh one."""
        async with self.rig(self.large) as rig:
            link = rig.link
            assert isinstance(link, VerbsLink)
            (stripe,) = link._stripes
            one, two = rig.serving.grant(0, self.large), rig.serving.grant(0, self.large)
            small, targets = Segments.of([(0, 0, 0, 4096)]), Targets([4096])
            whole, kept = Segments.of([(0, 0, 0, self.large)]), Targets([self.large])
            answers: list[Any] = []
            enter = link._enter

            def noted(work: Any, answer: Any) -> None:
                answers.append(answer)
                enter(work, answer)

            link._enter = noted  # type: ignore[method-assign]
            await rig.read(one, small, targets)
            targets.check(small, rig.source)
            assert await rig.serving.revoke(one)
            targets.fill(CANARY)
            before = stripe.peer
            other = asyncio.get_running_loop().create_task(rig.read(two, whole, kept))
            async with asyncio.timeout(LIMIT):
                while not stripe.flying:
                    assert not other.done(), "over before it could be disturbed"
                    await asyncio.sleep(0)

            ask = link._ask

            async def stale(question: Any) -> Any:
                """As if nobody had said that the key is gone."""
                return answers[0] if getattr(question, "key", b"") == one.key else await ask(question)

            link._ask = stale  # type: ignore[method-assign]
            error = await refused(AccessDenied, rig.read(one, small, targets))
            assert "remote access error" in str(error)
            assert targets.only(CANARY)
            await other
            kept.check(whole, rig.source)
            assert stripe.peer != before
            assert not link.broken
