"""Random models shared out in random ways, from any layout into any other and back, by both retile cores.

Every byte of every pool is one of three things: an element that moved, and holds its value; an element that did
not, and is as it was; or padding, which is zero where the plan owns it and as it was elsewhere.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hawk.errors import LayoutError, Unmappable
from hawk.layouts import load, names
from hawk.plan.shards import Grid, Kind, Model, cache_layers, check_parts, parts, shard
from hawk.retile import native
from tests.unit.plan import support as s

CORES = ["numpy", *(["c"] if native.available() else [])]
NAN = 0x7FC1

OWN = {
    "own/pairs": s.declare(
        "own/pairs", "block head/2 slot/8 | dim head%2 slot%8", buffers="layer kv", align=32
    ),
    "own/block-first": s.declare("own/block-first", "block layer kv head slot dim"),
    "own/tokens-are-pages": s.declare("own/tokens", "slot block | head dim", buffers="layer kv", align=64),
    "own/small-tiles": s.declare("own/small", s.SMALL_TILES, buffers="layer kv", align=96),
}


def known(name):
    return OWN.get(name) or load(name)


@functools.cache
def usable():
    """Layouts that hold a K and a V of 16 bits; whatever is shipped takes part."""
    found = []
    for name in [*OWN, *names()]:
        try:
            known(name).compile(s.shape(dim=64, block_size=32), codec="bf16")
        except LayoutError:
            continue
        found.append(name)
    return tuple(found)


class Side:
    """One worker's caches, one for each kind of layer, all of them rubbish but for what is stored."""

    def __init__(self, model, grid, rank, layout, *, block_size, channels, codec, tokens, rng):
        self.shard = shard(model, grid, rank)
        self.caches, self.blocks, self.layers = {}, {}, {}
        used = -(-tokens // block_size)
        kinds = model.all_kinds if grid.apart else model.all_kinds[:1]
        for kind in kinds:
            layers = cache_layers(model, grid, rank, kind)
            if not layers:
                continue
            shape = s.shape(len(layers), len(self.shard.heads), model.dim, block_size, used + 3, model.kvs)
            interleaved = layout.placement != "linear"
            compiled = layout.compile(shape, codec=codec, channels=channels if interleaved else None)
            cache = s.Cache(compiled, rng, staging=1 << 18)
            for memory in cache.regions:
                memory[: len(memory) // 2 * 2].view(np.uint16)[:] = NAN
            self.caches[kind.name], self.layers[kind.name] = cache, layers
            # One block more than the tokens need.
            self.blocks[kind.name] = rng.permutation(used + 3)[: used + 1]
        if not grid.apart:
            for table in (self.caches, self.blocks, self.layers):
                for kind in model.all_kinds[1:]:
                    table[kind.name] = table[model.all_kinds[0].name]

    def kept(self, kind):
        """(place in the cache, number in the model) of the worker's layers of this kind."""
        return [(i, n) for i, n in enumerate(self.layers.get(kind.name, ())) if n in kind.layers]


def sides(model, grid, layout, **options):
    return [Side(model, grid, rank, layout, **options) for rank in range(grid.ranks)]


def transfer(model, source, target, sources, targets, tokens, first, mode, rng):
    """All parts; what each target cache was before, and what was touched of it."""
    found = parts(model, source, target)
    check_parts(model, source, target, found)
    before = {id(c): [r.copy() for r in c.regions] for t in targets for c in t.caches.values()}
    marks = {id(c): [np.zeros(len(r), bool) for r in c.regions] for t in targets for c in t.caches.values()}
    for part in found:
        selection = part.selection(tokens, first)
        if selection is None:
            continue
        a, b, kind = sources[part.source], targets[part.target], part.kind.name
        cache = b.caches[kind]
        now = s.carry_out(
            a.caches[kind],
            cache,
            selection,
            a.blocks[kind],
            b.blocks[kind],
            rng=rng,
            mode=mode,
            max_bytes=1 << 18,
        )
        for mark, new in zip(marks[id(cache)], now, strict=True):
            assert not (mark & new).any(), "two parts own one byte"
            mark |= new
    return before, marks


def check_bytes(model, side, tokens, first, before, marks):
    """The three things that a byte of an elementwise cache can be."""
    caches = {id(c): (name, c) for name, c in side.caches.items()}
    for key, (name, cache) in caches.items():
        size = cache.layout.shape.block_size
        moved = [np.zeros(len(r), bool) for r in cache.regions]
        others = [np.zeros(len(r), bool) for r in cache.regions]
        heads = np.arange(cache.layout.shape.heads)
        width = cache.layout.codec.bits // 8
        for kv in range(model.kvs):
            every = s.positions(
                cache,
                kv,
                np.arange(cache.layout.shape.layers),
                heads,
                np.arange(cache.layout.shape.blocks),
                np.arange(size * cache.layout.shape.blocks),
            )
            _mark(others, *every, width)
            for kind in model.all_kinds:
                if side.caches.get(kind.name) is not cache:
                    continue
                begin = max(first, kind.first_token(tokens))
                if begin < tokens:
                    rows = np.arange(begin, -(-tokens // size) * size)
                    at, blocks = [i for i, _ in side.kept(kind)], side.blocks[kind.name]
                    _mark(moved, *s.positions(cache, kv, at, heads, blocks, rows), width)
                    assert not s.fetch(cache, kv, at, heads, blocks, rows[rows >= tokens]).any(), (
                        "padding rows"
                    )
        for r, memory in enumerate(cache.regions):
            end = cache.cache_bytes
            now, was, mark = memory[:end], before[key][r][:end], marks[key][r][:end]
            ours, theirs = moved[r][:end], others[r][:end] & ~moved[r][:end]
            assert not (mark & theirs).any(), "the plan owns another's element"
            assert mark[ours].all(), "an element is not owned"
            np.testing.assert_array_equal(now[~mark], was[~mark], err_msg=f"{name}: a byte nobody owns")
            assert not now[mark & ~ours].any(), "padding is not zero"


def check_canaries(side, before, marks):
    """Of a cache whose elements share exponents or scales: what no part owns is as it was."""
    for cache_ in side.caches.values():
        for now, was, mark in zip(cache_.regions, before[id(cache_)], marks[id(cache_)], strict=True):
            end = cache_.cache_bytes  # what is behind is for staging
            np.testing.assert_array_equal(now[:end][~mark[:end]], was[:end][~mark[:end]])


def _mark(table, region, byte, width):
    for r, mark in enumerate(table):
        own = byte[region == r]
        for k in range(width):
            mark[own + k] = True


@st.composite
def models(draw):
    layers = draw(st.integers(1, 3))
    kinds = ()
    if layers > 1 and draw(st.booleans()):
        kinds = (Kind("whole", tuple(range(0, layers, 2))), Kind("window", tuple(range(1, layers, 2)), 20))
    return Model("m", layers, draw(st.sampled_from([1, 2, 3, 4])), 64, 2, kinds)


@st.composite
def grids(draw, model, most=5):
    return Grid(
        draw(st.integers(1, most)), draw(st.integers(1, min(2, model.layers))), (), draw(st.booleans())
    )


@pytest.mark.parametrize("core", CORES)
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
@given(data=st.data())
def test_there_and_back(core, data):
    draw = data.draw
    model = draw(models())
    source, target = draw(grids(model)), draw(grids(model))
    one, other = (known(draw(st.sampled_from(usable()))) for _ in range(2))
    codec = draw(st.sampled_from([c for c in other.codecs if c in ("bf16", "fp32", *BOUNDS)]))
    tokens = draw(st.one_of(st.sampled_from([1, 31, 32, 33, 64]), st.integers(2, 90)))
    first = draw(st.one_of(st.just(0), st.integers(0, tokens - 1)))
    mode = draw(st.sampled_from(["direct", "staged"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    here = {
        "block_size": draw(st.sampled_from([16, 32, 40])),
        "channels": draw(st.sampled_from([1, 3])),
        "codec": "bf16",
    }
    there = {
        "block_size": draw(st.sampled_from([16, 32, 40, 64])),
        "channels": draw(st.sampled_from([1, 7, 8, 12])),
        "codec": codec,
    }
    try:
        there_and_back(core, model, source, target, one, other, here, there, tokens, first, mode, rng)
    except (LayoutError, Unmappable):
        assume(
            False
        )  # a layout that cannot hold this shape, or groups that would have to be filled from two pages


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(("heads", "source", "target"), [(8, 8, 16), (2, 1, 4), (8, 3, 2), (4, 8, 1)])
@pytest.mark.parametrize("other", ["tenstorrent/kv", "vllm/nhd"])
def test_heads_that_are_replicated_split_and_merged(core, heads, source, target, other):
    """F3: 8 KV heads from TP 8 to TP 16, 2 heads from 1 to 4; every read stays inside its buffer."""
    model = Model("m", 2, heads, 64, 2)
    here = {"block_size": 16, "channels": 1, "codec": "bf16"}
    there = {"block_size": 32, "channels": 7, "codec": "bf16"}
    rng = np.random.default_rng(heads)
    layouts = load("vllm/nhd"), load(other)
    there_and_back(core, model, Grid(source), Grid(target), *layouts, here, there, 45, 5, "direct", rng)


def there_and_back(
    core, model, source, target, one, other, here, there, tokens, first, mode, rng, bound=None
):
    """`bound` is that of `within`; without it the codec's own."""
    options, codec = {"tokens": tokens, "rng": rng}, there["codec"]
    bound = bound or BOUNDS.get(codec)
    shape = (model.layers, model.kvs, model.heads, tokens, model.dim)
    values = (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    sources = sides(model, source, one, **here, **options)
    targets = sides(model, target, other, **there, **options)
    for side in sources:
        for kind in model.all_kinds:
            at = side.kept(kind)
            # Before a window the source has let go of its tokens.
            begin = kind.first_token(tokens)
            for kv in range(model.kvs if at and begin < tokens else 0):
                own = values[[n for _, n in at], kv][:, list(side.shard.heads), begin:]
                heads = np.arange(len(side.shard.heads))
                rows = np.arange(begin, tokens)
                s.store(
                    side.caches[kind.name], kv, [i for i, _ in at], heads, side.blocks[kind.name], rows, own
                )
    back = sides(model, source, one, **here, **options)
    with native.using(core):
        before, marks = transfer(model, source, target, sources, targets, tokens, first, mode, rng)
        found = other.compile(s.shape(dim=64, block_size=32), codec=codec)
        for side in targets:
            if found.codec.group == 1 and found.scale is None:
                check_bytes(model, side, tokens, first, before, marks)
            else:
                check_canaries(side, before, marks)
        before, marks = transfer(model, target, source, targets, back, tokens, first, mode, rng)
    for side in back:
        check_bytes(model, side, tokens, first, before, marks)
        for kind in model.all_kinds:
            at, begin = side.kept(kind), max(first, kind.first_token(tokens))
            for kv in range(model.kvs if at and begin < tokens else 0):
                want = values[[n for _, n in at], kv][:, list(side.shard.heads), begin:]
                got = s.fetch(
                    side.caches[kind.name],
                    kv,
                    [i for i, _ in at],
                    np.arange(len(side.shard.heads)),
                    side.blocks[kind.name],
                    np.arange(begin, tokens),
                ).astype(np.uint16)
                if bound is None:
                    np.testing.assert_array_equal(got, want)
                else:
                    within(bound, got, want)


BOUNDS = {
    "bfp8_b": (0, 2.0**-7, 0),
    "bfp4_b": (0, 2.0**-3, 0),
    "fp16": (2.0**-11, 0, 2.0**-25),
    "fp8_e4m3fn": (2.0**-4, 0, 2.0**-10),
    "fp8_e5m2": (2.0**-3, 0, 2.0**-17),
    "int8": (0, 0, 0.5),
}
"""Error at most: of the element, of the largest of a group, and in any case (docs/layouts.md); then comes bf16's."""


def within(bound, got, want):
    """`bound` may name the axes of `[layer, head, token, dim]` that a group is of; else it lies in a row."""
    a, b = ((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (got, want))
    own, group, least, *axes = bound
    most = own * np.abs(b) + group * 1.001 * np.abs(b).max(axis=tuple(axes) or -1, keepdims=True) + least
    assert (np.abs(a - b) <= most + 2.0**-8 * np.abs(b) + 2.0**-126).all()
