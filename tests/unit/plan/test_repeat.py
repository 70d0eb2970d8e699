"""Plans that are derived from an earlier chunk of the job are what planning them anew gives."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from hawk.layouts import CacheShape, Layout, load
from hawk.plan.repeat import SourcePlans, TargetPlans
from hawk.plan.source import retile_steps
from hawk.plan.target import split, target_chunk
from hawk.plan.types import Placement, Selection
from hawk.retile.program import Pieces

SHARED = """
name = "test/layers-share-a-buffer"
codec = "bf16"
codecs = ["bf16"]
[[piece]]
order = "layer kv block slot head dim"
"""


def placement(layout, seed: int) -> Placement:
    rng = np.random.default_rng(seed)
    shape = (layout.buffer_count, layout.channels)
    return Placement(
        region=rng.integers(0, 3, shape).astype(np.int32), offset=rng.integers(0, 1 << 30, shape) // 64 * 64
    )


@pytest.mark.parametrize("target", ["tenstorrent/kv", "vllm/nhd", "shared"])
@pytest.mark.parametrize("max_bytes", [1 << 20, 70_000, 9_000])
@pytest.mark.parametrize("first", [0, 37])
@pytest.mark.parametrize("picked", [(), (6, 0, 3, 1, 5)])
def test_every_chunk_is_as_if_planned_alone(
    target: str, max_bytes: int, first: int, picked: tuple[int, ...]
) -> None:
    shape = CacheShape(layers=5, heads=2, dim=64, block_size=32, blocks=40)
    layout = Layout.from_toml(SHARED) if target == "shared" else load(target)
    channels = 7 if target.startswith("tenstorrent") else None
    dst = layout.compile(shape, channels=channels)
    src = load("vllm/nhd").compile(CacheShape(layers=7, heads=2, dim=64, block_size=16, blocks=64))
    rng = np.random.default_rng(1)
    src_blocks, dst_blocks = rng.permutation(64)[:20], rng.permutation(40)[:9]
    where = placement(src, 2)
    selection = Selection(layer=0, layers=5, token=first, tokens=250 - first, source_layers=picked)
    chunks = split(dst, selection, max_bytes=max(max_bytes, 4096 * 5))
    into, out = TargetPlans(dst, dst_blocks, selection), SourcePlans(src, src_blocks, where, dst, dst_blocks)
    assert len(chunks) > 1 or max_bytes == 1 << 20
    for chunk in chunks:
        planned, alone = into.plan(chunk), target_chunk(dst, dst_blocks, selection, chunk)
        assert (planned.chunk, planned.planes, planned.kind, planned.nbytes) == (
            alone.chunk,
            alone.planes,
            alone.kind,
            alone.nbytes,
        )
        assert np.array_equal(planned.base, alone.base)
        assert np.array_equal(planned.shift, alone.shift)
        for got, right in zip(planned.runs, alone.runs, strict=True):
            for name in ("channel", "arena", "target", "nbytes", "channel_bytes"):
                assert np.array_equal(getattr(got, name), getattr(right, name))
        steps = out.plan(planned)
        for step, expected in zip(
            steps, retile_steps(src, src_blocks, where, alone, dst_blocks), strict=True
        ):
            for name in ("layer", "kv", "program", "src_region", "src_offset", "dst_offset"):
                assert getattr(step, name) == getattr(expected, name), name
            for name in (f.name for f in fields(Pieces)):
                assert np.array_equal(getattr(step.pieces, name), getattr(expected.pieces, name)), name
