"""Caches of tests: what goes in, and what has to lie in a device's channels afterwards, by the reference alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hawk.cache import CacheSpec, KVCache
from hawk.handles import DeviceCache
from tests.reference import tenstorrent as tt

LAYERS, HEADS, DIM = 3, 2, 64
CANARY = 0xA5


def source_spec(block_size: int = 16, blocks: int = 40, **changes: object) -> CacheSpec:
    """The prefill side's cache, vLLM's layout."""
    spec = CacheSpec(layers=LAYERS, heads=HEADS, dim=DIM, block_size=block_size, blocks=blocks)
    return spec.replace(**changes)


def target_spec(block_size: int = 64, blocks: int = 14, codec: str = "bf16", **changes: object) -> CacheSpec:
    """The decode side's cache, Tenstorrent's layout."""
    spec = CacheSpec(
        layers=LAYERS,
        heads=HEADS,
        dim=DIM,
        block_size=block_size,
        blocks=blocks,
        layout="tenstorrent/kv",
        codec=codec,
    )
    return spec.replace(**changes)


def fill(cache: KVCache, seed: int = 0) -> None:
    """Any bits at all, NaNs and infinities among them."""
    rng = np.random.default_rng(seed)
    for buffer in cache.buffers:
        buffer.view(np.uint16)[:] = rng.integers(0, 1 << 16, buffer.size // 2, dtype=np.uint16)


def fill_layer(cache: KVCache, layer: int, seed: int) -> None:
    """Other bits in one layer."""
    buffer = cache.buffers[layer].view(np.uint16)
    buffer[:] = np.random.default_rng(seed).integers(0, 1 << 16, len(buffer), dtype=np.uint16)


def filled(spec: CacheSpec | None = None, seed: int = 0) -> KVCache:
    """A cache in shared memory, filled."""
    cache = KVCache.alloc(spec or source_spec())
    fill(cache, seed)
    return cache


def tables(seed: int, source: int, target: int, tokens: int, *, src: CacheSpec, dst: CacheSpec) -> tuple:
    """Shuffled block tables for so many tokens; `source` and `target` entries more than needed."""
    rng = np.random.default_rng(seed)
    need_src = -(-tokens // src.block_size) + source
    need_dst = -(-tokens // dst.block_size) + target
    return rng.permutation(src.blocks)[:need_src], rng.permutation(dst.blocks)[:need_dst]


def paint(device: DeviceCache) -> None:
    """Every byte of the whole pool becomes the canary, so that a byte written anywhere shows."""
    for channel in device.channels:
        channel[:] = CANARY


@dataclass
class Moved:
    """One fetch: tokens `[first, first + tokens)` of a source, by its block table, into a target's blocks."""

    source: KVCache
    source_blocks: Sequence[int]
    target_blocks: Sequence[int]
    first: int
    tokens: int


def _rows(moved: Moved, layer: int, kv: int) -> np.ndarray:
    """The request's tokens `[0, first + tokens)`, `uint16[tokens, heads, dim]`."""
    spec = moved.source.spec
    tensor = moved.source.buffers[layer].view(np.uint16)
    tensor = tensor.reshape(2, spec.blocks, spec.block_size, spec.heads, spec.dim)
    rows = tensor[kv][np.asarray(moved.source_blocks)].reshape(-1, spec.heads, spec.dim)
    return rows[: moved.first + moved.tokens]


def _put(channels: list[np.ndarray], device: DeviceCache, spec: CacheSpec, moved: Moved) -> None:
    size, last = spec.block_size, moved.first + moved.tokens
    begin, end = moved.first // size, -(-last // size)
    blocks = np.asarray(moved.target_blocks)[begin:end]
    stride = tt.PAGE_BYTES[spec.codec or "bf16"]
    ours = np.zeros((len(blocks) * size, spec.heads, spec.dim), np.uint16)
    ours[moved.first - begin * size :] = 1
    mask = tt.tilise(ours.reshape(len(blocks), size, spec.heads, spec.dim).transpose(0, 2, 1, 3)) == 1
    if spec.codec == "bfp8_b":
        mask = np.hstack([mask.reshape(-1, 64, 16)[:, :, 0], mask])
    else:
        mask = np.repeat(mask, 2, axis=1)
    for layer in range(spec.layers):
        for kv in range(2):
            rows = np.zeros((len(blocks) * size, spec.heads, spec.dim), np.uint16)
            wanted = _rows(moved, layer, kv)[begin * size :]
            rows[: len(wanted)] = wanted
            tensor = rows.reshape(len(blocks), size, spec.heads, spec.dim).transpose(0, 2, 1, 3)
            pages = tt.pages(np.ascontiguousarray(tensor), spec.codec or "bf16", kv == 0)
            per_block = len(pages) // len(blocks)
            base = device.offsets[layer * 2 + kv]
            for i, page in enumerate(pages):
                number = int(blocks[i // per_block]) * per_block + i % per_block
                channel, at = tt.bank(number, len(channels), stride)
                place = channels[channel][base + at : base + at + stride]
                place[mask[i]] = page[mask[i]]


def check(device: DeviceCache, spec: CacheSpec, *moves: Moved, guards: Sequence[DeviceCache] = ()) -> None:
    """Asserts that the pool holds the moved tokens in their places and the canary everywhere else.

    Without `guards` that means every byte of the pool.  Where the agent may use the rest for staging, it means
    the cache and its neighbours, which are the guards.
    """
    expected = [np.full(len(channel), CANARY, np.uint8) for channel in device.channels]
    for moved in moves:
        _put(expected, device, spec, moved)
    looked = np.zeros(len(expected[0]), bool)
    for cache in (device, *guards):
        for base in cache.offsets:
            looked[base : base + cache.layout.channel_bytes] = True
    if not guards:
        looked[:] = True
    for c, (got, right) in enumerate(zip(device.channels, expected, strict=True)):
        wrong = np.flatnonzero((got != right) & looked)
        assert len(wrong) == 0, (
            f"channel {c}: {len(wrong)} wrong bytes, the first at {int(wrong[0])}: "
            f"{int(got[wrong[0]]):#x} instead of {int(right[wrong[0]]):#x}"
        )


def untouched(device: DeviceCache) -> bool:
    """Whether the cache still holds the canary alone."""
    length = device.layout.channel_bytes
    return all(
        bool((channel[base : base + length] == CANARY).all())
        for channel in device.channels
        for base in device.offsets
    )
