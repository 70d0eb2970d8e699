"""Into simulated Blackhole and Wormhole DRAM through tt-umd, where HAWK_TT_SIMULATOR names the simulators' libraries.

The variable holds one path of a `libttsim.so` or several, with colons between them; the driver's description of the
chip, `soc_descriptor.yaml`, lies beside each.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.ttnn import simulated

LIBRARIES = [path for path in os.environ.get("HAWK_TT_SIMULATOR", "").split(os.pathsep) if path]
FIRST = {"blackhole": 0x100080, "wormhole_b0": 0x100040}
"""What ttnn's allocator gives out first."""


@pytest.mark.skipif(not LIBRARIES, reason="bank map: NOT CHECKED (HAWK_TT_SIMULATOR names no library)")
@pytest.mark.parametrize("library", LIBRARIES or [""])
def test_every_bank_is_where_the_driver_has_it(library: str) -> None:
    # A process for each: a simulator's library holds its one chip in variables of its own.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        channels = pool.submit(simulated.views, library).result(60)[0]
        arch = "wormhole_b0" if any(offset for _, _, offset in channels) else "blackhole"
        found = pool.submit(simulated.bank_map, library, FIRST[arch]).result(100)
    assert found["faults"] == []
    assert found["arch"] == arch
    assert found["banks"] == len(channels)
    assert found["channels"] * (2 if arch == "wormhole_b0" else 1) == found["banks"]
    # Few and large: as many writes as banks, and pieces of them, whatever the number of pages.
    for what, writes, fewest in found["counted"]:
        assert writes == fewest, what


@pytest.mark.skipif(not LIBRARIES, reason="bank map: NOT CHECKED (HAWK_TT_SIMULATOR names no library)")
def test_a_wrong_map_is_found(tmp_path) -> None:
    """The test above can fail: a description with two banks in each other's place is no longer what was written."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(swapped, LIBRARIES[0]).result(100)
    assert any("bank 0" in fault for fault in found["faults"])
    assert any("bank 1" in fault for fault in found["faults"])


def swapped(library: str) -> dict[str, object]:
    """The check with the first two banks of the driver's map exchanged."""
    real = simulated.views

    def other(path: str) -> tuple[list[tuple[int, int, int]], int]:
        banks, size = real(path)
        banks[0], banks[1] = banks[1], banks[0]
        return banks, size

    simulated.views = other
    return simulated.bank_map(library, 0x100080)
