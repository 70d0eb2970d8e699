"""Pieces of a few bytes, such as a block's scales: the C core against the numpy core."""

import numpy as np
import pytest

from hawk.errors import InvalidArgument
from hawk.layouts.codecs import CODECS
from hawk.retile import cpu, native
from hawk.retile.program import Loop, Pieces, Program

pytestmark = pytest.mark.skipif(not native.available(), reason="compares the C core, which was not built")

PLAIN = ("fp32", "bf16", "fp16", "fp8_e4m3fn", "int8")


@pytest.mark.parametrize("target", PLAIN)
@pytest.mark.parametrize("source", PLAIN)
def test_a_run_of_any_length(source, target):
    zero, one, n = np.zeros(1, np.int64), np.ones(1, np.int64), 3
    for ext in range(1, 36):
        loops = (Loop(ext, 1, 1, 0, 0),)
        program = Program(CODECS[source], CODECS[target], 1, loops, zero, zero, one, zero, ext, ext)
        i = np.arange(n, dtype=np.int64)
        ins, outs = (CODECS[name].page_bytes(ext) for name in (source, target))
        none, some = np.zeros(n, np.int64), np.ones(n, np.int64)
        pieces = Pieces(none, i * ins, none, none, i * outs, none, none, some, some)
        src = np.random.default_rng(ext).integers(0, 256, n * ins).astype(np.uint8)
        found = []
        for core in ("numpy", "c"):
            dst = np.full(n * outs, 0x5A, np.uint8)
            with native.using(core):
                cpu.run(program, pieces, [src], [dst])
            found.append(dst)
        assert np.array_equal(*found), ext


@pytest.mark.parametrize("source", ["bfp4_b", "bfp8_b", "mxfp4_e2m1"])
def test_a_page_holds_whole_groups(source):
    """Elements beyond the last whole group would be read behind the page's end."""
    group = CODECS[source].group
    zero, one = np.zeros(1, np.int64), np.ones(1, np.int64)
    program = Program(
        CODECS[source],
        CODECS["bf16"],
        1,
        (Loop(group + 1, 1, 1, 0, 0),),
        zero,
        zero,
        one,
        zero,
        group + 1,
        group + 1,
    )
    pieces = Pieces(zero, zero, zero, zero, zero, zero, zero, one, one)
    dst = np.full(2 * (group + 1), 0x5A, np.uint8)
    with native.using("c"), pytest.raises(InvalidArgument, match=r"program\.loops"):
        cpu.run(program, pieces, [np.zeros(4 * group, np.uint8)], [dst])
    assert (dst == 0x5A).all()
