"""Any layout into any other and back: values within the codecs' bounds, and no byte of another block touched."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hawk.errors import LayoutError, Unmappable
from hawk.layouts import CacheShape, CompiledLayout, Layout, load, names
from hawk.layouts.codecs import bound, decode
from hawk.plan.check import check
from tests.unit.layouts import moving, placing
from tests.unit.layouts.test_compile import whole_orders

CANARY = 0xA5

SPLITS = ["", "dim = a:(D/2) + b", "dim = a:(D/4) + b:(D/2) + c"]
RENAMES = {
    SPLITS[0]: ["m = (dim%(D/2) dim/(D/2))", "m = (dim%4 dim/4)", "m = dim"],
    SPLITS[1]: ["m = (a%(D/4) a/(D/4)) + b", "m = b + a", "m = a + (b%4 b/4)"],
    SPLITS[2]: ["m = a + (b%(D/4) b/(D/4)) + c", "m = c + a + b"],
}
INSIDE = [
    "head slot {m}",
    "slot head {m}",
    "head {m} slot",
    "slot%4 {m}%8 head slot/4 {m}/8",
    "{m}/16 head slot {m}%16",
]


@st.composite
def written(draw: st.DrawFn) -> str:
    """A declaration with parts of dim in other orders, pages of both, tiles, channels, shards."""
    split = draw(st.sampled_from(SPLITS))
    rename = draw(st.sampled_from(RENAMES[split]))
    codecs = draw(st.sampled_from(["bf16", "fp32", "fp16", "fp8_e5m2", "mxfp8_e4m3", "mxfp4_e2m1"]))
    buffers = draw(st.sampled_from(["layer kv", "layer", ""]))
    outer = draw(st.permutations([a for a in ("layer", "kv", "block") if a not in buffers.split()]))
    shared = "kv" not in buffers and draw(st.booleans())
    page = " ".join(a for a in outer if not (shared and a == "kv"))
    inside = draw(st.sampled_from(INSIDE))
    tiled = draw(st.booleans())
    if shared:
        order = f"{page} | " + (f"kv {inside}" if draw(st.booleans()) else f"{inside} kv")
    elif tiled:
        order = f"{page} head slot/8 {{m}}/8 | slot%8 {{m}}%8"
    else:
        order = f"{page} | {inside}"
    kind = draw(st.sampled_from(["linear", "interleaved"]))
    place = f'[placement]\nkind = "{kind}"\n' + (
        f"channels = {draw(st.integers(1, 5))}\n" if kind != "linear" else ""
    )
    if buffers == "layer kv" and not tiled and draw(st.booleans()):
        place = f'[placement]\nkind = "sharded"\nbanks = [2, 0, 1]\nshard = [{draw(st.integers(1, 3))}, 1]\n'
    piece = f'[[piece]]\nrename = "{rename}"\norder = "{order.format(m="m")}"\n'
    piece += f'split = "{split}"\n' if split else ""
    align = draw(st.sampled_from([1, 64]))
    head = f'name = "t"\ncodec = "{codecs}"\nbuffers = "{buffers}"\nalign = {align}\n'
    return f'{head}{place}[params]\nD = "dim"\n{piece}'


layouts = st.one_of(
    # Scales, and parts of heads, are tensors of their own; they have tests of their own.
    st.sampled_from([load(n) for n in names() if load(n).scale is None and not load(n).parts]),
    written().map(Layout.from_toml),
    whole_orders().map(
        lambda order: Layout.from_toml(f'name = "t"\ncodec = "bf16"\n[[piece]]\norder = "{order}"\n')
    ),
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[CompiledLayout, CompiledLayout]:
    """Two caches of one model: other layouts, codecs, block sizes, numbers of blocks."""
    same = {
        "layers": draw(st.integers(1, 2)),
        "heads": draw(st.integers(1, 3)),
        "dim": draw(st.sampled_from([8, 16, 32, 40, 64])),
        "kvs": draw(st.sampled_from([2, 2, 1])),
    }
    found = []
    for layout in (draw(layouts), draw(layouts)):
        shape = CacheShape(
            block_size=draw(st.sampled_from([1, 4, 8, 12, 32])), blocks=draw(st.integers(1, 4)), **same
        )
        try:
            found.append(layout.compile(shape, codec=draw(st.sampled_from(layout.codecs))))
        except LayoutError:
            assume(False)
    return found[0], found[1]


def request(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The tokens of a block table's blocks in turn, `[layers, kvs, heads, tokens, dim]`."""
    found = values[:, :, table].transpose(0, 1, 3, 2, 4, 5)
    return found.reshape(*found.shape[:3], -1, found.shape[5])


def read(layout: CompiledLayout, buffers: list[list[np.ndarray]]) -> np.ndarray:
    """The fp32 bits of all elements, `[layers, kvs, blocks, heads, block_size, dim]`."""
    shape, found = layout.shape, []
    for buffer in buffers:
        raw = np.stack(
            [
                buffer[i % layout.channels][i // layout.channels * layout.page_stride :][: layout.page_bytes]
                for i in range(layout.pages)
            ]
        )
        found.append(decode(layout.codec, raw, layout.pieces[0].elements))
    out = np.empty([shape.extent(a) for a in ("layer", "kv", *placing.AXES)], np.uint32)
    for layer in range(shape.layers):
        for kv in range(shape.kvs):
            out[layer, kv] = found[layout.buffer(layer, kv)][placing.positions(layout, kv, layer)]
    return out


def allowed(values: np.ndarray, codecs: list[str]) -> np.ndarray:
    """How far values may be off after passing through the codecs; a group's largest is at most the whole's."""
    total = np.zeros_like(values)
    for codec in codecs:
        limit = bound(codec)
        reference = np.abs(values) if limit.of == "element" else np.abs(values).max()
        total = total + np.maximum(limit.relative * (reference + total), limit.absolute)
    return total


@settings(max_examples=150, deadline=None)
@given(pairs(), st.data())
def test_there_and_back(pair, data):
    a, b = pair
    try:
        check(a, b)
        check(b, a)
    except Unmappable:
        assume(False)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    tables = rng.permutation(a.shape.blocks), rng.permutation(b.shape.blocks)
    room = min(x.shape.blocks * x.shape.block_size for x in pair)
    token = data.draw(st.integers(0, room - 1))
    tokens = data.draw(st.integers(1, room - token))
    extents = [a.shape.extent(axis) for axis in ("layer", "kv", *placing.AXES)]
    source = moving.buffers_of(a, (rng.integers(-100, 101, extents) / 8).astype(np.float32).view(np.uint32))
    for core in moving.CORES:
        there = moving.move(a, b, source, core, blocks=tables, token=token, tokens=tokens, fill=CANARY)
        back = moving.move(b, a, there, core, blocks=tables[::-1], token=token, tokens=tokens, fill=CANARY)
        sent = request(read(a, source), tables[0])[:, :, :, token : token + tokens].view(np.float32)
        for layout, buffers, table, codecs in (
            (b, there, tables[1], [b.codec.name]),
            (a, back, tables[0], [b.codec.name, a.codec.name]),
        ):
            size = layout.shape.block_size
            got = read(layout, buffers)
            arrived = request(got, table)[:, :, :, token : token + tokens].view(np.float32)
            if all(c in ("bf16", "fp32", "fp16") for c in codecs):
                assert np.array_equal(arrived, sent)
            else:
                limit = allowed(sent.astype(np.float64), codecs)
                assert (np.abs(arrived.astype(np.float64) - sent) <= limit).all()
            # Rows behind the range are zero to the end of the last block touched; other blocks are as they were.
            touched = range(token // size, -(-(token + tokens) // size))
            rest = request(got, table[touched.start : touched.stop])[
                :, :, :, token + tokens - touched.start * size :
            ]
            assert not (rest & 0x7FFFFFFF).any()
            others = np.setdiff1d(np.arange(layout.shape.blocks), table[touched.start : touched.stop])
            if layout.codec.group == 1:
                fill = np.full((1, layout.codec.page_bytes(1)), CANARY, np.uint8)
                assert (got[:, :, others] == decode(layout.codec, fill, 1)[0, 0]).all()
