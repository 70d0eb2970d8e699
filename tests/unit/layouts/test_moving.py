"""Layouts that store dim in another order, that share pages between K and V, or that shard: moved, both ways."""

import itertools

import numpy as np
import pytest

from hawk import convert
from hawk.errors import LayoutError
from hawk.layouts import CacheShape, CompiledLayout, Layout, load
from hawk.plan.types import Selection
from hawk.retile import native
from tests.reference import scales
from tests.unit.layouts import moving, placing
from tests.unit.layouts.test_compile import layout, prove_by_force


def words(shape: CacheShape, seed: int = 0) -> np.ndarray:
    """fp32 bits that every codec of 16 bits or more keeps, by layer, kv, block, head, slot and dim."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-(2**6), 2**6, [shape.extent(a) for a in ("layer", "kv", *placing.AXES)])
    return values.astype(np.float32).view(np.uint32)


def there_and_back(a: CompiledLayout, b: CompiledLayout, core: str, seed: int = 0) -> None:
    bits = words(a.shape, seed)
    source, target = moving.buffers_of(a, bits), moving.buffers_of(b, bits)
    assert moving.equal(moving.move(a, b, source, core), target)
    assert moving.equal(moving.move(b, a, target, core), source)


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize(
    ("dim", "rotary"), [(80, 80), (100, 100), (128, 64), (96, 32), (64, 16), (128, 128), (40, 20)]
)
@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_rotary_parts_of_any_width(dim, rotary, codec, core):
    shape = CacheShape(layers=1, heads=2, dim=dim, block_size=40, blocks=2)
    tiles = load("tenstorrent/kv").compile(shape, codec=codec, channels=7, params={"R": rotary})
    there_and_back(load("vllm/nhd").compile(shape), tiles, core)


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize("codec", ["bfp8_b", "bfp4_b"])
@pytest.mark.parametrize(("dim", "rotary"), [(80, 80), (128, 64), (96, 32), (100, 100), (64, 64)])
def test_grouped_codecs_over_rotary_parts(dim, rotary, codec, core):
    shape = CacheShape(layers=1, heads=2, dim=dim, block_size=33, blocks=2)
    tiles = load("tenstorrent/kv").compile(shape, codec=codec, params={"R": rotary})
    rows = load("vllm/nhd").compile(shape)
    bits = words(shape)
    got = moving.move(rows, tiles, moving.buffers_of(rows, bits), core)
    assert moving.equal(got, moving.buffers_of(tiles, bits))


SHARED = """
name = "shared"
codec = "bf16"
codecs = ["bf16", "fp32", "bfp8_b"]
buffers = "layer"
[[piece]]
order = "block | head slot kv dim"
"""

SHARDED = """
name = "sharded"
codec = "bf16"
buffers = "layer kv"
align = 64
[placement]
kind = "sharded"
banks = [1, 2, 0]
shard = ["B*H*S/32", "D/32"]
[params]
B = 2
H = "head"
S = "slot"
D = "dim"
[[piece]]
order = "block head slot/32 dim/32 | slot%32/16 dim%32/16 slot%16 dim%16"
"""


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize("text", [SHARED, SHARDED], ids=["shared", "sharded"])
@pytest.mark.parametrize("other", ["vllm/hnd", "tenstorrent/kv", "contiguous/bhsd"])
def test_pages_of_both_and_shards(text, other, core):
    shape = CacheShape(layers=2, heads=2, dim=64, block_size=32, blocks=5)
    there_and_back(Layout.from_toml(text).compile(shape), load(other).compile(shape), core)


@pytest.mark.parametrize("core", moving.CORES)
def test_blocks_and_ranges_in_shared_pages(core):
    """Other block sizes, shuffled tables, a range within blocks: neighbours' bytes stay, K's and V's alike."""
    wide = CacheShape(layers=2, heads=2, dim=32, block_size=24, blocks=7)
    narrow = CacheShape(layers=2, heads=2, dim=32, block_size=16, blocks=9)
    rows, shared = load("vllm/nhd").compile(narrow), Layout.from_toml(SHARED).compile(wide)
    rng = np.random.default_rng(3)
    tables = rng.permutation(9), rng.permutation(7)
    bits = words(narrow)
    source = moving.buffers_of(rows, bits)
    got = moving.move(rows, shared, source, core, blocks=tables, token=29, tokens=60, fill=0xA5)
    want = np.full((2, 7, wide.block_size, 2 * 2 * 32), 0xA5A5, np.uint16)
    for t in range(29, 96):  # to the end of the last block touched
        here = np.zeros((2, 2, 2, 32), np.uint16)  # layer, head, kv, dim
        if t < 89:
            here[:] = (bits[:, :, tables[0][t // 16], :, t % 16] >> 16).transpose(0, 2, 1, 3)
        page = want[:, tables[1][t // 24]].reshape(2, 2, 24, 2, 32)
        page[:, :, t % 24] = here
        want[:, tables[1][t // 24]] = page.reshape(2, 24, 128)
    assert moving.equal(got, [[x.reshape(-1).view(np.uint8)] for x in want])


@pytest.mark.parametrize("core", moving.CORES)
def test_groups_in_shared_pages(core):
    shape = CacheShape(layers=1, heads=2, dim=32, block_size=8, blocks=2)
    shared = Layout.from_toml(SHARED).compile(shape, codec="bfp8_b")
    rows, bits = load("vllm/nhd").compile(shape), words(shape)
    got = moving.move(rows, shared, moving.buffers_of(rows, bits), core)
    assert moving.equal(got, moving.buffers_of(shared, bits))


def test_positions_of_shards_are_those_of_the_banks():
    shape = CacheShape(layers=1, heads=2, dim=64, block_size=64, blocks=6)
    compiled = Layout.from_toml(SHARDED).compile(shape)
    for block, head, slot in itertools.product(range(6), range(2), (0, 33)):
        _, channel, at, _ = compiled.locate(0, 0, head, block, slot, 40)
        assert channel == block // 2
        assert at == (((block % 2 * 2 + head) * 2 + slot // 32) * 2 + 1) * 2048


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 96])
@pytest.mark.parametrize(
    "name", ["tenstorrent/kv", "tenstorrent/kv-sharded", "vllm/lbnhc", "ascend/nz", "tpu/vllm"]
)
def test_prompts_around_block_boundaries(name, tokens, core):
    """The last block's rows behind the prompt are zero, whatever lay there; a block more is left alone."""
    shape = CacheShape(layers=1, heads=2, dim=64, block_size=32, blocks=4)
    a, b = load("vllm/nhd").compile(shape), load(name).compile(shape, codec="bf16")
    bits = words(shape)
    source = moving.buffers_of(a, bits)
    blocks = np.arange(4), np.array([2, 0, 3, 1])
    used = -(-tokens // 32)
    values = np.zeros_like(bits)
    for i in range(used):
        values[:, :, blocks[1][i]] = bits[:, :, i]
        values[:, :, blocks[1][i], :, max(0, min(32, tokens - 32 * i)) :] = 0
    touched = np.zeros_like(bits)
    touched[:, :, blocks[1][:used]] = 0x3F800000  # 1.0: no byte of it is that of 0 all through
    mine, others = moving.buffers_of(b, touched), moving.buffers_of(b, touched ^ np.uint32(0x3F800000))
    filled = [
        moving.move(a, b, source, core, blocks=blocks, tokens=tokens, fill=fill) for fill in (0xA5, 0x00)
    ]
    assert moving.equal(filled[1], moving.buffers_of(b, values))
    # What does not depend on the filling is what was written: whole blocks, neither more nor less.
    for columns in zip(filled[0], filled[1], mine, others, strict=True):
        for x, y, ours, theirs in zip(*columns, strict=True):
            assert (x == y)[ours != 0].all()
            assert not (x == y)[theirs != 0].any()


def test_k_and_v_may_share_pages():
    shape = CacheShape(layers=2, heads=2, dim=4, block_size=3, blocks=2)
    compiled = layout("block | head slot kv dim", buffers="layer").compile(shape)
    prove_by_force(compiled)
    assert (compiled.pages, compiled.shares_pages, list(compiled.plane_kvs)) == (2, True, [0])
    assert [compiled.first_position(kv) for kv in (0, 1)] == [0, 4]
    assert compiled.locate(1, 1, 1, 1, 2, 3) == (1, 0, compiled.page_stride, ((1 * 3 + 2) * 2 + 1) * 4 + 3)
    apart = layout("block head slot kv dim", buffers="layer").compile(shape)
    assert (apart.pages, apart.shares_pages, list(apart.plane_kvs)) == (24, False, [0, 1])
    prove_by_force(
        Layout.from_toml(both("block head | kv dim slot", "block head | kv slot dim")).compile(shape)
    )
    with pytest.raises(LayoutError, match=r"share pages that hold other blocks.*the same digits"):
        Layout.from_toml(both("block head | kv slot dim", "head block | kv dim slot")).compile(shape)
    with pytest.raises(LayoutError, match="kv lies at different digits"):
        Layout.from_toml(both("block head | kv slot dim", "block head | dim slot kv")).compile(shape)


def both(k: str, v: str, codec: str = "bf16") -> str:
    """A layout in which K and V lie differently."""
    text = f'name = "cpu"\ncodec = "{codec}"\nbuffers = "layer"\n'
    for kv, order in enumerate((k, v)):
        text += f'[[piece]]\nwhere = "kv={kv}"\norder = "{order}"\n'
    return text


@pytest.mark.parametrize("core", moving.CORES)
@pytest.mark.parametrize(("token", "part"), [(0, ()), (7, ()), (16, (1, 1, 0)), (5, (0, 1, 1))])
def test_k_and_v_lie_differently_in_one_page(token, part, core):
    """K transposed, then V, of all heads of a block in one page: bytes by numpy's own transposing, and no others."""
    near, far = CacheShape(2, 2, 8, 6, 9), CacheShape(2, 2, 8, 16, 4)
    page = Layout.from_toml(both("block | head kv dim slot", "block | head kv slot dim"))
    src, dst = load("vllm/nhd").compile(near), page.compile(far)
    assert (dst.pages, dst.shares_pages) == (4, True)
    rng = np.random.default_rng(token)
    array = rng.integers(0, 65536, (2, 2, 9, 6, 2, 8)).astype(np.uint16)
    out = np.full(convert.nbytes(dst), 0x5A, np.uint8)
    selection = Selection(0, 2, token, 50 - token, (), *part)
    with native.using(core):
        convert.convert(array, src, dst, selection=selection, out=out)
    want = np.full((2, 4, 2, 2, 128), 0x5A5A, np.uint16)  # layer, block, head, kv
    tokens = array.reshape(2, 2, 54, 2, 8)
    for layer, kv, block, head in np.ndindex(2, 2, 4, 2):
        if part and head != part[0]:
            continue
        cells = want[layer, block, head, kv].reshape((16, 8) if kv else (8, 16))
        rows = cells if kv else cells.T
        for slot in range(16):
            t = block * 16 + slot
            if t >= token:
                rows[slot] = tokens[layer, kv, t, part[2] if part else head] if t < 50 else 0
    assert np.array_equal(out.view(np.uint16).reshape(want.shape), want)
    if not part and not token:
        back = convert.convert(out, dst, src, selection=Selection(0, 2, 0, 50))
        assert np.array_equal(back.view(np.uint16).reshape(tokens.shape)[:, :, :50], tokens[:, :, :50])


@pytest.mark.parametrize("core", moving.CORES)
def test_scales_of_k_and_v_share_a_page(core):
    """K and V of a token and head side by side, their scales behind the page: moved, and made anew."""
    near, far = CacheShape(2, 2, 8, 6, 8), CacheShape(2, 2, 8, 16, 3)
    text = 'name = "t"\ncodec = "int8"\nbuffers = "layer"\n[scale]\nplace = "page"\ndtype = "fp32"\n'
    text += 'order = "block | slot head kv"\n[[piece]]\norder = "block | slot head kv dim"\n'
    mine, other = Layout.from_toml(text).compile(near), Layout.from_toml(text).compile(far)
    x = np.random.default_rng(0).standard_normal((2, 2, 8, 2, 6, 8)).astype(np.float32)
    rows = load("contiguous/bhsd").compile(near, codec="fp32")
    elements, beside = scales.made(x, np.ones((8, 6), bool), (2, 2, 8, 2, 6, 1), "int8", "fp32")
    with native.using(core):
        packed = convert.convert(x, rows, mine)
        moved = convert.convert(packed, mine, other)

    def side_by_side(a: np.ndarray, slots: int) -> np.ndarray:
        """[layer, block, bytes] of slot, head, kv, dim."""
        a = np.ascontiguousarray(a.transpose(0, 2, 4, 3, 1, 5))
        return a.reshape(2, 48 // slots, -1).view(np.uint8)

    for got, slots in ((packed, 6), (moved, 16)):
        pages = got.reshape(2, 48 // slots, -1)
        want = [side_by_side(elements.astype(np.int8), slots), side_by_side(beside, slots)]
        assert np.array_equal(pages, np.concatenate(want, axis=-1))
