"""Tenstorrent's paged KV tensors: tiles, K's rotary order, block floating point, DRAM banks.

Written from tt-metal's public description with reshape, transpose and floating-point rounding, so that it shares
neither form nor arithmetic with HAWK.  K or V of one layer is an array `[blocks, heads, block_size, dim]`; the
tensor of that shape has TILE layout and lies in interleaved DRAM.
"""

import numpy as np

TILE, FACE = 32, 16
BITS = {"bfp8_b": 7, "bfp4_b": 3}  # bits of magnitude
PAGE_BYTES = {"fp32": 4096, "bf16": 2048, "bfp8_b": 1088, "bfp4_b": 576}


# -- order ---------------------------------------------------------------------------------------------------


def interleave(k: np.ndarray) -> np.ndarray:
    """Hugging Face's order of a head (two halves) into Meta's: out[2i] = k[i], out[2i+1] = k[i + dim/2]."""
    out = np.empty_like(k)
    half = k.shape[-1] // 2
    out[..., 0::2], out[..., 1::2] = k[..., :half], k[..., half:]
    return out


def deinterleave(k: np.ndarray) -> np.ndarray:
    """Meta's order of a head into Hugging Face's."""
    return np.concatenate([k[..., 0::2], k[..., 1::2]], axis=-1)


def tilise(x: np.ndarray) -> np.ndarray:
    """`[blocks, heads, rows, columns]` as `[tiles, 1024]`: padded with 0 to 32 x 32, tiles row-major, in each four
    16 x 16 faces row-major, each row-major."""
    blocks, heads, rows, columns = x.shape
    padded = np.zeros((blocks, heads, -(-rows // TILE) * TILE, -(-columns // TILE) * TILE), dtype=x.dtype)
    padded[:, :, :rows, :columns] = x
    tiles = [
        padded[b, h, r : r + TILE, c : c + TILE]
        for b in range(blocks)
        for h in range(heads)
        for r in range(0, padded.shape[2], TILE)
        for c in range(0, padded.shape[3], TILE)
    ]
    faces = [
        [tile[r : r + FACE, c : c + FACE].ravel() for r in (0, FACE) for c in (0, FACE)] for tile in tiles
    ]
    return np.array(faces, dtype=x.dtype).reshape(len(tiles), TILE * TILE)


def untilise(tiles: np.ndarray, shape: tuple[int, int, int, int]) -> np.ndarray:
    """The inverse of `tilise`, padding dropped."""
    blocks, heads, rows, columns = shape
    down, across = -(-rows // TILE), -(-columns // TILE)
    faces = tiles.reshape(blocks, heads, down, across, 2, 2, FACE, FACE)
    matrix = faces.transpose(0, 1, 2, 4, 6, 3, 5, 7).reshape(blocks, heads, down * TILE, across * TILE)
    return np.ascontiguousarray(matrix[:, :, :rows, :columns])


# -- codecs --------------------------------------------------------------------------------------------------


def to_bf16(bits: np.ndarray) -> np.ndarray:
    """fp32 bits (uint32) to bf16 bits (uint16), nearest even, any NaN 0x7fc0."""
    size = bits & 0x7FFFFFFF
    # For one sign, the order of floats is the order of their bits: rounding bits rounds values.
    rounded = np.rint(size / 65536.0).astype(np.uint32)
    return np.where(size > 0x7F800000, 0x7FC0, rounded | bits >> 31 << 15).astype(np.uint16)


def pack(bits: np.ndarray, codec: str) -> np.ndarray:
    """fp32 bits `uint32[tiles, 1024]` as block floating point, `uint8[tiles, page_bytes]`."""
    m = BITS[codec]
    rows = bits.reshape(len(bits), 64, 16)
    exponent = (rows >> 23 & 0xFF).astype(np.int64)
    shared = exponent.max(axis=2)
    significand = np.where(exponent == 0, 0.0, (rows & 0x7FFFFF) + 8388608.0)
    shifted = np.floor(np.ldexp(significand, (exponent - shared[:, :, None]).astype(np.int32)))
    magnitude = np.minimum(np.rint(shifted / 2.0 ** (24 - m)), 2**m - 1).astype(np.uint8)
    negative = (rows >> 31 == 1) & (magnitude > 0)
    codes = (magnitude + np.where(negative, 2**m, 0)).astype(np.uint8).reshape(len(bits), 1024)
    if m == 3:
        codes = codes[:, 0::2] + 16 * codes[:, 1::2]
    return np.hstack([shared.astype(np.uint8), codes])


def unpack(raw: np.ndarray, codec: str) -> np.ndarray:
    """The fp32 bits `uint32[tiles, 1024]` of block floating point pages."""
    m = BITS[codec]
    shared, codes = raw[:, :64], raw[:, 64:]
    if m == 3:
        codes = np.stack([codes % 16, codes // 16], axis=2)
    codes = codes.reshape(len(raw), 64, 16).astype(np.int64)
    sign = np.where(codes >= 2**m, -1.0, 1.0)
    power = shared.astype(np.int32)[:, :, None] - 127 - (m - 1)
    with np.errstate(over="ignore"):
        value = np.ldexp(sign * (codes % 2**m), power).astype(np.float32)
    return value.view(np.uint32).reshape(len(raw), 1024)


# -- pages ---------------------------------------------------------------------------------------------------


def pages(k: np.ndarray, codec: str, interleave_dim: bool) -> np.ndarray:
    """The pages of one tensor, `uint8[pages, page_bytes]`.

    `k` is `[blocks, heads, block_size, dim]`, bf16 bits as uint16 or fp32 bits as uint32.  `interleave_dim` is for K.
    """
    tiles = tilise(interleave(k) if interleave_dim else k)
    if codec == "bf16" and tiles.dtype == np.uint16:
        return tiles.view(np.uint8)
    bits = tiles.astype(np.uint32) << 16 if tiles.dtype == np.uint16 else tiles
    if codec == "fp32":
        return bits.view(np.uint8)
    if codec == "bf16":
        return to_bf16(bits).view(np.uint8)
    return pack(bits, codec)


def unpages(raw: np.ndarray, codec: str, shape: tuple[int, int, int, int], interleaved: bool) -> np.ndarray:
    """fp32 bits `uint32[blocks, heads, block_size, dim]` out of a tensor's pages; of bf16 they are `bits << 16`."""
    raw = np.ascontiguousarray(raw)
    if codec == "bf16":
        tiles = raw.view(np.uint16).astype(np.uint32) << 16
    elif codec == "fp32":
        tiles = raw.view(np.uint32)
    else:
        tiles = unpack(raw, codec)
    k = untilise(tiles, shape)
    return deinterleave(k) if interleaved else k


def bank(page: int, channels: int, stride: int) -> tuple[int, int]:
    """(bank, byte offset from the tensor's address in that bank) of a page."""
    return page % channels, page // channels * stride


def to_channels(raw: np.ndarray, channels: int, stride: int) -> list[np.ndarray]:
    """What lies in each bank, `uint8[nbytes]` each, as long as the longest; gaps and missing pages are 0."""
    out = [np.zeros(-(-len(raw) // channels) * stride, dtype=np.uint8) for _ in range(channels)]
    for i, page in enumerate(raw):
        channel, at = bank(i, channels, stride)
        out[channel][at : at + len(page)] = page
    return out


def from_channels(banks: list[np.ndarray], count: int, page_bytes: int, stride: int) -> np.ndarray:
    """The first `count` pages out of the banks, `uint8[count, page_bytes]`."""
    out = np.empty((count, page_bytes), dtype=np.uint8)
    for i in range(count):
        channel, at = bank(i, len(banks), stride)
        out[i] = banks[channel][at : at + page_bytes]
    return out
