"""The main job on a real model: prefill by torch, the cache through HAWK into the device's channels, decode from there.

What is read back out of the channels goes through the independent reference, never through HAWK's layouts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hawk.cache import CacheSpec, KVCache
from hawk.handles import DeviceCache
from tests.end_to_end.harness import AgentProcess, clients
from tests.model.conftest import PROMPT
from tests.model.llama import (
    DIM,
    KV_HEADS,
    LAYERS,
    Prefilled,
    bits,
    decode,
    from_bits,
    next_logits,
    write_pages,
)
from tests.reference import tenstorrent as tt

SOURCE = CacheSpec(layers=LAYERS, heads=KV_HEADS, dim=DIM, block_size=16, blocks=32, layout="vllm/nhd")
STEPS = 32


@dataclass
class Arrived:
    """A request in the device's channels: copies of the channels, and where the cache is in them."""

    channels: list[np.ndarray]
    offsets: list[int]
    channel_bytes: int
    blocks: np.ndarray
    codec: str

    @classmethod
    def of(cls, cache: DeviceCache, blocks: np.ndarray, codec: str) -> Arrived:
        channels = [channel.copy() for channel in cache.channels]
        return cls(channels, list(cache.offsets), cache.layout.channel_bytes, blocks, codec)

    def swapped(self, a: int, b: int) -> Arrived:
        """The same with two channels' bytes exchanged."""
        channels = list(self.channels)
        channels[a], channels[b] = channels[b], channels[a]
        return Arrived(channels, self.offsets, self.channel_bytes, self.blocks, self.codec)

    def read(self, tokens: int, block_size: int) -> torch.Tensor:
        """K and V as a decode kernel would see them, `bf16[layers, 2, heads, tokens, dim]`."""
        stride = tt.PAGE_BYTES[self.codec]
        per_block = KV_HEADS * (block_size // 32) * (DIM // 32)
        shape = (len(self.blocks), KV_HEADS, block_size, DIM)
        out = np.empty((LAYERS, 2, KV_HEADS, tokens, DIM), np.uint16)
        for layer in range(LAYERS):
            for kv in range(2):
                base = self.offsets[layer * 2 + kv]
                banks = [channel[base : base + self.channel_bytes] for channel in self.channels]
                pages = np.empty((len(self.blocks) * per_block, stride), np.uint8)
                for i in range(len(pages)):
                    page = int(self.blocks[i // per_block]) * per_block + i % per_block
                    channel, at = tt.bank(page, len(banks), stride)
                    pages[i] = banks[channel][at : at + stride]
                values = tt.unpages(pages, self.codec, shape, interleaved=kv == 0)
                rows = tt.to_bf16(values).transpose(1, 0, 2, 3).reshape(KV_HEADS, -1, DIM)
                out[layer, kv] = rows[:, :tokens]
        return from_bits(out)


async def through_hawk(
    pair: tuple[AgentProcess, AgentProcess], prefilled: Prefilled, codec: str, block_size: int
) -> Arrived:
    """The prefilled cache in paged tensors, through two agents, into the emulated device."""
    target = CacheSpec(
        layers=LAYERS,
        heads=KV_HEADS,
        dim=DIM,
        block_size=block_size,
        blocks=16,
        layout="tenstorrent/kv",
        codec=codec,
    )
    rng = np.random.default_rng(3)
    source_blocks = rng.permutation(SOURCE.blocks)[: -(-PROMPT // SOURCE.block_size)]
    target_blocks = rng.permutation(target.blocks)[: -(-PROMPT // block_size)]
    memory = KVCache.alloc(SOURCE)
    # The engine's own tensors, over shared memory, handed to HAWK as they are.
    layers = [
        torch.from_numpy(buffer.view(np.int16))
        .view(torch.bfloat16)
        .reshape(2, SOURCE.blocks, SOURCE.block_size, KV_HEADS, DIM)
        for buffer in memory.buffers
    ]
    write_pages(prefilled.kv, layers, source_blocks)
    async with clients(*pair) as (engine, decoder):
        cache = await engine.register(KVCache.from_torch(layers, layout="vllm/nhd"))
        into = await decoder.allocate(target, memory="npu0")
        for channel in into.channels:
            channel[:] = 0xFF  # NaN in bf16: whatever is read but was not written spoils every logit
        note = prefilled.first.to_bytes(4, "little")
        offer = await engine.offer(
            f"llama-{codec}-{block_size}", cache, source_blocks, tokens=PROMPT, note=note
        )
        ready = await decoder.fetch(offer.ticket, into=into, blocks=target_blocks, timeout="30s")
        assert ready.tokens == PROMPT
        assert int.from_bytes(ready.note, "little") == prefilled.first
        arrived = Arrived.of(into, target_blocks, codec)
        await into.release()
        await cache.release()
    return arrived


@pytest.mark.parametrize("block_size", [32, 64])
async def test_decode_goes_on_from_the_channels_as_if_nothing_had_moved(
    pair: tuple[AgentProcess, AgentProcess], model: torch.nn.Module, prefilled: Prefilled, block_size: int
) -> None:
    alone = decode(model, prefilled.first, prefilled.kv, STEPS)
    arrived = await through_hawk(pair, prefilled, "bf16", block_size)
    kv = arrived.read(PROMPT, block_size)
    assert np.array_equal(bits(kv), bits(prefilled.kv))
    assert decode(model, prefilled.first, kv, STEPS) == alone


async def test_a_swap_of_two_channels_is_noticed(
    pair: tuple[AgentProcess, AgentProcess], model: torch.nn.Module, prefilled: Prefilled
) -> None:
    alone = decode(model, prefilled.first, prefilled.kv, STEPS)
    arrived = await through_hawk(pair, prefilled, "bf16", 64)
    kv = arrived.swapped(2, 5).read(PROMPT, 64)
    assert decode(model, prefilled.first, kv, STEPS) != alone


async def test_block_floating_point_keeps_logits_within_its_bound(
    pair: tuple[AgentProcess, AgentProcess], model: torch.nn.Module, prefilled: Prefilled
) -> None:
    """bfp8_b is lossy: each element is off by at most its group's share, and the logits by no more than that explains.

    The logits' bound is taken from the model itself: elements pushed by the whole of the codec's bound, in random
    directions, move the logits further than the codec's rounding may.
    """
    arrived = await through_hawk(pair, prefilled, "bfp8_b", 64)
    kv = arrived.read(PROMPT, 64)
    share = _share(prefilled.kv)
    off = (kv.float() - prefilled.kv.float()).abs()
    # What comes back is rounded to bf16 once more, which holds every 7-bit magnitude exactly.
    assert bool((off <= share).all())
    assert bool((off > 0).any())

    exact = next_logits(model, prefilled.first, prefilled.kv)
    got = (next_logits(model, prefilled.first, kv) - exact).abs().max()
    generator = torch.Generator().manual_seed(5)
    pushed = []
    for _ in range(8):
        signs = torch.randint(0, 2, share.shape, generator=generator) * 2 - 1
        moved = (prefilled.kv.float() + signs * share).to(torch.bfloat16)
        pushed.append((next_logits(model, prefilled.first, moved) - exact).abs().max())
    assert got <= max(pushed)

    wrong = next_logits(model, prefilled.first, arrived.swapped(2, 5).read(PROMPT, 64))
    assert not bool((wrong - exact).abs().max() <= max(pushed))


def _share(kv: torch.Tensor) -> torch.Tensor:
    """How far bfp8_b may move each element: one unit of the 7-bit magnitude of its group of 16, `float32` like `kv`.

    Groups lie along the dim as the device orders it: K's halves are interleaved first.
    """
    values = kv.float()
    ordered = values.clone()
    half = DIM // 2
    ordered[:, 0, ..., 0::2], ordered[:, 0, ..., 1::2] = values[:, 0, ..., :half], values[:, 0, ..., half:]
    groups = ordered.reshape(*ordered.shape[:-1], DIM // 16, 16)
    exponent = torch.frexp(groups.abs().amax(-1, keepdim=True)).exponent - 1
    unit = torch.ldexp(torch.ones_like(groups), exponent - 6).reshape(ordered.shape)
    back = unit.clone()
    back[:, 0] = torch.cat([unit[:, 0, ..., 0::2], unit[:, 0, ..., 1::2]], -1)
    return back
