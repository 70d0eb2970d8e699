"""Where the buffers of steps lie: addresses of both sides, and how much lies behind each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.errors import InvalidArgument
from hawk.retile.cpu import places

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from hawk.retile.cpu import Step

    I64 = NDArray[np.int64]


class Span(NamedTuple):
    """Memory that a kernel can reach: its first address, and how many bytes."""

    address: int
    nbytes: int


class Spans(tuple[Span, ...]):
    """Memory of a cache, which does not move: its table is made once."""

    table: I64

    def __new__(cls, spans: Iterable[Span]) -> Spans:
        """All of them, in order."""
        made = super().__new__(cls, spans)
        made.table = np.array([*made], np.int64).reshape(-1, 2)
        return made


def table_of(regions: Sequence[Span]) -> I64:
    """Addresses and bytes, `int64[regions, 2]`."""
    return regions.table if isinstance(regions, Spans) else np.array([*regions], np.int64).reshape(-1, 2)


def bases_of(steps: Sequence[Step], regions: Sequence[Span], arena: Span) -> tuple[I64, list[int]]:
    """Addresses `int64[steps, channels of both sides]`, and the fewest bytes that lie behind them in any step.

    Steps of one program over the same pieces have as many channels.  Raises `InvalidArgument` as `places` does.
    """
    if any(len(step.src_region) != len(step.src_offset) for step in steps):
        return _one_by_one(steps, regions, arena)
    # All at once: one by one they would cost a launch of many layers more than everything else does.
    region = np.array([step.src_region for step in steps], np.int64)
    offset = np.array([step.src_offset + step.dst_offset for step in steps], np.int64)
    if int(region.min()) < 0 or int(region.max()) >= len(regions):
        return _one_by_one(steps, regions, arena)
    memory, channels = np.concatenate((table_of(regions), np.array([arena], np.int64))), region.shape[1]
    last = np.full((len(steps), offset.shape[1] - channels), len(regions), np.int64)
    lies = memory[np.concatenate((region, last), axis=1)]
    room = lies[..., 1] - offset
    if int(offset.min()) < 0 or int(room.min()) < 0:
        return _one_by_one(steps, regions, arena)
    return lies[..., 0] + offset, room.min(axis=0).tolist()


def _one_by_one(steps: Sequence[Step], regions: Sequence[Span], arena: Span) -> tuple[I64, list[int]]:
    """The same, which names the step's field that cannot be."""
    found, room = [], []
    for step in steps:
        src, dst = places(step, regions, arena, _behind)
        spans = [*src, *dst]
        found.append([span.address for span in spans])
        room.append([span.nbytes for span in spans])
    return np.array(found, np.int64), np.array(room, np.int64).min(axis=0).tolist()


def _behind(span: Span, offset: int, field: str) -> Span:
    if not 0 <= offset <= span.nbytes:
        raise InvalidArgument(
            "the offset lies outside its region", field=field, got=offset, expected=f"0..{span.nbytes}"
        )
    return Span(span.address + offset, span.nbytes - offset)
