"""Caches as a client describes them: a shape and a layout, and, for memory of the client's own, the arrays.

`CacheSpec` says what a cache is; `KVCache` adds where its bytes are in this process.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.arguments import instance, shown
from hawk.cache_gpu import gpu_arrays
from hawk.cache_spec import CacheSpec, loaded
from hawk.errors import InvalidArgument, LayoutError
from hawk.layouts import Layout
from hawk.memory import shared
from hawk.plan.part import Part
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CodecInfo
    from hawk.memory.cuda_arrays import CudaArray

    U8 = NDArray[np.uint8]

__all__ = ["CacheSpec", "KVCache"]

_ALIGN = 4096


@dataclass(eq=False, repr=False)
class KVCache:
    """A cache in this process' memory: `buffers[i]` holds the bytes of the layout's buffer i.

    Make one with `KVCache.alloc` (shared memory that a separate agent can map), `KVCache.from_numpy` or
    `KVCache.from_torch` (arrays you have; a separate agent can map them only where they lie in memory from
    `hawk.alloc`), or `KVCache.from_cuda` (arrays on a GPU, for an agent in this process): then `gpu_buffers` holds
    them, and `buffers` nothing.
    """

    spec: CacheSpec
    buffers: list[U8]
    _owned: shared.SharedBuffer | None = None
    gpu_buffers: list[CudaArray] = field(default_factory=list)

    def __post_init__(self) -> None:
        compiled = instance(self.spec, CacheSpec, "spec", "a CacheSpec").compile()
        if compiled.channels != 1:
            raise LayoutError(
                "a cache in host memory has one channel",
                field="channels",
                got=compiled.channels,
                hint="Use Client.allocate for a cache in the memory of a device",
            )
        sizes = compiled.buffer_bytes
        held = self._held
        if len(held) != len(sizes):
            raise InvalidArgument(
                f"the layout {compiled.name} keeps {' x '.join(compiled.buffers) or 'all'} in separate buffers",
                field="buffers",
                got=len(held),
                expected=f"{compiled.buffer_count} and {len(sizes) - compiled.buffer_count} of scales"
                if len(sizes) > compiled.buffer_count
                else compiled.buffer_count,
            )
        for i, buffer in enumerate(held):
            if buffer.nbytes != sizes[i]:
                raise InvalidArgument(
                    "the buffer's size does not match the spec",
                    field=f"buffers[{i}]",
                    got=f"{buffer.nbytes} bytes",
                    expected=f"{sizes[i]} bytes",
                )

    @property
    def _held(self) -> Sequence[U8 | CudaArray]:
        return self.gpu_buffers or self.buffers

    @classmethod
    def alloc(cls, spec: CacheSpec) -> KVCache:
        """A zeroed cache in fresh shared memory; raises `OutOfMemory`."""
        compiled = instance(spec, CacheSpec, "spec", "a CacheSpec").compile()
        sizes = compiled.buffer_bytes
        ends = np.cumsum([-(-size // _ALIGN) * _ALIGN for size in sizes]).tolist()
        owned = shared.alloc(ends[-1], name="hawk-cache")
        buffers = [owned.array[at : at + size] for at, size in zip([0, *ends], sizes, strict=False)]
        return cls(spec, buffers, owned)

    @classmethod
    def from_numpy(cls, arrays: Sequence[NDArray[Any]], spec: CacheSpec) -> KVCache:
        """Over arrays that exist, one per buffer of the layout, C-contiguous, without a copy.

        Their elements are bytes (`uint8`, `int8`), integers or void as wide as the codec's elements (`uint16` for
        bf16), or the codec's own type (`float16` for fp16); buffers of scales are taken as they are.  Raises
        `InvalidArgument` naming the array.
        """
        compiled = instance(spec, CacheSpec, "spec", "a CacheSpec").compile()
        buffers: list[U8] = []
        for i, array in enumerate(instance(arrays, Iterable, "arrays", "numpy arrays, one per buffer")):  # type: ignore[type-abstract]
            instance(array, np.ndarray, f"arrays[{i}]", "a numpy array")
            if array.dtype.hasobject or array.dtype.itemsize == 0:
                raise InvalidArgument(
                    "a buffer must be plain bytes", field=f"arrays[{i}]", got=array.dtype, expected="numbers"
                )
            if not array.flags.c_contiguous:
                raise InvalidArgument(
                    "a buffer must be C-contiguous", field=f"arrays[{i}]", got=f"strides {array.strides}"
                )
            if i < compiled.buffer_count:
                _check_dtype(array.dtype, compiled.codec, f"arrays[{i}].dtype")
            buffers.append(array.reshape(-1).view(np.uint8))
        return cls(spec, buffers)

    @classmethod
    def from_torch(
        cls,
        tensors: Sequence[Any],
        *,
        layout: str | Layout = "vllm/nhd",
        spec: CacheSpec | None = None,
        part: Part | None = None,
    ) -> KVCache:
        """Over tensors that exist, one per buffer of the layout, without a copy; all on the CPU, or all on one GPU.

        Without `spec` the shape is read from the tensors: their axes must be those of the layout's order, so for
        `vllm/nhd` each layer's tensor is `[kv, block, slot, head, dim]`.  The codec follows from the dtype.  `part`
        says which heads and layers of the model these are, as in `CacheSpec`.

        Raises `InvalidArgument` naming the tensor that differs from the first, or from the spec's codec.
        """
        if not isinstance(tensors, list | tuple) or not tensors:
            raise InvalidArgument(
                "no tensor was given",
                field="tensors",
                got=shown(tensors),
                expected="one per buffer of the layout",
            )
        for i, tensor in enumerate(tensors):
            if not hasattr(tensor, "device") or not hasattr(tensor, "is_contiguous"):
                raise InvalidArgument(
                    "no tensor", field=f"tensors[{i}]", got=shown(tensor), expected="a torch tensor"
                )
            if tensor.device.type not in ("cpu", "cuda") or tensor.device.type != tensors[0].device.type:
                raise InvalidArgument(
                    "tensors are on the CPU or on a GPU, all alike",
                    field=f"tensors[{i}]",
                    got=f"a tensor on {tensor.device}",
                    expected=f"{tensors[0].device}, as the first" if i else "cpu or cuda",
                )
            if not tensor.is_contiguous():
                raise InvalidArgument(
                    "a buffer must be contiguous", field=f"tensors[{i}]", got=tensor.stride()
                )
        if spec is None:
            spec = _spec_from_torch(tensors, layout)
        if part is not None:
            spec = spec.replace(part=part)
        compiled = instance(spec, CacheSpec, "spec", "a CacheSpec").compile()
        for i, tensor in enumerate(tensors[: compiled.buffer_count]):
            _check_torch(tensor, compiled.codec, f"tensors[{i}].dtype")
        if tensors[0].device.type == "cuda":
            return cls(spec, [], gpu_buffers=gpu_arrays(tensors, compiled, "tensors"))
        buffers = [_torch_bytes(t) for t in tensors]
        return cls(spec, buffers)

    @classmethod
    def from_cuda(cls, arrays: Sequence[Any], spec: CacheSpec) -> KVCache:
        """Over arrays in the memory of one GPU, one per buffer of the layout, without a copy: source caches only.

        Torch tensors, and whatever has `__cuda_array_interface__` or DLPack (CuPy, JAX).  Its agent is one in this
        process.  The arrays are kept as long as this object is.  Raises `InvalidArgument` naming the array,
        `MissingDependency` without a driver.
        """
        compiled = instance(spec, CacheSpec, "spec", "a CacheSpec").compile()
        return cls(spec, [], gpu_buffers=gpu_arrays(arrays, compiled, "arrays"))

    def __repr__(self) -> str:
        """What it is, and none of the bytes."""
        spec = self.spec
        layout = spec.resolve()
        held = self._held
        size = approximate_size(sum(buffer.nbytes for buffer in held))
        state = f"{size} in {len(held)} buffers" if held else "closed"
        if self.gpu_buffers:
            state += f" on cuda:{self.gpu_buffers[0].device}"
        box = ", ".join(f"{k}={getattr(spec, k)}" for k in ("layers", "heads", "dim", "block_size", "blocks"))
        part = "" if spec.part is None else f", {spec.part}"
        return f"<KVCache {layout.name} {spec.codec or layout.codec}, {box}{part}: {state}>"

    def array(self, layer: int, kv: int = 0) -> U8:
        """The bytes of the buffer that holds this layer and kv, `uint8[n]`; of memory of the host only."""
        if self.gpu_buffers:
            raise InvalidArgument(
                "the cache is in memory of a GPU", field="array", got=f"cuda:{self.gpu_buffers[0].device}"
            )
        return self.buffers[self.spec.compile().buffer(layer, kv)]

    def close(self) -> None:
        """Lets go of memory that `alloc` made.  Call it after the cache was released by its client."""
        self.buffers, self.gpu_buffers = [], []
        if self._owned is not None:
            self._owned.close()
            self._owned = None


_NUMPY_CODECS = {
    "float16": "fp16",
    "float32": "fp32",
    "bfloat16": "bf16",  # this and the next two are ml_dtypes', which numpy counts as void
    "float8_e4m3fn": "fp8_e4m3fn",
    "float8_e5m2": "fp8_e5m2",
}


def _width(codec: CodecInfo) -> int:
    return codec.bits // 8 if codec.group == 1 else 1


def _check_dtype(dtype: np.dtype[Any], codec: CodecInfo, field: str) -> None:
    """Raises `InvalidArgument` for elements that cannot be the codec's: their bytes would be read as other numbers."""
    if not dtype.isnative:
        raise InvalidArgument(
            "the elements are in the other byte order",
            field=field,
            got=dtype,
            expected=dtype.newbyteorder("="),
        )
    width = _width(codec)
    if dtype.name in _NUMPY_CODECS:
        if _NUMPY_CODECS[dtype.name] == codec.name:
            return
    elif dtype.kind in "uiV" and dtype.itemsize in (1, width):
        return
    own = [name for name, named in _NUMPY_CODECS.items() if named == codec.name]
    raw = ["uint8", "int8"] if width == 1 else [f"uint{8 * width}", f"int{8 * width}", "uint8"]
    raise InvalidArgument(
        f"the spec stores its elements as {codec.name}",
        field=field,
        got=dtype,
        expected=" or ".join([*own, *raw]),
        hint="Convert the values, or give the spec the codec that they are in",
    )


_TORCH_CODECS = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "fp8_e4m3fn",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.int8": "int8",
}


def _check_torch(tensor: Any, codec: CodecInfo, field: str) -> None:
    """The same for a tensor."""
    named, whole = (
        _TORCH_CODECS.get(str(tensor.dtype)),
        not (tensor.is_floating_point() or tensor.is_complex()),
    )
    if named == codec.name or (whole and tensor.element_size() in (1, _width(codec))):
        return
    own = [name for name, known in _TORCH_CODECS.items() if known == codec.name]
    raise InvalidArgument(
        f"the spec stores its elements as {codec.name}",
        field=field,
        got=tensor.dtype,
        expected=" or ".join([*own, "torch.uint8"]),
        hint="Convert the values, or give the spec the codec that they are in",
    )


def _torch_bytes(tensor: Any) -> U8:
    import torch

    flat: U8 = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat


def _spec_from_torch(tensors: Sequence[Any], layout: str | Layout) -> CacheSpec:
    known = loaded(layout)
    codec = _TORCH_CODECS.get(str(tensors[0].dtype))
    if codec is None:
        raise InvalidArgument(
            "no codec for this dtype",
            field="tensors[0].dtype",
            got=tensors[0].dtype,
            expected=list(_TORCH_CODECS),
        )
    names = known.plain_axes()
    if names is None or len(names) != tensors[0].dim():
        raise InvalidArgument(
            "the shape cannot be read from the tensors",
            field="tensors[0].shape",
            got=tuple(tensors[0].shape),
            expected=f"[{', '.join(names)}]" if names else "a layout whose order is plain axes",
            hint="Give spec=CacheSpec(...) instead",
        )
    for i, tensor in enumerate(tensors):
        for what in ("dtype", "shape"):
            if getattr(tensor, what) != getattr(tensors[0], what):
                raise InvalidArgument(
                    "the tensors differ",
                    field=f"tensors[{i}].{what}",
                    got=shown(getattr(tensor, what)),
                    expected=f"{getattr(tensors[0], what)}, as the first has it",
                )
    extents: dict[str, int] = dict(zip(names, (int(n) for n in tensors[0].shape), strict=True))
    kvs = extents.get("kv", 2 if "kv" in known.buffers else 1)
    layers = extents.get("layer", len(tensors) // (kvs if "kv" in known.buffers else 1))
    return CacheSpec(
        layers=layers,
        heads=extents["head"],
        dim=extents["dim"],
        block_size=extents["slot"],
        blocks=extents["block"],
        layout=known,
        codec=codec,
        kvs=kvs,
    )
