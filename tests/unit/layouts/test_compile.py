"""Compiled layouts are bijections, and say what their order says; other orders are refused."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hawk.errors import LayoutError
from hawk.layouts import CacheShape, CompiledLayout, Layout, load, names
from hawk.layouts.compiled import AXES, Digit, Run
from hawk.layouts.grammar import Group, Name, Term, evaluate, parse_order


def layout(order: str, *, rename: str = "", buffers: str = "", codec: str = "fp32", more: str = "") -> Layout:
    renames = f'rename = "{rename}"\n' if rename else ""
    return Layout.from_toml(
        f'name = "t"\ncodec = "{codec}"\nbuffers = "{buffers}"\n{more}\n[[piece]]\norder = "{order}"\n{renames}'
    )


def box(shape: CacheShape):
    return itertools.product(*(range(shape.extent(axis)) for axis in AXES))


def prove_by_force(compiled: CompiledLayout) -> None:
    """Every element has a place of its own within the buffers; `padded` tells whether places are left over."""
    places = set()
    for index in box(compiled.shape):
        buffer, channel, at, position = compiled.locate(*index)
        assert 0 <= buffer < compiled.buffer_count
        assert 0 <= channel < compiled.channels
        assert 0 <= at <= compiled.channel_bytes - compiled.page_stride
        assert at % compiled.page_stride == 0
        assert 0 <= position < compiled.pieces[0].elements
        places.add((buffer, channel, at, position))
    elements = math.prod(compiled.shape.extent(axis) for axis in AXES)
    assert len(places) == elements
    room = compiled.buffer_count * compiled.pages * compiled.pieces[0].elements
    assert any(piece.padded for piece in compiled.pieces) == (room > elements)


def value(term: Term, index: dict[str, int], shape: CacheShape, params: dict[str, int]) -> tuple[int, int]:
    """(value, number of values) of a term at one element, by plain arithmetic."""
    if isinstance(term.base, Name):
        total, count = index[term.base.name], shape.extent(term.base.name)
    else:
        assert isinstance(term.base, Group)
        total, count = 0, 1
        for inner in term.base.terms:
            v, n = value(inner, index, shape, params)
            total, count = total * n + v, count * n
    for op, operand in term.ops:
        n = evaluate(operand, params, "")
        total, count = (total // n, -(-count // n)) if op == "/" else (total % n, n)
    return total, count


def follow(terms, index, shape, params=None) -> int:
    total = 0
    for term in terms:
        v, n = value(term, index, shape, params or {})
        total = total * n + v
    return total


SHAPES = [
    CacheShape(layers=2, heads=2, dim=8, block_size=4, blocks=3),
    CacheShape(layers=1, heads=3, dim=6, block_size=5, blocks=2, kvs=1),
    CacheShape(layers=1, heads=1, dim=1, block_size=1, blocks=1),
    CacheShape(layers=2, heads=1, dim=16, block_size=6, blocks=2),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["vllm/nhd", "vllm/hnd", "contiguous/bhsd", "tenstorrent/kv-hf"])
def test_shipped_layouts_are_bijections(name, shape):
    prove_by_force(load(name).compile(shape, codec="fp32"))


@pytest.mark.parametrize("channels", [1, 3, 8])
def test_the_rotary_interleave_is_a_bijection(channels):
    shape = CacheShape(layers=1, heads=1, dim=64, block_size=33, blocks=1)
    prove_by_force(load("tenstorrent/kv").compile(shape, channels=channels))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "order",
    [
        "layer kv block slot head dim",
        "dim slot head block kv layer",
        "layer block head kv slot/2 dim/4 | slot%2 dim%4",
        "layer kv block head slot/4 dim/4 | slot%4/2 dim%4/2 slot%2 dim%2",
        "layer kv block head slot/32%3 slot/96 dim | slot%32",
        "layer kv block (head dim%16)/2 slot (head dim%16)%2 dim/16",
        "layer kv (block slot%6)/3 head dim slot/6 (block slot%6)%3",
        "layer kv block head slot/8 dim/128 | slot%8/2 dim%128 slot%2",
        "layer kv block (head (slot%8 dim/2%8))%4 slot/8 (head (slot%8 dim/2%8))/4 dim/16 dim%2",
    ],
)
def test_an_order_means_what_it_says(order, shape):
    compiled = layout(order).compile(shape)
    prove_by_force(compiled)
    tree = parse_order(order)
    for index in box(shape):
        named = dict(zip(AXES, index, strict=True))
        _, _, at, position = compiled.locate(*index)
        whole = at // compiled.page_stride * compiled.pieces[0].elements + position
        assert whole == follow([*tree.page, *tree.inside], named, shape)


def terms() -> st.SearchStrategy[str]:
    """Terms that cut axes and pairs of axes at all kinds of numbers."""
    base = st.one_of(
        st.sampled_from(AXES),
        st.permutations(AXES).map(lambda axes: f"({axes[0]} {axes[1]})"),
        st.permutations(AXES).map(lambda axes: f"({axes[0]} {axes[1]}/2)"),
    )
    cut = st.tuples(st.sampled_from("/%"), st.integers(1, 9)).map(lambda c: f"{c[0]}{c[1]}")
    return st.tuples(base, st.lists(cut, max_size=3)).map(lambda t: t[0] + "".join(t[1]))


@st.composite
def whole_orders(draw: st.DrawFn) -> str:
    """Orders in which every axis, or pair of axes, is cut up and scattered: bijections where they compile."""
    axes = draw(st.permutations(AXES))
    parts: list[str] = list(axes)
    if draw(st.booleans()):
        parts = [f"({axes[0]} {axes[1]})", *axes[2:]]
    found = []
    for part in parts:
        chain = part
        for n in draw(st.lists(st.integers(1, 6), max_size=3)):
            found.append(f"{chain}/{n}")
            chain = f"{chain}%{n}"
        found.append(chain)
    return " ".join(draw(st.permutations(found)))


small_shapes = st.builds(
    CacheShape,
    layers=st.integers(1, 2),
    heads=st.integers(1, 3),
    dim=st.integers(1, 6),
    block_size=st.integers(1, 4),
    blocks=st.integers(1, 2),
    kvs=st.integers(1, 2),
)


@settings(max_examples=100, deadline=None)
@given(whole_orders(), small_shapes)
def test_random_orders_mean_what_they_say(order, shape):
    try:
        compiled = layout(order).compile(shape)
    except LayoutError:
        assume(False)
    prove_by_force(compiled)
    tree = parse_order(order)
    for index in box(shape):
        named = dict(zip(AXES, index, strict=True))
        _, _, at, position = compiled.locate(*index)
        assert at // compiled.page_stride * compiled.pieces[0].elements + position == follow(
            tree.page, named, shape
        )


@settings(max_examples=300, deadline=None)
@given(st.lists(terms(), min_size=3, max_size=9), small_shapes)
def test_what_is_no_bijection_is_refused(order, shape):
    text = " ".join(order)
    tree = parse_order(text)
    found = [follow(tree.page, dict(zip(AXES, index, strict=True)), shape) for index in box(shape)]
    try:
        compiled = layout(text).compile(shape)
    except LayoutError:
        return
    assert len(set(found)) == len(found)
    prove_by_force(compiled)


def test_renamed_digits_become_digits_of_plain_axes():
    shape = CacheShape(layers=1, heads=8, dim=128, block_size=64, blocks=10)
    key, plain = load("tenstorrent/kv").compile(shape).pieces
    assert (key.kvs, plain.kvs) == ((0,), (1,))
    assert key.page == (
        Digit("block", 1, 10, 64),
        Digit("head", 1, 8, 8),
        Digit("slot", 32, 2, 4),
        Digit("dim", 16, 4, 1),
    )
    assert key.inside == (
        Digit("slot", 16, 2, 512),
        Digit("dim", 8, 2, 256),
        Digit("slot", 1, 16, 16),
        Digit("dim", 1, 8, 2),
        Digit("dim", 64, 2, 1),
    )
    assert plain.inside[-1] == Digit("dim", 1, 16, 1)


def test_digits_that_continue_each_other_are_joined():
    shape = CacheShape(layers=1, heads=2, dim=32, block_size=8, blocks=2)
    compiled = layout("layer kv block head | slot/2 slot%2 dim/8 dim%8/4 dim%4").compile(shape)
    assert compiled.pieces[0].inside == (Digit("slot", 1, 8, 32), Digit("dim", 1, 32, 1))


def test_without_a_cut_a_page_ends_behind_layers_kv_and_blocks():
    shape = CacheShape(layers=2, heads=2, dim=4, block_size=4, blocks=6)
    compiled = layout("layer slot/2 block/2 kv head block%2 slot%2 dim").compile(shape)
    assert {d.axis for d in compiled.pieces[0].inside} == {"slot", "dim"}
    assert (compiled.pages, compiled.pieces[0].elements) == (2 * 2 * 3 * 2 * 2 * 2, 8)


def test_surplus_is_padding_in_pages_too():
    shape = CacheShape(layers=1, heads=1, dim=40, block_size=33, blocks=1)
    compiled = load("tenstorrent/kv-hf").compile(shape)
    assert (compiled.pages, compiled.pieces[0].padded) == (4, True)
    whole = CacheShape(layers=1, heads=1, dim=64, block_size=64, blocks=1)
    assert not load("tenstorrent/kv-hf").compile(whole).pieces[0].padded


def test_pages_are_dealt_to_channels_and_aligned():
    shape = CacheShape(layers=1, heads=1, dim=100, block_size=1, blocks=10)
    more = "align = 64\nplacement = { kind = 'interleaved', channels = 8 }"
    rows = layout("layer kv block | head slot dim", codec="bf16", more=more)
    compiled = rows.compile(shape)
    assert (compiled.page_bytes, compiled.page_stride, compiled.channels) == (200, 256, 8)
    assert compiled.channel_bytes == 3 * 256  # 20 pages of K and V over 8 channels
    assert rows.compile(shape, align=32, channels=12).page_stride == 224
    assert rows.compile(shape, align=32, channels=12).channel_bytes == 2 * 224


def test_pieces_may_lie_page_by_page_in_one_buffer():
    text = """
    name = "cpu"
    codec = "bf16"
    buffers = "layer"
    [[piece]]
    where = "kv=0"
    order = "block head kv | dim slot"
    [[piece]]
    where = "kv=1"
    order = "block head kv | slot dim"
    """
    compiled = Layout.from_toml(text).compile(CacheShape(layers=2, heads=2, dim=4, block_size=3, blocks=2))
    prove_by_force(compiled)
    assert compiled.locate(0, 0, 0, 0, 1, 2) == (0, 0, 0, 2 * 3 + 1)
    assert compiled.locate(0, 1, 0, 0, 1, 2) == (0, 0, compiled.page_stride, 1 * 4 + 2)
    elsewhere = text.replace('"block head kv | slot dim"', '"kv block head | slot dim"')
    with pytest.raises(LayoutError, match="overlap"):
        Layout.from_toml(elsewhere).compile(CacheShape(layers=2, heads=2, dim=4, block_size=3, blocks=2))
    padded = text.replace('"block head kv | slot dim"', '"block head kv | slot dim%8"')
    with pytest.raises(LayoutError, match="elements per page"):
        Layout.from_toml(padded).compile(CacheShape(layers=2, heads=2, dim=4, block_size=3, blocks=2))


def test_one_latent_needs_no_values_piece():
    shape = CacheShape(layers=1, heads=1, dim=64, block_size=32, blocks=1, kvs=1)
    assert [piece.kvs for piece in load("tenstorrent/kv").compile(shape).pieces] == [(0,)]
    head = 'name = "k"\ncodec = "bf16"\nbuffers = "kv"\n'
    keys = head + '[[piece]]\nwhere = "kv=0"\norder = "layer block head slot dim"\n'
    assert Layout.from_toml(keys).compile(shape).buffer_count == 1
    with pytest.raises(LayoutError, match="no piece holds"):
        Layout.from_toml(keys).compile(CacheShape(layers=1, heads=1, dim=64, block_size=32, blocks=1))


SHAPE = CacheShape(layers=2, heads=4, dim=64, block_size=64, blocks=3)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("layer kv block slot dim", ["missing", "head"]),
        ("layer kv block slot head dim/2", ["missing", "dim%2"]),
        ("layer kv block slot head dim%2", ["missing", "dim/2%32"]),
        ("layer kv block slot head dim/8 dim%4", ["missing", "dim/4%2"]),
        ("layer kv block slot head dim/4 dim%8", ["twice", "dim/4"]),
        ("layer kv block slot head dim head", ["twice", "head"]),
        ("layer kv block slot hed dim", ["unknown axis", "'hed' at column 21", "Did you mean 'head'?"]),
        ("layer kv block token head dim", ["unknown axis", "'token'", "'block' and 'slot'"]),
        ("layer kv block | slot head m", ["unknown axis", "'m'"]),
        ("layer kv | block slot head dim", ["may not span", "block"]),
        ("layer block slot head kv/1 | dim kv%2", ["twice", "kv"]),
        ("kv block slot head layer/1 | dim layer%2", ["may not span", "layer"]),
        (
            "layer block (kv dim head)/24 slot (kv dim head)%24",
            ["'(kv dim head)/24' at column 13", "cuts dim%64 at 6", "a factor of 64"],
        ),
        (
            "layer kv block slot head dim%8/16 dim/8",
            ["not a digit of one axis", "'dim%8/16'", "cuts dim%8 at 16"],
        ),
        ("layer kv block slot head dim%1%2 dim", ["'dim%1%2'", "always 0"]),
        ("layer kv block slot head (dim%24)/16 dim/24 dim%16", ["not a digit of one axis", "(dim%24)/16"]),
        ("layer kv block slot head%R dim", ["unknown parameter", "'R'"]),
    ],
)
def test_refusals_name_the_digit(order, words):
    with pytest.raises(LayoutError) as caught:
        layout(order).compile(SHAPE)
    message = str(caught.value)
    assert message.startswith("t: piece[0].order: ")
    assert all(word in message for word in words), message


def test_an_axis_that_selects_buffers_has_no_place_in_the_order():
    with pytest.raises(LayoutError, match=r"selects the buffer.*kv%2"):
        layout("kv block slot head dim", buffers="layer kv").compile(SHAPE)


@pytest.mark.parametrize(
    ("order", "codec", "words"),
    [
        ("layer kv block head dim slot", "bfp8_b", ["not of one row of dim", "slot%64"]),
        ("layer kv block slot dim/8 head dim%8", "bfp8_b", ["not of one row of dim", "head%4"]),
        ("layer kv block head slot dim/8 | dim%8", "bfp4_b", ["smaller than a group"]),
        ("layer kv block head slot dim/24 | dim%24", "bfp4_b", ["not of one row of dim", "dim%24"]),
    ],
)
def test_groups_lie_along_one_row(order, codec, words):
    with pytest.raises(LayoutError) as caught:
        layout(order, codec=codec).compile(SHAPE)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_groups_may_be_made_of_several_digits():
    compiled = layout("layer kv block head slot | dim%8 dim/8", codec="bfp8_b").compile(SHAPE)
    assert (compiled.page_bytes, compiled.codec.group) == (68, 16)
    assert load("tenstorrent/kv").compile(SHAPE, codec="bfp8_b").page_bytes == 1088
    assert load("tenstorrent/kv").compile(SHAPE, codec="bfp4_b").page_bytes == 576


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"codec": "bfp8"}, ["codec", "'bfp8'", "Did you mean 'bfp8_b'?"]),
        ({"codec": "fp16"}, ["codec", "bf16, bfp8_b"]),
        ({"channels": 0}, ["channels", "1..65536"]),
        ({"channels": 10**30}, ["channels"]),
        ({"channels": True}, ["channels"]),
        ({"align": 0}, ["align"]),
        ({"align": 2**40}, ["align"]),
        ({"params": {"Q": 2}}, ["params.'Q'", "R"]),
        ({"params": {"R": 128}}, ["params.R", "1..64"]),
        ({"params": {"R": 10**5000}}, ["params.R"]),
        ({"params": {"R": 63}}, ["rename", "63 / 2"]),
    ],
)
def test_options_are_checked(options, words):
    with pytest.raises(LayoutError) as caught:
        load("tenstorrent/kv").compile(SHAPE, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_linear_memory_has_one_channel():
    assert load("vllm/nhd").compile(SHAPE, channels=1).channels == 1
    with pytest.raises(LayoutError, match="one channel"):
        load("vllm/nhd").compile(SHAPE, channels=8)


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


def test_what_has_one_value_is_no_obstacle():
    """(head dim)/16 with one head is dim/16, padded; with three heads of 40 no digit says it."""
    order = "layer kv block (head dim)/16 slot (head dim)%16"
    one = CacheShape(layers=1, heads=1, dim=40, block_size=2, blocks=2)
    compiled = layout(order).compile(one)
    prove_by_force(compiled)
    assert compiled.pieces[0].inside == (
        Digit("dim", 16, 3, 32),
        Digit("slot", 1, 2, 16),
        Digit("dim", 1, 16, 1),
    )
    with pytest.raises(LayoutError, match=r"cuts dim%40 at 16"):
        layout(order).compile(CacheShape(layers=1, heads=3, dim=40, block_size=2, blocks=2))


def test_k_and_v_may_share_pages():
    shape = CacheShape(layers=2, heads=2, dim=4, block_size=3, blocks=2)
    compiled = layout("block | head slot kv dim", buffers="layer").compile(shape)
    prove_by_force(compiled)
    assert (compiled.pages, compiled.shares_pages, list(compiled.plane_kvs)) == (2, True, [0])
    assert [compiled.first_position(kv) for kv in (0, 1)] == [0, 4]
    assert compiled.locate(1, 1, 1, 1, 2, 3) == (1, 0, compiled.page_stride, ((1 * 3 + 2) * 2 + 1) * 4 + 3)
    apart = layout("block head slot kv dim", buffers="layer").compile(shape)
    assert (apart.pages, apart.shares_pages, list(apart.plane_kvs)) == (24, False, [0, 1])
    text = 'name = "cpu"\ncodec = "bf16"\nbuffers = "layer"\n'
    for kv, order in enumerate(("block head | kv dim slot", "block head | kv slot dim")):
        text += f'[[piece]]\nwhere = "kv={kv}"\norder = "{order}"\n'
    with pytest.raises(LayoutError, match=r"share pages but lie differently.*kv before '\|'"):
        Layout.from_toml(text).compile(shape)


def sharded(shard: str, *, banks: str = "banks = [2, 0, 1]", more: str = "", order: str = "") -> Layout:
    return layout(
        order or "block head slot/2 dim/4 | slot%2 dim%4",
        buffers="layer kv",
        more=f'[placement]\nkind = "sharded"\n{banks}\nshard = {shard}\n{more}',
    )


def deal(
    compiled: CompiledLayout, wide: int, shard: tuple[int, int], down: bool
) -> dict[int, tuple[int, int]]:
    """Bank and place in it of every page of the matrix, counted out shard by shard."""
    high = compiled.shape.blocks * compiled.shape.heads * -(-compiled.shape.block_size // 2)
    rows, columns = shard
    grid = [(r, c) for r in range(0, high, rows) for c in range(0, wide, columns)]
    if down:
        grid.sort(key=lambda corner: (corner[1], corner[0]))
    found, filled = {}, [0] * compiled.channels
    for i, (r, c) in enumerate(grid):
        bank = i % compiled.channels
        for row in range(r, r + rows):
            for column in range(c, c + columns):
                found[row * wide + column] = (bank, filled[bank])
                filled[bank] += 1
    return found


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(
    ("banks", "shard"),
    [([2, 0, 1], (4, 4)), ([2, 0, 1], (16, 4)), ([1, 0], (8, 2)), ([1, 0], (8, 1)), ([0, 1], (2, 4))],
)
def test_shards_lie_whole_in_banks(banks, shard, down):
    shape = CacheShape(layers=1, heads=2, dim=16, block_size=4, blocks=12)
    more = 'orientation = "column"' if down else ""
    compiled = sharded(str(list(shard)), banks=f"banks = {banks}", more=more).compile(shape)
    prove_by_force(compiled)
    assert (compiled.channels, compiled.banks) == (len(banks), tuple(banks))
    where = deal(compiled, 4, shard, down)
    for block, head, slot, dim in itertools.product(range(12), range(2), range(4), range(16)):
        page = ((block * 2 + head) * 2 + slot // 2) * 4 + dim // 4
        _, channel, at, _ = compiled.locate(0, 0, head, block, slot, dim)
        assert (channel, at // compiled.page_stride) == where[page]


def test_the_last_shards_may_be_padding():
    shape = CacheShape(layers=1, heads=1, dim=4, block_size=2, blocks=7)
    compiled = sharded("[2, 1]").compile(shape)
    prove_by_force(compiled)
    assert (compiled.pages, compiled.channel_bytes) == (12, 4 * compiled.page_stride)


@pytest.mark.parametrize(
    ("shard", "options", "words"),
    [
        ("[3, 4]", {}, ["placement.shard", "cuts", "at 3"]),
        ("[4, 3]", {}, ["placement.shard", "cuts", "at 3"]),
        ('["Q", 4]', {}, ["placement.shard", "'Q'"]),
        (
            "[4, 4]",
            {"banks": "channels = 8"},
            ["placement.shard", "block%4", "at 8"],
        ),
    ],
)
def test_shards_that_cut_digits_are_refused(shard, options, words):
    shape = CacheShape(layers=1, heads=2, dim=16, block_size=4, blocks=4)
    order = "block%4 head slot/2 dim/4 | slot%2 dim%4" if "banks" in options else ""
    with pytest.raises(LayoutError) as caught:
        sharded(shard, order=order, **options).compile(shape)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_banks_are_as_many_as_channels():
    with pytest.raises(LayoutError, match="not one channel a bank"):
        sharded("[4, 4]").compile(SHAPE, channels=8)


@pytest.mark.parametrize(
    "shape",
    [
        CacheShape(layers=1, heads=1, dim=2**41, block_size=1, blocks=1),
        CacheShape(layers=2**20, heads=1, dim=128, block_size=64, blocks=2**20),
        CacheShape(layers=1, heads=2**20, dim=2**20, block_size=1, blocks=2),
        CacheShape(layers=1, heads=1, dim=10**5000, block_size=1, blocks=1),
    ],
)
def test_absurd_sizes_are_refused(shape):
    for name in names():
        if name in ("mla/interleaved", "tenstorrent/kv-sharded") and shape.dim < 2**41:
            continue  # their parameters refuse these shapes first
        with pytest.raises(LayoutError, match="too large"):
            load(name).compile(shape)


def test_renames_do_not_blow_up():
    doubled = ", ".join(f'"a{i + 1} = (a{i} a{i})"' for i in range(7))
    head = 'name = "t"\ncodec = "bf16"\n[[piece]]\norder = "a7 kv layer block head slot"\n'
    text = f'{head}rename = ["a0 = (dim dim)", {doubled}]\n'
    with pytest.raises(LayoutError, match="too many digits"):
        Layout.from_toml(text).compile(SHAPE)
