"""Processes that each see one kind of chip: ttnn looks for its devices once in a process, when it is first asked."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.ttnn import compiler

HERE = Path(__file__).resolve().parent
CHIPS = ("p150", "p100", "n150", "4xp150")
"""Descriptions of mock chips in `clusters`, ours: what a machine with such boards would find."""


def settle(cluster: str, cache: str) -> None:
    """Runs first in a process: before ttnn is imported."""
    os.environ.update(
        {
            "TT_METAL_MOCK_CLUSTER_DESC_PATH": str(HERE / "clusters" / f"{cluster}.yaml"),
            "TT_METAL_SLOW_DISPATCH_MODE": "1",
            "TT_METAL_CACHE": cache,
            "TT_LOGGER_LEVEL": "FATAL",
            "LOGURU_LEVEL": "ERROR",
            # ttnn starts MPI, which would leave files in the temporary folder and in /dev/shm.
            "TMPDIR": cache,
            "OMPI_MCA_btl": "self",
        }
    )
    os.chdir(cache)  # ttnn leaves reports where it stands


@pytest.fixture(scope="session")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """`on("p150", checks.tiles, ...)` runs a function where ttnn sees that chip, and raises what it raises."""
    pools: dict[str, ProcessPoolExecutor] = {}

    def run(cluster: str, work: Callable[..., Any], *arguments: Any) -> Any:
        if cluster not in pools:
            pools[cluster] = ProcessPoolExecutor(
                1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=settle,
                initargs=(cluster, str(tmp_path_factory.mktemp(f"ttnn-{cluster}"))),
            )
        return pools[cluster].submit(work, *arguments).result(timeout=110)

    yield run
    for pool in pools.values():
        pool.shutdown()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What no mock chip can show."""
    if not os.environ.get("HAWK_TT_SIMULATOR"):
        terminalreporter.write_line("bank map: NOT CHECKED (HAWK_TT_SIMULATOR names no simulator's library)")
    wanting = compiler.missing()
    if wanting or not os.environ.get("HAWK_TT_SIMULATOR"):
        terminalreporter.write_line(f"moves on a chip: NOT RUN ({wanting or 'no simulator'})")
