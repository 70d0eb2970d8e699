"""What a process is left with that has used an engine: a clean end, and nothing on standard output."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("nixl")
pytest.importorskip("mooncake.engine")

USE = """
import asyncio
from hawk.memory.region import Segments
from hawk.transports import registry
from hawk.transports.testing import SharedArena, Targets

async def use(name):
    serving, reading, arena = registry.make(name), registry.make(name), SharedArena(1 << 20)
    await serving.start()
    await reading.start()
    serving.serve(arena.region)
    link = await reading.connect(serving.endpoint, timeout=30.0)
    targets, segments = Targets([1 << 20]), Segments.of([(0, 0, 0, 1 << 20)])
    await link.read(serving.grant(0, 1 << 20).key, segments, targets.regions, timeout=30.0)
    targets.check(segments, arena.region.array)
    {end}

asyncio.run(use({name!r}))
"""
CLOSED = "await link.close(); await reading.close(); await serving.close(); arena.close()"


@pytest.mark.parametrize("end", [CLOSED, "pass"], ids=["closed", "left open"])
@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_it_ends_well_and_says_nothing(name: str, end: str) -> None:
    code = USE.format(name=name, end=end)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    assert done.stdout == ""
