"""Arrays in a GPU's memory as HAWK takes them: an address, bytes, a device, and whatever keeps them alive.

Torch tensors, and anything with `__cuda_array_interface__` or DLPack (CuPy, JAX, Numba), without a copy and without
importing any of their libraries.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import DeviceLost, InvalidArgument
from hawk.memory import cuda_driver

if TYPE_CHECKING:
    from collections.abc import Sequence

WAYS = "a torch tensor, or something with __cuda_array_interface__ or __dlpack__"

_CUDA, _MANAGED = 2, 13
"""DLDeviceType of memory of a GPU, and of memory that moves between it and the host by itself."""

_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
"""DLDataTypeCode as numpy and ml_dtypes name such types."""


@dataclass(frozen=True, slots=True, eq=False)
class CudaArray:
    """Contiguous bytes in the memory of a GPU.

    address, nbytes    where they are; the address means something to this process only
    device             which GPU, as this process numbers them
    dtype              name of the elements' type, such as `"bfloat16"`, and `width`, their bytes
    owner              what the memory is kept by
    """

    address: int
    nbytes: int
    device: int
    dtype: str
    width: int
    owner: object = field(repr=False)

    def current_stream(self) -> int:
        """The stream that the array's library works on now: torch's, where it is a tensor of that; else 0."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(self.owner, torch.Tensor):
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)


def on_gpu(array: Any) -> bool:
    """Whether an array says that it is in the memory of a GPU; nothing of it is looked at."""
    kind = getattr(getattr(array, "device", None), "type", None)
    if isinstance(kind, str):
        return kind == "cuda"
    if getattr(type(array), "__cuda_array_interface__", None) is not None:
        return True
    told = getattr(array, "__dlpack_device__", None)
    return callable(told) and not isinstance(array, np.ndarray) and int(told()[0]) in (_CUDA, _MANAGED)


def taken(array: Any, name: str = "array") -> CudaArray:
    """The array's memory.

    Raises `InvalidArgument` naming `name` for what is no array of a GPU, has gaps, holds nothing, or is memory that
    moves by itself (which a copy engine may meet on the way), and `MissingDependency` without a driver.
    """
    if _is_tensor(array):
        found = _of_tensor(array, name)
    elif getattr(type(array), "__cuda_array_interface__", None) is not None:
        found = _of_interface(array, name)
    elif callable(getattr(array, "__dlpack__", None)):
        found = _of_capsule(array, name)
    else:
        raise InvalidArgument("no array of a GPU", field=name, got=type(array).__name__, expected=WAYS)
    if not found.nbytes:
        raise InvalidArgument("the array is empty", field=name, got="0 bytes")
    return _checked(found, name)


def _checked(found: CudaArray, name: str) -> CudaArray:
    """The same, as the driver knows it."""
    driver = cuda_driver.load()
    # Both ends: one array may lie in several mappings that follow each other.
    for address in (found.address, found.address + found.nbytes - 1):
        try:
            known = driver.pointer(address)
        except cuda_driver.CudaFault as fault:
            if fault.sticky:
                raise DeviceLost(
                    "the GPU's context in this process has failed", field=name, got=fault
                ) from fault
            raise InvalidArgument("the driver does not know this memory", field=name, got=fault) from fault
        if known.device < 0 or (found.device >= 0 and known.device != found.device):
            raise InvalidArgument(
                "the memory is not that GPU's",
                field=name,
                got=f"memory of cuda:{known.device}" if known.device >= 0 else "memory of no GPU",
                expected=f"memory of cuda:{found.device}" if found.device >= 0 else "memory of a GPU",
            )
        if known.managed:
            raise InvalidArgument(
                "managed memory moves by itself", field=name, got="managed memory", expected="plain memory"
            )
    if found.device >= 0:
        return found
    return CudaArray(found.address, found.nbytes, known.device, found.dtype, found.width, found.owner)


def _is_tensor(array: Any) -> bool:
    return all(hasattr(array, name) for name in ("data_ptr", "is_contiguous", "element_size", "numel"))


def _of_tensor(tensor: Any, name: str) -> CudaArray:
    if tensor.device.type != "cuda":
        raise InvalidArgument(
            "the tensor is not on a GPU", field=name, got=tensor.device, expected="a tensor on cuda:N"
        )
    if not tensor.is_contiguous():
        raise _gaps(name, tensor.stride())
    width = int(tensor.element_size())
    return CudaArray(
        address=int(tensor.data_ptr()),
        nbytes=int(tensor.numel()) * width,
        device=-1 if tensor.device.index is None else int(tensor.device.index),
        dtype=str(tensor.dtype).removeprefix("torch."),
        width=width,
        owner=tensor,
    )


def _of_interface(array: Any, name: str) -> CudaArray:
    found = array.__cuda_array_interface__
    dtype = np.dtype(found["typestr"])
    if dtype.hasobject or not dtype.itemsize:
        raise InvalidArgument("a buffer must be plain bytes", field=name, got=dtype, expected="numbers")
    shape = [int(n) for n in found["shape"]]
    strides = found.get("strides")
    if strides is not None:
        _check_gaps(shape, [int(step) for step in strides], dtype.itemsize, name)
    nbytes = prod(shape) * dtype.itemsize
    return CudaArray(int(found["data"][0] or 0), nbytes, -1, dtype.name, dtype.itemsize, array)


def _check_gaps(shape: Sequence[int], strides: Sequence[int], width: int, name: str) -> None:
    expected = width
    for n, step in zip(reversed(shape), reversed(strides), strict=True):
        if n > 1 and step != expected:
            raise _gaps(name, tuple(strides))
        expected *= n


def _gaps(name: str, strides: object) -> InvalidArgument:
    return InvalidArgument("a buffer must be contiguous", field=name, got=f"strides {strides}")


class _DlDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DlType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DlTensor(ctypes.Structure):
    """DLTensor of dlpack.h, version 0; the managed tensor behind a capsule begins with it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DlDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DlType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_NAME = b"dltensor"
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _of_capsule(array: Any, name: str) -> CudaArray:
    # The capsule is kept and never consumed: when it goes, it gives the array's memory back itself.
    try:
        kind = int(array.__dlpack_device__()[0])
        # -1: no stream of ours has to wait for the array's; when its bytes are there is said layer by layer.
        capsule = array.__dlpack__(stream=-1) if kind == _CUDA else array.__dlpack__()
        at = _pointer_of(capsule, _NAME)
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
        raise InvalidArgument(
            "the array gives no DLPack capsule", field=name, got=error, expected=WAYS
        ) from error
    told = _DlTensor.from_address(at)
    if told.device.type != _CUDA:
        what = "managed memory" if told.device.type == _MANAGED else f"DLPack device type {told.device.type}"
        raise InvalidArgument("the array is not on a GPU", field=name, got=what, expected="memory of a GPU")
    if told.dtype.lanes != 1 or told.dtype.bits % 8:
        raise InvalidArgument(
            "a buffer must be plain bytes", field=name, got=f"{told.dtype.bits} bits x {told.dtype.lanes}"
        )
    width = told.dtype.bits // 8
    shape = [int(told.shape[i]) for i in range(told.ndim)]
    if told.strides:
        _check_gaps(shape, [int(told.strides[i]) * width for i in range(told.ndim)], width, name)
    return CudaArray(
        address=(told.data or 0) + told.byte_offset,
        nbytes=prod(shape) * width,
        device=int(told.device.id),
        dtype=f"{_KINDS.get(told.dtype.code, 'opaque')}{told.dtype.bits}",
        width=width,
        owner=(array, capsule),
    )
