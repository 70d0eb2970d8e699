"""Moves whole caches from one layout into another as the agents do: plan, retile into an arena, place its segments."""

import numpy as np

from hawk.layouts import CompiledLayout
from hawk.layouts.codecs import encode
from hawk.plan.segments import direct
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Placement, Selection
from hawk.retile import cpu, native
from tests.unit.layouts import placing

CORES = ("numpy", "c") if native.available() else ("numpy",)


def buffers_of(layout: CompiledLayout, values: np.ndarray) -> list[list[np.ndarray]]:
    """The bytes of every buffer, by channel, for fp32 bits `uint32[layers, kvs, blocks, heads, block_size, dim]`."""
    bits = np.zeros((layout.buffer_count, layout.pages, layout.pieces[0].elements), np.uint32)
    for layer in range(layout.shape.layers):
        for kv in range(layout.shape.kvs):
            bits[layout.buffer(layer, kv)][placing.positions(layout, kv, layer)] = values[layer, kv]
    found = []
    for buffer in bits:
        channels = np.zeros((layout.channels, layout.channel_bytes), np.uint8)
        for i, page in enumerate(encode(layout.codec, buffer)):
            at = i // layout.channels * layout.page_stride
            channels[i % layout.channels, at : at + layout.page_bytes] = page
        found.append(list(channels))
    return found


def placement(layout: CompiledLayout) -> Placement:
    """Every channel of every buffer a region of its own."""
    buffers = len(layout.buffer_bytes)
    region = np.arange(buffers * layout.channels, dtype=np.int32).reshape(buffers, layout.channels)
    return Placement(region, np.zeros(region.shape, np.int64))


def move(
    src: CompiledLayout,
    dst: CompiledLayout,
    source: list[list[np.ndarray]],
    core: str,
    *,
    blocks: tuple[np.ndarray, np.ndarray] | None = None,
    token: int = 0,
    tokens: int | None = None,
    fill: int = 0,
) -> list[list[np.ndarray]]:
    """The target's buffers, filled with `fill` before, after tokens `[token, token + tokens)` have been moved."""
    if blocks is None:
        blocks = np.arange(src.shape.blocks), np.arange(dst.shape.blocks)
    if tokens is None:
        tokens = min(x.shape.blocks * x.shape.block_size for x in (src, dst)) - token
    size = dst.shape.block_size
    first, last = token // size, -(-(token + tokens) // size)
    selection = Selection(layer=0, layers=dst.shape.layers, token=token, tokens=tokens)
    chunk = Chunk(layer=0, layers=dst.shape.layers, block=first, blocks=last - first)
    target = target_chunk(dst, blocks[1], selection, chunk)
    arena = np.full(target.nbytes, 0x5A, np.uint8)
    regions = [channel for buffer in source for channel in buffer]
    for step in retile_steps(src, blocks[0], placement(src), target, blocks[1]):
        with native.using(core):
            cpu.run_step(step, regions, arena)
    out = [[np.full(size, fill, np.uint8) for _ in range(dst.channels)] for size in dst.buffer_bytes]
    flat = [channel for buffer in out for channel in buffer]
    rows = direct(target, placement(dst), 0)
    for region, local, remote, nbytes in zip(rows.region, rows.local, rows.remote, rows.nbytes, strict=True):
        flat[region][local : local + nbytes] = arena[remote : remote + nbytes]
    return out


def equal(got: list[list[np.ndarray]], want: list[list[np.ndarray]]) -> bool:
    """Whether two caches hold the same bytes."""
    return all(
        np.array_equal(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True)
    )
