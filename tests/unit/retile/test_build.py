"""The program, checked against the address sums it must reproduce."""

from __future__ import annotations

from itertools import product
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.errors import Unmappable
from hawk.retile.build import build_program, merge_loops, piece_count, piece_elements
from hawk.retile.program import Loop
from tests.unit.retile import layouts as lay


def term(digits, axis, index):
    return sum(index // d.div % d.ext * d.stride for d in digits if d.axis == axis)


def check(src, dst, kv=0):
    """Every index of the target's padded box is met once, and both sides' addresses are those of the digits."""
    p = build_program(src, dst, kv)
    a, b = src.piece(kv), dst.piece(kv)
    axes = ("head", "slot", "dim")
    padded = {x: max([d.div * d.ext for d in (*b.page, *b.inside) if d.axis == x], default=1) for x in axes}
    seen = set()
    for head, slot, dim in product(p.heads.tolist(), p.slots.tolist(), p.dims.tolist()):
        base = {"head": head, "slot": slot, "dim": dim}
        start = [sum(term(x.inside, axis, base[axis]) for axis in axes) for x in (a, b)]
        page = [sum(term(x.page, axis, base[axis]) for axis in axes) for x in (a, b)]
        for steps in product(*(range(loop.ext) for loop in p.loops)):
            s = start[0] + sum(i * loop.src for i, loop in zip(steps, p.loops, strict=True))
            d = start[1] + sum(i * loop.dst for i, loop in zip(steps, p.loops, strict=True))
            row = sum(i * loop.row for i, loop in zip(steps, p.loops, strict=True))
            col = sum(i * loop.col for i, loop in zip(steps, p.loops, strict=True))
            assert row < p.rows
            key = (page[1], d)
            assert key not in seen
            seen.add(key)
            # The head is found from the target's address, for loops over heads carry no mark of their own.
            heads = [
                h
                for h in range(padded["head"])
                if page[1]
                == sum(term(b.page, x, i) for x, i in zip(axes, (h, slot + row, dim + col), strict=True))
                and d
                == sum(term(b.inside, x, i) for x, i in zip(axes, (h, slot + row, dim + col), strict=True))
            ]
            assert len(heads) == 1
            h, t, c = heads[0], slot + row, dim + col
            if h < src.shape.heads and t < dst.shape.block_size and c < src.shape.dim:
                # the source slot: pieces begin at multiples of rows in source blocks too
                slot_in = (
                    slot % src.shape.block_size if src.shape.block_size <= dst.shape.block_size else slot
                )
                src_start = sum(
                    term(a.inside, x, i) for x, i in (("head", head), ("slot", slot_in), ("dim", dim))
                )
                want = sum(
                    term(a.inside, x, i) for x, i in (("head", h), ("slot", slot_in + row), ("dim", c))
                )
                assert src_start + s - start[0] == want
                page_at = [
                    sum(term(a.page, x, i) for x, i in (("head", hh), ("slot", tt), ("dim", cc)))
                    for hh, tt, cc in ((head, slot_in, dim), (h, slot_in + row, c))
                ]
                assert page_at[0] == page_at[1]
    assert len(seen) == padded["head"] * padded["slot"] * padded["dim"]
    assert [loop.dst for loop in p.loops] == sorted((loop.dst for loop in p.loops), reverse=True)
    assert piece_count(p, 3) == 3 * len(p.heads) * len(p.slots) * len(p.dims)
    assert len(seen) == piece_count(p, 1) * piece_elements(p)
    return p


def test_pieces_end_where_a_digit_above_them_does():
    """Tiles inside a page, whose height the pieces that blocks allow do not divide."""
    for size, other, tile, rows in ((48, 36, 32, 4), (6, 6, 5, 1), (12, 18, 8, 2)):
        for a, b in ((size, other), (other, size)):
            one, two = lay.shape_of(block_size=a, heads=2, dim=4), lay.shape_of(block_size=b, heads=2, dim=4)

            def tiled(s, tile=tile):
                inside = [
                    ("slot", tile, -(-s.block_size // tile)),
                    ("head", 1, 2),
                    ("slot", 1, tile),
                    ("dim", 1, 4),
                ]
                return lay.compiled(
                    "in", s, lay.BF16, [("block", 1, s.blocks)], inside, buffers=("layer", "kv")
                )

            assert rows % check(lay.nhd(one), tiled(two)).rows == 0
            assert rows % check(tiled(one), lay.nhd(two)).rows == 0
    # Of 4 rows that the blocks allow 6 leaves 2, and then 3 is above.
    sides = [
        lay.compiled(
            "in", lay.shape_of(block_size=size), lay.BF16, [("block", 1, 4)], inside, buffers=("layer", "kv")
        )
        for size, inside in (
            (40, [("slot", 6, 7), ("head", 1, 2), ("slot", 2, 3), ("slot", 1, 2), ("dim", 1, 64)]),
            (12, [("slot", 3, 4), ("head", 1, 2), ("slot", 1, 3), ("dim", 1, 64)]),
        )
    ]
    assert check(*sides).rows == 1


def test_rows_fit_one_block_of_either_side():
    assert check(lay.nhd(lay.shape_of(block_size=16)), lay.tiles(lay.shape_of(block_size=32))).rows == 16
    p = check(lay.nhd(lay.shape_of(block_size=40)), lay.tiles(lay.shape_of(block_size=40)))
    assert p.rows == 8
    assert p.slots.tolist() == list(range(0, 64, 8))
    assert check(lay.nhd(lay.shape_of(block_size=24)), lay.hnd(lay.shape_of(block_size=36))).rows == 12


def test_nhd_to_tiles_is_one_piece_per_tile():
    p = check(lay.nhd(lay.shape_of(dim=64, heads=2)), lay.tiles(lay.shape_of(dim=64, heads=2)))
    assert p.rows == 32
    assert p.heads.tolist() == [0, 1]
    assert p.dims.tolist() == [0, 32]
    assert p.loops == (
        Loop(2, 16 * 128, 512, 16, 0),
        Loop(2, 16, 256, 0, 16),
        Loop(16, 128, 16, 1, 0),
        Loop(16, 1, 1, 0, 1),
    )


def test_interleave_weaves_the_halves():
    p = check(lay.nhd(lay.shape_of()), lay.tiles(lay.shape_of(), interleave=True))
    assert p.dims.tolist() == [0, 16]
    assert p.loops[-2:] == (Loop(8, 1, 2, 0, 1), Loop(2, 32, 1, 0, 32))
    check(lay.tiles(lay.shape_of(), interleave=True), lay.nhd(lay.shape_of()))


def test_same_layout_is_one_run_when_pieces_are_full():
    p = check(lay.hnd(lay.shape_of()), lay.hnd(lay.shape_of()))
    assert merge_loops(p.loops, full=True) == (Loop(piece_elements(p), 1, 1, 0, 1),)
    assert len(p.loops) == 3  # heads, tokens and dims do not chain as rows and columns


def test_padding_of_dims_and_heads():
    p = check(lay.nhd(lay.shape_of(dim=80)), lay.tiles(lay.shape_of(dim=80)))
    assert p.dims.tolist() == [0, 32, 64]
    s = lay.shape_of(heads=3)
    padded = lay.compiled(
        "h",
        s,
        lay.BF16,
        [("block", 1, 4)],
        [("head", 2, 2), ("slot", 1, 32), ("head", 1, 2), ("dim", 1, 64)],
        buffers=("layer", "kv"),
    )
    assert check(lay.nhd(s), padded).heads.tolist() == [0, 1, 2, 3]


def test_a_wider_source_tile_never_reaches_past_the_target():
    s = lay.shape_of(dim=96)
    check(lay.tiles(s, tile=64, face=32), lay.tiles(s))


def test_refusals_name_the_axis():
    with pytest.raises(Unmappable, match=r"dim: .*dim/24%4.*expected.*dim/32%3"):
        s = lay.shape_of(dim=96)
        odd = lay.compiled(
            "odd",
            s,
            lay.BF16,
            [("block", 1, 4)],
            [("head", 1, 2), ("dim", 24, 4), ("slot", 1, 32), ("dim", 1, 24)],
            buffers=("layer", "kv"),
        )
        build_program(odd, lay.tiles(s), 0)
    with pytest.raises(Unmappable, match="heads: "):
        build_program(lay.nhd(lay.shape_of(heads=4)), lay.nhd(lay.shape_of(heads=2)), 0)
    with pytest.raises(Unmappable, match="dim: "):
        build_program(lay.nhd(lay.shape_of(dim=32)), lay.nhd(lay.shape_of(dim=64)), 0)
    with pytest.raises(Unmappable, match=r"codec\.group"):
        build_program(lay.nhd(lay.shape_of()), lay.dim_major(lay.shape_of(), lay.BFP8), 0)


def test_programs_are_cached_and_read_only():
    a, b = lay.nhd(lay.shape_of()), lay.tiles(lay.shape_of())
    p = build_program(a, b, 0)
    assert build_program(lay.nhd(lay.shape_of()), lay.tiles(lay.shape_of()), 0) is p
    with pytest.raises(ValueError, match="read-only"):
        p.dims[0] = 1


MAKERS = (lay.nhd, lay.hnd, lay.dim_major, lay.tiles, lay.head_fraction)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(MAKERS),
    st.sampled_from(MAKERS),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((16, 48, 64)),
    st.sampled_from((1, 8, 12, 16, 32, 40)),
    st.sampled_from((1, 8, 16, 24, 32)),
)
def test_any_pair(source, target, heads, dim, block_in, block_out):
    a = source(lay.shape_of(heads=heads, dim=dim, block_size=block_in))
    b = target(lay.shape_of(heads=heads, dim=dim, block_size=block_out))
    p = check_light(a, b)
    assert gcd(block_in, block_out) % p.rows == 0


def check_light(a, b):
    """The target's positions are each met once: the cheap half of `check`."""
    p = build_program(a, b, 0)
    piece = b.piece(0)
    inside = np.zeros(1, np.int64)
    for loop in p.loops:
        inside = (inside[:, None] + np.arange(loop.ext) * loop.dst).ravel()
    at = []
    for head, slot, dim in product(p.heads, p.slots, p.dims):
        index = (("head", head), ("slot", slot), ("dim", dim))
        page = sum(term(piece.page, x, int(i)) for x, i in index)
        at.append(page * piece.elements + sum(term(piece.inside, x, int(i)) for x, i in index) + inside)
    at = np.sort(np.concatenate(at))
    total = piece.elements * b.pages // (b.shape.blocks)
    if "layer" not in b.buffers:
        total //= b.shape.kvs * b.shape.layers
    assert np.array_equal(at, np.unique(at))
    assert len(at) == total
    return p
