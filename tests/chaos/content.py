"""What every byte of a transfer has to be: a function of request, layer, K or V, token, head and dim, and nothing else.

Bits are made by an integer hash, so that any place can be checked without having kept anything.  Where they have
to lie in the decode side's channels is said by the reference in `tests.reference.tenstorrent`, which shares
nothing with HAWK.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hawk.cache import CacheSpec
from tests.reference import tenstorrent as tt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    U8 = NDArray[np.uint8]
    U16 = NDArray[np.uint16]

LAYERS, HEADS, DIM = 3, 2, 64
CHANNELS = 7
SOURCE = CacheSpec(layers=LAYERS, heads=HEADS, dim=DIM, block_size=16, blocks=96)
TARGET = CacheSpec(
    layers=LAYERS, heads=HEADS, dim=DIM, block_size=32, blocks=40, layout="tenstorrent/kv", codec="bf16"
).shard(tp_rank=0, tp_size=1)
PARTS = [SOURCE.shard(tp_rank=rank, tp_size=HEADS) for rank in range(HEADS)]
"""The caches of a prefill group that shares the heads out, and which agent's clients have which."""
RANK = {"p0": 0, "p1": 1}
PAGE = tt.PAGE_BYTES["bf16"]

CANARY = 0xA5
"""What blocks hold that belong to no job."""
POISON = 0x7F5A
"""What source blocks hold that are not written yet, or are the engine's again."""


def bits(request: int, layer: int, kv: int, first: int, tokens: int) -> U16:
    """The cache's bits of tokens `[first, first + tokens)`, `uint16[tokens, heads, dim]`."""
    row = HEADS * DIM
    x = np.arange(first * row, (first + tokens) * row, dtype=np.uint64)
    x += np.uint64(((request * LAYERS + layer) * 2 + kv) << 24)
    # splitmix64's finaliser: neighbouring numbers become bits that have nothing to do with each other.
    x *= np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(48)).astype(np.uint16).reshape(tokens, HEADS, DIM)


class Pool:
    """The pages of one decode cache in its channels, as one process sees them.

    channels    `uint8[region bytes]` each
    offsets     where the buffer of (layer, kv) begins in each of them
    """

    def __init__(self, channels: Sequence[U8], offsets: Sequence[int]) -> None:
        self._channels = channels
        self._offsets = offsets
        self._per_block = HEADS * -(-TARGET.block_size // tt.TILE) * -(-DIM // tt.TILE)

    def _pages(self, block: int, layer: int, kv: int) -> Iterator[U8]:
        """The pages of one block, in their order, as views."""
        base = self._offsets[layer * 2 + kv]
        for i in range(self._per_block):
            channel, at = tt.bank(block * self._per_block + i, len(self._channels), PAGE)
            yield self._channels[channel][base + at : base + at + PAGE]

    def paint(self, blocks: Sequence[int]) -> None:
        """Fills blocks with the canary."""
        for block in blocks:
            for layer in range(LAYERS):
                for kv in range(2):
                    for page in self._pages(block, layer, kv):
                        page[:] = CANARY

    def dirty(self, blocks: Sequence[int]) -> str:
        """Where a block does not hold the canary alone, or nothing."""
        for block in blocks:
            for layer in range(LAYERS):
                for kv in range(2):
                    for i, page in enumerate(self._pages(block, layer, kv)):
                        wrong = np.flatnonzero(page != CANARY)
                        if len(wrong):
                            at = int(wrong[0])
                            return (
                                f"block {block}, layer {layer}, {'KV'[kv]}, page {i}: {len(wrong)} bytes written "
                                f"that no job owned, the first at {at}: {int(page[at]):#x}"
                            )
        return ""

    def differs(self, request: int, blocks: Sequence[int], first: int, tokens: int) -> str:
        """Where the blocks do not hold tokens `[first, first + tokens)` of a request, or nothing.

        Rows before the first token are a neighbour's and have to hold the canary; rows after the last, up to
        the end of its block, are zero.
        """
        size, last = TARGET.block_size, first + tokens
        begin, end = first // size, -(-last // size)
        lead = first - begin * size
        for layer in range(LAYERS):
            for kv in range(2):
                rows = np.zeros(((end - begin) * size, HEADS, DIM), np.uint16)
                rows[:lead] = CANARY << 8 | CANARY
                rows[lead : lead + tokens] = bits(request, layer, kv, first, tokens)
                tensor = rows.reshape(end - begin, size, HEADS, DIM).transpose(0, 2, 1, 3)
                right = tt.pages(np.ascontiguousarray(tensor), "bf16", kv == 0)
                for number, block in enumerate(blocks[begin:end]):
                    for i, page in enumerate(self._pages(block, layer, kv)):
                        expected = right[number * self._per_block + i]
                        wrong = np.flatnonzero(page != expected)
                        if len(wrong):
                            at = int(wrong[0])
                            return (
                                f"table entry {begin + number} (block {block}), layer {layer}, {'KV'[kv]}, page {i}: "
                                f"{len(wrong)} wrong bytes, the first at {at}: {int(page[at]):#x} instead of "
                                f"{int(expected[at]):#x}"
                            )
        return ""
