"""Memory of every bank that ttnn's allocator leaves to HAWK: it belongs to a tensor that HAWK owns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hawk.arguments import count as whole
from hawk.errors import OutOfMemory
from hawk.integrations.ttnn import api
from hawk.memory.tenstorrent import Reservation
from hawk.units import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = 2048
"""Bytes of a tile of bf16, of which the tensor that reserves is made: a multiple of every chip's alignment."""


def banks(device: Any) -> int:
    """DRAM banks that ttnn deals pages over."""
    ttnn = api.library()
    return int(ttnn.get_memory_view(device, ttnn.BufferType.DRAM).num_banks)


def chips(device: Any) -> tuple[int, ...]:
    """Numbers of the chips of a device or mesh, in the mesh's row-major order."""
    return tuple(int(n) for n in device.get_device_ids())


def bounds(device: Any) -> tuple[int, int]:
    """First address that ttnn's allocator deals out in each bank, and one past its last."""
    ttnn = api.library()
    first = int(ttnn.device.get_allocator_base_address(device, ttnn.BufferType.DRAM))
    return first, first + int(ttnn.get_memory_view(device, ttnn.BufferType.DRAM).total_bytes_per_bank)


def reserve(device: Any, nbytes: int) -> Reservation:
    """`nbytes` or a little more of every bank of every chip of `device`, out of ttnn's own allocator's way.

    The reservation holds the tensor that the memory belongs to: it ends when the reservation is forgotten, or when that
    tensor is deallocated.  Raises `InvalidArgument` for a size that is none, `OutOfMemory` where ttnn has not that
    much.
    """
    ttnn = api.library()
    view = ttnn.get_memory_view(device, ttnn.BufferType.DRAM)
    count, free = int(view.num_banks), int(view.largest_contiguous_bytes_free_per_bank)
    wanted = -(-max(1, whole(nbytes, "nbytes")) // PAGE) * PAGE
    if wanted > free:
        raise OutOfMemory(
            "ttnn's allocator has no such piece of every bank left",
            field="nbytes",
            got=approximate_size(wanted),
            expected=f"at most {approximate_size(free)}",
            banks=count,
        )
    tiles = wanted // PAGE * count
    tensor = allocate(
        device, (tiles, 1, api.TILE, api.TILE), "bf16", f"{wanted} bytes of each of {count} banks"
    )
    lowest, highest = bounds(device)
    return Reservation(
        chips=chips(device),
        address=int(tensor.buffer_address()),
        nbytes=wanted,
        banks=count,
        alignment=int(ttnn.get_dram_alignment()),
        lowest=lowest,
        highest=highest,
        holder=tensor,
    )


def allocate(device: Any, shape: Sequence[int], codec: str, what: str) -> Any:
    """A tensor of tiles in interleaved DRAM, of each chip `shape`; raises `OutOfMemory`."""
    return _allocated(device, shape, api.dtype(codec), api.library().TILE_LAYOUT, what)


def _allocated(device: Any, shape: Sequence[int], dtype: Any, layout: Any, what: str) -> Any:
    ttnn = api.library()
    try:
        return ttnn.allocate_tensor_on_device(
            ttnn.Shape(list(shape)), dtype, layout, device, ttnn.DRAM_MEMORY_CONFIG
        )
    except RuntimeError as fault:
        if "out of memory" not in str(fault).lower():
            raise
        raise OutOfMemory(
            "ttnn has not that much DRAM left", field="nbytes", got=what, reason=_reason(fault)
        ) from fault


def rows(device: Any, count: int, words: int, what: str) -> Any:
    """A tensor `uint32[count, words]` in interleaved DRAM, a page for each row; raises `OutOfMemory`."""
    ttnn = api.library()
    return _allocated(device, (count, words), ttnn.uint32, ttnn.ROW_MAJOR_LAYOUT, what)


def _reason(fault: RuntimeError) -> str:
    """The line of ttnn's that says what is free."""
    lines = [line for line in str(fault).splitlines() if "out of memory" in line.lower()]
    return lines[-1][:300]
