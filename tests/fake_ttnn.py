"""The part of ttnn that HAWK's integration touches, for tests without it: tensors are bytes, chips arrays of banks.

Its form is that of ttnn 0.81, against which `tests/ttnn` compares the integration itself: a tensor's file is a
length, a head and the bytes; what is loaded is mapped; tiles and numbers are the reference's.
"""

from __future__ import annotations

import math
import mmap
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.reference import tenstorrent as reference

CODECS = {"bfloat16": "bf16", "bfloat8_b": "bfp8_b", "bfloat4_b": "bfp4_b", "float32": "fp32"}
HEAD = b"head" * 22
FIRST = 0x100080


class Mesh:
    """Chips of one row, each with `banks` banks; allocations go bottom-up and are never given back."""

    def __init__(
        self, chips: int = 1, banks: int = 8, bank_bytes: int = 1 << 24, alignment: int = 64
    ) -> None:
        self.shape = [1, chips]
        self.banks = banks
        self.alignment = alignment
        self.bank_bytes = bank_bytes
        self.next = FIRST
        self.memory = [np.zeros((banks, bank_bytes), np.uint8) for _ in range(chips)]

    def get_device_ids(self) -> list[int]:
        return list(range(len(self.memory)))

    def take(self, nbytes: int) -> int:
        if self.next + nbytes > FIRST + self.bank_bytes:
            raise RuntimeError("TT_FATAL\nOut of Memory: not enough space")
        address, self.next = self.next, self.next + nbytes
        return address


class Tensor:
    """A host tensor (`shards`: bytes of each chip) or one in a mesh's DRAM (`address`)."""

    def __init__(
        self,
        data: Any,
        dtype: str,
        layout: str = "tile",
        mesh_mapper: Any = None,
        device: Any = None,
        address: int = 0,
    ) -> None:
        self.dtype, self.layout, self.address, self._device = dtype, layout, address, device
        parts = [] if data is None else [data]
        if mesh_mapper is not None:
            parts = np.array_split(data, mesh_mapper[0], axis=mesh_mapper[1])
        self.shape = list(parts[0].shape) if parts else []
        self.shards = [
            reference.pages(np.ascontiguousarray(p).view(np.uint32), CODECS[dtype], False).reshape(-1)
            for p in parts
        ]

    def host_buffer(self) -> Any:
        return SimpleNamespace(
            shape=lambda: [1, len(self.shards)], get_shard=lambda place: self.shards[place[1]]
        )

    def device(self) -> Any:
        return self._device

    def buffer_address(self) -> int:
        return self.address

    def memory_config(self) -> Any:
        return self._config

    # -- on a chip ---------------------------------------------------------------------------------------

    @property
    def page(self) -> int:
        return reference.PAGE_BYTES[CODECS[self.dtype]]

    @property
    def pages(self) -> int:
        *rest, rows, columns = self.shape
        return math.prod(rest) * -(-rows // 32) * -(-columns // 32)

    def held(self, chip: int, page: int) -> np.ndarray:
        """The bytes of a page in the banks."""
        mesh = self._device
        bank, at = reference.bank(page, mesh.banks, self.page)
        start = self.address - FIRST + at
        return mesh.memory[chip][bank, start : start + self.page]


def allocate(shape: list[int], dtype: str, layout: str, device: Mesh, config: Any) -> Tensor:
    made = Tensor(None, dtype, layout, device=device)
    made.shape, made._config = list(shape), config
    made.address = device.take(-(-made.pages // device.banks) * made.page)
    return made


def narrow(of: Tensor, dim: int, start: int, length: int) -> Tensor:
    assert dim == 0
    made = Tensor(None, of.dtype, of.layout, device=of._device)
    made.shape, made._config = [length, *of.shape[1:]], of._config
    first = of.pages // of.shape[0] * start
    if first % of._device.banks:
        raise RuntimeError("Start page ID must be aligned with number of banks for INTERLEAVED DRAM buffer")
    made.address = of.address + first // of._device.banks * of.page
    return made


def copy(host: Tensor, device: Tensor) -> None:
    assert host.shape == device.shape
    assert len(host.shards) == len(device._device.memory)
    for chip, shard in enumerate(host.shards):
        for i, page in enumerate(shard.reshape(-1, device.page)):
            device.held(chip, i)[:] = page


def paged_fill_cache(cache: Tensor, given: Tensor, page_table: Any, *, batch_idx: int = 0) -> None:
    """`given` is [1, heads, rows, dim]; block j of a request is page_table[user][j]."""
    assert cache.dtype == given.dtype
    _, heads, rows, dim = given.shape
    down, across = rows // 32, -(-dim // 32)
    high = cache.shape[2] // 32
    for chip in range(len(cache._device.memory)):
        for head in range(heads):
            for row in range(down):
                block = page_table[batch_idx][row // high]
                for column in range(across):
                    source = (head * down + row) * across + column
                    target = ((block * heads + head) * high + row % high) * across + column
                    cache.held(chip, target)[:] = given.held(chip, source)


def dump(path: str, tensor: Tensor) -> None:
    with open(path, "wb") as file:
        file.write(len(HEAD).to_bytes(8, "little") + HEAD + b"".join(s.tobytes() for s in tensor.shards))
    _dumped[HEAD] = tensor


_dumped: dict[bytes, Tensor] = {}
"""What the head stands for: this library's heads say nothing, and a test makes tensors of one shape at a time."""


def load(path: str) -> Tensor:
    like = _dumped[HEAD]
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    whole = np.frombuffer(mapped, np.uint8)[8 + len(HEAD) :]
    made = Tensor(None, like.dtype, like.layout)
    made.shape, made.shards = list(like.shape), np.split(whole, len(like.shards))
    return made


def library() -> ModuleType:
    """A module to put in the place of ttnn."""
    made = ModuleType("ttnn")
    parts: dict[str, Any] = {
        **{name: name for name in CODECS},
        "TILE_LAYOUT": "tile",
        "Shape": list,
        "MeshShape": lambda *n: list(n),
        "MeshCoordinate": lambda *n: n,
        "Tensor": Tensor,
        "TensorMemoryLayout": SimpleNamespace(INTERLEAVED="interleaved"),
        "BufferType": SimpleNamespace(DRAM="dram"),
        "DRAM_MEMORY_CONFIG": SimpleNamespace(memory_layout="interleaved", buffer_type="dram"),
        "get_memory_view": lambda mesh, _: SimpleNamespace(
            num_banks=mesh.banks, largest_contiguous_bytes_free_per_bank=FIRST + mesh.bank_bytes - mesh.next
        ),
        "get_dram_alignment": lambda: 64,
        "shard_tensor_to_mesh_mapper": lambda mesh, dim: (len(mesh.memory), dim),
        "allocate_tensor_on_device": allocate,
        "narrow": narrow,
        "copy_host_to_device_tensor": copy,
        "dump_tensor": dump,
        "load_tensor": load,
        "experimental": SimpleNamespace(paged_fill_cache=paged_fill_cache),
    }
    for name, value in parts.items():
        setattr(made, name, value)
    return made


def install(monkeypatch: Any) -> ModuleType:
    """`import ttnn` gives this one until the test ends."""
    made = library()
    monkeypatch.setitem(sys.modules, "ttnn", made)
    return made
