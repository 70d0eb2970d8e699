"""All that is used of ttnn, and how its words and HAWK's go together."""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import InvalidArgument, MissingDependency
from hawk.extras import install

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

TILE = 32
"""Rows and columns of a tile."""

CODECS = {"bf16": "bfloat16", "bfp8_b": "bfloat8_b", "bfp4_b": "bfloat4_b", "fp32": "float32"}
"""ttnn's names of HAWK's codecs."""

NEEDED = (
    "Tensor",
    "Shape",
    "allocate_tensor_on_device",
    "copy_host_to_device_tensor",
    "dump_tensor",
    "get_memory_view",
    "load_tensor",
    "narrow",
    "synchronize_device",
)
"""What HAWK calls, apart from a chip's operations."""

HINT = f"{install('ttnn')}; its wheels are for Python 3.12 and want numpy below 2 (docs/ttnn.md)"


def library() -> Any:
    """The module ttnn; raises `MissingDependency` where it is not installed, or lacks what HAWK calls."""
    try:
        found = importlib.import_module("ttnn")
    except ImportError as absent:
        raise MissingDependency(
            "ttnn is not installed, or does not load", field="ttnn", got=str(absent)[:200], hint=HINT
        ) from absent
    lacking = [name for name in NEEDED if not hasattr(found, name)]
    if lacking:
        raise MissingDependency(
            "this ttnn has not all that HAWK calls", field="ttnn", got=f"no {', '.join(lacking)}", hint=HINT
        )
    return found


def dtype(codec: str) -> Any:
    """The number type of ttnn's for a codec; raises `InvalidArgument` for one that it has not."""
    if codec not in CODECS:
        raise InvalidArgument(
            "ttnn has no such numbers", field="codec", got=codec, expected=", ".join(CODECS)
        )
    return getattr(library(), CODECS[codec])


def codec(of: Any, field: str) -> str:
    """HAWK's codec of a ttnn number type."""
    for name, theirs in CODECS.items():
        if of == getattr(library(), theirs):
            return name
    raise InvalidArgument(
        "no cache is of these numbers", field=field, got=of, expected=", ".join(CODECS.values())
    )


def extents(tensor: Any) -> tuple[int, ...]:
    """The logical shape, of one chip's share."""
    return tuple(int(n) for n in tensor.shape)


def shard_bytes(tensor: Any, index: int = 0) -> NDArray[np.uint8]:
    """The bytes of a host tensor, of chip `index` of a mesh in row-major order: a view, `uint8[n]`."""
    ttnn = library()
    buffer = tensor.host_buffer()
    shape = tuple(int(n) for n in buffer.shape()) if len(tuple(buffer.shape())) else (1,)
    place = [int(n) for n in np.unravel_index(index, shape)]
    return np.from_dlpack(buffer.get_shard(ttnn.MeshCoordinate(*place))).view(np.uint8).reshape(-1)


def mesh_size(shape: Sequence[int]) -> int:
    """Chips of a mesh."""
    return math.prod(int(n) for n in shape)
