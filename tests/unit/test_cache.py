"""Caches as a client describes them."""

import numpy as np
import pytest

import hawk
from hawk.errors import InvalidArgument

SPEC = hawk.CacheSpec(layers=2, heads=2, dim=8, block_size=4, blocks=3)
SHAPE = (2, 3, 4, 2, 8)


def test_a_cache_says_what_it_is_and_none_of_its_bytes() -> None:
    spec = hawk.CacheSpec(layers=2, heads=8, dim=128, block_size=16, blocks=64, layout="vllm/nhd")
    cache = hawk.KVCache.alloc(spec)
    box = "layers=2, heads=8, dim=128, block_size=16, blocks=64"
    assert repr(cache) == f"<KVCache vllm/nhd bf16, {box}: 8 MiB in 2 buffers>"
    cache.close()
    assert repr(cache) == f"<KVCache vllm/nhd bf16, {box}: closed>"


@pytest.mark.parametrize("kind", [">u2", ">f2", ">f4"])
def test_arrays_of_the_other_byte_order_are_refused(kind: str) -> None:
    spec = SPEC.replace(codec={">u2": "bf16", ">f2": "fp16", ">f4": "fp32"}[kind])
    with pytest.raises(InvalidArgument, match=r"arrays\[0\]\.dtype: .*other byte order"):
        hawk.KVCache.from_numpy([np.zeros(SHAPE, kind)] * 2, spec)
    assert hawk.KVCache.from_numpy([np.zeros(SHAPE, kind[1:]) for _ in range(2)], spec).spec == spec
