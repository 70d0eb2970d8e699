"""Arrays in a GPU's memory, of every kind of library, the driver made up."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from hawk.errors import (
    InvalidArgument,
)
from hawk.memory import cuda_arrays
from tests.fake_cuda import FakeCuda

ILLEGAL, NO_ROOM, REFUSED = 700, 2, 801


def test_an_array_of_any_library_is_taken_where_it_is(driver: FakeCuda) -> None:
    array = driver.tensor(np.arange(24, dtype=np.float16).reshape(2, 3, 4), device=1)
    assert cuda_arrays.on_gpu(array)
    found = cuda_arrays.taken(array)
    assert (found.address, found.nbytes, found.device, found.dtype) == (array.address, 48, 1, "float16")
    assert found.owner is array
    assert found.current_stream() == 0
    array.strides = (24, 8, 2)
    assert cuda_arrays.taken(array).nbytes == 48
    array.strides = (48, 16, 4)
    with pytest.raises(InvalidArgument, match=r"kv: a buffer must be contiguous; got strides \(48, 16, 4\)"):
        cuda_arrays.taken(array, "kv")


class Tensor:
    """As torch's look."""

    class Device:
        type, index = "cuda", 0

        def __str__(self) -> str:
            return "cuda:0"

    def __init__(self, address: int, count: int, contiguous: bool = True) -> None:
        self.address, self.count, self.contiguous = address, count, contiguous
        self.device = self.Device()
        self.dtype = "torch.bfloat16"

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 2

    def is_contiguous(self) -> bool:
        return self.contiguous

    def stride(self) -> tuple[int, ...]:
        return (7,)


def test_tensors_are_taken_by_their_own_word(driver: FakeCuda) -> None:
    memory = driver.tensor(np.zeros(64, np.uint8))
    found = cuda_arrays.taken(Tensor(memory.address, 32))
    assert (found.address, found.nbytes, found.device, found.dtype) == (memory.address, 64, 0, "bfloat16")
    with pytest.raises(InvalidArgument, match="contiguous"):
        cuda_arrays.taken(Tensor(memory.address, 32, contiguous=False))
    with pytest.raises(InvalidArgument, match="empty"):
        cuda_arrays.taken(Tensor(memory.address, 0))
    with pytest.raises(InvalidArgument, match="the memory is not that GPU's; got memory of cuda:1"):
        cuda_arrays.taken(Tensor(driver.tensor(np.zeros(64, np.uint8), device=1).address, 32))
    with pytest.raises(InvalidArgument, match="got memory of no GPU"):  # its end lies outside
        cuda_arrays.taken(Tensor(memory.address, 1 << 30))
    with pytest.raises(InvalidArgument, match="managed memory moves by itself"):
        cuda_arrays.taken(driver.tensor(np.zeros(64, np.uint8), kind="managed"))
    on_host = Tensor(memory.address, 32)
    on_host.device.type = "cpu"  # type: ignore[misc]
    with pytest.raises(InvalidArgument, match="not on a GPU"):
        cuda_arrays.taken(on_host)


class Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", cuda_arrays._DlTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Capsuled:
    """An array that gives DLPack and nothing else."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...] | None, kind: int = 2):
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        tensor = cuda_arrays._DlTensor(
            data=address,
            device=cuda_arrays._DlDevice(kind, 0),
            ndim=len(shape),
            dtype=cuda_arrays._DlType(4, 16, 1),
            byte_offset=32,
        )
        tensor.shape = self.shape
        if self.strides is not None:
            tensor.strides = self.strides
        self.managed, self.kind = Managed(tensor), kind

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.kind, 0)

    def __dlpack__(self, stream: int | None = None) -> object:
        make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
            ("PyCapsule_New", ctypes.pythonapi)
        )
        return make(ctypes.addressof(self.managed), cuda_arrays._NAME, None)


def test_dlpack_is_taken_without_being_consumed(driver: FakeCuda) -> None:
    memory = driver.tensor(np.zeros(128, np.uint8))
    array = Capsuled(memory.address, (4, 6), (6, 1))
    assert cuda_arrays.on_gpu(array)
    found = cuda_arrays.taken(array)
    assert (found.address, found.nbytes, found.dtype, found.width) == (memory.address + 32, 48, "bfloat16", 2)
    assert cuda_arrays.taken(Capsuled(memory.address, (4, 6), None)).nbytes == 48
    with pytest.raises(InvalidArgument, match="contiguous"):
        cuda_arrays.taken(Capsuled(memory.address, (4, 6), (12, 2)))
    with pytest.raises(InvalidArgument, match="not on a GPU; got DLPack device type 1"):
        cuda_arrays.taken(Capsuled(memory.address, (4, 6), None, kind=1))
    with pytest.raises(InvalidArgument, match="managed memory"):
        cuda_arrays.taken(Capsuled(memory.address, (4, 6), None, kind=13))


def test_what_is_no_array_of_a_gpu(driver: FakeCuda) -> None:
    assert not cuda_arrays.on_gpu(np.zeros(3))
    for wrong in (None, 5, "kv", object()):
        with pytest.raises(InvalidArgument, match="no array of a GPU"):
            cuda_arrays.taken(wrong)
    with pytest.raises(InvalidArgument, match="not on a GPU"):
        cuda_arrays.taken(np.zeros(3))
    text = driver.tensor(np.zeros(8, np.uint8))
    text.dtype = np.dtype(object)
    with pytest.raises(InvalidArgument):
        cuda_arrays.taken(text)
