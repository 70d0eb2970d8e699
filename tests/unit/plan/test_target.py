"""The arena's order and its runs, byte by byte, for elementwise and grouped codecs; and how a selection is cut."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.errors import InvalidArgument, OutOfMemory
from hawk.layouts import load
from hawk.plan.check import entries
from hawk.plan.target import chunk_bytes, split, target_chunk
from hawk.plan.types import Chunk, Selection
from tests.unit.plan import support as s

LAYOUTS = {
    **{f"tiles {c}": s.declare("t", s.SMALL_TILES, buffers="layer kv", codec=c) for c in ("bf16", "fp32")},
    "grouped 8": s.declare(
        "g8", "block head slot/8 | slot%8 dim", buffers="layer kv", codec="bfp8_b", align=32
    ),
    "grouped 4": s.declare("g4", "layer block slot/8 | head slot%8 dim", buffers="kv", codec="bfp4_b"),
    "gaps": s.declare("gaps", "block kv head slot/8 | slot%8 dim", buffers="layer", align=96, codec="bfp8_b"),
}


def expected_map(layout, blocks, selection, chunk):
    """For each plane: {(channel, byte from the buffer's base): byte in the plane's part of that channel's arena}."""
    moved: dict[tuple[int, int], dict[tuple[int, int], set[int]]] = {}
    for layer, kv, head, entry, slot, dim, _ in s.chunk_elements(layout, selection, chunk):
        _, channel, page, inside = s.place(layout, layer, kv, head, int(blocks[entry]), slot, dim)
        pages = moved.setdefault((layer, kv), {})
        pages.setdefault((channel, page), set()).update(s.element_bytes(layout, kv, inside))
    out = {}
    for plane, pages in moved.items():
        table = out[plane] = {}
        for channel in range(layout.channels):
            own = sorted(page for c, page in pages if c == channel)
            for rank, page in enumerate(own):
                for byte in pages[channel, page]:
                    table[channel, page + byte] = rank * layout.page_stride + byte
    return out


def actual_map(target):
    out = {}
    for i, plane in enumerate(target.planes):
        runs = target.runs[target.kind[i]]
        table = out[plane] = {}
        columns = (runs.channel, runs.arena, runs.target + target.shift[i], runs.nbytes)
        for channel, arena, at, n in zip(*(c.tolist() for c in columns), strict=True):
            for k in range(n):
                assert (channel, at + k) not in table, "two runs fill one byte"
                table[channel, at + k] = arena + k
    return out


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_run_lies_where_the_pages_say(data):
    draw = data.draw
    name = draw(st.sampled_from(sorted(LAYOUTS)))
    size = draw(st.sampled_from([16, 32, 40, 64]))
    token, tokens = draw(st.integers(0, 70)), draw(st.integers(1, 80))
    heads = draw(st.integers(1, 3))
    some = draw(st.integers(0, heads))
    head = draw(st.integers(0, heads - some)) if some else 0
    selection = Selection(draw(st.integers(0, 1)), 1, token, tokens, head=head, heads=some)
    used = -(-(token + tokens) // size)
    dims = draw(st.sampled_from([16, 32])) if tokens < 40 else 16
    layout = LAYOUTS[name].compile(
        s.shape(heads=heads, dim=dims, block_size=size, blocks=used + 4),
        channels=draw(st.sampled_from([1, 3, 7, 8, 12])),
    )
    blocks = np.random.default_rng(draw(st.integers(0, 999))).permutation(used + 4)[: used + 1]
    begin, end = entries(layout, selection)
    first = draw(st.integers(begin, end - 1))
    chunk = Chunk(selection.layer, 1, first, draw(st.integers(1, end - first)))
    target = target_chunk(layout, blocks, selection, chunk)
    got, want = actual_map(target), expected_map(layout, blocks, selection, chunk)
    assert list(got) == list(want)
    for plane, table in want.items():
        # Not one big comparison: nobody can read the difference of two maps of all bytes.
        wrong = [(at, got[plane].get(at), table.get(at)) for at in {*got[plane], *table}]
        assert [w for w in wrong if w[1] != w[2]][:4] == []
    for runs in target.runs:
        key = runs.channel.astype(np.int64) << 40
        assert (np.diff(key + runs.arena) > 0).all()
        assert (np.diff(key + runs.target) > 0).all()
        same = runs.channel[1:] == runs.channel[:-1]
        touching = (
            same & (np.diff(runs.arena) == runs.nbytes[:-1]) & (np.diff(runs.target) == runs.nbytes[:-1])
        )
        assert not touching.any(), "two runs that could be one"
        assert (runs.channel_bytes % 64 == 0).all()
        for c in range(layout.channels):
            own = runs.channel == c
            assert runs.channel_bytes[c] >= (runs.arena + runs.nbytes)[own].max(initial=0)


def test_arena_is_channel_major_and_planes_follow_each_other():
    layout = load("tenstorrent/kv").compile(s.shape(layers=3, dim=64, block_size=64), channels=7)
    target = target_chunk(layout, np.arange(5), Selection(0, 3, 0, 300), Chunk(0, 3, 0, 5))
    at = 0
    for c in range(7):
        for p in range(len(target.planes)):
            assert target.base[p, c] == at
            at += int(target.runs[target.kind[p]].channel_bytes[c])
    assert target.nbytes == at == int(target.channel_bytes.sum())
    assert target.planes == ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))


@pytest.mark.parametrize(("channels", "per_plane"), [(7, 7), (8, 8), (12, 12)])
def test_neighbouring_blocks_become_one_run_per_channel(channels, per_plane):
    layout = load("tenstorrent/kv").compile(
        s.shape(heads=8, dim=128, block_size=64, blocks=64), channels=channels
    )
    target = target_chunk(layout, np.arange(3, 63), Selection(0, 2, 0, 60 * 64), Chunk(0, 2, 0, 60))
    assert [len(r.nbytes) for r in target.runs] == [per_plane] * len(target.runs)


def test_planes_share_their_runs_unless_they_begin_at_another_channel():
    shape = s.shape(layers=80, heads=1, dim=32, block_size=32, blocks=7)
    apart = s.declare("apart", "layer kv " + s.TILES).compile(shape, channels=8)
    target = target_chunk(apart, np.arange(7), Selection(0, 80, 0, 7 * 32), Chunk(0, 80, 0, 7))
    assert len(target.runs) == 8
    together = s.declare("together", s.TILES, buffers="layer kv").compile(shape, channels=8)
    target = target_chunk(together, np.arange(7), Selection(0, 80, 0, 7 * 32), Chunk(0, 80, 0, 7))
    assert len(target.runs) == 1


def test_place_agrees_with_locate():
    for layout in (*LAYOUTS.values(), load("tenstorrent/kv"), load("vllm/nhd")):
        compiled = layout.compile(s.shape(blocks=3), channels=layout.channels)
        rng = np.random.default_rng(1)
        for _ in range(40):
            layer, kv, head, block, slot, dim = (int(rng.integers(n)) for n in (2, 2, 2, 3, 32, 32))
            index = (layer, kv, head, block, slot, dim)
            assert compiled.locate(*index) == s.place(compiled, *index)


# -- cutting ---------------------------------------------------------------------------------------------


def covered(chunks):
    return sorted(
        (layer, block)
        for c in chunks
        for layer in range(c.layer, c.layer + c.layers)
        for block in range(c.block, c.block + c.blocks)
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_split_covers_all_once_within_the_limit(data):
    draw = data.draw
    size = draw(st.sampled_from([16, 32, 40, 64]))
    layout = LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))].compile(
        s.shape(layers=9, block_size=size, blocks=40), channels=draw(st.sampled_from([1, 7, 8]))
    )
    selection = Selection(
        draw(st.integers(0, 4)), draw(st.integers(1, 5)), draw(st.integers(0, 200)), draw(st.integers(1, 400))
    )
    begin, end = entries(layout, selection)
    limit = draw(
        st.integers(1, 2 * chunk_bytes(layout, selection, Chunk(0, selection.layers, begin, end - begin)))
    )
    align = draw(st.sampled_from([64, 256]))
    try:
        chunks = split(layout, selection, max_bytes=limit, align=align)
    except OutOfMemory as refused:
        least = int(refused.expected.split()[0])
        assert least > limit
        assert split(layout, selection, max_bytes=least, align=align)
        with pytest.raises(OutOfMemory):
            split(layout, selection, max_bytes=least - 1, align=align)
        return
    layers = range(selection.layer, selection.layer + selection.layers)
    assert covered(chunks) == [(layer, block) for layer in layers for block in range(begin, end)]
    assert [c.layer for c in chunks] == sorted(c.layer for c in chunks)
    for c, after in pairwise(chunks):
        assert chunk_bytes(layout, selection, c, align=align) <= limit
        if c.layer == after.layer:
            assert c.layers == after.layers == 1
            more = Chunk(c.layer, 1, c.block, c.blocks + 1)
        else:
            more = Chunk(c.layer, c.layers + 1, c.block, c.blocks)
        if c.blocks == end - begin or c.layer == after.layer:
            assert chunk_bytes(layout, selection, more, align=align) > limit, "another one would have fitted"
    assert chunk_bytes(layout, selection, chunks[-1], align=align) <= limit


def test_chunk_bytes_is_exact_for_aligned_pages():
    layout = load("tenstorrent/kv").compile(s.shape(heads=3, block_size=64), codec="bfp8_b", channels=7)
    selection = Selection(0, 2, 70, 200)
    chunk = Chunk(0, 2, 1, 4)
    target = target_chunk(layout, np.asarray([9, 4, 5, 0, 7]), selection, chunk)
    assert chunk_bytes(layout, selection, chunk) == target.nbytes


def test_as_many_entries_as_fit_exactly():
    layout = load("tenstorrent/kv").compile(s.shape(block_size=32, blocks=20))
    selection = Selection(0, 2, 0, 320)
    three = chunk_bytes(layout, selection, Chunk(0, 1, 0, 3))
    assert [c.blocks for c in split(layout, selection, max_bytes=three)] == [3, 3, 3, 1] * 2
    assert [c.blocks for c in split(layout, selection, max_bytes=three - 1)] == [2] * 10
    both = chunk_bytes(layout, selection, Chunk(0, 2, 0, 10))
    assert split(layout, selection, max_bytes=both) == (Chunk(0, 2, 0, 10),)
    assert split(layout, selection, max_bytes=both - 1) == (Chunk(0, 1, 0, 10), Chunk(1, 1, 0, 10))


def test_a_block_that_fits_nowhere_names_the_smallest_size():
    layout = load("tenstorrent/kv").compile(s.shape(heads=8, dim=128, block_size=64))
    with pytest.raises(OutOfMemory, match="262144 or more") as refused:
        split(layout, Selection(0, 2, 0, 640), max_bytes=1000)
    assert refused.value.field == "max_bytes"


@pytest.mark.parametrize(
    ("blocks", "selection", "chunk", "field"),
    [
        ([0, 1], Selection(0, 1, 0, 96), Chunk(0, 1, 0, 3), "blocks"),
        ([0, 12, 1], Selection(0, 1, 0, 96), Chunk(0, 1, 0, 3), r"blocks\[1\]"),
        ([0, 1, -1], Selection(0, 1, 0, 96), Chunk(0, 1, 0, 3), r"blocks\[2\]"),
        ([0, 1, 2], Selection(0, 1, 0, 96), Chunk(0, 1, 0, 4), "chunk.block"),
        ([0, 1, 2], Selection(0, 1, 40, 50), Chunk(0, 1, 0, 1), "chunk.block"),
        ([0, 1, 2], Selection(0, 1, 0, 96), Chunk(0, 2, 0, 3), "chunk.layer"),
        ([0, 1, 2], Selection(1, 2, 0, 96), Chunk(1, 2, 0, 3), "selection.layers"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(blocks, selection, chunk, field):
    layout = load("tenstorrent/kv").compile(s.shape())
    with pytest.raises(InvalidArgument, match=field):
        target_chunk(layout, np.asarray(blocks), selection, chunk)


@pytest.mark.parametrize(
    ("order", "shape", "channels", "field"),
    [
        ("block head slot dim/2 | dim%2", s.shape(heads=128, dim=512, block_size=256), 1, "pages of a block"),
        ("block head slot | dim", s.shape(heads=8, block_size=64), 65536, "channels"),
        ("block | head slot dim", s.shape(heads=4096, dim=512, block_size=64), 1, "elements of a page"),
    ],
)
def test_layouts_beyond_any_cache_are_refused_before_they_cost_anything(order, shape, channels, field):
    layout = s.declare("huge", order, buffers="layer kv").compile(shape, channels=channels)
    with pytest.raises(InvalidArgument, match=field):
        split(layout, Selection(0, 1, 3, 40), max_bytes=1 << 40)
