"""Caches in the memory of a GPU, on the client's side: their arrays, and when what is in them is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hawk.arguments import instance
from hawk.errors import InvalidArgument
from hawk.memory.cuda_arrays import CudaArray, taken
from hawk.memory.cuda_marks import Mark, drop, mark

if TYPE_CHECKING:
    from hawk.cache import KVCache
    from hawk.layouts.compiled import CodecInfo, CompiledLayout

__all__ = ["Mark", "drop", "gpu_arrays", "set_mark"]

_CODECS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e5m2": "fp8_e5m2",
    "int8": "int8",
}
"""Codecs by the names that libraries have for types of elements."""


def gpu_arrays(arrays: object, compiled: CompiledLayout, name: str) -> list[CudaArray]:
    """The arrays' memory, one per buffer of the layout, all of it on one GPU.

    Raises `InvalidArgument` naming the array, as `hawk.memory.cuda_arrays.taken` does, and for one whose elements
    cannot be the codec's.
    """
    found: list[CudaArray] = []
    for i, array in enumerate(instance(arrays, Iterable, name, "arrays, one per buffer")):  # type: ignore[type-abstract]
        one = taken(array, f"{name}[{i}]")
        if one.device != (found or [one])[0].device:
            raise InvalidArgument(
                "the arrays are on several GPUs",
                field=f"{name}[{i}]",
                got=f"cuda:{one.device}",
                expected=f"cuda:{found[0].device}, as the first",
                hint="One cache is on one GPU; register a part for each (CacheSpec.shard)",
            )
        if i < compiled.buffer_count:
            _check(one, compiled.codec, f"{name}[{i}].dtype")
        found.append(one)
    return found


def _check(one: CudaArray, codec: CodecInfo, field: str) -> None:
    width = codec.bits // 8 if codec.group == 1 else 1
    plain = one.dtype.startswith(("int", "uint", "void", "opaque"))
    if _CODECS.get(one.dtype) == codec.name or (
        plain and one.width in (1, width) and one.dtype not in _CODECS
    ):
        return
    if one.dtype == "int8" and width == 1:
        return
    raise InvalidArgument(
        f"the spec stores its elements as {codec.name}",
        field=field,
        got=one.dtype,
        expected=" or ".join([*(n for n, known in _CODECS.items() if known == codec.name), "uint8"]),
        hint="Convert the values, or give the spec the codec that they are in",
    )


def set_mark(cache: KVCache | None, after: Any) -> Mark | None:
    """A mark behind which a cache's layers are written, set now and from this thread; None for memory of the host.

    Raises `InvalidArgument` for what cannot be waited for.
    """
    if isinstance(after, Mark):
        return after
    if cache is None or not cache.gpu_buffers:
        if after is not None:
            raise InvalidArgument(
                "only what a GPU writes can be waited for",
                field="after",
                got=type(after).__name__,
                expected="none: the cache is not in memory of a GPU",
            )
        return None
    return mark(cache.gpu_buffers[0], after)
