"""vLLM's cache tensors as a cache of HAWK's: layout and shape are read from what vLLM says, strides prove it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.cache import CacheSpec, KVCache
from hawk.errors import RegistrationFailed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.plan.part import Part

_AXES = "LBHNC"


def read_caches(
    tensors: Mapping[str, Any],
    names: Sequence[str],
    *,
    layout: str,
    page: str,
    codec: str,
    kvs: int,
    part: Part,
) -> KVCache:
    """The cache that lies in `tensors[name]` of the layers `names`, each `[block, head, slot, K and V]`.

    layout    vLLM's word for the order in memory, such as `"LBHNC"`
    page      name of HAWK's layout
    kvs       2, or 1 where a row holds no V

    Raises `RegistrationFailed` naming a layer whose memory is not as the layout says.
    """
    first = tensors[names[0]]
    blocks, heads, slots, width = (int(n) for n in first.shape)
    sizes = dict(zip(_AXES, (len(names), blocks, heads, slots, width), strict=True))
    wanted = _strides(layout, sizes)
    base, item = int(first.data_ptr()), int(first.element_size())
    for i, name in enumerate(names):
        tensor = tensors[name]
        got = tuple(int(n) for n in tensor.stride())
        right = tuple(wanted[axis] for axis in "BHNC")
        if (
            tuple(tensor.shape) != tuple(first.shape)
            or tensor.dtype != first.dtype
            or _differ(got, right, first.shape)
        ):
            raise RegistrationFailed(
                "the tensor of this layer lies not as vLLM's layout says",
                field=name,
                got=f"{tuple(tensor.shape)} {tensor.dtype} with strides {got}",
                expected=f"{tuple(first.shape)} {first.dtype} with strides {right} ({layout})",
            )
        if layout[0] != "L" and int(tensor.data_ptr()) != base + i * wanted["L"] * item:
            raise RegistrationFailed(
                "the layers are not one behind the other",
                field=name,
                got=hex(tensor.data_ptr()),
                expected=layout,
            )
    spec = CacheSpec(
        layers=len(names),
        heads=heads,
        dim=width // kvs,
        block_size=slots,
        blocks=blocks,
        layout=page,
        codec=codec,
        kvs=kvs,
        part=part,
    )
    sizes_of = spec.compile().buffer_bytes
    held = [tensors[name] for name in names] if layout[0] == "L" else [first]
    if first.device.type == "cuda":
        flat = [tensor.as_strided((n // item,), (1,)) for tensor, n in zip(held, sizes_of, strict=True)]
        return KVCache.from_torch(flat, spec=spec)
    return KVCache.from_numpy(
        [_bytes(int(t.data_ptr()), n) for t, n in zip(held, sizes_of, strict=True)], spec
    )


def _strides(layout: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """The stride of each axis in elements, of axes in that order in memory."""
    found, stride = {}, 1
    for axis in reversed(layout):
        found[axis] = stride
        stride *= sizes[axis]
    return found


def _differ(got: Sequence[int], right: Sequence[int], shape: Sequence[int]) -> bool:
    return any(a != b for a, b, n in zip(got, right, shape, strict=True) if n > 1)


def _bytes(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
