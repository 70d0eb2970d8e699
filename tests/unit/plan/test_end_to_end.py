"""Whole plans carried out byte by byte, against what every element of the target must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.plan.check import check, check_blocks, entries
from hawk.plan.segments import direct, staged, touched
from hawk.plan.source import retile_steps
from hawk.plan.target import chunk_bytes, split, target_chunk
from hawk.plan.types import Chunk, Selection
from tests.unit.plan import support as s

SOURCES = {
    "nhd": s.declare("nhd", "kv block slot head dim", buffers="layer"),
    "hnd": s.declare("hnd", "kv block head slot dim", buffers="layer"),
    "block-first": s.declare("block-first", "block layer kv head slot dim"),
    "k-transposed": s.declare("kt", "block head dim slot", "block head slot dim", buffers="layer kv"),
    "tiles": s.declare("tiles", s.SMALL_TILES, buffers="layer kv"),
    "head-pairs": s.declare("pairs", "block head/2 slot/8 | dim head%2 slot%8", buffers="layer kv"),
    "head-threes": s.declare("threes", "layer block slot head/3 | head%3 dim", buffers="kv"),
}
TARGETS = {
    "tiles": s.declare("tiles", s.TILES, buffers="layer kv", align=64),
    "small-tiles": s.declare("small", s.SMALL_TILES, buffers="layer kv"),
    "gaps": s.declare("gaps", s.SMALL_TILES, buffers="layer kv", align=96),
    "layers-in-pages": s.declare("lp", "layer kv " + s.SMALL_TILES),
    "layers-in-blocks": s.declare("lb", "block layer kv head slot dim"),
    "heads-outside": s.declare("ho", "head block slot dim", buffers="layer kv", align=32),
    "nhd": s.declare("nhd", "kv block slot head dim", buffers="layer"),
    "k-interleaved": s.declare(
        "ki",
        "block head slot/8 m/16 | slot%8/4 m%16/8 slot%4 m%8",
        s.SMALL_TILES,
        buffers="layer kv",
        rename="m = (dim%16 dim/16)",
    ),
    "padded-heads": s.declare("ph", "block head/2 slot/8 | head%2 dim slot%8", buffers="layer kv"),
    "padded-pages": s.declare(
        "pp", "block slot/32 slot%32/8 | slot%8 head dim", buffers="layer kv", align=64
    ),
    "k-and-v-apart": s.declare(
        "kva", "block head slot/8 | slot%8 dim", "block slot/8 head | slot%8 dim", buffers="layer kv"
    ),
    "tokens-are-pages": s.declare("tp", "slot block | head dim", buffers="layer kv", align=64),
}


class Scene:
    """One transfer: a source with known elements, a target full of rubbish, and what the target must hold after."""

    def __init__(
        self,
        source,
        target,
        *,
        src_block,
        dst_block,
        channels,
        src_channels,
        token,
        tokens,
        seed,
        heads=2,
        dim=32,
        part=None,
    ):
        rng = np.random.default_rng(seed)
        self.selection = Selection(1, 2, token, tokens)
        src_heads, src_layers = heads, 3
        if part is not None:
            # (heads of the source, its layers, its layers for ours, first head, how many, the source's first)
            src_heads, src_layers, picked, head, count, source_head = part
            self.selection = Selection(1, 2, token, tokens, picked, head, count, source_head)
        end = token + tokens
        n_src, n_dst = -(-end // src_block), -(-end // dst_block)
        self.src = SOURCES[source].compile(
            s.shape(layers=src_layers, heads=src_heads, dim=dim, block_size=src_block, blocks=n_src + 3),
            channels=src_channels,
        )
        self.dst = TARGETS[target].compile(
            s.shape(layers=3, heads=heads, dim=dim, block_size=dst_block, blocks=n_dst + 3), channels=channels
        )
        self.src_blocks = rng.permutation(n_src + 3)[:n_src]
        # Decode allocated one block more than the tokens need.
        self.dst_blocks = rng.permutation(n_dst + 3)[: n_dst + 1]
        check(self.src, self.dst, self.selection)
        check_blocks(self.src, self.src_blocks, self.selection, "src_blocks")
        check_blocks(self.dst, self.dst_blocks, self.selection, "dst_blocks")
        self.source = s.Cache(self.src, rng)
        self.target = s.Cache(self.dst, rng, staging=1 << 17)
        self.before = [r.copy() for r in self.target.regions]

    def expected(self, chunks):
        want = [r.copy() for r in self.before]
        size = self.src.shape.block_size
        moved_by = self.selection.source_head - self.selection.head
        for chunk in chunks:
            for layer, kv, head, entry, slot, dim, token in s.chunk_elements(self.dst, self.selection, chunk):
                region, page, inside = self.target.at(layer, kv, head, int(self.dst_blocks[entry]), slot, dim)
                value = 0
                if token is not None:
                    block = int(self.src_blocks[token // size])
                    value = self.source.get(
                        self.source.at(
                            self.selection.source_layer(layer), kv, head + moved_by, block, token % size, dim
                        )
                    )
                want[region][page + 2 * inside] = value & 255
                want[region][page + 2 * inside + 1] = value >> 8
        return want

    def arena(self, target, offset):
        arena = np.full(offset + target.nbytes + 64, 0xEE, np.uint8)
        steps = retile_steps(self.src, self.src_blocks, self.source.placement, target, self.dst_blocks)
        assert [(p.layer, p.kv) for p in steps] == list(target.planes)
        for step in steps:
            s.run_step(step, self.source.regions, arena, offset)
        moved = direct(target, self.target.placement, offset)
        outside = np.ones(len(arena), bool)
        for at, n in zip(moved.remote, moved.nbytes, strict=True):
            outside[at : at + n] = False
        # Of its neighbours' rows a job neither reads nor writes a value; zeros come from dims that do not exist.
        assert np.isin(arena[outside], (0xEE, 0)).all()
        assert (arena[:offset] == 0xEE).all()
        assert (arena[offset + target.nbytes :] == 0xEE).all()
        return arena

    def staging(self):
        c = self.dst.channels
        # The placement says which region each channel is.
        return self.target.placement.region[0], np.full(c, self.target.cache_bytes, np.int64)

    def check(self, max_bytes):
        chunks = split(self.dst, self.selection, max_bytes=max_bytes)
        want = self.expected(chunks)
        rubbish = [r.copy() for r in self.target.regions]
        written = [np.zeros(len(r), bool) for r in rubbish]
        second = [r.copy() for r in rubbish]
        region_of = self.target.placement.region[0]
        for n, chunk in enumerate(chunks):
            target = target_chunk(self.dst, self.dst_blocks, self.selection, chunk)
            assert target.nbytes <= chunk_bytes(self.dst, self.selection, chunk) <= max_bytes
            assert (target.base % 64 == 0).all()
            offset = 64 * n
            arena = self.arena(target, offset)
            segments = direct(target, self.target.placement, offset)
            s_end = segments.remote + segments.nbytes
            assert (segments.remote[1:] >= s_end[:-1]).all()
            assert (segments.nbytes > 0).all()
            s.apply_segments(segments, self.target.regions, arena)
            ranges = touched(target, self.target.placement)
            assert int(ranges.nbytes.sum()) == segments.total
            for r, at, size in zip(ranges.region, ranges.start, ranges.nbytes, strict=True):
                assert not written[r][at : at + size].any(), "two chunks own one byte"
                written[r][at : at + size] = True
            large, moves = staged(target, self.target.placement, offset, *self.staging())
            assert len(large) == np.count_nonzero(target.channel_bytes)
            assert moves.nbytes.sum() == segments.total
            s.apply_segments(large, second, arena)
            for c, src, dst, size in zip(
                moves.channel, moves.source, moves.target, moves.nbytes, strict=True
            ):
                region = second[region_of[c]]
                region[dst : dst + size] = region[src : src + size]
        for r in range(self.dst.channels):
            np.testing.assert_array_equal(self.target.regions[r], want[r])
            cache = slice(0, self.target.cache_bytes)
            np.testing.assert_array_equal(second[r][cache], want[r][cache])
            assert not (want[r] != rubbish[r])[~written[r]].any()


SIZES = [16, 32, 64, 40]


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_byte_of_the_target(data):
    draw = data.draw
    target = draw(st.sampled_from(sorted(TARGETS)))
    scene = Scene(
        draw(st.sampled_from(sorted(SOURCES))),
        target,
        src_block=draw(st.sampled_from(SIZES)),
        dst_block=draw(st.sampled_from(SIZES)),
        channels=draw(st.sampled_from([1, 3, 7, 8, 12])),
        src_channels=draw(st.sampled_from([1, 1, 3])),
        token=draw(st.one_of(st.just(0), st.integers(0, 90))),
        tokens=draw(st.one_of(st.sampled_from([1, 31, 32, 33, 64, 80]), st.integers(1, 100))),
        seed=draw(st.integers(0, 2**32)),
        heads=draw(st.integers(1, 3)),
        dim=32 if target == "k-interleaved" else draw(st.sampled_from([16, 24, 32])),
    )
    whole = chunk_bytes(scene.dst, scene.selection, Chunk(1, 2, *_span(scene)))
    block = max(
        chunk_bytes(scene.dst, scene.selection, Chunk(1, 1, b, 1))
        for b in range(*entries(scene.dst, scene.selection))
    )
    scene.check(draw(st.one_of(st.just(whole), st.integers(block, whole))))


@st.composite
def head_parts(draw):
    """Heads of the target and a part of them, from a source that has others, in other layers."""
    heads, src_heads = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    count = draw(st.integers(1, min(heads, src_heads)))
    picked = draw(st.sampled_from([(), (3, 0), (0, 1), (2, 2)]))
    head, source_head = draw(st.integers(0, heads - count)), draw(st.integers(0, src_heads - count))
    return heads, (src_heads, 4, picked, head, count, source_head)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_some_heads_and_other_layers(data):
    """Only the named heads of the target change, byte by byte, and only they are read."""
    draw = data.draw
    target = draw(st.sampled_from(sorted(TARGETS)))
    heads, part = draw(head_parts())
    scene = Scene(
        draw(st.sampled_from(sorted(SOURCES))),
        target,
        src_block=draw(st.sampled_from([16, 32, 40])),
        dst_block=draw(st.sampled_from([16, 32, 40])),
        channels=draw(st.sampled_from([1, 3, 7])),
        src_channels=draw(st.sampled_from([1, 3])),
        token=draw(st.integers(0, 45)),
        tokens=draw(st.one_of(st.sampled_from([1, 31, 32, 33]), st.integers(1, 50))),
        seed=draw(st.integers(0, 2**32)),
        heads=heads,
        part=part,
        dim=32 if target == "k-interleaved" else draw(st.sampled_from([16, 24])),
    )
    whole = chunk_bytes(scene.dst, scene.selection, Chunk(1, 2, *_span(scene)))
    scene.check(whole)


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("nhd", (1, 3, (), 2, 1, 0)),
        ("nhd", (8, 3, (2, 0), 0, 4, 4)),
        ("hnd", (5, 3, (), 1, 3, 2)),
        ("head-pairs", (4, 3, (), 0, 2, 1)),
        ("head-pairs", (4, 3, (), 2, 2, 0)),
        ("head-threes", (6, 3, (), 0, 4, 2)),
    ],
)
def test_every_target_in_parts(source, target, part):
    Scene(
        source,
        target,
        src_block=16,
        dst_block=40,
        channels=7,
        src_channels=1,
        token=5,
        tokens=40,
        seed=5,
        heads=4,
        part=part,
    ).check(1 << 20)


def _span(scene):
    begin, end = entries(scene.dst, scene.selection)
    return begin, end - begin


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("source", sorted(SOURCES))
def test_every_pair_once(source, target):
    Scene(
        source, target, src_block=16, dst_block=40, channels=7, src_channels=1, token=21, tokens=40, seed=5
    ).check(1 << 20)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 128])
@pytest.mark.parametrize("channels", [7, 8, 12])
def test_odd_prompts_and_one_block_too_many(tokens, channels):
    """F5: the block that decode allocated beyond the prompt is left alone; padding is zero."""
    Scene(
        "nhd",
        "tiles",
        src_block=16,
        dst_block=64,
        channels=channels,
        src_channels=1,
        token=0,
        tokens=tokens,
        seed=tokens,
    ).check(1 << 20)


@pytest.mark.parametrize("heads", [1, 3])
def test_source_pieces_stay_inside_their_block(heads):
    """F3: no piece reads a byte that is not in a block of the table and in its head."""
    scene = Scene(
        "hnd",
        "tiles",
        src_block=16,
        dst_block=64,
        channels=8,
        src_channels=1,
        token=7,
        tokens=90,
        seed=1,
        heads=heads,
    )
    target = target_chunk(scene.dst, scene.dst_blocks, scene.selection, Chunk(1, 2, *_span(scene)))
    lawful = set()
    for layer in (1, 2):
        for kv in (0, 1):
            for block in scene.src_blocks.tolist():
                buffer, channel, page, _ = s.place(scene.src, layer, kv, 0, block, 0, 0)
                lawful.add((layer, kv, channel, page + int(scene.source.placement.offset[buffer, channel])))
    for step in retile_steps(scene.src, scene.src_blocks, scene.source.placement, target, scene.dst_blocks):
        p, loops = step.pieces, step.program.loops
        reach = sum((loop.ext - 1) * loop.src for loop in loops)
        for i in np.flatnonzero(p.hi > 0):
            at = int(p.src_page[i]) + step.src_offset[int(p.src_channel[i])]
            assert (step.layer, step.kv, int(p.src_channel[i]), at) in lawful
            assert 0 <= p.src_start[i] <= p.src_start[i] + reach < step.program.src_elements
        zero = p.hi == 0
        for column in (p.src_channel, p.src_page, p.src_start, p.lo):
            assert not column[zero].any()
