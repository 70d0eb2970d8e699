"""A small Llama with a fixed seed, and its KV cache in and out of paged tensors.  No HAWK here."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, KV_HEADS, DIM = 4, 8, 2, 64

# transformers renamed the argument in 2026; both spellings work with the releases that know them.
_CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def make_model() -> LlamaForCausalLM:
    """Four layers, grouped queries, bf16 weights large enough that logits depend on the cache."""
    torch.manual_seed(1234)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=HEADS * DIM,
        intermediate_size=512,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.2,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def make_prompt(tokens: int) -> torch.Tensor:
    """A fixed prompt, `int64[1, tokens]`."""
    return torch.randint(3, 1000, (1, tokens), generator=torch.Generator().manual_seed(7))


@dataclass
class Prefilled:
    """What prefill leaves: the first token, and K and V as `bf16[layers, 2, heads, tokens, dim]`."""

    first: int
    kv: torch.Tensor


@torch.no_grad()
def prefill(model: LlamaForCausalLM, prompt: torch.Tensor) -> Prefilled:
    """Runs the prompt."""
    cache = DynamicCache()
    logits = model(prompt, **{_CACHE: cache}, use_cache=True).logits[0, -1]
    kv = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])
    return Prefilled(int(logits.argmax()), kv)


def as_cache(kv: torch.Tensor) -> DynamicCache:
    """K and V as a cache that the model goes on from."""
    cache = DynamicCache()
    for layer in range(kv.shape[0]):
        cache.update(kv[layer, 0][None].clone(), kv[layer, 1][None].clone(), layer)
    return cache


@torch.no_grad()
def decode(model: LlamaForCausalLM, first: int, kv: torch.Tensor, steps: int) -> list[int]:
    """`steps` greedy tokens that follow `first`, attending to `kv`."""
    cache, token, tokens = as_cache(kv), first, []
    for _ in range(steps):
        logits = model(torch.tensor([[token]]), **{_CACHE: cache}, use_cache=True).logits[0, -1]
        token = int(logits.argmax())
        tokens.append(token)
    return tokens


@torch.no_grad()
def next_logits(model: LlamaForCausalLM, first: int, kv: torch.Tensor) -> torch.Tensor:
    """Logits after `first`, `float32[vocabulary]`."""
    output = model(torch.tensor([[first]]), **{_CACHE: as_cache(kv)}, use_cache=True)
    return output.logits[0, -1].float()


def write_pages(kv: torch.Tensor, layers: list[torch.Tensor], blocks: np.ndarray) -> None:
    """K and V into paged tensors `bf16[2, blocks, slots, heads, dim]`, one per layer, as an engine's kernels do."""
    slots = layers[0].shape[2]
    for layer, paged in enumerate(layers):
        for position in range(kv.shape[3]):
            block, slot = int(blocks[position // slots]), position % slots
            paged[0, block, slot] = kv[layer, 0, :, position]
            paged[1, block, slot] = kv[layer, 1, :, position]


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bit patterns of bf16 values, `uint16` of the same shape."""
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def from_bits(array: np.ndarray) -> torch.Tensor:
    """bf16 values from bit patterns."""
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
