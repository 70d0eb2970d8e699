"""A piece of a read in the requests that an engine is given: every byte once, to its place, and none too large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hawk.memory.region import Region
from hawk.transports._engine import _steps
from hawk.transports._pieces import Piece, bases

CHUNK, STRIDE, GATHER = 4096, 3 * 4096, 512


def laid(lengths: list[int], order: list[int], regions: int) -> tuple[Any, Piece, np.ndarray]:
    """Rows one after the other at the sender's, their places in that order, dealt over regions in turn."""
    nbytes = np.asarray(lengths, np.int64)
    remote = np.cumsum(nbytes) - nbytes
    region = np.arange(len(nbytes), dtype=np.int32) % regions
    local = np.empty(len(nbytes), np.int64)
    ends = [0] * regions
    for i in np.argsort(np.asarray(order)).tolist():
        local[i] = ends[region[i]]
        ends[region[i]] += lengths[i]
    targets = [Region(f"r{i}", np.zeros(max(end, 1), np.uint8)) for i, end in enumerate(ends)]
    work: Any = SimpleNamespace(bases=bases(targets), regions=tuple(targets))
    arena = np.random.default_rng(1).integers(1, 256, int(nbytes.sum()), np.uint8)
    return work, Piece(region, local, remote, nbytes, int(nbytes.sum())), arena


def carried(work: Any, steps: list[_steps.Step], arena: np.ndarray) -> None:
    """What an engine and a dealer would do, a byte at a time."""
    for step in steps:
        if step.places:
            for at, remote, n in zip(step.local, step.remote, step.nbytes, strict=True):
                i = int(np.flatnonzero(work.bases <= at)[np.argmax(work.bases[work.bases <= at])])
                into = work.regions[i].array[int(at - work.bases[i]) :][: int(n)]
                assert not into.any(), "no byte comes twice"
                into[:] = arena[remote : remote + n]
            continue
        buffer = np.zeros(CHUNK, np.uint8)
        for at, remote, n in zip(step.local, step.remote, step.nbytes, strict=True):
            buffer[at : at + n] = arena[remote : remote + n]
        taken = 0
        rows = step.rows
        for region, local, n in zip(rows.region, rows.local, rows.nbytes, strict=True):
            into = work.regions[region].array[local : local + n]
            assert not into.any(), "no byte comes twice"
            into[:] = buffer[taken : taken + n]
            taken += int(n)


@given(
    st.lists(st.sampled_from([1, 7, 100, 511, 512, 600, 5000, 20000]), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
    st.booleans(),
)
def test_every_byte_comes_to_its_place_once(
    lengths: list[int], random: object, regions: int, taken: bool
) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    work, piece, arena = laid(lengths, order, regions)
    steps = list(_steps.steps(work, piece, CHUNK, STRIDE, GATHER, lambda used: taken))
    for step in steps:
        assert int(step.nbytes.sum()) == step.rows.total <= (STRIDE if step.places else CHUNK)
        assert taken or not step.places
    carried(work, steps, arena)
    for region, local, remote, n in zip(piece.region, piece.local, piece.remote, piece.nbytes, strict=True):
        assert np.array_equal(work.regions[region].array[local : local + n], arena[remote : remote + n])


@pytest.mark.parametrize(
    ("lengths", "places", "most"),
    [
        ([512] * 64, True, STRIDE),
        ([511] * 64, False, CHUNK),
        ([20000, *[16] * 20], True, STRIDE),  # hardly anything is short
        ([20000, *[16] * 400], False, CHUNK),
    ],
)
def test_long_rows_go_to_their_places_in_larger_steps(lengths: list[int], places: bool, most: int) -> None:
    work, piece, _ = laid(lengths, list(range(len(lengths)))[::-1], 1)
    steps = list(_steps.steps(work, piece, CHUNK, STRIDE, GATHER, lambda used: True))
    assert all(step.places for step in steps) == places
    assert max(step.rows.total for step in steps) == most


def test_a_faster_engine_is_asked_for_more_at_a_time() -> None:
    pace = _steps.Pace(1000)
    assert pace.stride == 1000
    pace.went(999, 1e-9)
    assert pace.stride == 1000, "too little to tell by"
    pace.went(1_000_000, 5.0)
    assert pace.stride == 2000
    pace.went(1_000_000, 0.0)
    assert pace.stride == 4000
    pace.went(1_000_000, 100.0)
    assert pace.stride == 1000
