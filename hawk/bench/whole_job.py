"""The whole job, and its parts one at a time.

The job is what a user sees: offer and fetch through two agents as processes, from pages of 16 tokens into tiles.
The parts are the same chunks of the same plan, with nothing else running: retile, then read, then finish.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hawk.bench.samples import Samples
from hawk.bench.serving import Served
from hawk.cache import KVCache
from hawk.demo import agents, engine
from hawk.demo.scenario import ALIGNMENT
from hawk.errors import InternalError, UnknownRequest
from hawk.memory import shared
from hawk.memory.npu import EmulatedNpu
from hawk.memory.region import Region
from hawk.plan.segments import direct, staged
from hawk.plan.source import retile_steps
from hawk.plan.target import split, target_chunk
from hawk.plan.types import Placement, Selection
from hawk.retile.cpu import Retiler

if TYPE_CHECKING:
    from hawk.demo.scenario import Scenario
    from hawk.handles import Ready
    from hawk.layouts import CompiledLayout
    from hawk.plan.types import TargetChunk

SPARE = 64 << 20
"""Bytes of the device beyond the cache, for staging where the plan wants it."""

_TIMEOUT = 120.0

PARTS = ("retile", "read", "finish")
CONTROL = ("connect", "accept", "release", "client")


@dataclass
class WholeJob:
    """One transport's whole job.

    wall      from offering until the fetch is ready, as the client sees it
    phases    median seconds by phase as the agents count them; `client` is what passed outside the job.  Phases
              of different chunks overlap.
    parts     median seconds of each part alone
    """

    transport: str
    mode: str
    wall: Samples
    phases: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def control(self) -> float:
        """Seconds of the job in which agents and client talk and nothing moves."""
        return sum(self.phases.get(name, 0.0) for name in CONTROL)

    @property
    def parts_sum(self) -> float:
        """Seconds that retile, bytes and finish take one after the other."""
        return sum(self.parts[name] for name in PARTS)

    @property
    def over_sum(self) -> float:
        """The job's time by that of its parts; below 1 where they overlap."""
        return self.wall.median / self.parts_sum

    @property
    def over_largest(self) -> float:
        """The job's time by that of its largest part; 1 where everything else is hidden behind it."""
        return self.wall.median / max(self.parts[name] for name in PARTS)

    def to_dict(self) -> dict[str, object]:
        """Everything as plain values."""
        return {
            "mode": self.mode,
            "bytes": self.wall.nbytes,
            **self.wall.to_dict(),
            "phases": self.phases,
            "control": self.control,
            "parts": self.parts,
            "parts_sum": self.parts_sum,
            "over_sum": self.over_sum,
            "over_largest": self.over_largest,
        }


def settings(scene: Scenario, transport: str) -> agents.Settings:
    """The agents' configuration for one job."""
    return agents.Settings(
        capacity=scene.target_bytes + SPARE,
        channels=scene.channels,
        alignment=ALIGNMENT,
        transports=(transport,),
    )


async def measure(scene: Scenario, transports: tuple[str, ...], runs: int) -> dict[str, WholeJob]:
    """The whole job and its parts over each transport; raises `InternalError` if a byte came out wrong."""
    results = {}
    with contextlib.closing(KVCache.alloc(scene.source)) as cache:
        await engine.fill_in_threads(cache, scene)
        for name in transports:
            job = results[name] = await _jobs(scene, cache, settings(scene, name), runs)
            job.parts = await _parts(scene, cache, settings(scene, name), job.mode, runs)
    return results


# -- the job -------------------------------------------------------------------------------------------------


async def _jobs(scene: Scenario, cache: KVCache, chosen: agents.Settings, runs: int) -> WholeJob:
    walls: list[float] = []
    readies: list[Ready] = []
    source_blocks, target_blocks = scene.source_blocks(), scene.target_blocks()
    async with agents.Pair(chosen) as pair:
        registered = await pair.prefill.register(cache)
        device = await pair.decode.allocate(scene.target, memory=agents.MEMORY)
        engine.mark(device)
        for number in range(runs + 1):
            began = time.perf_counter()
            offer = await pair.prefill.offer(
                f"bench-{number}", registered, source_blocks, tokens=scene.tokens, ttl=_TIMEOUT
            )
            async with pair.decode.fetch(offer, into=device, blocks=target_blocks, timeout=_TIMEOUT) as fetch:
                ready = await fetch
            took = time.perf_counter() - began
            with contextlib.suppress(UnknownRequest):  # it may be over before we ask
                await offer.ended()
            if number:  # the first makes the connection and warms up
                walls.append(took)
                readies.append(ready)
        verdict = await engine.verify(engine.job(device, scene))
        if verdict.mismatch:
            raise InternalError("a byte is wrong after the job", got=verdict.mismatch)
        await registered.release()
        await device.release()
    phases = {
        name: statistics.median(ready.phases.get(name, 0.0) for ready in readies)
        for name in readies[0].phases
        if name != "total"
    }
    phases["client"] = statistics.median(
        wall - ready.phases["total"] for wall, ready in zip(walls, readies, strict=True)
    )
    return WholeJob(
        transport=chosen.transports[0],
        mode=readies[0].mode,
        wall=Samples(readies[0].nbytes, walls),
        phases=phases,
    )


# -- its parts -----------------------------------------------------------------------------------------------


async def _parts(
    scene: Scenario, cache: KVCache, chosen: agents.Settings, mode: str, runs: int
) -> dict[str, float]:
    source, target = scene.source.compile(), scene.target.compile()
    with contextlib.ExitStack() as stack:
        arena = stack.enter_context(shared.alloc(chosen.arena, name="bench-arena"))
        memory = EmulatedNpu(
            "bench", capacity=chosen.capacity, channels=chosen.channels, alignment=chosen.alignment
        )
        stack.callback(memory.close)
        parts = _Parts(scene, cache, source, target, memory, arena.region(), mode)
        retiler = stack.enter_context(Retiler(len(os.sched_getaffinity(0))))
        name = chosen.transports[0]
        totals: list[dict[str, float]] = []
        async with Served(arena, (name,)) as served:
            for number in range(runs + 1):
                took = dict.fromkeys(("plan", *PARTS), 0.0)
                at = 0
                for chunk in split(target, parts.selection, max_bytes=min(chosen.chunk, chosen.arena // 2)):
                    at = await parts.chunk(chunk, at, retiler, served, name, took)
                if number:
                    totals.append(took)
    return {name: statistics.median(took[name] for took in totals) for name in totals[0]}


class _Parts:
    """One chunk after the other, one part after the other."""

    def __init__(
        self,
        scene: Scenario,
        cache: KVCache,
        source: CompiledLayout,
        target: CompiledLayout,
        memory: EmulatedNpu,
        arena: Region,
        mode: str,
    ) -> None:
        self.selection = Selection(0, scene.target.layers, 0, scene.tokens)
        self._source, self._target = source, target
        self._source_blocks, self._target_blocks = scene.source_blocks(), scene.target_blocks()
        self._buffers = cache.buffers
        numbers = np.arange(source.buffer_count, dtype=np.int32)[:, None]
        self._source_placement = Placement(numbers, np.zeros((source.buffer_count, 1), np.int64))
        offsets = [memory.allocate(target.channel_bytes, "bench").offset for _ in range(target.buffer_count)]
        self._placement = Placement(
            np.tile(np.arange(memory.channels, dtype=np.int32), (target.buffer_count, 1)),
            np.tile(np.array(offsets, np.int64)[:, None], (1, memory.channels)),
        )
        self._memory, self._arena, self._mode = memory, arena, mode
        self._staging = -1

    async def chunk(
        self, chunk: object, at: int, retiler: Retiler, served: Served, name: str, took: dict[str, float]
    ) -> int:
        """Takes a chunk through all parts from arena offset `at`; where the next one may begin."""
        clock = time.perf_counter
        began = clock()
        planned = target_chunk(self._target, self._target_blocks, self.selection, chunk)  # type: ignore[arg-type]
        steps = retile_steps(
            self._source, self._source_blocks, self._source_placement, planned, self._target_blocks
        )
        if at + planned.nbytes > self._arena.nbytes:
            at = 0
        regions = self._memory.regions
        moves = None
        if self._mode == "staged":
            staging = np.full(len(regions), self._slot(planned), np.int64)
            segments, moves = staged(planned, self._placement, at, self._placement.region[0], staging)
        else:
            segments = direct(planned, self._placement, at, [region.extents for region in regions])
        took["plan"] += clock() - began
        began = clock()
        await retiler.run_steps(steps, self._buffers, self._arena.array[at : at + planned.nbytes])
        took["retile"] += clock() - began
        began = clock()
        await served.links[name].read(served.keys[name], segments, regions, timeout=_TIMEOUT)
        took["read"] += clock() - began
        if moves is not None:
            began = clock()
            await self._memory.move(moves)
            took["finish"] += clock() - began
        return at + -(-planned.nbytes // 4096) * 4096

    def _slot(self, planned: TargetChunk) -> int:
        if self._staging < 0:
            # A little more than the first chunk needs: blocks spread unevenly over channels.
            wanted = int(planned.channel_bytes.max()) * 5 // 4
            self._staging = self._memory.allocate(wanted, "bench/staging").offset
        return self._staging
