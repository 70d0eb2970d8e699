"""A request into simulated DRAM and back as ttnn's tensors, where HAWK_TT_SIMULATOR names simulators' libraries."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.ttnn import request, simulated
from tests.ttnn.conftest import settle

LIBRARIES = [path for path in os.environ.get("HAWK_TT_SIMULATOR", "").split(os.pathsep) if path]
absent = pytest.mark.skipif(
    not LIBRARIES, reason="bank map: NOT CHECKED (HAWK_TT_SIMULATOR names no library)"
)


def run(library: str, folder: Path, codec: str, swap: bool = False) -> dict:
    """In a process of its own: a simulator's library holds one chip, and ttnn sees one kind."""
    banks = len(simulated.views(library)[0])
    kind = "n150" if banks == 12 else "p150"
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=settle, initargs=(kind, str(folder))
    ) as pool:
        return pool.submit(request.into_dram, library, codec, swap).result(timeout=110)


@absent
@pytest.mark.parametrize("library", LIBRARIES or [""])
@pytest.mark.parametrize("codec", ["bfp8_b", "bf16"])
def test_a_request_lies_in_dram_as_ttnn_would_have_it(library, codec, short_path):
    found = run(library, short_path, codec)
    assert found["faults"] == []
    # Few and large: less than one write for each of its pages.
    assert found["writes"]["written_bytes"] == found["writes"]["moved"]
    page = {"bfp8_b": 1088, "bf16": 2048}[codec]
    assert found["writes"]["writes"] * 4 < found["writes"]["moved"] // page


@absent
def test_a_wrong_bank_is_seen(short_path):
    assert run(LIBRARIES[0], short_path, "bfp8_b", True)["faults"]
