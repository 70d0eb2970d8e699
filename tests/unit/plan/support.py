"""A slow, independent account of what a plan has to do: addresses element by element, bytes moved one row at a time."""

from __future__ import annotations

from itertools import product

import numpy as np

from hawk.layouts import CacheShape, Layout
from hawk.memory.groups import GroupedSegments
from hawk.memory.region import Region
from hawk.plan.check import check, check_placement
from hawk.plan.segments import direct, groups_of, staged, touched
from hawk.plan.source import retile_steps
from hawk.plan.target import split, target_chunk
from hawk.plan.types import Placement
from hawk.retile import cpu
from hawk.retile.rows import RowsStep

AXES = ("layer", "kv", "head", "block", "slot", "dim")

TILES = "block head slot/32 dim/32 | slot%32/16 dim%32/16 slot%16 dim%16"
SMALL_TILES = "block head slot/8 dim/16 | slot%8/4 dim%16/8 slot%4 dim%8"


def declare(name, *orders, buffers="", codec="bf16", align=1, rename=""):
    """A layout from its orders, one for all or one for each value of kv."""
    text = f'name = "{name}"\nsummary = "s"\nsource = "t"\ncodec = "{codec}"\n'
    text += f'codecs = ["{codec}"]\nbuffers = "{buffers}"\nalign = {align}\n'
    text += '[placement]\nkind = "interleaved"\nchannels = 1\n'
    for kv, order in enumerate(orders):
        text += "[[piece]]\n" + (f'where = "kv={kv}"\n' if len(orders) > 1 else "")
        text += f'rename = "{rename}"\n' if rename and kv == 0 else ""
        text += f'order = "{order}"\n'
    return Layout.from_toml(text)


def shape(layers=2, heads=2, dim=32, block_size=32, blocks=12, kvs=2):
    return CacheShape(layers, heads, dim, block_size, blocks, kvs)


def padded(layout, kv, axis):
    piece = layout.piece(kv)
    return max([d.div * d.ext for d in (*piece.page, *piece.inside) if d.axis == axis], default=1)


_TERMS: dict[tuple[int, int], tuple[object, list[list[tuple[int, int]]], list[int]]] = {}
"""By the layout's id, for hashing one takes longer than all the rest; the layout is kept so that ids stay its own."""


def _terms(layout, kv):
    """For every axis what each index, padding included, adds to (page number, position), in plain integers."""
    piece, tables = layout.piece(kv), []
    for axis in AXES:
        page = [d for d in piece.page if d.axis == axis and axis not in layout.buffers]
        inside = [d for d in piece.inside if d.axis == axis]
        tables.append(
            [
                tuple(sum(i // d.div % d.ext * d.stride for d in digits) for digits in (page, inside))
                for i in range(max(padded(layout, kv, axis), layout.shape.extent(axis)))
            ]
        )
    return layout, tables, [layout.buffer(layer, kv) for layer in range(layout.shape.layers)]


def place(layout, layer, kv, head, block, slot, dim):
    """(buffer, channel, page's byte offset, position) like `locate`, padding included."""
    key = id(layout), kv
    if key not in _TERMS:
        _TERMS[key] = _terms(layout, kv)
    _, (layers, kvs, heads, blocks, slots, dims), buffer = _TERMS[key]
    a, b, c, d, e, f = layers[layer], kvs[kv], heads[head], blocks[block], slots[slot], dims[dim]
    page, inside = a[0] + b[0] + c[0] + d[0] + e[0] + f[0], a[1] + b[1] + c[1] + d[1] + e[1] + f[1]
    at = page // layout.channels * layout.page_stride
    return buffer[layer], page % layout.channels, at, inside


def element_bytes(layout, kv, inside):
    """Bytes of a page that position `inside` lives in: its own and its group's exponent."""
    codec = layout.codec
    header = codec.header_bytes(layout.piece(kv).elements)
    first = header + inside * codec.bits // 8
    last = header + (inside * codec.bits + codec.bits - 1) // 8
    return {*range(first, last + 1)} | ({inside // codec.group} if header else set())


def chunk_elements(layout, selection, chunk):
    """Every element (padding included) that the chunk has to write, with the token it holds or None for zero."""
    size, t0, t1 = layout.shape.block_size, selection.token, selection.token + selection.tokens
    for layer, kv in product(range(chunk.layer, chunk.layer + chunk.layers), range(layout.shape.kvs)):
        extents = [range(padded(layout, kv, axis)) for axis in ("head", "slot", "dim")]
        if selection.heads:
            last = selection.head + selection.heads
            # Heads that are padding go with the last one.
            extents[0] = range(selection.head, last if last < layout.shape.heads else extents[0].stop)
        for entry in range(chunk.block, chunk.block + chunk.blocks):
            for head, slot, dim in product(*extents):
                token = entry * size + slot
                if slot < size and token < t0:
                    continue
                real = slot < size and token < t1 and head < layout.shape.heads and dim < layout.shape.dim
                yield layer, kv, head, entry, slot, dim, token if real else None


class Cache:
    """A cache in memory: one region per channel, buffers one behind another with room between them."""

    GUARD = 192

    def __init__(self, layout, rng, *, staging=0):
        self.layout = layout
        count = len(layout.buffer_bytes)  # those of scales among them
        step = -(-max(layout.buffer_bytes) // 64) * 64 + self.GUARD
        start = rng.permutation(count) * step + self.GUARD
        self.cache_bytes = count * step + self.GUARD
        self.regions = [
            rng.integers(0, 256, self.cache_bytes + staging, np.uint8) for _ in range(layout.channels)
        ]
        # Channel c need not be region c.
        order = rng.permutation(layout.channels)
        self.placement = Placement(
            region=np.tile(order.astype(np.int32), (count, 1)),
            offset=np.tile(start[:, None], (1, layout.channels)).astype(np.int64),
        )

    def at(self, layer, kv, head, block, slot, dim):
        """(region, byte offset of the page in it, position)."""
        buffer, channel, page, inside = place(self.layout, layer, kv, head, block, slot, dim)
        return (
            int(self.placement.region[buffer, channel]),
            int(self.placement.offset[buffer, channel]) + page,
            inside,
        )

    def put(self, where, value):
        """Stores a 16-bit element."""
        region, page, inside = where
        self.regions[region][page + 2 * inside : page + 2 * inside + 2].view(np.uint16)[0] = value

    def get(self, where):
        region, page, inside = where
        return int(self.regions[region][page + 2 * inside : page + 2 * inside + 2].view(np.uint16)[0])


def run_step(step, src_regions, arena, chunk_offset):
    """A retile core for 16-bit elements, straight from the words of `Pieces` and `Program`."""
    program, p = step.program, step.pieces
    src = dst = row = col = np.zeros(1, np.int64)
    for loop in program.loops:
        n = np.arange(loop.ext)
        src = (src[:, None] + n * loop.src).ravel()
        dst = (dst[:, None] + n * loop.dst).ravel()
        row = (row[:, None] + n * loop.row).ravel()
        col = (col[:, None] + n * loop.col).ravel()
    for i in range(len(p)):
        c = int(p.dst_channel[i])
        at = chunk_offset + step.dst_offset[c] + int(p.dst_page[i])
        page = arena[at : at + 2 * program.dst_elements].view(np.uint16)
        valid = (row >= p.lo[i]) & (row < p.hi[i]) & (col < p.cols[i])
        page[(p.dst_start[i] + dst)[(row >= p.lo[i]) & ~valid]] = 0
        if valid.any():
            s = int(p.src_channel[i])
            at = step.src_offset[s] + int(p.src_page[i])
            source = src_regions[step.src_region[s]][at : at + 2 * program.src_elements].view(np.uint16)
            page[(p.dst_start[i] + dst)[valid]] = source[(p.src_start[i] + src)[valid]]


def apply_segments(segments, regions, remote):
    for rows in segments.batches():
        for r, local, at, n in zip(rows.region, rows.local, rows.remote, rows.nbytes, strict=True):
            regions[r][local : local + n] = remote[at : at + n]


class Tables:
    """Where elements lie, many at once: one table an axis, read off `CompiledLayout.locate`, which is separable."""

    def __init__(self, layout, kv):
        self.layout, shape = layout, layout.shape

        def number(**index):
            at = dict.fromkeys(("layer", "head", "block", "slot", "dim"), 0) | index
            buffer, channel, page, inside = layout.locate(kv=kv, **at)
            return page // layout.page_stride * layout.channels + channel, inside, buffer

        zero = number()
        self.base = zero[:2]
        axes = ("layer", "head", "block", "slot", "dim")
        found = {a: [number(**{a: i}) for i in range(shape.extent(a))] for a in axes}
        self.buffer = np.asarray([n[2] for n in found["layer"]], np.int64)
        self.terms = {
            a: (
                np.asarray([n[0] - zero[0] for n in rows], np.int64),
                np.asarray([n[1] - zero[1] for n in rows], np.int64),
            )
            for a, rows in found.items()
        }

    def at(self, layer, head, block, slot, dim):
        """(buffer, channel, byte offset of the page, position) of index arrays that broadcast."""
        index = {"layer": layer, "head": head, "block": block, "slot": slot, "dim": dim}
        page = sum((self.terms[a][0][i] for a, i in index.items()), np.int64(self.base[0]))
        inside = sum((self.terms[a][1][i] for a, i in index.items()), np.int64(self.base[1]))
        layout = self.layout
        return (
            np.broadcast_to(self.buffer[layer], page.shape),
            page % layout.channels,
            page // layout.channels * layout.page_stride,
            inside,
        )


_KEPT: dict[tuple[int, int], Tables] = {}


def tables(layout, kv):
    """`Tables`, made once; they hold their layout, so that its id stays its own."""
    key = id(layout), kv
    if key not in _KEPT:
        if len(_KEPT) > 200:
            _KEPT.clear()
        _KEPT[key] = Tables(layout, kv)
    return _KEPT[key]


def positions(cache, kv, layers, heads, blocks, tokens):
    """(region, first byte) of elements `[layers, heads, tokens, dims]` of an elementwise codec."""
    layout = cache.layout
    size, bits = layout.shape.block_size, layout.codec.bits
    layers, heads, blocks, tokens = (np.asarray(x, np.int64) for x in (layers, heads, blocks, tokens))
    buffer, channel, page, inside = tables(layout, kv).at(
        layers[:, None, None, None],
        heads[:, None, None],
        blocks[tokens // size][:, None],
        (tokens % size)[:, None],
        np.arange(layout.shape.dim),
    )
    place = cache.placement
    return place.region[buffer, channel], place.offset[buffer, channel] + page + inside * bits // 8


def store(cache, kv, layers, heads, blocks, tokens, values):
    """Writes 16-bit elements `values[layers, heads, tokens, dims]`."""
    region, byte = positions(cache, kv, layers, heads, blocks, tokens)
    for r, memory in enumerate(cache.regions):
        for half in (0, 1):
            memory[byte[region == r] + half] = (values[region == r] >> (8 * half)) & 255


def fetch(cache, kv, layers, heads, blocks, tokens):
    """Elements `[layers, heads, tokens, dims]` as their bits, `uint32`."""
    region, byte = positions(cache, kv, layers, heads, blocks, tokens)
    out = np.zeros(region.shape, np.uint32)
    for r, memory in enumerate(cache.regions):
        own = region == r
        for k in range(cache.layout.codec.bits // 8):
            out[own] |= memory[byte[own] + k].astype(np.uint32) << np.uint32(8 * k)
    return out


def check_reads(cache, tensor):
    """Every page that a step through rows reads, of elements and of their scales, lies in one buffer of the cache."""
    place, sizes = cache.placement, np.asarray(cache.layout.buffer_bytes)[:, None, None]
    for one in tensor.passes:
        codec, elements, channel = one.program.src_codec, one.program.src_elements, one.pieces.src_channel
        size = codec.header_bytes(elements) + elements * codec.bits // 8
        begin = np.asarray(one.offset)[channel] + one.pieces.src_page
        inside = (place.region[:, :, None] == np.asarray(one.region)[channel]) & (
            (begin >= place.offset[:, :, None]) & (begin + size <= place.offset[:, :, None] + sizes)
        )
        assert inside.any(axis=(0, 1)).all(), "a page lies outside of the buffers"
    if tensor.scales is not None:
        check_reads(cache, tensor.scales)


def carry_out(source, target, selection, src_blocks, dst_blocks, *, rng, mode="direct", max_bytes=1 << 22):
    """A whole transfer with the retile core in use, through an arena of rubbish; what it touched of each region."""
    regions = [Region(f"r{i}", r) for i, r in enumerate(target.regions)]
    marks = [np.zeros(len(r), bool) for r in target.regions]
    check(source.layout, target.layout, selection)
    check_placement(source.layout, source.placement, [len(r) for r in source.regions])
    for chunk in split(target.layout, selection, max_bytes=max_bytes):
        planned = target_chunk(target.layout, dst_blocks, selection, chunk)
        arena = rng.integers(0, 256, planned.nbytes, np.uint8)
        for step in retile_steps(source.layout, src_blocks, source.placement, planned, dst_blocks):
            if isinstance(step, RowsStep):
                for tensor in step.reads:
                    check_reads(source, tensor)
                cpu.run_step(step, source.regions, arena)
                continue
            # The core refuses what leaves these slices, and they are the buffers and nothing more.
            taken = [
                source.regions[r][o : o + source.layout.channel_bytes]
                for r, o in zip(step.src_region, step.src_offset, strict=True)
            ]
            cpu.run(step.program, step.pieces, taken, [arena[o:] for o in step.dst_offset])
        if mode == "direct":
            segments = direct(planned, target.placement, 0)
            if rng.integers(2):  # as of a plan with many rows
                segments = GroupedSegments(groups_of(planned, target.placement))
            segments.check(regions, len(arena))
            apply_segments(segments, target.regions, arena)
        else:
            channels = target.layout.channels
            home = target.placement.region[0]
            begin = np.full(channels, target.cache_bytes, np.int64)
            segments, moves = staged(planned, target.placement, 0, home, begin)
            segments.check(regions, len(arena))
            apply_segments(segments, target.regions, arena)
            for c, a, b, n in zip(moves.channel, moves.source, moves.target, moves.nbytes, strict=True):
                memory = target.regions[home[c]]
                memory[b : b + n] = memory[a : a + n].copy()
        for r, at, n in zip(*_columns(touched(planned, target.placement)), strict=True):
            marks[r][at : at + n] = True
    return marks


def _columns(ranges):
    return ranges.region.tolist(), ranges.start.tolist(), ranges.nbytes.tolist()
