"""The contract's first part: every byte arrives where it belongs, and no other byte changes."""

from __future__ import annotations

import asyncio

import numpy as np

from hawk.errors import InvalidArgument
from hawk.memory.region import Region, Segments
from hawk.transports.testing._helpers import CANARY, Targets, scatter
from hawk.transports.testing._rig import LIMIT, ContractBase, on_a_loop, refused


class MovingContract(ContractBase):
    """Bytes."""

    async def _moves(self, segments: Segments, sizes: list[int]) -> None:
        nbytes = int((segments.remote + segments.nbytes).max())
        async with self.rig(nbytes) as rig:
            targets = Targets(sizes)
            await rig.read(rig.serving.grant(0, nbytes), segments, targets)
            targets.check(segments, rig.source)

    @on_a_loop
    async def test_one_segment(self) -> None:
        await self._moves(Segments.of([(0, 0, 0, 1 << 20)]), [1 << 20])

    @on_a_loop
    async def test_one_large_segment(self) -> None:
        await self._moves(Segments.of([(0, 3, 5, self.large)]), [self.large + 3])

    @on_a_loop
    async def test_pages_of_2_kib_over_several_regions(self) -> None:
        # Far more than one system call or work request takes.
        await self._moves(*scatter([2048] * 6000, 8, gap=0))

    @on_a_loop
    async def test_pages_with_gaps_on_both_sides(self) -> None:
        await self._moves(*scatter([2048] * 3000, 5, gap=64, seed=1))

    @on_a_loop
    async def test_odd_sizes_from_one_byte_to_megabytes(self) -> None:
        rng = np.random.default_rng(2)
        lengths = [1, 2, 3, 4095, 4097, 65537, (3 << 20) + 1, 1, (1 << 20) - 1]
        lengths += rng.integers(1, 9000, 300).tolist()
        await self._moves(*scatter(lengths, 3, seed=2))

    @on_a_loop
    async def test_thousands_of_single_bytes(self) -> None:
        await self._moves(*scatter([1] * 5000, 2, gap=3, seed=3))

    @on_a_loop
    async def test_neighbours_on_both_sides(self) -> None:
        rows = [(0, i * 512, i * 512, 512) for i in range(2500)]
        await self._moves(Segments.of(rows), [2500 * 512])

    @on_a_loop
    async def test_many_pieces(self) -> None:
        rows = max(self.large // 30011, 1)
        await self._moves(*scatter([30011] * rows, 4, gap=1, seed=4))

    @on_a_loop
    async def test_no_segments(self) -> None:
        async with self.rig(4096) as rig:
            targets = Targets([64])
            empty = Segments.of([])
            await rig.read(rig.serving.grant(0, 4096), empty, targets)
            assert targets.only(CANARY)

    @on_a_loop
    async def test_segments_outside_their_region_move_nothing(self) -> None:
        async with self.rig(1 << 20) as rig:
            grant = rig.serving.grant(0, 1 << 20)
            targets = Targets([4096, 4096])
            for bad in (
                (0, 4000, 8192, 97),
                (0, -1, 8192, 8),
                (2, 0, 8192, 8),
                (1, 0, -8, 8),
                (1, 0, 8192, 0),
            ):
                segments = Segments.of([(0, 0, 0, 64), bad])
                await refused(InvalidArgument, rig.read(grant, segments, targets))
            assert targets.only(CANARY)
            good = Segments.of([(1, 0, 0, 4096)])
            await rig.read(grant, good, targets)
            targets.check(good, rig.source)

    @on_a_loop
    async def test_a_region_that_forbids_writing_is_not_written(self) -> None:
        async with self.rig(4096) as rig:
            array = np.full(4096, CANARY, np.uint8)
            array.flags.writeable = False
            reading = rig.link.read(
                rig.serving.grant(0, 4096).key,
                Segments.of([(0, 0, 0, 4096)]),
                [Region("sealed", array)],
                timeout=LIMIT,
            )
            await refused(InvalidArgument, reading)
            assert (array == CANARY).all()

    @on_a_loop
    async def test_reads_at_a_time_on_one_link(self) -> None:
        async with self.rig(16 << 20) as rig:
            grant = rig.serving.grant(0, 16 << 20)
            jobs = []
            for i in range(12):
                length = 997 if i % 3 else 1 << 20
                segments, sizes = scatter([length] * (3 + i % 4), 2, seed=i)
                segments = Segments(
                    segments.region, segments.local, segments.remote + i * 4099, segments.nbytes
                )
                jobs.append((segments, Targets(sizes)))
            await asyncio.gather(*(rig.read(grant, segments, targets) for segments, targets in jobs))
            for segments, targets in jobs:
                targets.check(segments, rig.source)

    @on_a_loop
    async def test_a_small_read_does_not_wait_for_a_large_one(self) -> None:
        async with self.rig(self.large) as rig:
            grant = rig.serving.grant(0, self.large)
            large = Targets([self.large])
            whole = Segments.of([(0, 0, 0, self.large)])
            order: list[str] = []

            async def noted(name: str, segments: Segments, targets: Targets) -> None:
                await rig.read(grant, segments, targets)
                order.append(name)

            task, gate = await self.held(rig, lambda: noted("large", whole, large))
            small, part = Targets([100]), Segments.of([(0, 0, 7, 100)])
            other = asyncio.get_running_loop().create_task(noted("small", part, small))
            await asyncio.sleep(0)
            gate.open()
            await asyncio.gather(task, other)
            small.check(part, rig.source)
            large.check(whole, rig.source)
            assert order[0] == "small" or not self.takes_turns

    takes_turns: bool = False
    """Whether one worker carries a read of `large` bytes in three turns or more, so that the small one is done
    first whatever the scheduling; with several workers it mostly is, but not for certain."""

    @on_a_loop
    async def test_two_links_and_the_second_outlives_the_first(self) -> None:
        async with self.rig(1 << 20) as rig:
            grant = rig.serving.grant(0, 1 << 20)
            second = await rig.reading.connect(rig.serving.endpoint, timeout=LIMIT)
            segments, one, two = Segments.of([(0, 0, 11, 9999)]), Targets([9999]), Targets([9999])
            await asyncio.gather(rig.read(grant, segments, one), rig.read(grant, segments, two, link=second))
            await rig.link.close()
            two.fill(CANARY)
            await rig.read(grant, segments, two, link=second)
            one.check(segments, rig.source)
            two.check(segments, rig.source)
            await second.close()
