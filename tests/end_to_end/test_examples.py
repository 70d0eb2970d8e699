"""The programs in docs/examples do what they say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.child import child
from tests.end_to_end.harness import LIMIT, AgentProcess, Site, npu

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
SAYS = {
    "blocking_client.py": "bytes in 8 fetches",
    "embedded_pair.py": "every row is right",
    "progress.py": "seconds of each phase",
    "two_agents.py": "prefill: the offer was consumed",
}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[AgentProcess, AgentProcess]]:
    site = Site()
    prefill = site.start("p0", role="prefill")
    tables = {"peers": {"p0": prefill.control}, "memory.npu0": npu(8)}
    yield prefill, site.start("d0", tables, role="decode")
    site.close()


def test_every_example_is_run() -> None:
    elsewhere = {"ttnn_decode.py"}  # test_ttnn.py, and tests/ttnn
    assert {path.name for path in FOLDER.glob("*.py")} == {*SAYS, *elsewhere}


@pytest.mark.parametrize("name", SAYS)
async def test_an_example(pair: tuple[AgentProcess, AgentProcess], name: str) -> None:
    command = (sys.executable, FOLDER / name, *(agent.local for agent in pair))
    async with child(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        said, _ = await asyncio.wait_for(process.communicate(), LIMIT)
    assert process.returncode == 0, said.decode()
    assert SAYS[name] in said.decode()


@pytest.mark.parametrize("name", sorted(set(SAYS) - {"embedded_pair.py"}))
def test_without_its_agents_an_example_says_how_it_is_called(name: str) -> None:
    done = subprocess.run([sys.executable, FOLDER / name], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: python ")
    assert "Traceback" not in done.stderr
