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


def test_tensors_are_all_alike_and_of_the_specs_codec() -> None:
    torch = pytest.importorskip("torch")
    half, bf16 = torch.zeros(SHAPE, dtype=torch.float16), torch.zeros(SHAPE, dtype=torch.bfloat16)
    turned = torch.zeros((2, 3, 2, 4, 8), dtype=torch.bfloat16)
    assert hawk.KVCache.from_torch([bf16, bf16.clone()]).spec == SPEC.replace(
        layout=SPEC.resolve(), codec="bf16"
    )
    raw = [bf16.view(torch.int16), bf16.view(torch.uint8)]
    assert hawk.KVCache.from_torch(raw, spec=SPEC).spec == SPEC
    for tensors, spec, field in (
        ([bf16, half], None, r"tensors\[1\]\.dtype"),
        ([bf16, turned], None, r"tensors\[1\]\.shape"),
        ([bf16, half], SPEC, r"tensors\[1\]\.dtype: .*stores its elements as bf16; got torch\.float16"),
        ([half, half], SPEC, r"tensors\[0\]\.dtype"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            hawk.KVCache.from_torch(tensors, spec=spec)
