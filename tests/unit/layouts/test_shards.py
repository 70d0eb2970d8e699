"""Pages dealt in shards: against a count of what lies in each bank, shard by shard."""

import itertools

import pytest

from hawk.errors import LayoutError
from hawk.layouts import CacheShape, CompiledLayout, Layout
from tests.unit.layouts.test_compile import SHAPE, layout, prove_by_force


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
