"""The contract's second part: a key opens its range, while it stands, and nothing else."""

from __future__ import annotations

import asyncio

from hawk.errors import AccessDenied, HawkError, InvalidArgument, PeerUnreachable, TransferFailed
from hawk.memory.region import Segments
from hawk.transports.testing._helpers import CANARY, FRESH, Targets
from hawk.transports.testing._rig import LIMIT, ContractBase, on_a_loop, refused


class AccessContract(ContractBase):
    """Keys."""

    @on_a_loop
    async def test_unknown_keys(self) -> None:
        async with self.rig(8192) as rig:
            grant = rig.serving.grant(0, 8192)
            targets, segments = Targets([64]), Segments.of([(0, 0, 0, 64)])
            for key in (bytes(len(grant.key)), grant.key[:-1] + bytes([grant.key[-1] ^ 1]), b"", b"x" * 64):
                reading = rig.link.read(key, segments, targets.regions, timeout=LIMIT)
                await refused(AccessDenied, reading)
            assert targets.only(CANARY)
            link = await rig.usable_link()
            await rig.read(grant, segments, targets, link=link)
            targets.check(segments, rig.source)

    @on_a_loop
    async def test_a_revoked_key(self) -> None:
        async with self.rig(8192) as rig:
            grant = rig.serving.grant(0, 8192)
            targets, segments = Targets([64]), Segments.of([(0, 0, 0, 64)])
            await rig.read(grant, segments, targets)
            assert await rig.serving.revoke(grant)
            assert await rig.serving.revoke(grant), "asking twice is harmless"
            targets.fill(CANARY)
            await refused(AccessDenied, rig.read(grant, segments, targets, link=await rig.usable_link()))
            assert targets.only(CANARY)

    @on_a_loop
    async def test_ranges_that_the_key_does_not_cover(self) -> None:
        low, high = 4096, 12288
        outside = {
            "before": (0, 100),
            "across the start": (low - 1, 2),
            "across the end": (high - 1, 2),
            "after": (high, 10),
            "past the arena": (16384 - 1, 2),
            "around": (low - 1, high - low + 2),
        }
        async with self.rig(16384) as rig:
            grant = rig.serving.grant(low, high - low)
            for name, (remote, nbytes) in outside.items():
                targets = Targets([16384])
                segments = Segments.of([(0, 0, remote, nbytes)])
                await refused(AccessDenied, rig.read(grant, segments, targets, link=await rig.usable_link()))
                assert targets.only(CANARY), name
            targets, whole = Targets([high - low]), Segments.of([(0, 0, low, high - low)])
            await rig.read(grant, whole, targets, link=await rig.usable_link())
            targets.check(whole, rig.source)

    @on_a_loop
    async def test_one_segment_among_good_ones_that_the_key_does_not_cover(self) -> None:
        async with self.rig(16384) as rig:
            grant = rig.serving.grant(0, 8192)
            targets = Targets([4096, 4096])
            segments = Segments.of([(0, 0, 0, 4096), (1, 0, 8191, 2)])
            await refused(AccessDenied, rig.read(grant, segments, targets))
            assert (targets.regions[1].array == CANARY).all()

    @on_a_loop
    async def test_grants_are_checked_and_keys_are_never_alike(self) -> None:
        async with self.rig(4096) as rig:
            for offset, nbytes in ((-1, 2), (0, 0), (0, -1), (0, 4097), (4096, 1), (4095, 2)):
                try:
                    rig.serving.grant(offset, nbytes)
                except InvalidArgument:
                    continue
                raise AssertionError(f"granted offset {offset}, {nbytes} bytes of 4096")
            keys = {rig.serving.grant(0, 4096).key for _ in range(64)}
            assert len(keys) == 64
            assert all(16 <= len(key) <= 64 for key in keys)

    @on_a_loop
    async def test_grants_are_independent(self) -> None:
        async with self.rig(8192) as rig:
            one, two = rig.serving.grant(0, 4096), rig.serving.grant(0, 8192)
            targets, segments = Targets([64]), Segments.of([(0, 0, 1000, 64)])
            assert await rig.serving.revoke(one)
            await rig.read(two, segments, targets)
            targets.check(segments, rig.source)
            await refused(AccessDenied, rig.read(one, segments, targets))

    @on_a_loop
    async def test_revoking_one_read_leaves_another_alone(self) -> None:
        async with self.rig(self.large) as rig:
            one, two = rig.serving.grant(0, self.large), rig.serving.grant(0, self.large)
            segments = Segments.of([(0, 0, 0, self.large)])
            lost, kept = Targets([self.large]), Targets([self.large])
            task, gate = await self.held(rig, lambda: rig.read(one, segments, lost))
            other = asyncio.get_running_loop().create_task(rig.read(two, segments, kept))
            revoking = asyncio.get_running_loop().create_task(rig.serving.revoke(one))
            await asyncio.sleep(0)
            gate.open()
            await revoking
            assert await rig.outcome(other) is None
            kept.check(segments, rig.source)
            assert not isinstance(await rig.outcome(task), AssertionError)

    @on_a_loop
    async def test_no_byte_that_was_written_after_a_revoke_is_read(self) -> None:
        async with self.rig(self.large) as rig:
            grant = rig.serving.grant(0, self.large)
            targets, segments = Targets([self.large]), Segments.of([(0, 0, 0, self.large)])
            task, gate = await self.held(rig, lambda: rig.read(grant, segments, targets))
            # The read is held by now: a transport that can fence needs nobody's help to end it.
            fenced = await rig.serving.revoke(grant)
            assert fenced or not rig.serving.capabilities.can_fence
            rig.arena.array[:] = FRESH
            gate.open()
            error = await rig.outcome(task)
            if error is None:
                targets.check(segments, rig.source)
            else:
                assert isinstance(error, (AccessDenied, TransferFailed)), repr(error)
            if fenced:
                assert not targets.holds(FRESH)
            else:
                assert error is not None, "the grant ended under the read, which did not say so"
            assert await rig.serving.revoke(grant), "the reader has left by now"

    @on_a_loop
    async def test_a_revoke_beside_a_running_read(self) -> None:
        async with self.rig(self.large) as rig:
            segments = Segments.of([(0, 0, 0, self.large)])
            for turn in range(6):
                rig.arena.array[:] = rig.source
                grant, targets = rig.serving.grant(0, self.large), Targets([self.large])
                link = await rig.usable_link()
                task = asyncio.get_running_loop().create_task(rig.read(grant, segments, targets, link=link))
                for _ in range(turn * 3):
                    await asyncio.sleep(0)
                fenced = await rig.serving.revoke(grant)
                if fenced:
                    rig.arena.array[:] = FRESH
                error = await rig.outcome(task)
                if error is None:
                    targets.check(segments, rig.source)
                else:
                    assert isinstance(error, HawkError), repr(error)
                assert not targets.holds(FRESH)

    @on_a_loop
    async def test_nothing_is_granted_before_something_is_served(self) -> None:
        transport = self.make()
        await transport.start()
        try:
            transport.grant(0, 1)
        except InvalidArgument:
            pass
        else:
            raise AssertionError("granted without a region")
        finally:
            await transport.close()

    @on_a_loop
    async def test_what_is_no_endpoint_is_not_reachable(self) -> None:
        transport, arena = self.make(), self.arena(4096)
        await transport.start()
        try:
            transport.serve(arena.region)
            assert transport.reachable(transport.endpoint).ok
            assert all(isinstance(v, str) for v in transport.endpoint.values())
            for endpoint in (
                {},
                dict.fromkeys(transport.endpoint, ""),
                dict.fromkeys(transport.endpoint, "?"),
            ):
                verdict = transport.reachable(endpoint)
                assert not verdict.ok
                assert verdict.reason
                try:
                    link = await transport.connect(endpoint, timeout=5.0)
                except PeerUnreachable:
                    continue
                await link.close()
                raise AssertionError(f"connected to {endpoint}")
        finally:
            await transport.close()
            arena.close()
