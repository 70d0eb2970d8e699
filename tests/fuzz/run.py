"""One run: an agent under fire, another whose jobs with it must not notice."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.harness import AgentProcess, Site, npu
from tests.end_to_end.scene import Scene, scene
from tests.fuzz.flood import Strangers, flood

WARM = 5000
"""Frames before memory is first measured: caches and buffers that fill once."""

GROWTH = 48 << 20
"""Bytes by which an agent's private memory may be above what it was then."""


@dataclass
class Figures:
    """What a run saw: frames and seconds, connections at a time, good jobs meanwhile, bytes of growth (of it `flooded`
    after the frames, before the connections)."""

    frames: int = 0
    seconds: float = 0.0
    connections: int = 0
    jobs: int = 0
    flooded: int = 0
    growth: int = 0
    peak: int = 0

    def __str__(self) -> str:
        return (
            f"{self.frames:,} frames in {self.seconds:.0f} s, {self.connections:,} strangers at a time, "
            f"{self.jobs} good jobs meanwhile; memory {self.flooded / 2**20:+.1f} MiB after the frames, "
            f"{self.growth / 2**20:+.1f} MiB at the end, "
            f"at most {self.peak / 2**20:+.1f} MiB"
        )


def private(agent: AgentProcess) -> int:
    """Bytes of memory that are the process' alone."""
    lines = Path(f"/proc/{agent.pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def _is_fault(line: str) -> bool:
    """An error, what is no event at all (a traceback, a library's last words), or a good peer taken for lost."""
    if not line.startswith("{"):
        return True
    event = json.loads(line)
    return event.get("level") in ("error", "critical") or event.get("event") in (
        "peer lost",
        "peer restarted",
    )


async def run(frames: int, connections: int, seed: int) -> Figures:
    """Raises what was wrong; every good job's bytes are looked at, and both agents must be as before at the end."""
    site, figures = Site(), Figures()
    try:
        tcp = {"transport": {"prefer": ["tcp"]}}
        prefill = site.start("p0", tcp, role="prefill")
        peers = {"p0": prefill.control}
        decode = site.start("d0", {**tcp, "peers": peers, "memory.npu8": npu(8)}, role="decode")
        loop = asyncio.get_running_loop()
        async with scene(prefill, decode) as s:
            await loop.run_in_executor(None, flood, site, prefill, min(WARM, frames), seed + 1)
            await s.good_job()
            before = private(prefill)

            async def under_fire(shots: asyncio.Future[float]) -> float:
                while not shots.done():
                    await s.good_job()
                    figures.jobs += 1
                    figures.peak = max(figures.peak, private(prefill) - before)
                    await asyncio.wait({shots}, timeout=0.2)
                return await shots

            shots = loop.run_in_executor(None, flood, site, prefill, frames, seed)
            figures.seconds, figures.frames = await under_fire(shots), frames
            figures.flooded = private(prefill) - before
            await _strangers(s, figures, connections, seed)
            figures.peak = max(figures.peak, private(prefill) - before)
            await s.good_job()
            figures.growth = private(prefill) - before
        for agent in (prefill, decode):
            wrong = [line for line in agent.log().splitlines() if _is_fault(line)]
            assert not wrong, wrong[:3]
        assert figures.growth < GROWTH, str(figures)
    finally:
        site.close()
    return figures


async def _strangers(s: Scene, figures: Figures, connections: int, seed: int) -> None:
    """Comes with all at once, and has good jobs while they stand there."""
    loop = asyncio.get_running_loop()
    strangers = Strangers(s.prefill.control, seed)
    try:
        coming = loop.run_in_executor(None, strangers.come, connections)
        while not coming.done():
            await s.good_job()
            figures.jobs += 1
            await asyncio.wait({coming}, timeout=0.2)
        figures.connections = await coming
        await loop.run_in_executor(None, strangers.drip)
        await s.good_job()
        figures.jobs += 1
    finally:
        strangers.go()
