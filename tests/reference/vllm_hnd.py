"""vLLM's paged cache, HND: one tensor (2, num_blocks, num_kv_heads, block_size, head_size) per layer, contiguous.

K and V are exchanged as `[blocks, heads, block_size, dim]` arrays of raw words (bf16 and fp16 bits as uint16,
fp32 bits as uint32).
"""

import numpy as np


def buffer(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The bytes of the tensor, `uint8[nbytes]`."""
    return np.ascontiguousarray(np.stack([k, v])).reshape(-1).view(np.uint8)


def tensors(
    raw: np.ndarray, blocks: int, heads: int, block_size: int, dim: int, word: type = np.uint16
) -> tuple[np.ndarray, np.ndarray]:
    """K and V out of the bytes of the tensor."""
    tensor = np.ascontiguousarray(raw).view(word).reshape(2, blocks, heads, block_size, dim)
    return tensor[0].copy(), tensor[1].copy()
