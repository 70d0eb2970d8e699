"""Attention over tiles: a step's rows go into them, and what is attended to comes out of them.

The arithmetic is vLLM's own for CPUs, so that tokens can be compared with an ordinary engine's one by one.  It is given
pages that were gathered from tiles for the step, and never the page tensor that vLLM made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from tests.vllm.npu import device


class NpuAttention(CPUAttentionBackend):
    """What vLLM asks of an attention backend."""

    @staticmethod
    def get_name() -> str:
        """vLLM's word for a backend that is not its own."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[NpuAttentionImpl]:
        """What computes."""
        return NpuAttentionImpl


class NpuAttentionImpl(CPUAttentionBackendImpl):
    """One layer."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """The step's rows go into tiles."""
        slots = slot_mapping.numpy()
        for tiles, rows in zip(device.LAYERS[layer.layer_name], (key, value), strict=True):
            tiles.write(slots, rows[: len(slots)].float().numpy())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attends to rows out of tiles; of a prompt's step, to its own rows as they were computed.

        That is how such a device prefills: what it has just computed is at hand, before it is rounded into tiles.  A
        row that is alone, as in decoding, comes out of its tile.
        """
        if attn_metadata is None:
            return output
        keys, values = device.LAYERS[layer.layer_name]
        size, lengths = keys.shape[2], attn_metadata.seq_lens.tolist()
        starts = attn_metadata.query_start_loc.tolist()
        counts = [-(-length // size) for length in lengths]
        # The kernel multiplies rows behind a request's last by nothing, so they have to be numbers.
        pages = torch.zeros((sum(counts), *kv_cache.shape[1:]), dtype=kv_cache.dtype)
        table = torch.zeros_like(attn_metadata.block_table)
        page = 0
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks = attn_metadata.block_table[i, :count].numpy()
            k, v = (torch.from_numpy(tiles.read(blocks)[:length]).to(key.dtype) for tiles in (keys, values))
            begin, end = starts[i : i + 2]
            if end - begin > 1:
                k[length - (end - begin) :] = key[begin:end]
                v[length - (end - begin) :] = value[begin:end]
            table[i, :count] = torch.arange(page, page + count)
            self._write(layer, k, v, pages, torch.arange(page * size, page * size + length))
            page += count
        gathered = dataclasses.replace(attn_metadata, block_table=table)
        return super().forward(
            layer, query, key, value, pages, gathered, output, output_scale, output_block_scale
        )

    def _write(
        self, layer: Any, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rows into pages as vLLM's kernel reads them."""
        number, heads, size, width = pages.shape
        halves = pages.view(number, heads, 2 * size, width // 2).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(k, v, *halves, slots, layer.isa)
