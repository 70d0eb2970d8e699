"""Renames that are no sum of digits of dim: parts of a head, odd head sizes, and what is no permutation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hawk.errors import LayoutError, Unmappable
from hawk.layouts import CacheShape, Layout, load
from hawk.layouts.compiled import Run
from hawk.plan.check import check
from tests.unit.layouts.test_compile import SHAPE, prove_by_force


@pytest.mark.parametrize(
    ("dim", "rotary"), [(80, 80), (100, 100), (128, 64), (96, 32), (64, 2), (40, 20), (256, 256)]
)
def test_an_interleave_that_is_no_sum_of_digits_of_dim(dim, rotary):
    """meta[2i] = hf[i], meta[2i+1] = hf[i + R/2] in the first R, the rest in place, all of it padded to tiles."""
    shape = CacheShape(layers=1, heads=1, dim=dim, block_size=2, blocks=1)
    compiled = load("tenstorrent/kv").compile(shape, params={"R": rotary})
    prove_by_force(compiled)
    assert bool(compiled.pieces[0].stored) == (dim != 256)
    half = rotary // 2
    for d in range(dim):
        at = d if d >= rotary else 2 * (d % half) + d // half
        _, channel, _, position = compiled.locate(0, 0, 0, 0, 1, d)
        assert channel == at // 32 % 8
        assert position == at % 32 // 16 * 256 + 16 + at % 16
    stored = compiled.pieces[0].store(np.arange(dim + 9))
    assert stored[dim:].tolist() == list(range(dim, dim + 9))
    assert compiled.pieces[0].unstore(stored).tolist() == list(range(dim + 9))


def parted(split: str, rename: str, order: str = "block head slot m", params: str = "") -> Layout:
    return Layout.from_toml(
        f'name = "t"\ncodec = "fp32"\nbuffers = "layer kv"\n{params}\n'
        f'[[piece]]\nsplit = "{split}"\nrename = {rename}\norder = "{order}"\n'
    )


def test_only_a_part_may_be_permuted():
    """A latent of 512 stays, the 64 behind it are interleaved."""
    mla = parted("dim = latent:512 + rope:64", '"m = latent + (rope%32 rope/32)"')
    compiled = mla.compile(CacheShape(layers=1, heads=1, dim=576, block_size=2, blocks=1, kvs=1))
    assert compiled.pieces[0].stored == (Run(0, 513, 0, 1), Run(513, 31, 514, 2), Run(544, 32, 513, 2))
    assert [compiled.locate(0, 0, 0, 0, 1, d)[3] for d in (0, 511, 512, 513, 544, 575)] == [
        576 + at for at in (0, 511, 512, 514, 513, 575)
    ]


def test_padding_beyond_all_measure_is_no_plan():
    huge = parted("dim = a:3 + b", '"m = b + a"', "block head slot m/1000000000 | m%1000000000")
    shape = CacheShape(layers=1, heads=1, dim=8, block_size=2, blocks=1)
    rows = load("sglang/pool").compile(shape, codec="fp32")
    with pytest.raises(Unmappable, match=r"dim: .*beyond all measure"):
        check(rows, huge.compile(shape))


def test_parts_may_change_places():
    swapped = parted("dim = a:3 + b", '["m = b + a"]').compile(
        CacheShape(layers=1, heads=2, dim=8, block_size=2, blocks=2)
    )
    prove_by_force(swapped)
    assert [swapped.locate(0, 0, 0, 0, 0, d)[3] for d in range(8)] == [5, 6, 7, 0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "rename", "order", "words"),
    [
        ("dim = a:60 + b:8", '"m = a + b"', "block head slot m", ["split", "larger", "64 in all"]),
        ("dim = a:60 + b:2", '"m = a + b"', "block head slot m", ["split", "do not fill", "got 62"]),
        ("dim = a:60 + b", '"m = a"', "block head slot m", ["rename", "every index", "m"]),
        ("dim = a:60 + b", '"m = a + a"', "block head slot m", ["rename", "'a' at column 9", "same indices"]),
        (
            "dim = a:60 + b",
            '"m = a + (b%3 b/3)"',
            "block head slot m",
            ["every index of dim once, without gaps"],
        ),
        ("dim = a:60 + b", '"m = a + b"', "block head slot a b", ["one rename that holds all"]),
        ("dim = a:60 + b", '"m = a + b"', "block head slot dim m", ["one rename that holds all"]),
        ("dim = a:60 + b", '"m = a + (b head)"', "block head slot m", ["'head'", "parts of dim"]),
        ("dim = a:60 + b", '"m = (dim%4 dim/4) + b"', "block head slot m", ["same indices"]),
    ],
)
def test_splits_that_are_no_permutation_are_refused(text, rename, order, words):
    with pytest.raises(LayoutError) as caught:
        parted(text, rename, order).compile(SHAPE)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_renames_of_absurd_heads_are_refused():
    huge = CacheShape(layers=1, heads=1, dim=2**20, block_size=1, blocks=1)
    with pytest.raises(LayoutError, match="too large"):
        parted("dim = a:6 + b", '"m = a + b"').compile(huge)
    with pytest.raises(LayoutError, match="too many runs"):
        parted("dim = a:1 + b", '"m = a + (b%3 b/3)"').compile(
            CacheShape(layers=1, heads=1, dim=3000 + 1, block_size=1, blocks=1)
        )
    long = CacheShape(layers=1, heads=1, dim=3000 + 1, block_size=1, blocks=1)
    assert len(parted("dim = a:1 + b", '"m = a + (b%1000 b/1000)"').compile(long).pieces[0].stored) == 4


def test_renames_do_not_blow_up():
    doubled = ", ".join(f'"a{i + 1} = (a{i} a{i})"' for i in range(7))
    head = 'name = "t"\ncodec = "bf16"\n[[piece]]\norder = "a7 kv layer block head slot"\n'
    text = f'{head}rename = ["a0 = (dim dim)", {doubled}]\n'
    with pytest.raises(LayoutError, match="too many digits"):
        Layout.from_toml(text).compile(SHAPE)


def parts_of_parts() -> st.SearchStrategy[str]:
    """Terms of one or two parts of dim, cut at all kinds of numbers."""
    base = st.sampled_from(
        ["a", "b", "c", "(a%2 a/2)", "(b%3 b/3)", "(b%2 b/2)", "(c/2 c%2)", "(a b)", "dim"]
    )
    cut = st.sampled_from(["", "", "%2", "/2", "%4/2"])
    return st.tuples(base, cut).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(parts_of_parts(), min_size=1, max_size=4),
    st.sampled_from(["dim = a:2 + b", "dim = a:2 + b:4 + c", "dim = a:4 + b:(D/2) + c"]),
    st.sampled_from(
        ["block head slot m", "block | m/4 slot head m%4", "m/8 block head | slot/2 m%8/2 slot%2 m%2"]
    ),
    st.sampled_from([8, 10, 12]),
)
def test_what_is_no_permutation_of_dim_is_refused(terms, split, order, dim):
    shape = CacheShape(layers=1, heads=2, dim=dim, block_size=3, blocks=2, kvs=1)
    params = '[params]\nD = "dim"'
    try:
        compiled = parted(split, f'"m = {" + ".join(terms)}"', order, params).compile(shape)
    except LayoutError:
        return
    prove_by_force(compiled)


@pytest.mark.parametrize("split", ["dim = a:2 + b:4 + c"])
@pytest.mark.parametrize("rename", list(itertools.permutations(["(a%2 a/2)", "(b%2 b/2)", "c"])))
def test_sums_of_whole_parts_are_permutations(split, rename):
    shape = CacheShape(layers=1, heads=1, dim=9, block_size=2, blocks=1)
    prove_by_force(parted(split, f'"m = {" + ".join(rename)}"').compile(shape))
