"""The documented decode loop with ttnn itself, run in a process that sees one kind of chip."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.integrations.ttnn import HostTensors, PagedCache, api
from tests.ttnn.checks import by_itself, device, library, tensor

if TYPE_CHECKING:
    from collections.abc import Callable


def accepted(work: Callable[[], Any]) -> str:
    """What ttnn says against an operation; nothing where it takes it, and at most cannot compile its kernels.

    Arguments are looked at before any kernel is compiled, which a stand-in for the compiler refuses.
    """
    try:
        work()
    except RuntimeError as refusal:
        said = str(refusal)
        return "" if "Failed to generate binaries" in said else said
    return ""


def example() -> Any:
    """docs/examples/ttnn_decode.py."""
    path = Path(__file__).parents[2] / "docs" / "examples" / "ttnn_decode.py"
    spec = importlib.util.spec_from_file_location("ttnn_decode", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def decode_loop() -> dict[str, str]:
    """What ttnn says against each operation of the documented decode loop, over a request that agents brought."""
    program = example()
    ttnn = library()
    cache_of = PagedCache.alloc(device(), program.MODEL, program.BLOCKS)
    table = program.on_device(device(), np.asarray([program.TABLE], np.int32))
    said = {}
    with HostTensors.for_request(program.MODEL, program.TOKENS) as held:
        asyncio.run(program.fetch(held))
        pages_of = np.stack([b.view(np.uint16) for b in program.prompt().buffers])
        pages = pages_of.reshape(2, 2, 1, 128, 8, 128).copy()
        pages[:, :, :, program.TOKENS :] = 0
        for layer in range(2):
            for kv in range(2):
                theirs = tensor(by_itself(pages, layer, kv), program.MODEL.codec)
                if not np.array_equal(api.shard_bytes(held.tensor(layer, kv)), api.shard_bytes(theirs)):
                    said[f"layer {layer} kv {kv}"] = "other bytes"
        said["fill"] = accepted(lambda: cache_of.fill(held, table))
        wrong = held.tensor(0, 0).to(device(), ttnn.DRAM_MEMORY_CONFIG)
        odd = ttnn.allocate_tensor_on_device(
            ttnn.Shape([8, 8, 64, 128]), ttnn.bfloat16, ttnn.TILE_LAYOUT, device(), ttnn.DRAM_MEMORY_CONFIG
        )
        said["other numbers"] = accepted(
            lambda: ttnn.experimental.paged_fill_cache(odd, wrong, table, batch_idx=0)
        )
    said["step"] = accepted(lambda: program.step(device(), cache_of, table, program.TOKENS))
    # Attention comes after an update that may not have run: asked for by itself.
    at = program.on_device(device(), np.asarray([program.TOKENS], np.int32))
    query = program.on_device(device(), np.zeros((1, 1, 32, 128), np.float32))
    said["attention"] = accepted(
        lambda: ttnn.transformer.paged_scaled_dot_product_attention_decode(
            query, *cache_of.tensors[0], table, cur_pos_tensor=at, scale=128**-0.5
        )
    )
    return said
