"""Caches of inference engines, from their public descriptions: reshape and transpose only.

`x` is `[layers, kvs, blocks, heads, block_size, dim]`, of any type of number; what comes back is a list of arrays, one
for each tensor the engine allocates, in C order as they lie in memory.
"""

import numpy as np

from tests.reference import small_floats


def each_layer(x: np.ndarray, *axes: int) -> list[np.ndarray]:
    """One tensor a layer, the axes (1 kv, 2 block, 3 head, 4 slot, 5 dim) in this order."""
    return [np.ascontiguousarray(x[i : i + 1].transpose(0, *axes)) for i in range(len(x))]


def apart(x: np.ndarray, *axes: int) -> list[np.ndarray]:
    """One tensor for K and one for V of each layer, the axes (2 block, 3 head, 4 slot, 5 dim) in this order."""
    kinds = [x[i : i + 1, k : k + 1] for i in range(x.shape[0]) for k in range(x.shape[1])]
    return [np.ascontiguousarray(t.transpose(0, 1, *axes)) for t in kinds]


def vllm_nhd(x: np.ndarray) -> list[np.ndarray]:
    """(2, blocks, block_size, heads, head_size)."""
    return each_layer(x, 1, 2, 4, 3, 5)


def vllm_hnd(x: np.ndarray) -> list[np.ndarray]:
    """(2, blocks, heads, block_size, head_size)."""
    return each_layer(x, 1, 2, 3, 4, 5)


def logical(x: np.ndarray) -> np.ndarray:
    """vLLM's [L, B, H, N, C]: C is K, then V of one head."""
    return np.concatenate([x[:, 0], x[:, 1]], axis=-1)


def vllm_lbnhc(x: np.ndarray) -> list[np.ndarray]:
    return list(np.ascontiguousarray(logical(x).transpose(0, 1, 3, 2, 4)))


def vllm_lbhnc(x: np.ndarray) -> list[np.ndarray]:
    return list(logical(x))


def vllm_lhbnc(x: np.ndarray) -> list[np.ndarray]:
    return list(np.ascontiguousarray(logical(x).transpose(0, 2, 1, 3, 4)))


def vllm_blhnc(x: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(logical(x).transpose(1, 0, 2, 3, 4))]


def vllm_blnhc(x: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(logical(x).transpose(1, 0, 3, 2, 4))]


def vllm_bhlnc(x: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(logical(x).transpose(1, 2, 0, 3, 4))]


def vllm_cpu(x: np.ndarray) -> list[np.ndarray]:
    """[B, H, N, 2D], in each (block, head) K as [D, N], then V as [N, D]."""
    layers, _, blocks, heads, slots, dim = x.shape
    out = np.empty((layers, blocks, heads, 2, slots * dim), x.dtype)
    for b in range(blocks):
        for h in range(heads):
            for layer in range(layers):
                out[layer, b, h, 0] = x[layer, 0, b, h].T.ravel()
                out[layer, b, h, 1] = x[layer, 1, b, h].ravel()
    return list(out)


def vllm_cpu_amx(x: np.ndarray) -> list[np.ndarray]:
    """As on CPUs with tile instructions: K in columns of 16 tokens, V in columns of 16 elements, rows woven by twos."""
    layers, _, blocks, heads, slots, dim = x.shape
    out = np.empty((layers, blocks, heads, 2, slots * dim), x.dtype)
    for layer, b, h in np.ndindex(layers, blocks, heads):
        k, v = x[layer, 0, b, h], x[layer, 1, b, h]
        woven = [k[n : n + 16, d : d + 2].ravel() for n in range(0, slots, 16) for d in range(0, dim, 2)]
        out[layer, b, h, 0] = np.concatenate(woven)
        woven = [v[n : n + 2, d : d + 16].T.ravel() for d in range(0, dim, 16) for n in range(0, slots, 2)]
        out[layer, b, h, 1] = np.concatenate(woven)
    return list(out)


def vllm_mla(x: np.ndarray) -> list[np.ndarray]:
    """(blocks, block_size, 576): one head, no V."""
    return apart(x, 2, 4, 3, 5)


def mla_interleaved(x: np.ndarray, rope: int) -> list[np.ndarray]:
    """The last `rope` elements as pairs (rope[i], rope[i + rope / 2])."""
    latent, first, second = np.split(x, [x.shape[-1] - rope, x.shape[-1] - rope // 2], axis=-1)
    pairs = np.stack([first, second], axis=-1).reshape(*first.shape[:-1], rope)
    return vllm_mla(np.concatenate([latent, pairs], axis=-1))


def flashinfer_nhd(x: np.ndarray) -> list[np.ndarray]:
    """(pages, 2, page_size, heads, head_dim)."""
    return each_layer(x, 2, 1, 4, 3, 5)


def flashinfer_hnd(x: np.ndarray) -> list[np.ndarray]:
    """(pages, 2, heads, page_size, head_dim)."""
    return each_layer(x, 2, 1, 3, 4, 5)


def flashinfer_nhd_apart(x: np.ndarray) -> list[np.ndarray]:
    """A pair of (pages, page_size, heads, head_dim)."""
    return apart(x, 2, 4, 3, 5)


def flashinfer_hnd_apart(x: np.ndarray) -> list[np.ndarray]:
    """A pair of (pages, heads, page_size, head_dim)."""
    return apart(x, 2, 3, 4, 5)


def sglang_pool(x: np.ndarray) -> list[np.ndarray]:
    """Pools of (size, heads, head_dim): a token's place is page * page_size + offset."""
    tokens = [t.reshape(-1, *t.shape[-2:]) for t in apart(x, 2, 4, 3, 5)]
    return [np.ascontiguousarray(t) for t in tokens]


def contiguous(x: np.ndarray) -> list[np.ndarray]:
    """(batch, heads, tokens, head_dim)."""
    return apart(x, 2, 3, 4, 5)


def fp8_bytes(x: np.ndarray) -> np.ndarray:
    """The codes of numbers that E4M3 holds."""
    return small_floats.codes("fp8_e4m3fn", x.astype(np.float64)).astype(np.uint8)


def indexer(elements: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[layers, blocks, block_size * (head_dim + 4)]: a block's elements, then its float32 scales."""
    layers, _, blocks = elements.shape[:3]
    codes = fp8_bytes(elements).reshape(layers, blocks, -1)
    beside = np.ascontiguousarray(scales, np.float32).reshape(layers, blocks, -1).view(np.uint8)
    return np.concatenate([codes, beside.reshape(layers, blocks, -1)], axis=-1)


def flashinfer_mla(x: np.ndarray, latents: int) -> list[np.ndarray]:
    """ckv (pages, page_size, 512) of every layer, then kpe (pages, page_size, 64) of every layer."""
    one = x[:, 0, :, 0]
    return [np.ascontiguousarray(t) for part in (one[..., :latents], one[..., latents:]) for t in part]


def mla_fp8(elements: np.ndarray, scales: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """(layers, blocks, block_size, 656): a token's latents in E4M3, their float32 scales, its rope in bf16."""
    codes = fp8_bytes(elements)[:, 0, :, 0]
    beside = np.ascontiguousarray(scales[:, 0, :, 0], np.float32).view(np.uint8)
    words = (np.ascontiguousarray(rope[:, 0, :, 0]).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return np.concatenate([codes, beside, words], axis=-1)
