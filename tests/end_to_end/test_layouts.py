"""Layouts that ask more of the agents than pages of elements: scales, named banks, pages of both K and V."""

from __future__ import annotations

import numpy as np
import pytest

from hawk import convert
from hawk.cache import CacheSpec, KVCache
from hawk.errors import HawkError
from hawk.layouts import CompiledLayout, Layout, load
from tests.end_to_end import caches as c
from tests.end_to_end.conftest import Decoders
from tests.end_to_end.harness import AgentProcess, back_to, clients, counts
from tests.unit.layouts import moving

TOKENS = 13 * 16
MODES = ["direct", "staged"]

QUANTISED = """
name = "t/int8"
codec = "int8"
buffers = "layer kv"
{more}
[scale]
place = "{place}"
dtype = "fp32"
order = "block | slot head"
[[piece]]
order = "block | {order}"
"""

INTERLEAVED = """
[placement]
kind = "interleaved"
channels = 8
"""


def values(shape: object, dim: int, seed: int) -> np.ndarray:
    """fp32 bits of small whole numbers, `[layers, kvs, blocks, heads, block_size, dim]`."""
    extents = [getattr(shape, name) for name in ("layers", "kvs", "blocks", "heads", "block_size")]
    whole = np.random.default_rng(seed).integers(-9, 10, [*extents, dim])
    return whole.astype(np.float32).view(np.uint32)


def tensors(layout: CompiledLayout, seed: int = 0) -> list[np.ndarray]:
    """What the cache holds: its elements, and its scales if it has some."""
    found = [values(layout.shape, layout.shape.dim, seed)]
    return found + ([values(layout.shape, 1, seed + 1)] if layout.scale is not None else [])


def put(x: np.ndarray, source: np.ndarray, target: np.ndarray, blocks: int, size: int) -> np.ndarray:
    """The tokens of the source's blocks, in turn, in those of the target; the rest is 0."""
    rows = x[:, :, source].transpose(0, 1, 2, 4, 3, 5)
    rows = rows.reshape(*rows.shape[:2], -1, *rows.shape[4:])
    room = np.zeros((*rows.shape[:2], len(target) * size, *rows.shape[3:]), x.dtype)
    room[:, :, : rows.shape[2]] = rows
    out = np.zeros((*rows.shape[:2], blocks, rows.shape[3], size, rows.shape[4]), x.dtype)
    out[:, :, target] = room.reshape(*rows.shape[:2], len(target), size, *rows.shape[3:]).transpose(
        0, 1, 2, 4, 3, 5
    )
    return out


def pages(layout: CompiledLayout, found: list[np.ndarray]) -> list[list[np.ndarray]]:
    """The bytes of all buffers, by channel."""
    elements = moving.buffers_of(layout, found[0])
    if layout.scale is None:
        return elements
    beside = moving.buffers_of(layout.scale, found[1])
    if not layout.scale.inset:
        return elements + beside
    for buffer, more in zip(elements, beside, strict=True):
        for channel, extra in zip(buffer, more, strict=True):
            channel |= np.concatenate([np.zeros(layout.page_bytes, np.uint8), extra])[: len(channel)]
    return elements


async def move(prefill: AgentProcess, decode: AgentProcess, src: CacheSpec, dst: CacheSpec) -> None:
    """One fetch of shuffled blocks; every byte of the target's blocks is looked at."""
    async with clients(prefill, decode) as (hp, hd):
        before = await counts(hp), await counts(hd)
        device = await hd.allocate(dst, memory="npu8")
        a, b = src.compile(), device.layout
        source, found = KVCache.alloc(src), tensors(a)
        for buffer, (bytes_,) in zip(source.buffers, pages(a, found), strict=True):
            buffer[:] = bytes_
        cache = await hp.register(source)
        rng = np.random.default_rng(1)
        table, into = (
            rng.permutation(src.blocks)[:13],
            rng.permutation(dst.blocks)[: -(-TOKENS // dst.block_size)],
        )
        offer = await hp.offer("r", cache, table, tokens=TOKENS)
        for channel in device.channels:
            channel[:] = 0
        await hd.fetch(offer, into=device, blocks=into, timeout="20s")
        want = pages(b, [put(x, table, into, dst.blocks, dst.block_size) for x in found])
        banks = b.banks or tuple(range(b.channels))
        for base, buffer in zip(device.offsets, want, strict=True):
            for bank, right in zip(banks, buffer, strict=True):
                assert np.array_equal(device.channels[bank][base : base + len(right)], right)
        await device.release()
        await cache.release()
        await back_to(before[0], hp)
        await back_to(before[1], hd)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["buffer", "page"])
async def test_scales_arrive_with_their_elements(
    prefill: AgentProcess, decoders: Decoders, place: str, mode: str
) -> None:
    src = c.source_spec(
        layout=Layout.from_toml(QUANTISED.format(more="", place="buffer", order="slot head dim"))
    )
    there = QUANTISED.format(more=INTERLEAVED, place=place, order="head slot dim")
    dst = c.target_spec(layout=Layout.from_toml(there), codec=None)
    await move(prefill, decoders.get("tcp", mode), src, dst)


@pytest.mark.parametrize("mode", MODES)
async def test_shards_arrive_in_the_banks_that_are_named(
    prefill: AgentProcess, decoders: Decoders, mode: str
) -> None:
    text = load("tenstorrent/kv-sharded").text.replace("[0, 1, 2, 3, 4, 5, 6, 7]", "[6, 1, 3]")
    dst = c.target_spec(layout=Layout.from_toml(text), params={"R": 32})
    await move(prefill, decoders.get("tcp", mode), c.source_spec(layout="vllm/lbnhc"), dst)


async def test_latents_leave_their_rows_and_scales(prefill: AgentProcess, decoders: Decoders) -> None:
    """Rows of 656 bytes into tensors of latents and of rope over eight channels, read under their scales on the way."""
    src = CacheSpec(2, 1, 576, 16, 20, "vllm/mla-fp8", kvs=1)
    apart = load("flashinfer/mla").text.replace("[params]", INTERLEAVED + "[params]")
    dst = CacheSpec(2, 1, 576, 32, 9, Layout.from_toml(apart), kvs=1)
    async with clients(prefill, decoders.get("tcp", "direct")) as (hp, hd):
        device, source = await hd.allocate(dst, memory="npu8"), KVCache.alloc(src)
        rows = load("vllm/mla").compile(src.shape)
        words = np.random.default_rng(3).integers(0x3C00, 0x4400, (2, 1, 20, 16, 1, 576)).astype(np.uint16)
        packed = convert.convert(words, rows, src.compile())
        for buffer, row in zip(source.buffers, packed.reshape(2, -1), strict=True):
            buffer[:] = row
        cache = await hp.register(source)
        table, into = np.arange(13)[::-1].copy(), np.array([4, 0, 5, 2, 8, 1, 7])
        offer = await hp.offer("r", cache, table, tokens=TOKENS)
        for channel in device.channels:
            channel[:] = 0
        await hd.fetch(offer, into=device, blocks=into, timeout="20s")
        wide = load("contiguous/bhsd").compile(src.shape, codec="fp32")
        meant = convert.convert(packed, src.compile(), wide).view(np.uint32).reshape(2, 1, 20, 1, 16, 576)
        want = put(meant, table, into, 9, 32)
        buffers = [
            buffer
            for part in device.layout.parts
            for buffer in moving.buffers_of(part, want[..., part.first : part.first + part.shape.dim])
        ]
        for base, buffer in zip(device.offsets, buffers, strict=True):
            for channel, right in zip(device.channels, buffer, strict=True):
                assert np.array_equal(channel[base : base + len(right)], right)
        await device.release()
        await cache.release()


async def test_banks_that_the_memory_does_not_have(decoders: Decoders, prefill: AgentProcess) -> None:
    text = load("tenstorrent/kv-sharded").text.replace("[0, 1, 2, 3, 4, 5, 6, 7]", "[6, 1, 8]")
    async with clients(prefill, decoders.get("tcp", "direct")) as (_, hd):
        with pytest.raises(HawkError, match=r"channels: .*banks 6, 1, 8; expected banks below 8"):
            await hd.allocate(c.target_spec(layout=Layout.from_toml(text)), memory="npu8")


async def test_scales_are_not_left_behind(decoders: Decoders, prefill: AgentProcess) -> None:
    """A target without room for them refuses the job by name, and nothing moves."""
    src = c.source_spec(
        layout=Layout.from_toml(QUANTISED.format(more="", place="buffer", order="slot head dim"))
    )
    bare = QUANTISED.format(more=INTERLEAVED, place="buffer", order="slot head dim")
    begin, end = bare.index("[scale]"), bare.index("[[piece]]")
    dst = c.target_spec(layout=Layout.from_toml(bare[:begin] + bare[end:]), codec=None)
    async with clients(prefill, decoders.get("tcp", "direct")) as (hp, hd):
        device, cache = await hd.allocate(dst, memory="npu8"), await hp.register(KVCache.alloc(src))
        offer = await hp.offer("r", cache, np.arange(13), tokens=TOKENS)
        c.paint(device)
        with pytest.raises(HawkError, match="scale"):
            await hd.fetch(offer, into=device, blocks=[0, 1, 2, 3], timeout="20s")
        assert c.untouched(device)
        await offer.withdraw()
        await device.release()
        await cache.release()
