"""There and back through codecs that share exponents or scales, and of plain tensors, in pools full of NaN.

As `test_identity`, for what no shipped layout, or hardly a draw of that test, holds: MXFP8 and MXFP4, eight bits under
scale tensors of tokens, heads or groups, and tensors that are one block of rows.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hawk.convert import tensor_shape
from hawk.errors import LayoutError, Unmappable
from hawk.layouts import Layout, load, names
from hawk.plan.types import Selection
from hawk.retile import native
from tests.unit.plan import support as s
from tests.unit.plan.test_identity import (
    BOUNDS,
    CORES,
    NAN,
    grids,
    known,
    models,
    there_and_back,
    usable,
    within,
)

QUIET = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

MX = {
    "mxfp8_e4m3": (0, 2.0**-3, 2.0**-137),
    "mxfp8_e5m2": (0, 2.0**-3, 2.0**-144),
    "mxfp4_e2m1": (0, 2.0**-2, 2.0**-129),
}
"""Error at most, as in `BOUNDS`: of the largest of 32 neighbours, which here lie in one row."""

MX_LAYOUT = """
name = "own/mx"
codec = "bf16"
codecs = ["bf16", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4_e2m1"]
buffers = "layer kv"
align = 64
[placement]
kind = "interleaved"
channels = 1
[[piece]]
order = "ORDER"
"""

MX_ORDERS = ("block | head slot dim", "block head slot/8 dim/32 | slot%8 dim%32", "block slot | head dim")

SCALED_LAYOUT = """
name = "own/scaled"
codec = "int8"
codecs = ["int8", "fp8_e4m3fn", "fp8_e5m2"]
buffers = "layer kv"
align = 64
[placement]
kind = "interleaved"
channels = 1
[scale]
SCALE
[[piece]]
order = "block | slot head dim"
"""

SCALES = {
    "a token of all heads, in tensors of their own": 'place = "buffer"\ndtype = "fp32"\norder = "block slot"',
    "a token and head, in tensors of their own": 'place = "buffer"\ndtype = "fp32"\norder = "block slot head"',
    "a token and head, behind the elements": 'place = "page"\ndtype = "fp32"\norder = "block | slot head"',
    "groups of 16": 'place = "buffer"\ndtype = "bf16"\norder = "block | head dim slot"\ngroup = 16',
}

SCALED = {
    # Half a step of largest / 127, and what a scale of bf16 is off by.
    "int8": (0, 2.0**-7, 2.0**-126),
    "fp8_e4m3fn": (2.0**-4, 2.0**-10 / 400, 2.0**-126),
    "fp8_e5m2": (2.0**-3, 2.0**-17 / 50000, 2.0**-126),
}
"""Error at most where a scale is the largest that it covers by the largest that the codec holds."""


def through(core, data, other, codec, bound, *, split=True):
    """A drawn model with a drawn layout, into `other` and back; `split` with several workers on either side."""
    draw = data.draw
    model = draw(models())
    source, target = (draw(grids(model, most=3 if split else 1)) for _ in range(2))
    tokens = draw(st.one_of(st.sampled_from([1, 32, 33]), st.integers(2, 70)))
    first = draw(st.one_of(st.just(0), st.integers(0, tokens - 1)))
    here = {"block_size": draw(st.sampled_from([16, 40])), "channels": 3, "codec": "bf16"}
    sizes, channels = st.sampled_from([16, 32, 40]), st.sampled_from([1, 7])
    there = {"block_size": draw(sizes), "channels": draw(channels), "codec": codec}
    one = known(draw(st.sampled_from(usable())))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mode = draw(st.sampled_from(["direct", "staged"]))
    try:
        there_and_back(core, model, source, target, one, other, here, there, tokens, first, mode, rng, bound)
    except (LayoutError, Unmappable):
        assume(False)  # a layout that cannot hold this shape


@pytest.mark.parametrize("core", CORES)
@QUIET
@given(data=st.data())
def test_shared_exponents_of_32(core, data):
    order, codec = data.draw(st.sampled_from(MX_ORDERS)), data.draw(st.sampled_from(sorted(MX)))
    through(core, data, Layout.from_toml(MX_LAYOUT.replace("ORDER", order)), codec, MX[codec])


@pytest.mark.parametrize("core", CORES)
@QUIET
@given(data=st.data())
def test_scale_tensors(core, data):
    scale, codec = data.draw(st.sampled_from(sorted(SCALES))), data.draw(st.sampled_from(sorted(SCALED)))
    other = Layout.from_toml(SCALED_LAYOUT.replace("SCALE", SCALES[scale]))
    # A scale of all heads cannot be made of some of them, and what it is off by is of all of them.
    every = "all heads" in scale
    through(core, data, other, codec, (*SCALED[codec], *((1, 3) if every else ())), split=not every)


@cache
def for_tensors():
    """Shipped layouts with plain tensors' one kind of piece, and those of this file, by name."""
    found = {f"own/mx {order}": Layout.from_toml(MX_LAYOUT.replace("ORDER", order)) for order in MX_ORDERS}
    for name in names():
        layout = load(name)
        if len(layout.pieces) == 1 and "bf16" in layout.codecs:
            found[name] = layout
    return found


@pytest.mark.parametrize("core", CORES)
@QUIET
@given(data=st.data())
def test_plain_tensors(core, data):
    """Weights and activations, `[..., rows, columns]`: some of the rows, into any layout and back into NaN."""
    draw = data.draw
    form = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 24, 32, 64])),
        draw(st.sampled_from([32, 64, 96])),
    )
    layout = for_tensors()[draw(st.sampled_from(sorted(for_tensors())))]
    codec = draw(st.sampled_from([c for c in layout.codecs if c in ("bf16", "fp32", *BOUNDS, *MX)]))
    first = draw(st.integers(0, form[1] - 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = tensor_shape(form)
    channels = draw(st.sampled_from([1, 7])) if layout.placement != "linear" else None
    try:
        there = layout.compile(shape, codec=codec, channels=channels)
        here, ours = (s.Cache(load("contiguous/bhsd").compile(shape), rng) for _ in range(2))
        target = s.Cache(there, rng)
        for memory in (*here.regions, *ours.regions, *target.regions):
            memory[: len(memory) // 2 * 2].view(np.uint16)[:] = NAN
        x = (rng.standard_normal((1, *form), np.float32).view(np.uint32) >> 16).astype(np.uint16)
        whole = [0], np.arange(form[0]), np.zeros(1, np.int64)
        rows = np.arange(first, form[1])
        s.store(here, 0, *whole, rows, x[:, :, first:])
        block, selection = np.zeros(1, np.int64), Selection(0, 1, first, form[1] - first)
        with native.using(core):
            s.carry_out(here, target, selection, block, block, rng=rng)
            marks = s.carry_out(target, ours, selection, block, block, rng=rng)
    except (LayoutError, Unmappable):
        assume(False)  # columns or rows that this layout does not take
    got = s.fetch(ours, 0, *whole, rows).astype(np.uint16)
    if codec in ("bf16", "fp32"):
        np.testing.assert_array_equal(got, x[:, :, first:])
    else:
        within((MX | BOUNDS)[codec], got, x[:, :, first:])
    for memory, mark in zip(ours.regions, marks, strict=True):
        assert (
            memory[: len(memory) // 2 * 2].view(np.uint16)[~mark[: len(memory) // 2 * 2 : 2]] == NAN
        ).all()
