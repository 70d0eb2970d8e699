"""Compiled layouts are bijections, and say what their order says; other orders are refused."""

import itertools
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hawk.errors import LayoutError
from hawk.layouts import CacheShape, CompiledLayout, Layout, load, names
from hawk.layouts.compiled import AXES, Digit
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
        own = ("mla/interleaved", "tenstorrent/kv-sharded", "flashinfer/mla", "vllm/mla-fp8", "vllm/cpu-amx")
        if name in own and shape.dim < 2**41:
            continue  # their parameters, or pieces that are padded apart, refuse these shapes first
        with pytest.raises(LayoutError, match="too large"):
            load(name).compile(shape)
