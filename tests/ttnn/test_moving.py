"""Moves inside banks by a program: ttnn takes it, and it runs where a simulator and a compiler are there."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.ttnn import compiler, moving

LIBRARIES = [path for path in os.environ.get("HAWK_TT_SIMULATOR", "").split(os.pathsep) if path]
WANTING = compiler.missing() if LIBRARIES else "HAWK_TT_SIMULATOR names no library"
absent = pytest.mark.skipif(bool(WANTING), reason=f"moves on a chip: NOT RUN ({WANTING})")


@pytest.mark.parametrize(
    ("cluster", "chip", "banks", "align", "last"),
    [
        ("p150", 0, 8, 64, (4 << 30) - (16 << 20)),
        ("p100", 0, 7, 64, (4 << 30) - (16 << 20)),
        ("n150", 0, 12, 32, 1 << 30),
        ("4xp150", 3, 8, 64, (4 << 30) - (16 << 20)),
    ],
)
def test_ttnn_takes_the_program_up_to_its_compiler(on, cluster, chip, banks, align, last):
    found = on(cluster, moving.described, chip)
    assert "Failed to generate binaries" in found["said"]
    assert (found["banks"], found["align"]) == (banks, align)
    cores = [core for line in found["cores"] for core in line]
    assert len(set(cores)) == len(cores) == 2 * banks
    assert all(x < found["grid"][0] and y < found["grid"][1] for x, y in cores)
    # What HAWK knows of a chip whose allocator it cannot ask is no more than the allocator has.
    lowest, highest = found["bounds"]
    assert lowest >= 1 << 20
    assert highest == last


def run(library: str, folder: Path, each: int, wrong: bool = False) -> dict:
    """In a process of its own: a simulator's library holds one chip."""
    with ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=moving.settle,
        initargs=(library, str(folder)),
    ) as pool:
        return pool.submit(moving.moved, each, wrong).result(timeout=350)


@absent
@pytest.mark.timeout(400)
@pytest.mark.parametrize("library", LIBRARIES or [""])
def test_the_program_moves_what_it_is_told_on_a_simulated_chip(library, tmp_path):
    found = run(library, tmp_path, 12)
    assert found["differ"] == 0
    assert found["moved"] > 10_000
    assert found["launched"] == 1


@absent
@pytest.mark.timeout(400)
def test_a_row_that_was_not_moved_is_seen(tmp_path):
    assert run(LIBRARIES[0], tmp_path, 2, wrong=True)["differ"] > 0
