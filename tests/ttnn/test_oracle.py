"""HAWK's bytes are ttnn's, on every kind of chip that ttnn can be told of, for the cache shapes of real models."""

from __future__ import annotations

import pytest

from hawk.retile import native
from tests.ttnn import checks
from tests.ttnn.conftest import CHIPS

BANKS = {"p150": 8, "p100": 7, "n150": 12, "4xp150": 8}
CODECS = ("bf16", "bfp8_b", "bfp4_b", "fp32")
# KV heads of one chip: Llama 8B and 70B have 8, at TP 1, 2, 4, 8; and some that no power of two divides.
HEADS = (8, 4, 2, 1, 3, 5)


def test_hawks_own_core_runs_in_this_python():
    assert native.available()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("block_size", [32, 64])
def test_bytes_of_every_share_of_the_heads(on, chip, codec, block_size):
    for heads in HEADS:
        assert on(chip, checks.tiles, heads, block_size, 128, codec, "tenstorrent/kv", BANKS[chip]) == (0, 0)


@pytest.mark.parametrize("chip", ["p150", "p100", "n150"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b"])
def test_the_shares_of_a_mesh_are_those_of_shard_tensor_to_mesh(on, chip, model):
    for tp in (1, 2, 4, 8) if model != "qwen2.5-7b" else (1, 2, 4):
        for codec in ("bf16", "bfp8_b", "bfp4_b"):
            assert on(chip, checks.shares, f"tt_transformers/{model}", tp, codec) == []


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", ["wide", "ties", "zeros"])
def test_bytes_of_numbers_that_round_oddly(on, chip, kind):
    for codec in CODECS:
        assert on(chip, checks.tiles, 3, 64, 128, codec, "tenstorrent/kv", BANKS[chip], kind) == (0, 0)


@pytest.mark.parametrize(("block_size", "dim"), [(64, 64), (40, 80), (16, 96), (128, 256)])
def test_bytes_of_heads_and_blocks_that_do_not_fill_tiles(on, block_size, dim):
    for codec in CODECS:
        for layout in ("tenstorrent/kv", "tenstorrent/kv-hf"):
            assert on("p100", checks.tiles, 3, block_size, dim, codec, layout, 7) == (0, 0)


@pytest.mark.parametrize("chip", CHIPS)
def test_pages_strides_and_banks_are_the_allocators(on, chip):
    for heads, block_size, codec, blocks in (
        (8, 64, "bfp8_b", 16),
        (2, 64, "bfp8_b", 33),
        (1, 32, "bfp4_b", 9),
        (8, 32, "bf16", 5),
        (3, 64, "fp32", 7),
    ):
        mine, theirs = on(chip, checks.places, heads, block_size, 128, codec, blocks)
        assert mine == theirs
        assert mine[2] == BANKS[chip]


@pytest.mark.parametrize(
    ("text", "wrong", "k", "v"),
    [
        (
            'rename = "m = (rotary%(R/2) rotary/(R/2)) + rest"',
            'rename = "m = (rotary/2 rotary%2) + rest"',
            1,
            0,
        ),
        ('m/32 | slot%32/16 m%32/16 slot%16 m%16"', 'm/32 | m%32/16 slot%32/16 slot%16 m%16"', 1, 0),
        (
            'dim/32 | slot%32/16 dim%32/16 slot%16 dim%16"',
            'dim/32 | dim%32/16 slot%32/16 slot%16 dim%16"',
            0,
            1,
        ),
        ("block head slot/32 dim/32", "block slot/32 head dim/32", 0, 1),
    ],
)
def test_a_mistake_in_the_layout_is_seen(on, text, wrong, k, v):
    # Of the shipped file: Meta's order, the faces of K, those of V, heads inside rows.
    found = on("p150", checks.broken, text, wrong)
    assert [bool(n) for n in found] == [bool(k), bool(v)]


def test_a_wrong_number_of_banks_is_seen(on):
    for chip, wrong in (("p150", 7), ("p100", 8), ("n150", 8)):
        assert all(n > 0 for n in on(chip, checks.tiles, 2, 64, 128, "bfp8_b", "tenstorrent/kv", wrong))


def test_k_in_the_order_of_hugging_face_is_not_metas(on):
    # The layout of one and the numbers of the other: K differs, V does not.
    text = 'rename = "m = (rotary%(R/2) rotary/(R/2)) + rest"'
    k, v = on("p150", checks.broken, text, 'rename = "m = rotary + rest"', "bfp8_b")
    assert k > 0
    assert v == 0


# -- host tensors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("heads", "tokens"), [(8, 100), (1, 32), (3, 65)])
def test_host_tensors_are_views_of_what_hawk_writes(on, codec, heads, tokens):
    assert on("p150", checks.mapped, heads, tokens, 128, codec, 2, False) == []


@pytest.mark.parametrize("codec", ["bf16", "bfp8_b", "bfp4_b"])
@pytest.mark.parametrize(("heads", "tokens"), [(8, 100), (4, 64)])
def test_host_tensors_of_a_mesh_are_those_of_shard_tensor_to_mesh(on, codec, heads, tokens):
    assert on("4xp150", checks.mapped, heads, tokens, 128, codec, 2, True) == []


# -- memory of the chips ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("chip", "blocks"), [("p150", 16), ("p100", 14), ("n150", 18), ("4xp150", 16)])
def test_a_paged_cache_lies_where_hawk_would_put_it(on, chip, blocks):
    found = on(chip, checks.paged, "tt_transformers/llama-3.1-8b", 3, blocks)
    group = 4 if chip == "4xp150" else 1
    assert found["addresses"] == found["wanted"]
    assert found["again"]
    assert found["heads"] == [8 // group] * group
    if group > 1:
        assert [(p.start, p.stop) for p in found["parts"]] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    chips, address, nbytes, count = found["reservation"]
    assert (address, nbytes, count) == (found["addresses"][0], found["bytes"], BANKS[chip])
    assert chips == found["chips"]
    assert sorted(chips) == list(range(group))
    assert found["alignment"] == (32 if chip == "n150" else 64)


def test_views_begin_in_the_first_bank(on):
    with pytest.raises(ValueError, match=r"blocks: .*multiple of 7"):
        on("p100", checks.paged, "tt_transformers/llama-3.1-8b", 1, 16)


def test_tensors_that_do_not_follow_each_other_are_no_reservation(on):
    assert "kv[1].v" in on("p150", checks.apart, "tt_transformers/llama-3.1-8b")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, ""),
        ({"heads": 4}, "kv[0].k.heads"),
        ({"block_size": 128}, "kv[0].k.block_size"),
        ({"dim": 64}, "kv[0].k.dim"),
        ({"codec": "bf16"}, "kv[0].k.codec"),
        ({"codec": "bfp4_b"}, "kv[0].k.codec"),
        ({"k_order": "hf"}, "k_order"),
        ({"layers": 2}, "kv:"),
        ({"l1": True}, "kv[0].k.memory_config"),
    ],
)
def test_a_cache_that_the_model_would_misread_is_refused(on, changes, field):
    said = on("p150", checks.refused, "tt_transformers/llama-3.1-8b", changes)
    assert (field in said) if field else said == ""


@pytest.mark.parametrize("chip", CHIPS)
def test_ttnn_allocates_around_a_reservation(on, chip):
    found = on(chip, checks.reserved, 100_000)
    assert found["nbytes"] >= 100_000
    assert found["address"] % found["alignment"] == 0
    assert found["banks"] == BANKS[chip]
    assert all(not found["address"] <= other < found["end"] for other in found["others"])
    assert "at most" in found["too much"]
