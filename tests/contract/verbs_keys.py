"""What verbs adds to the contract of keys: a reader or a writer that goes on with a key that was taken back.

Over fakes (test_verbs.py) and over a real device (tests/lab/guest/verbs_contract.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np

from hawk.errors import AccessDenied, TransferFailed
from hawk.memory.region import Segments
from hawk.transports.testing import CANARY, LIMIT, ContractBase, Targets, on_a_loop, refused
from hawk.transports.verbs import VerbsTransport, _wire
from hawk.transports.verbs._link import VerbsLink
from hawk.transports.verbs._outlet import Outlet


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


def outlet_of(serving: object) -> Outlet:
    """The queue pairs by which a transport writes to its only reader."""
    assert isinstance(serving, VerbsTransport)
    assert serving._server is not None
    (session,) = serving._server.sessions
    return session._outlet


class StaleWriters(ContractBase):
    """Of a transport that pushes; its writer goes on after the read, or beside what it is to fill."""

    windows_have_bounds = True
    """Whether the device keeps writers within a window, and not only within the registration that it is bound to."""

    @on_a_loop
    async def test_a_writer_reaches_nothing_but_what_a_read_fills_while_it_lasts(self) -> None:
        async with self.rig(self.large) as rig:
            outlet = outlet_of(rig.serving)
            asked: list[_wire.Push] = []
            answer = outlet.push

            def noted(push: _wire.Push) -> Any:
                asked.append(push)
                return answer(push)

            outlet.push = noted  # type: ignore[method-assign]
            grant, targets = rig.serving.grant(0, self.large), Targets([8192])
            middle = Segments.of([(0, 2048, 0, 4096)])
            await rig.read(grant, middle, targets)
            targets.check(middle, rig.source)
            (push,) = asked
            targets.fill(CANARY)
            said = await answer(msgspec.structs.replace(push, seq=1 << 40))
            assert isinstance(said, _wire.Refused), "its keys are gone"
            assert "remote access error" in said.text
            assert targets.only(CANARY)

            if not self.windows_have_bounds:
                await rig.read(grant, middle, targets)
                targets.check(middle, rig.source)
                return

            def wider(push: _wire.Push) -> Any:
                """Begins a byte before the window."""
                row = np.asarray([[0, push.windows[0] - 1, 4096]], "<i8")
                first = [push.windows[0] - 1, *push.windows[1:]]
                return answer(msgspec.structs.replace(push, windows=first, rows=row.tobytes()))

            outlet.push = wider  # type: ignore[method-assign]
            await refused(TransferFailed, rig.read(grant, middle, targets))
            assert targets.only(CANARY)
            outlet.push = answer  # type: ignore[method-assign]
            await rig.read(grant, middle, targets)
            targets.check(middle, rig.source)
            assert not rig.link.broken
