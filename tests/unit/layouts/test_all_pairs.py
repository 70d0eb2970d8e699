"""Every shipped layout into every other: byte by byte what a page-by-page account says, or refused by name.

Refusals stand below, each with its field, so that a pair that is newly refused, or refused for another reason, fails.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from hawk.errors import HawkError, LayoutError
from hawk.layouts import CacheShape, Layout, load, names
from hawk.plan.check import check
from tests.unit.layouts import moving, placing
from tests.unit.layouts.test_moving import SHARED, there_and_back

SHAPES = {
    "kv": CacheShape(layers=2, heads=2, dim=128, block_size=32, blocks=3),
    "latent": CacheShape(layers=2, heads=1, dim=576, block_size=64, blocks=2, kvs=1),
    "indexer": CacheShape(layers=2, heads=1, dim=128, block_size=64, blocks=2, kvs=1),
}

CODECS = ("bf16", "fp16", "fp8_e4m3fn")
"""The first of these that a layout has is what it is tried with."""


@cache
def compiled(name):
    """The layout for each of the shapes that it takes."""
    layout, found = load(name), {}
    for kind, shape in SHAPES.items():
        codec = next(c for c in CODECS if c in layout.codecs)
        interleaved = layout.placement == "interleaved"
        try:
            found[kind] = layout.compile(shape, codec=codec, channels=7 if interleaved else None)
        except LayoutError:
            continue
    return found


def plain(layout):
    """Whether all of a cache is elements of one tensor; others are compared in `test_shipped_scales`, `test_parts`."""
    return len(layout.tensors) == 1


@cache
def bits(kind):
    """Whole numbers that all of the codecs hold."""
    shape = SHAPES[kind]
    rng = np.random.default_rng(len(kind))
    extents = [shape.extent(axis) for axis in ("layer", "kv", *placing.AXES)]
    return rng.integers(-8, 9, extents).astype(np.float32).view(np.uint32)


@cache
def cache_of(name, kind):
    return moving.buffers_of(compiled(name)[kind], bits(kind))


def verdict(a, b, kind):
    """Empty where the pair is brought over, byte by byte; else the field of the refusal."""
    src, dst = compiled(a)[kind], compiled(b)[kind]
    try:
        check(src, dst)
    except HawkError as error:
        return error.field or "a refusal that names no field"
    if plain(src) and plain(dst):
        # The cores are compared with each other elsewhere; here the one that is used has its say.
        moved = moving.move(src, dst, cache_of(a, kind), moving.CORES[-1])
        assert moving.equal(moved, cache_of(b, kind)), f"{a} into {b}: {kind}"
    return ""


REFUSED = {
    # A scale of the whole cache cannot be made of the tokens of one request.
    ("*", "vllm/nhd-fp8"): "scale.order",
    # Elements of the same eight bits, whose scale is the constant one.
    ("xla/tiled-8bit", "vllm/nhd-fp8"): "",
}
"""(source, target) -> field of the refusal, for every kind of cache; `*` is every source but the target itself."""


def refusal(source, target):
    return REFUSED.get((source, target), REFUSED.get(("*", target), "") if source != target else "")


@pytest.mark.parametrize("source", names())
def test_every_target(source):
    assert compiled(source), "no shape of this test fits the layout"
    got, want = {}, {}
    for target in names():
        kinds = [kind for kind in compiled(source) if kind in compiled(target)]
        assert kinds, f"{source} and {target} hold no kind of cache in common"
        for kind in kinds:
            got[target, kind] = verdict(source, target, kind)
            want[target, kind] = refusal(source, target)
    assert got == want


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize("run", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_one_run_of_the_source_spread_in_short_ones(run, codec, core):
    """A piece that is contiguous in its page and lies in parts of `run` elements in the other one, both ways."""
    apart = SHARED.replace("| head slot kv dim", "kv head | slot dim")
    text = SHARED.replace("| head slot kv dim", f"kv | slot dim/{run} head dim%{run}")
    shape = CacheShape(layers=2, heads=2, dim=64, block_size=32, blocks=3)
    one, other = (Layout.from_toml(x).compile(shape, codec=codec) for x in (apart, text))
    there_and_back(one, other, core)
