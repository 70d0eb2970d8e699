"""The emulated NPU of this process, and how it comes by its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.vllm.npu.tiles import Tiles

if TYPE_CHECKING:
    import hawk
    from hawk.integrations.provided import Wanted

LAYERS: dict[str, tuple[Tiles, Tiles]] = {}
"""K and V of each layer, by vLLM's name of the layer."""

PAGES: list[Any] = []
"""vLLM's own tensors, which nobody is to read or write."""


async def provide(client: hawk.Client, wanted: Wanted) -> hawk.Cache:
    """The cache in the NPU's channels, and NaN in the tensors that vLLM made for it."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # the kernels of `attention` compute by it, and may be the first here to do so
    codec = wanted.options["codec"]
    cache = await client.allocate(wanted.spec("tenstorrent/kv", codec=codec), memory="npu0")
    shape = (wanted.blocks, wanted.heads, wanted.block_size, wanted.dim)
    for number, name in enumerate(wanted.names):
        k, v = (Tiles(cache.buffer(number, kv), shape, codec, rotary=kv == 0) for kv in (0, 1))
        LAYERS[name] = k, v
        PAGES.append(wanted.given[name].fill_(float("nan")))
    return cache


def channels() -> int:
    """How many the device has."""
    return len(next(iter(LAYERS.values()))[0].banks)


def untouched() -> bool:
    """Whether vLLM's own tensors are there, and still NaN throughout."""
    return bool(PAGES) and all(bool(page.isnan().all()) for page in PAGES)


def made(how: str) -> None:
    """The device as if it were made otherwise: see `Tiles`."""
    for both in LAYERS.values():
        for tiles in both:
            tiles.made = how


def save(blocks: list[int], tokens: int, file: str) -> None:
    """Writes what the first tokens of these blocks are, `float32[layers, 2, tokens, heads, dim]`."""
    table = np.array(blocks)
    found = np.stack([np.stack([tiles.read(table)[:tokens] for tiles in both]) for both in LAYERS.values()])
    np.save(file, found)
