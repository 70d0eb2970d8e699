"""Checks every byte of a device cache, knowing numpy and nothing of HAWK; run as a script in a process of its own.

The cache's contents are a function of (layer, kv, token, head, dim), `elements`, which the demo also fills the
source with.  From it this program works out what each byte of each memory channel has to be, by its own account
of one arrangement: the tensor (blocks, heads, slots, dim) of each layer's K and V lies in 32 x 32 tiles, a tile
is four 16 x 16 faces, a tile is a page, and page i lies in channel i % channels.  K's head is stored with the
halves of each rotary pair side by side.  Pages hold bf16, or 8-bit block floating point with one exponent for
each row of a face.  Blocks that the request has nothing to do with must still hold the byte `untouched`.

stdin takes one JSON object, a `Job` by its fields; stdout gives one JSON object, a `Verdict` by its fields.
Exit status: 0 all is right, 1 a byte is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

TILE, FACE = 32, 16
BATCH = 1 << 16
"""Elements worked on at a time by one thread: small temporaries, so that memory is bounded and the caches help."""


@dataclass(frozen=True)
class Job:
    """What lies where.

    tokens          tokens `[0, tokens)` of the request are there; the rest of the last block is zero
    blocks          blocks of the device cache; `table[i]` is the one that holds tokens from `i * block_size` on
    codec           "bf16" or "bfp8_b"
    align           bytes; a page's stride is its size rounded up to this
    bases           byte offset of the tensor of each layer's K and V, the same in every channel
    fds             one descriptor per channel
    channel_bytes   bytes of each
    untouched       what every byte of the other blocks holds
    """

    layers: int
    heads: int
    dim: int
    block_size: int
    blocks: int
    tokens: int
    table: list[int]
    codec: str
    align: int
    bases: list[list[int]]
    fds: list[int]
    channel_bytes: int
    untouched: int


@dataclass(frozen=True)
class Verdict:
    """What was found.

    checked     bytes compared, per channel
    mismatch    one sentence on the first wrong byte, or ""
    """

    seconds: float
    checked: list[int]
    mismatch: str


# -- what the cache holds ------------------------------------------------------------------------------------


def elements(layer: int, kv: int, first: int, count: int, heads: int, dim: int) -> U16:
    """bf16 bits of tokens `[first, first + count)`, `uint16[count, heads, dim]`.

    Finite values from 2**-7 to 2 of both signs.  Neighbours in any axis differ, and so do rows of different
    tokens, layers and kvs, 16 elements at a time, so bytes in the wrong place show.
    """
    token = np.arange(first, first + count)
    place = (np.arange(heads * dim) * 12289).astype(np.uint16)
    key = (layer * 2 + kv + 1) * 25173
    x = (token * 40503 + key).astype(np.uint16)[:, None] + place
    x ^= x >> np.uint16(7)
    x *= np.uint16(0x6D2B)
    # Once more: equal sums above would make rows of 16 elements alike, and their exchange would not show.
    x += (token * 7919 + key * 3).astype(np.uint16)[:, None]
    x *= np.uint16(0x4F6D)
    x ^= x >> np.uint16(9)
    x &= np.uint16(0x83FF)  # the sign, 7 bits of mantissa and the lowest 3 bits of the exponent
    x += np.uint16(0x3C00)
    return x.reshape(count, heads, dim)


# -- how the device holds it ---------------------------------------------------------------------------------


def tiles(rows: U16, block_size: int, interleave: bool) -> U16:
    """`[blocks * block_size, heads, dim]` as `[blocks, tiles of a block, 1024]`, tiles row by row, face by face."""
    tokens, heads, dim = rows.shape
    if interleave:
        pairs = np.empty_like(rows)
        pairs[..., 0::2], pairs[..., 1::2] = rows[..., : dim // 2], rows[..., dim // 2 :]
        rows = pairs
    down, across = block_size // TILE, dim // TILE
    split = rows.reshape(tokens // block_size, down, 2, FACE, heads, across, 2, FACE)
    #       block 0, tile row 1, face row 2, row 3, head 4, tile column 5, face column 6, column 7
    return np.ascontiguousarray(split.transpose(0, 4, 1, 5, 2, 6, 3, 7)).reshape(
        tokens // block_size, heads * down * across, TILE * TILE
    )


def block_float(bits: U16) -> U8:
    """bf16 bits `[..., 1024]` as bytes `[..., 1088]`: 64 exponents, then 1024 of sign and 7 bits of magnitude.

    The 16 elements of a row of a face share the largest exponent.  The others' significands are shifted down to
    it, and 7 bits are kept, rounded to nearest, ties to even.
    """
    row = bits.reshape(*bits.shape[:-1], 64, 16)
    exponent = row >> np.uint16(7)
    exponent &= np.uint16(0xFF)
    # The same as max(axis=-1), which numpy is ten times slower at.
    shared = np.ascontiguousarray(exponent.reshape(-1, 16).T).max(axis=0).reshape(row.shape[:-1])
    # 8 bits of significand at bit 7 of 16, so that rounding cannot overflow.  A shift by 8 or more leaves less
    # than half of the last bit that is kept, so what falls off at the lower end never matters.
    value = row & np.uint16(0x7F)
    value |= np.uint16(0x80)
    value <<= np.uint16(7)
    value *= exponent != 0
    np.subtract(shared[..., None], exponent, out=exponent)
    value >>= exponent  # numpy defines shifts by 16 and more: nothing is left
    odd = value >> np.uint16(8)
    odd &= np.uint16(1)
    value += odd
    value += np.uint16(0x7F)
    value >>= np.uint16(8)
    value -= value >> np.uint16(7)  # 128, a carry out of the rounding, saturates
    sign = row >> np.uint16(15)
    sign <<= np.uint16(7)
    sign *= value != 0
    value |= sign
    out = np.empty((*bits.shape[:-1], 64 + TILE * TILE), np.uint8)
    out[..., :64] = shared
    out[..., 64:] = value.reshape(*bits.shape[:-1], TILE * TILE)
    return out


def pages(job: Job, layer: int, kv: int, entry: int, count: int) -> U8:
    """What the blocks `table[entry : entry + count]` have to hold, `uint8[count, pages of a block, page bytes]`."""
    first = entry * job.block_size
    there = min(count * job.block_size, job.tokens - first)
    rows = np.zeros((count * job.block_size, job.heads, job.dim), np.uint16)
    rows[:there] = elements(layer, kv, first, there, job.heads, job.dim)
    tiled = tiles(rows, job.block_size, interleave=kv == 0)
    return block_float(tiled) if job.codec == "bfp8_b" else tiled.view(np.uint8)


# -- comparing -----------------------------------------------------------------------------------------------


class Checker:
    """Compares the channels with what they have to hold, tensor by tensor."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.page_bytes = {"bf16": 2048, "bfp8_b": 1088}[job.codec]
        self.stride = -(-self.page_bytes // job.align) * job.align
        self.block_pages = job.heads * (job.block_size // TILE) * (job.dim // TILE)
        self.maps = [mmap.mmap(fd, job.channel_bytes, prot=mmap.PROT_READ) for fd in job.fds]
        self.channels: list[U8] = [np.frombuffer(m, np.uint8) for m in self.maps]
        if job.block_size % TILE or job.dim % (2 * TILE):
            raise SystemExit("the checker knows whole tiles only")

    def tensor(self, plane: int) -> tuple[list[int], str]:
        """Checks one layer's K or V; bytes compared per channel, and the first mismatch or ""."""
        job = self.job
        layer, kv = divmod(plane, 2)
        step = max(1, BATCH // (job.block_size * job.heads * job.dim))
        checked = [0] * len(self.channels)
        for entry in range(0, len(job.table), step):
            blocks = np.asarray(job.table[entry : entry + step])
            wrong = self._blocks(layer, kv, blocks, pages(job, layer, kv, entry, len(blocks)), checked)
            if wrong:
                return checked, wrong
        others = np.setdiff1d(np.arange(job.blocks), job.table)
        for begin in range(0, len(others), step):
            blocks = others[begin : begin + step]
            canary = np.full((len(blocks), self.block_pages, self.page_bytes), job.untouched, np.uint8)
            wrong = self._blocks(layer, kv, blocks, canary, checked)
            if wrong:
                return checked, wrong
        return checked, ""

    def _blocks(self, layer: int, kv: int, blocks: NDArray[np.int64], want: U8, checked: list[int]) -> str:
        """Compares whole blocks; `want` is `uint8[blocks, pages of a block, page bytes]`."""
        base, count = self.job.bases[layer][kv], len(self.channels)
        number = (blocks[:, None] * self.block_pages + np.arange(self.block_pages)).ravel()
        want = want.reshape(-1, self.page_bytes)
        for c, channel in enumerate(self.channels):
            mine = np.flatnonzero(number % count == c)
            slots = number[mine] // count
            if not len(slots):
                continue
            end = base + (int(slots.max()) + 1) * self.stride
            if end > len(channel):
                return f"channel {c} ends at byte {len(channel)}, before the tensor's {end}"
            cells = channel[base:end].reshape(-1, self.stride)[:, : self.page_bytes]
            # 8 bytes at a time where that divides a page, which it does for both codecs.
            got = np.ascontiguousarray(cells[slots]).view(np.uint64)
            bad = got != want[mine].view(np.uint64)
            checked[c] += got.nbytes
            if bad.any():
                row = int(np.flatnonzero(bad.any(axis=1))[0])
                have, right = got[row].view(np.uint8), want[mine[row]]
                at = int(np.flatnonzero(have != right)[0])
                page = int(number[mine[row]])
                return (
                    f"channel {c}, page {page} of layer {layer} {'KV'[kv]} (block {page // self.block_pages}), "
                    f"byte {at} of the page, {base + page // count * self.stride + at} of the channel: "
                    f"0x{have[at]:02x} instead of 0x{right[at]:02x}"
                )
        return ""

    def run(self, threads: int) -> Verdict:
        """Checks all tensors, `threads` at a time."""
        began = time.perf_counter()
        checked = [0] * len(self.channels)
        mismatch = ""
        with ThreadPoolExecutor(threads) as pool:
            for part, wrong in pool.map(self.tensor, range(2 * self.job.layers)):
                checked = [a + b for a, b in zip(checked, part, strict=True)]
                mismatch = mismatch or wrong
        return Verdict(time.perf_counter() - began, checked, mismatch)


def main() -> int:
    """Reads the job from stdin, writes the verdict to stdout."""
    job = Job(**json.load(sys.stdin))
    verdict = Checker(job).run(min(4, len(os.sched_getaffinity(0))))
    json.dump(dataclasses.asdict(verdict), sys.stdout)
    return 1 if verdict.mismatch else 0


if __name__ == "__main__":
    sys.exit(main())
