"""The engines alone, and HAWK on them, in one table: it runs, and what arrives is right."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl")
pytest.importorskip("mooncake.engine")

from hawk.bench import engines


def test_every_way_is_measured_beside_its_engine() -> None:
    (size,) = engines.run(quick=True).sizes
    ways = {way for way, _ in size.hawk}
    assert {"tcp", "shm", "nixl", "nixl+read", "nixl+write", "mooncake"} <= ways
    assert (
        {way for way, _ in size.alone} == {"nixl", "nixl+read", "nixl+write", "mooncake"} == set(size.joined)
    )
