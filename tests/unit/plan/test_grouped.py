"""A plan into a codec with shared exponents, carried out by a real retile core."""

from __future__ import annotations

import numpy as np
import pytest

from hawk.layouts import load
from hawk.layouts.codecs import encode
from hawk.plan.segments import direct
from hawk.plan.source import retile_steps
from hawk.plan.target import split, target_chunk
from hawk.plan.types import Selection
from hawk.retile.cpu import run
from tests.unit.plan import support as s


@pytest.mark.parametrize("codec", ["bfp8_b", "bfp4_b"])
@pytest.mark.parametrize(
    ("name", "token", "tokens"),
    [("tenstorrent/kv", 37, 60), ("tenstorrent/kv-hf", 5, 64), ("tenstorrent/kv", 0, 33)],
)
@pytest.mark.parametrize("part", [(), (1, 1, 2)])
def test_exponents_and_mantissas_of_our_rows_and_no_others(codec, name, token, tokens, part):
    rng = np.random.default_rng(token)
    selection = Selection(0, 2, token, tokens, (), *part)
    moved_by = selection.source_head - selection.head
    src = load("vllm/nhd").compile(s.shape(heads=4 if part else 2, dim=64, block_size=16))
    dst = load(name).compile(s.shape(dim=64, block_size=40), codec=codec, channels=7)
    src_blocks, dst_blocks = rng.permutation(12)[:7], rng.permutation(12)[:4]
    source, target = s.Cache(src, rng), s.Cache(dst, rng)
    for region in source.regions:
        halves = region[: len(region) // 2 * 2].view(np.uint16)
        halves[:] = rng.standard_normal(len(halves)).astype(np.float32).view(np.uint32) >> 16
    want = [r.copy() for r in target.regions]
    # One group at a time: sixteen neighbouring positions, their values from the source, their bytes into the page.
    groups: dict[tuple[int, int, int], np.ndarray] = {}
    least = {"bfp8_b": 20_000, "bfp4_b": 12_000}[codec]
    chunks = split(dst, selection, max_bytes=least // 2 if part else least)
    assert len(chunks) > 1
    for chunk in chunks:
        for layer, kv, head, entry, slot, dim, at in s.chunk_elements(dst, selection, chunk):
            region, page, inside = target.at(layer, kv, head, int(dst_blocks[entry]), slot, dim)
            group = groups.setdefault((region, page, inside // 16), np.zeros((1, 16), np.uint32))
            if at is not None:
                where = source.at(layer, kv, head + moved_by, int(src_blocks[at // 16]), at % 16, dim)
                group[0, inside % 16] = source.get(where) << 16
    half = 16 * dst.codec.bits // 8
    for (region, page, number), bits in groups.items():
        raw = encode(codec, bits)[0]
        want[region][page + number] = raw[0]
        body = page + dst.codec.header_bytes(1024) + number * half
        want[region][body : body + half] = raw[1:]
    for chunk in chunks:
        planned = target_chunk(dst, dst_blocks, selection, chunk)
        arena = rng.integers(0, 256, planned.nbytes, np.uint8)
        for step in retile_steps(src, src_blocks, source.placement, planned, dst_blocks):
            taken = [
                source.regions[r][o : o + src.channel_bytes]
                for r, o in zip(step.src_region, step.src_offset, strict=True)
            ]
            run(step.program, step.pieces, taken, [arena[o:] for o in step.dst_offset])
        s.apply_segments(direct(planned, target.placement, 0), target.regions, arena)
    for c in range(7):
        np.testing.assert_array_equal(target.regions[c], want[c])
