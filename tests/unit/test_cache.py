"""Caches as a client describes them."""

import hawk


def test_a_cache_says_what_it_is_and_none_of_its_bytes() -> None:
    spec = hawk.CacheSpec(layers=2, heads=8, dim=128, block_size=16, blocks=64, layout="vllm/nhd")
    cache = hawk.KVCache.alloc(spec)
    box = "layers=2, heads=8, dim=128, block_size=16, blocks=64"
    assert repr(cache) == f"<KVCache vllm/nhd bf16, {box}: 8 MiB in 2 buffers>"
    cache.close()
    assert repr(cache) == f"<KVCache vllm/nhd bf16, {box}: closed>"
