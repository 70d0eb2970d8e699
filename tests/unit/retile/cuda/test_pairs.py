"""Kernels for every pair of layouts that real use has, run on the CPU, against the core that the agents use."""

from __future__ import annotations

import numpy as np
import pytest

from hawk.bench.retile_cases import Planned, cases
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from hawk.retile import cpu
from hawk.retile.cuda.box import box_of
from hawk.retile.cuda.tables import bind
from tests.unit.retile.cuda.on_cpu import aligned, span

CASES = {case.pair: case for case in cases(1) if case.group != "scales made and spread"}  # see test_through

# Every other element of a row's groups: what a group shares belongs to two pieces.
SINGLY = {"latent-tiles:bfp8_b > latent"}


def planned(case, token, tokens):
    """Steps, regions and the arena's size; shuffled blocks on both sides."""
    rng = np.random.default_rng(len(case.pair))
    size = case.target.shape.block_size
    tables = [rng.permutation(side.shape.blocks).astype(np.int64) for side in (case.source, case.target)]
    source_bytes = Planned(case).region_bytes
    numbers = np.arange(len(source_bytes), dtype=np.int32).reshape(-1, case.source.channels)
    placement = Placement(numbers, np.zeros(numbers.shape, np.int64))
    first, last = token // size, -(-(token + tokens) // size)
    chunk = target_chunk(
        case.target, tables[1], Selection(0, 1, token, tokens), Chunk(0, 1, first, last - first)
    )
    steps = retile_steps(case.source, tables[0], placement, chunk, tables[1])
    return list(steps), [aligned(n, rng=rng) for n in source_bytes], chunk.nbytes


@pytest.mark.parametrize("pair", CASES)
def test_the_bytes_are_those_of_the_cpu(pair, kernels):
    steps, regions, nbytes = planned(CASES[pair], 5, 187)
    want, got = aligned(nbytes, 0xA5), aligned(nbytes, 0xA5)
    for step in steps:
        cpu.run_step(step, regions, want)
    launches = bind(steps, [span(r) for r in regions], span(got))
    assert len(launches) == 1
    fast = [box_of(spec).fast for spec in launches[0].specs]
    assert all(fast) != (pair in SINGLY), "vectors, not elements one by one"
    assert kernels.launch(launches[0], regions, got) == 0, "an access outside, or not aligned"
    assert np.array_equal(got, want), np.flatnonzero(got != want)[:8]


@pytest.mark.parametrize("pair", ["nhd > words", "nhd:fp8_e4m3fn > words4:fp8_e4m3fn"])
def test_both_halves_of_a_word_are_written_at_once(pair):
    """K and V are two programs, each of which would write parts of words."""
    steps, regions, nbytes = planned(CASES[pair], 0, 128)
    assert len(steps) == 2
    (bound,) = bind(steps, [span(r) for r in regions], span(aligned(nbytes, 0)))
    (spec,) = bound.specs
    assert box_of(spec).store_bytes == 16
