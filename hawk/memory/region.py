"""Regions and segments: the only words that transports, memories and plans share.

A leaf module: it imports nothing of HAWK but the errors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]
    U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Handle:
    """How a device reaches one extent of a region that is made of several pieces.

    dmabuf   a dma-buf whose byte `offset` is the extent's first, or -1
    address  where a peer-memory module knows the extent in this process, or 0 for the region's own address
    """

    dmabuf: int = -1
    offset: int = 0
    address: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """One contiguous range of one memory that bytes can be moved into and out of.

    name     for people and logs, unique in its agent: `"npu0/channel3"`, `"arena"`, `"cache-7/buffer0"`
    array    the bytes as seen by this process, `uint8[nbytes]`, writable unless the owner forbade it
    fd       a memfd whose bytes `[fd_offset, fd_offset + nbytes)` are this region's, or -1
    extents  offsets (ascending, the first 0) at which a registration of this memory begins anew; no segment
             may cross one.  Most regions have one extent.
    dmabuf   a dma-buf whose bytes `[dmabuf_offset, dmabuf_offset + nbytes)` are this region's, or -1
    handles  one for each extent, where each has a dma-buf or an address of its own; else empty

    The region owns neither the array nor a descriptor; the memory that made it does.
    """

    name: str
    array: U8
    fd: int = -1
    fd_offset: int = 0
    extents: tuple[int, ...] = (0,)
    dmabuf: int = -1
    dmabuf_offset: int = 0
    handles: tuple[Handle, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.array.nbytes)

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process."""
        return int(self.array.__array_interface__["data"][0])

    @property
    def gpu(self) -> int:
        """The GPU whose memory it is, -1 for memory that processors read and write: only that has an `array`."""
        return -1

    @property
    def reached_by(self) -> frozenset[int]:
        """Other GPUs of this process that can write it by an address of theirs, where it is a GPU's."""
        return frozenset()


@dataclass(frozen=True, slots=True)
class Segments:
    """What to move: row i takes `nbytes[i]` bytes from the remote arena to (or from) a local region.

    region   index into the list of local regions that goes with this batch, `int32[n]`
    local    byte offset in that region, `int64[n]`
    remote   byte offset in the remote arena region, `int64[n]`
    nbytes   length in bytes, `int64[n]`, every one positive

    Rows are sorted by `remote`, do not overlap there, and cross no extent.
    """

    region: I32
    local: I64
    remote: I64
    nbytes: I64

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Bytes in all rows together."""
        return int(self.nbytes.sum())

    def batches(self) -> Iterator[Segments]:
        """All rows in order, a part at a time: who moves them needs them no other way."""
        yield self

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int]]) -> Segments:
        """From (region, local, remote, nbytes) rows; for tests and small batches."""
        table = np.asarray(rows, dtype=np.int64).reshape(-1, 4)
        return cls(table[:, 0].astype(np.int32), table[:, 1].copy(), table[:, 2].copy(), table[:, 3].copy())

    def check(self, regions: Sequence[Region], remote_nbytes: int | None = None) -> None:
        """Raises `InvalidArgument` unless every row lies inside its regions."""
        n = len(self.nbytes)
        if not (len(self.region) == len(self.local) == len(self.remote) == n):
            raise InvalidArgument("columns differ in length", field="segments")
        if n == 0:
            return
        if int(self.nbytes.min()) <= 0:
            raise InvalidArgument("a segment is empty", field="segments.nbytes", got=int(self.nbytes.min()))
        if int(self.region.min()) < 0 or int(self.region.max()) >= len(regions):
            raise InvalidArgument(
                "no such local region",
                field="segments.region",
                got=int(self.region.max()),
                expected=f"0..{len(regions) - 1}",
            )
        each = np.asarray([r.nbytes for r in regions], dtype=np.int64)
        sizes = each if len(regions) == 1 else each[self.region]
        bad = (self.local < 0) | (self.local + self.nbytes > sizes)
        bad |= self.remote < 0
        if remote_nbytes is not None:
            bad |= self.remote + self.nbytes > remote_nbytes
        if bad.any():
            i = int(np.argmax(bad))
            raise InvalidArgument(
                "a segment lies outside its region",
                field=f"segments[{i}]",
                got=f"local {int(self.local[i])}, remote {int(self.remote[i])}, {int(self.nbytes[i])} bytes",
                expected=f"within {int(each[self.region[i]])} local and {remote_nbytes} remote bytes",
            )


@dataclass(frozen=True, slots=True)
class Moves:
    """Copies inside channels that finish a staged plan: row i moves `nbytes[i]` bytes within one channel.

    channel, source, target, nbytes: `int32[n]`, then three `int64[n]` of byte offsets in that channel's region.
    """

    channel: I32
    source: I64
    target: I64
    nbytes: I64

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclass(frozen=True, slots=True)
class ByteRanges:
    """Byte ranges of regions: what a flush must make visible, what a job owns.

    region `int32[n]` indexes a list of regions; `start` and `nbytes` are `int64[n]`.
    """

    region: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    start: I64 = field(default_factory=lambda: np.empty(0, np.int64))
    nbytes: I64 = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        """Bytes in all rows together."""
        return int(self.nbytes.sum())

    def spans(self) -> ByteRanges:
        """Fewer and larger ranges in the same regions that cover all rows; these rows, where there are none."""
        return self
