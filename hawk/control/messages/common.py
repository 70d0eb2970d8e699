"""Field types that messages share: every one bounded, since a stranger may choose its value."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from hawk.errors import BadFrame

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Software = Annotated[str, Meta(max_length=64, pattern=r"^[ -~]*\Z")]
"""What a program says it is, in a word or two; it is shown in operators' terminals, so printable ASCII."""
RequestId = Annotated[str, Meta(min_length=1, max_length=512)]
JobId = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]{32}$")]
CacheId = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]{32}$")]
Claim = Annotated[str, Meta(min_length=32, max_length=32, pattern="^[0-9a-f]{32}$")]
Key = Annotated[bytes, Meta(min_length=16, max_length=64)]
Note = Annotated[bytes, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, le=2**48)]
Seconds = Annotated[float, Meta(ge=0, le=86_400 * 7)]
Priority = Annotated[int, Meta(ge=-100, le=100)]
Blocks = Annotated[bytes, Meta(max_length=4 * 2**19)]
CheckName = Annotated[str, Meta(max_length=32)]
Checks = Annotated[bytes, Meta(max_length=8 * 2**17)]
Wire = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=8192)]]
Endpoints = dict[Annotated[str, Meta(max_length=64)], Wire]


def pack_blocks(blocks: np.ndarray) -> bytes:
    """A block table as little-endian int32."""
    return np.ascontiguousarray(blocks, dtype="<i4").tobytes()


def unpack_blocks(raw: bytes) -> np.ndarray:
    """The block table that `pack_blocks` wrote, as `int64[n]`; raises `BadFrame` for a ragged length."""
    if len(raw) % 4:
        raise BadFrame("a block table is a whole number of int32", field="blocks", got=f"{len(raw)} bytes")
    return np.frombuffer(raw, dtype="<i4").astype(np.int64)


Extent = Annotated[int, Meta(ge=1, le=65_536)]


class PartDescr(Struct, frozen=True, array_like=True):
    """Which heads and layers of a model a cache holds: `[head, head + heads)` of `of_heads`, layers likewise.

    copy, copies    which of so many caches that hold the same
    """

    head: Annotated[int, Meta(ge=0, le=65_536)]
    heads: Extent
    of_heads: Extent
    layer: Annotated[int, Meta(ge=0, le=65_536)]
    layers: Extent
    of_layers: Extent
    copy: Annotated[int, Meta(ge=0, le=65_536)] = 0
    copies: Extent = 1


class CacheDescr(Struct, frozen=True, kw_only=True):
    """A cache as any agent can understand it: the layout's own text, and what it is bound to.

    part    what of a model's cache it is; None: all of it
    """

    layout: Annotated[str, Meta(max_length=32_768)]
    codec: Annotated[str, Meta(max_length=32)]
    layers: Annotated[int, Meta(ge=1, le=65_536)]
    heads: Annotated[int, Meta(ge=1, le=65_536)]
    dim: Annotated[int, Meta(ge=1, le=1_048_576)]
    block_size: Annotated[int, Meta(ge=1, le=1_048_576)]
    blocks: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    kvs: Annotated[int, Meta(ge=1, le=2)] = 2
    channels: Annotated[int, Meta(ge=0, le=4096)] = 0
    align: Annotated[int, Meta(ge=0, le=2**30)] = 0
    params: dict[Annotated[str, Meta(max_length=64)], int] = {}
    part: PartDescr | None = None
