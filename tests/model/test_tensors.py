"""Caches made of real torch tensors: what their dtypes and shapes say, and what is refused."""

import pytest
import torch

import hawk
from hawk.errors import InvalidArgument

SPEC = hawk.CacheSpec(layers=2, heads=2, dim=8, block_size=4, blocks=3)
SHAPE = (2, 3, 4, 2, 8)


def test_tensors_are_all_alike_and_of_the_specs_codec() -> None:
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
