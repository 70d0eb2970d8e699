"""What cannot be mapped, and block tables that do not fit, are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from hawk.errors import InvalidArgument, Unmappable
from hawk.layouts import load
from hawk.plan.check import check, check_blocks, check_selection
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from hawk.plan.ways import through_rows
from tests.unit.plan import support as s

BASE = {"layers": 2, "heads": 2, "dim": 64, "block_size": 32, "blocks": 8, "kvs": 2}


@pytest.mark.parametrize(("field", "other"), [("layers", 3), ("heads", 4), ("dim", 128)])
def test_shapes_that_differ_are_named_with_both_values(field, other):
    src = load("vllm/nhd").compile(s.shape(**BASE))
    dst = load("tenstorrent/kv").compile(s.shape(**{**BASE, field: other}))
    with pytest.raises(Unmappable) as refused:
        check(src, dst)
    assert refused.value.field == f"shape.{field}"
    assert str(other) in refused.value.got
    assert str(BASE[field]) in refused.value.expected


def test_latents_do_not_map_onto_keys_and_values():
    one = s.declare("latent", "kv block slot head dim", buffers="layer")
    src = one.compile(s.shape(**{**BASE, "kvs": 1}))
    dst = load("vllm/nhd").compile(s.shape(**BASE))
    with pytest.raises(Unmappable, match=r"shape\.kvs"):
        check(src, dst)


def test_what_may_differ_is_bridged():
    src = load("vllm/hnd").compile(s.shape(**{**BASE, "block_size": 16, "blocks": 99}))
    for codec in ("bf16", "bfp8_b"):
        check(src, load("tenstorrent/kv").compile(s.shape(**BASE), codec=codec, channels=12))


def test_digits_without_a_common_refinement_go_through_rows():
    src = s.declare("by6", "block head slot dim/6 | dim%6", buffers="layer kv").compile(s.shape(dim=12))
    dst = s.declare("by4", "block head slot dim/4 | dim%4", buffers="layer kv").compile(s.shape(dim=12))
    check(src, dst)
    assert through_rows(src, dst, None) == (0, 1)


LAYOUT = load("vllm/nhd").compile(s.shape(**BASE))
SELECTION = Selection(0, 2, 40, 50)  # entries 1 and 2


@pytest.mark.parametrize(
    ("blocks", "field"),
    [
        ([1, 2], "src_blocks:"),
        ([], "src_blocks:"),
        ([1, 2, 8], r"src_blocks\[2\]: no such block; got 8; expected 0\.\.7"),
        ([1, -1, 2], r"src_blocks\[1\]"),
        ([0, 1, 2, 77], r"src_blocks\[3\]"),
        ([0, 5, 5], r"src_blocks\[2\]: a block is used twice; got 5; expected .*src_blocks\[1\]"),
        ([0, 1.5, 2], "src_blocks:"),
        ([[0, 1, 2]], "src_blocks:"),
    ],
)
def test_bad_tables(blocks, field):
    with pytest.raises(InvalidArgument, match=field):
        check_blocks(LAYOUT, blocks, SELECTION, "src_blocks")


def test_good_tables_come_back_as_int64():
    for table in ([3, 4, 5], np.asarray([3, 4, 5], np.uint32), (7, 0, 1, 2)):
        got = check_blocks(LAYOUT, table, SELECTION, "blocks")
        assert got.dtype == np.int64
        assert got.tolist() == list(table)
    # Entries that the selection does not touch may repeat: engines put a null block there.
    check_blocks(LAYOUT, [3, 3, 4, 4], SELECTION, "blocks")


def test_layers_that_do_not_exist():
    check_selection(LAYOUT, Selection(1, 1, 0, 1))
    with pytest.raises(InvalidArgument, match=r"selection\.layers"):
        check_selection(LAYOUT, Selection(1, 2, 0, 1))


def test_the_source_side_refuses_what_does_not_fit():
    dst = load("tenstorrent/kv").compile(s.shape(**BASE))
    target = target_chunk(dst, np.arange(3), SELECTION, Chunk(0, 2, 1, 2))
    good = Placement(np.zeros((2, 1), np.int32), np.zeros((2, 1), np.int64))
    assert len(retile_steps(LAYOUT, np.arange(3), good, target, np.arange(3))) == 4
    with pytest.raises(InvalidArgument, match="src_blocks: the block table is too short"):
        retile_steps(LAYOUT, np.arange(2), good, target, np.arange(3))
    with pytest.raises(InvalidArgument, match=r"src_blocks\[2\]"):
        retile_steps(LAYOUT, np.asarray([0, 1, 8]), good, target, np.arange(3))
    with pytest.raises(InvalidArgument, match="src_placement"):
        bad = Placement(np.zeros((4, 1), np.int32), np.zeros((4, 1), np.int64))
        retile_steps(LAYOUT, np.arange(3), bad, target, np.arange(3))
