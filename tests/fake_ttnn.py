"""The part of ttnn that HAWK's integration touches, for tests without it: tensors are bytes, chips arrays of banks.

Its form is that of ttnn 0.81, against which `tests/ttnn` compares the integration itself: a tensor's file is a
length, a head and the bytes; what is loaded is mapped; tiles and numbers are the reference's.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Callable
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
        self.queue: list[Callable[[], None]] = []
        self.memory = [np.zeros((banks, bank_bytes), np.uint8) for _ in range(chips)]
        self.grid = SimpleNamespace(x=8, y=9)

    def view(self, chip: int, bank: int, address: int, nbytes: int) -> np.ndarray:
        """Bytes of a bank by the addresses that programs have."""
        assert FIRST <= address <= FIRST + self.bank_bytes - nbytes
        return self.memory[chip][bank, address - FIRST : address - FIRST + nbytes]

    def compute_with_storage_grid_size(self) -> SimpleNamespace:
        return self.grid

    def get_optimal_dram_bank_to_logical_worker_assignment(self, noc: int, place: Any) -> dict[int, Any]:
        """In this grid two banks have the same."""
        return {bank: SimpleNamespace(x=bank // 2 % 8, y=3) for bank in range(self.banks)}

    def finish(self) -> None:
        """Does what is on the queue, in order."""
        queue, self.queue = self.queue, []
        for work in queue:
            work()

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
        self.data = data
        parts = [] if data is None else [data]
        if mesh_mapper is not None and mesh_mapper[1] is None:
            parts = [data] * mesh_mapper[0]
        elif mesh_mapper is not None:
            parts = np.array_split(data, mesh_mapper[0], axis=mesh_mapper[1])
        self.shape = list(parts[0].shape) if parts else []
        self.shards = [
            reference.pages(np.ascontiguousarray(p).view(np.uint32), CODECS[dtype], False).reshape(-1)
            for p in (parts if dtype in CODECS else [])
        ]
        if dtype == "uint32":
            self.shards = [np.ascontiguousarray(p, np.uint32).view(np.uint8).reshape(-1) for p in parts]

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

    def to(self, device: Mesh, config: Any) -> Tensor:
        """On the chip, for operations that look at the numbers alone."""
        made = Tensor(self.data, self.dtype, self.layout, device=device)
        made._config = config
        return made

    # -- on a chip ---------------------------------------------------------------------------------------

    @property
    def page(self) -> int:
        if self.layout == "rows":
            return self.shape[-1] * 4
        return reference.PAGE_BYTES[CODECS[self.dtype]]

    @property
    def pages(self) -> int:
        *rest, rows, columns = self.shape
        if self.layout == "rows":
            return math.prod(rest) * rows
        return math.prod(rest) * -(-rows // 32) * -(-columns // 32)

    def held(self, chip: int, page: int) -> np.ndarray:
        """The bytes of a page in the banks."""
        mesh = self._device
        bank, at = reference.bank(page, mesh.banks, self.page)
        return mesh.view(chip, bank, self.address + at, self.page)


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
    """On the queue: the host's bytes are read later."""
    assert host.shape == device.shape
    assert len(host.shards) == len(device._device.memory)
    device._device.queue.append(lambda: _copy(host, device))


def _copy(host: Tensor, device: Tensor) -> None:
    for chip, shard in enumerate(host.shards):
        for i, page in enumerate(shard.reshape(-1, device.page)):
            device.held(chip, i)[:] = page


def from_device(tensor: Tensor) -> Tensor:
    """A host tensor of what the chips hold, behind all that is on the queue."""
    mesh = tensor.device()
    mesh.finish()
    made = Tensor(None, tensor.dtype, tensor.layout)
    made.shape = list(tensor.shape)
    made.shards = [
        np.concatenate([tensor.held(chip, page) for page in range(tensor.pages)])
        for chip in range(len(mesh.memory))
    ]
    return made


def paged_fill_cache(cache: Tensor, given: Tensor, page_table: Any, *, batch_idx: int = 0) -> None:
    """`given` is [1, heads, rows, dim]; block j of a request is page_table[user][j]."""
    assert cache.dtype == given.dtype
    cache._device.queue.append(lambda: _fill(cache, given, page_table.data[batch_idx]))


def _fill(cache: Tensor, given: Tensor, blocks: Any) -> None:
    _, heads, rows, dim = given.shape
    down, across = rows // 32, -(-dim // 32)
    high = cache.shape[2] // 32
    for chip in range(len(cache._device.memory)):
        for head in range(heads):
            for row in range(down):
                for column in range(across):
                    source = (head * down + row) * across + column
                    target = ((int(blocks[row // high]) * heads + head) * high + row % high) * across + column
                    cache.held(chip, target)[:] = given.held(chip, source)


def plane(cache: Tensor, block: int, head: int) -> np.ndarray:
    """The numbers of a block's head on chip 0, `float32[block_size, dim]`."""
    _, heads, rows, dim = cache.shape
    each = rows // 32 * (dim // 32)
    pages = np.stack([cache.held(0, (block * heads + head) * each + i) for i in range(each)])
    return reference.unpages(pages, CODECS[cache.dtype], (1, 1, rows, dim), False)[0, 0].view(np.float32)


def put_plane(cache: Tensor, block: int, head: int, numbers: np.ndarray) -> None:
    _, heads, rows, dim = cache.shape
    each = rows // 32 * (dim // 32)
    bits = np.ascontiguousarray(numbers[None, None]).view(np.uint32)
    for i, page in enumerate(reference.pages(bits, CODECS[cache.dtype], False)):
        cache.held(0, (block * heads + head) * each + i)[:] = page


def paged_update_cache(cache: Tensor, new: Tensor, *, update_idxs_tensor: Tensor, page_table: Tensor) -> None:
    """`new` is [1, users, heads, dim], sharded by users."""
    assert new.memory_config() == "sharded"
    cache._device.finish()
    size = cache.shape[2]
    for user, at in enumerate(update_idxs_tensor.data):
        for head in range(new.shape[2]):
            block = int(page_table.data[user][at // size])
            held = plane(cache, block, head)
            held[at % size] = new.data[0, user, head]
            put_plane(cache, block, head, held)


def attention(
    query: Tensor, k: Tensor, v: Tensor, page_table: Tensor, *, cur_pos_tensor: Tensor, scale: float
) -> np.ndarray:
    """Softmax of query and K over tokens 0..cur_pos, times V: [1, users, query heads, dim]."""
    out = np.empty(query.shape, np.float32)
    group = query.shape[2] // k.shape[1]
    for user, at in enumerate(cur_pos_tensor.data):
        for head in range(query.shape[2]):
            keys, values = (
                np.concatenate([plane(of, int(b), head // group) for b in page_table.data[user]])[: at + 1]
                for of in (k, v)
            )
            weight = keys @ query.data[0, user, head] * scale
            weight = np.exp(weight - weight.max())
            out[0, user, head] = weight @ values / weight.sum()
    return out


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
        "int32": "int32",
        "uint32": "uint32",
        "TILE_LAYOUT": "tile",
        "ROW_MAJOR_LAYOUT": "rows",
        "Shape": list,
        "MeshShape": lambda *n: list(n),
        "MeshCoordinate": lambda *n: n,
        "Tensor": Tensor,
        "TensorMemoryLayout": SimpleNamespace(INTERLEAVED="interleaved"),
        "BufferType": SimpleNamespace(DRAM="dram"),
        "DRAM_MEMORY_CONFIG": SimpleNamespace(memory_layout="interleaved", buffer_type="dram"),
        "get_memory_view": lambda mesh, _: SimpleNamespace(
            num_banks=mesh.banks,
            total_bytes_per_bank=mesh.bank_bytes,
            largest_contiguous_bytes_free_per_bank=FIRST + mesh.bank_bytes - mesh.next,
        ),
        "get_dram_alignment": lambda: 64,
        "device": SimpleNamespace(get_allocator_base_address=lambda mesh, _: FIRST),
        "shard_tensor_to_mesh_mapper": lambda mesh, dim: (len(mesh.memory), dim),
        "allocate_tensor_on_device": allocate,
        "narrow": narrow,
        "copy_host_to_device_tensor": copy,
        "synchronize_device": lambda mesh: mesh.finish(),
        "dump_tensor": dump,
        "load_tensor": load,
        "experimental": SimpleNamespace(
            paged_fill_cache=paged_fill_cache, paged_update_cache=paged_update_cache
        ),
        "transformer": SimpleNamespace(paged_scaled_dot_product_attention_decode=attention),
        "open_mesh_device": lambda shape: Mesh(chips=shape[1]),
        "close_mesh_device": lambda mesh: None,
        "create_sharded_memory_config": lambda **_: "sharded",
        "CoreGrid": lambda **_: None,
        "ShardStrategy": SimpleNamespace(HEIGHT=0),
        "ShardOrientation": SimpleNamespace(ROW_MAJOR=0),
    }
    for name, value in parts.items():
        setattr(made, name, value)
    return made


def install(monkeypatch: Any) -> ModuleType:
    """`import ttnn` gives this one until the test ends."""
    made = library()
    monkeypatch.setitem(sys.modules, "ttnn", made)
    return made
