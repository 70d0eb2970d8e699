"""The plan's vocabulary: selections, chunks, and what both sides derive from them.

Both agents compute the plan for themselves from the same facts, so no segment list crosses the wire: the
sender needs the target's layout, block table and token range to lay out its arena; the receiver needs the
same to know where each byte of the arena goes.  Within a chunk the arena is channel-major:

    [ channel 0: plane 0 | plane 1 | ... ] [ channel 1: plane 0 | plane 1 | ... ] ...

where a *plane* is one (layer, kv) and holds its pages for that channel in ascending page order.  Where K and V share
pages, the plane of K holds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, overload

import numpy as np

from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.retile.lies import Lies
    from hawk.retile.program import Pieces, Program
    from hawk.retile.rows import RowsStep

    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a request is moved: layers `[layer, layer + layers)` and token positions `[token, token + tokens)`.

    Layers and heads are those of the target.  Where the source counts otherwise, because the two sides share the
    model out among their workers in other ways, the rest says how; `hawk.plan.shards` fills it in.

    source_layers        the source's layer for each target layer, in their order; empty: the same numbers
    head, heads          target heads `[head, head + heads)`; 0 heads: all of them, which are then all of the source's
    source_head          the source's head that becomes `head`; the following ones follow

    Block tables on both sides count from token 0 of the request: entry i holds tokens
    `[i * block_size, (i + 1) * block_size)`.
    """

    layer: int
    layers: int
    token: int
    tokens: int
    source_layers: tuple[int, ...] = ()
    head: int = 0
    heads: int = 0
    source_head: int = 0

    def __post_init__(self) -> None:
        plain = not (self.heads or self.head or self.source_head or self.source_layers)
        if plain and self.layers > 0 and self.tokens > 0 and self.layer >= 0 and self.token >= 0:
            return  # most are like this, and there is nothing else that could be wrong with them
        for name in ("layers", "tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgument(
                    "nothing is selected",
                    field=f"selection.{name}",
                    got=getattr(self, name),
                    expected="1 or more",
                )
        for name in ("layer", "token", "head", "heads", "source_head"):
            if getattr(self, name) < 0:
                raise InvalidArgument(
                    "negative", field=f"selection.{name}", got=getattr(self, name), expected="0 or more"
                )
        if self.heads == 0 and (self.head or self.source_head):
            raise InvalidArgument(
                "a range of heads needs its length", field="selection.heads", got=0, expected="1 or more"
            )
        if self.source_layers and len(self.source_layers) != self.layers:
            raise InvalidArgument(
                "one layer of the source is needed for each layer of the target",
                field="selection.source_layers",
                got=f"{len(self.source_layers)} layers",
                expected=self.layers,
            )
        if min(self.source_layers, default=0) < 0:
            raise InvalidArgument(
                "negative",
                field="selection.source_layers",
                got=min(self.source_layers),
                expected="0 or more",
            )

    def source_layer(self, layer: int) -> int:
        """The source's layer that becomes the target's `layer`."""
        return self.source_layers[layer - self.layer] if self.source_layers else layer

    def target_heads(self, layout: CompiledLayout) -> tuple[int, int]:
        """First head of the target, and how many."""
        return self.head, self.heads or layout.shape.heads


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is prepared, moved and finished in one go: layers x entries of the target's block table."""

    layer: int
    layers: int
    block: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a cache lies: for every buffer and channel a region and the byte offset of the buffer's base in it.

    region, offset    `int32[buffers, channels]` and `int64[buffers, channels]`; `region` indexes whatever list of
                      regions the owner keeps for this cache
    """

    region: I32
    offset: I64


@dataclass(frozen=True, slots=True)
class PlaneRuns:
    """The byte runs of one plane of a chunk: contiguous both in the plane's part of the arena and in the target.

    channel    `int32[n]`
    arena      byte offset within the plane's part of that channel, `int64[n]`
    target     byte offset in that channel from the buffer's base plus the plane's `shift`, `int64[n]`
    nbytes     `int64[n]`
    channel_bytes    arena bytes of the plane per channel, a multiple of 64, `int64[channels]`
    moved      `int64[entries * channels]`: from the pages of each entry in each channel to their places in the arena,
               bytes, where all of them lie at one distance (0 where there are none); else empty

    Rows are sorted by channel, then by `arena`, which is also the order of `target`.
    """

    channel: I32
    arena: I64
    target: I64
    nbytes: I64
    channel_bytes: I64
    moved: I64


@dataclass(frozen=True, slots=True)
class TargetChunk:
    """The target's side of a chunk, independent of where the arena and the cache lie.

    planes      (layer, kv) in arena order
    kind        for each plane, index into `runs` (planes of one kind share their runs)
    base        byte offset of each plane's part per channel from the chunk's first arena byte,
                `int64[planes, channels]`
    shift       what to add to `PlaneRuns.target` for this plane, bytes, the same in every channel, `int64[planes]`
                (not 0 where layers or kvs of one buffer follow each other)
    nbytes      arena bytes of the chunk
    tensors     planes of each of `layout.tensors`, see `hawk.plan.tensors`; empty: all are of the one
    tables      for which planes of `layout` alone these are known: kinds and numbers of buffers, `int64[planes]` each
    """

    layout: CompiledLayout
    selection: Selection
    chunk: Chunk
    planes: tuple[tuple[int, int], ...]
    kind: tuple[int, ...]
    runs: tuple[PlaneRuns, ...]
    base: I64
    shift: I64
    nbytes: int
    tensors: tuple[int, ...] = ()
    tables: tuple[tuple[tuple[int, int], ...], I64, I64] | None = None

    def tensor_of(self, plane: int) -> CompiledLayout:
        """The tensor that plane number `plane` is of."""
        for tensor, count in zip(self.layout.tensors, self.tensors, strict=False):
            if plane < count:
                return tensor
            plane -= count
        return self.layout.tensors[0]

    @property
    def buffers(self) -> I64:
        """Row of each plane's buffer in a `Placement` of the cache, `int64[planes]`."""
        if self.tables is not None and self.tables[0] is self.planes and not self.tensors:
            return self.tables[2]
        return _buffers(self.layout, self.planes, self.tensors)

    @property
    def kinds(self) -> I64:
        """`kind` as an array, `int64[planes]`."""
        if self.tables is not None and self.tables[0] is self.planes:
            return self.tables[1]
        return np.asarray(self.kind, np.int64)

    @property
    def channel_bytes(self) -> I64:
        """Arena bytes per channel, all planes together, `int64[channels]`."""
        planes = np.bincount(np.asarray(self.kind), minlength=len(self.runs)).astype(np.int64)
        return planes @ np.stack([r.channel_bytes for r in self.runs])


@lru_cache(maxsize=256)
def _buffers(layout: CompiledLayout, planes: tuple[tuple[int, int], ...], tensors: tuple[int, ...]) -> I64:
    found, end = [], 0
    for tensor, (first, _), count in zip(
        layout.tensors, layout.places, tensors or (len(planes),), strict=True
    ):
        begin, end = end, end + count
        found += [first + tensor.buffer(layer, kv) for layer, kv in planes[begin:end]]
    numbers = np.asarray(found, np.int64)
    numbers.flags.writeable = False
    return numbers


@dataclass(frozen=True, slots=True)
class RetileStep:
    """One call of a retile core: a program, its pieces, and where the plane lies on both sides.

    src_region, src_offset    region index and byte offset of the plane's buffer per source channel
    dst_offset                byte offset of the plane's part per target channel, from the chunk's first arena byte
    tensor                    0 for elements, 1 for scales that lie beside them
    """

    layer: int
    kv: int
    program: Program
    pieces: Pieces
    src_region: tuple[int, ...]
    src_offset: tuple[int, ...]
    dst_offset: tuple[int, ...]
    tensor: int = 0


Step: TypeAlias = "RetileStep | RowsStep"
"""What a retiler carries out."""

StepT = TypeVar("StepT", covariant=True)


class Steps(Sequence[StepT]):
    """The steps of a chunk, each made when it is looked at: they are many, and their pieces, which count, are few.

    count    how many
    make     the step of a number in `range(count)`
    lies     tells of all of them where they lie, where that can be told at once
    """

    __slots__ = ("_count", "_make", "lies")

    def __init__(
        self, count: int, make: Callable[[int], StepT], lies: Callable[[], Lies] | None = None
    ) -> None:
        self._count = count
        self._make = make
        self.lies = lies

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> StepT: ...
    @overload
    def __getitem__(self, index: slice) -> Steps[StepT]: ...
    def __getitem__(self, index: int | slice) -> StepT | Steps[StepT]:
        numbers = range(self._count)[index]
        if isinstance(numbers, int):
            return self._make(numbers)
        make = self._make
        return Steps(len(numbers), lambda i: make(numbers[i]))

    def __iter__(self) -> Iterator[StepT]:
        return map(self._make, range(self._count))


Mode = Literal["direct", "staged"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Direct or staged, and why, in one sentence for logs and `explain`."""

    mode: Mode
    reason: str
