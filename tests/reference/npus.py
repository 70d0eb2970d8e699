"""Caches of NPUs, from their public descriptions: pad, reshape and transpose only; Tenstorrent's are in `tenstorrent`.

`x` is `[layers, kvs, blocks, heads, block_size, dim]`; what comes back is a list of arrays in C order, one a buffer.
"""

import numpy as np

from tests.reference import tenstorrent


def padded(x: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    """`x` with zeros behind the end of `axis`, to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return np.pad(x, widths)


def ascend_nz(x: np.ndarray, lanes: int = 16) -> list[np.ndarray]:
    """Of K and of V of each layer (blocks, heads * head_size // lanes, block_size, lanes)."""
    layers, kvs, blocks, heads, slots, dim = x.shape
    rows = x.transpose(0, 1, 2, 4, 3, 5).reshape(layers, kvs, blocks, slots, heads * dim // lanes, lanes)
    return [np.ascontiguousarray(t) for layer in rows.transpose(0, 1, 2, 4, 3, 5) for t in layer]


def tpu_pages(x: np.ndarray, packing: int) -> np.ndarray:
    """(layers, pages, page_size, 2 * heads // packing, packing, head_dim to 128), K and V of each head in turn."""
    layers, _, blocks, _, slots, _ = x.shape
    wide = padded(x, 5, 128)
    rows = wide.transpose(0, 2, 4, 3, 1, 5).reshape(layers, blocks, slots, -1, wide.shape[-1])
    rows = padded(rows, 3, packing)
    return rows.reshape(layers, blocks, slots, -1, packing, wide.shape[-1])


def tpu_vllm(x: np.ndarray, packing: int = 2) -> list[np.ndarray]:
    """The array in C order, one a layer."""
    return list(np.ascontiguousarray(tpu_pages(x, packing)))


def tpu_vllm_packed(x: np.ndarray, packing: int = 2) -> list[np.ndarray]:
    """The array under the tiling (packing, 128)(packing, 1): in each row of words the packed elements side by side."""
    pages = tpu_pages(x, packing)
    lanes = pages.reshape(*pages.shape[:-1], pages.shape[-1] // 128, 128)
    return list(np.ascontiguousarray(np.moveaxis(lanes, 4, 6)))


def xla_tiled(x: np.ndarray, rows: int, woven: int) -> list[np.ndarray]:
    """One array under the tiling (rows, 128)(woven, 1) of its last two axes."""
    wide = padded(padded(x, 4, rows), 5, 128)
    *outer, slots, dim = wide.shape
    tiles = wide.reshape(*outer, slots // rows, rows // woven, woven, dim // 128, 128)
    n = len(outer)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return [np.ascontiguousarray(tiles.transpose(order))]


def tenstorrent_tiles(x: np.ndarray, rotary: int) -> list[np.ndarray]:
    """`[tiles, 1024]` of K and of V of each layer, the first `rotary` elements of K interleaved."""
    found = []
    for layer in x:
        for kv, tensor in enumerate(layer):
            turned = tensor
            if kv == 0 and rotary:
                parts = tenstorrent.interleave(tensor[..., :rotary]), tensor[..., rotary:]
                turned = np.concatenate(parts, axis=-1)
            found.append(tenstorrent.tilise(turned))
    return found


def height_sharded(tiles: np.ndarray, per_shard: int, banks: int) -> np.ndarray:
    """What lies in each bank, `[banks, tiles, 1024]`: shards of `per_shard` tiles dealt to the banks in turn."""
    count = -(-len(tiles) // per_shard)
    rounds = -(-count // banks)
    room = np.zeros((rounds * banks * per_shard, tiles.shape[1]), tiles.dtype)
    room[: len(tiles)] = tiles
    return room.reshape(rounds, banks, per_shard, -1).transpose(1, 0, 2, 3).reshape(banks, -1, tiles.shape[1])
