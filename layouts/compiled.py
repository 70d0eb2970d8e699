"""The compiled form of a layout: digits with strides, the only thing retile and plan ever read.

A compiled layout answers, for every element of a cache, *which buffer, which page of it, which position in
that page*, as sums over digits.  A digit is one factor of one axis' index: `(index // div) % ext`, worth
`stride` pages or `stride` elements.  Since each digit belongs to one axis, addresses are separable: the
address of an element is a sum with one term per axis, which is what makes plans vectorisable.

Every layout is in page form.  One whose declaration has no `|` is cut behind its least significant `layer`,
`kv` or `block` digit: below that cut lie only `head`, `slot` and `dim` digits, and a page is a contiguous
stretch of memory.  So a page never spans two blocks or two layers, and K and V only where a declaration's `|` says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Axis = Literal["layer", "kv", "head", "block", "slot", "dim"]
Per = Literal["token", "block", "cache"]
AXES: tuple[Axis, ...] = ("layer", "kv", "head", "block", "slot", "dim")


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The index box of one worker's cache: `layers x kvs x heads x blocks x block_size x dim` elements.

    kvs is 2 where K and V are both kept, 1 where there is one tensor (latents).  `block_size` counts tokens
    (the extent of the `slot` axis), `heads` the KV heads of this worker.
    """

    layers: int
    heads: int
    dim: int
    block_size: int
    blocks: int
    kvs: int = 2

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "dim", "block_size", "blocks", "kvs"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InvalidArgument(
                    "an extent is a positive integer", field=f"shape.{name}", got=value, expected="1 or more"
                )

    def extent(self, axis: Axis) -> int:
        """Number of indices along `axis`."""
        return {
            "layer": self.layers,
            "kv": self.kvs,
            "head": self.heads,
            "block": self.blocks,
            "slot": self.block_size,
            "dim": self.dim,
        }[axis]


@dataclass(frozen=True, slots=True)
class Digit:
    """`(index[axis] // div) % ext`, worth `stride` (pages in a page number, elements inside a page).

    The most significant digit of an axis takes what is left: there `div * ext` may exceed the axis' extent,
    and the surplus indices are padding.
    """

    axis: Axis
    div: int
    ext: int
    stride: int


@dataclass(frozen=True, slots=True)
class Run:
    """`count` indices of dim from `first` on, stored at `to`, `to + step`, ... in the order of a rename."""

    first: int
    count: int
    to: int
    step: int


@dataclass(frozen=True, slots=True)
class CodecInfo:
    """How elements are stored; the bytes themselves are defined by the codec of that name in `codecs`.

    name        as in `codecs.CODECS`
    bits        bits per element, without scales
    group       elements that share one exponent, along the least significant inside digits; 1 for elementwise
    header      bytes at the start of each page that hold the exponents of its groups in order (0 if none)
    lossy       whether a value survives a round trip through bf16 only approximately
    factor      what elements are multiplied by: a scale of the whole cache that lies nowhere in memory, a binary32
    """

    name: str
    bits: int
    group: int = 1
    lossy: bool = False
    factor: float = 1.0

    def header_bytes(self, elements: int) -> int:
        """Bytes of shared exponents at the start of a page of `elements`."""
        return 0 if self.group == 1 else elements // self.group

    def page_bytes(self, elements: int) -> int:
        """Bytes of one page of `elements`: header and elements."""
        return self.header_bytes(elements) + (elements * self.bits) // 8


@dataclass(frozen=True, slots=True)
class CompiledPiece:
    """The digits that hold for some values of `kv` (all of them, or `kv=0` where K and V are laid differently).

    page        digits of the page number within a buffer, most significant first, strides in pages
    inside      digits of the position within a page, most significant first, strides in elements
    elements    elements per page, padding included
    padded      whether some positions of some pages are padding (they hold zero)
    stored      empty: `dim` digits are digits of the index.  Else they are digits of the *stored* index, and this is
                where each index is stored: runs over `0..dim-1`, a permutation of it.  Indices from dim on are
                padding and stand for themselves.
    """

    kvs: tuple[int, ...]
    page: tuple[Digit, ...]
    inside: tuple[Digit, ...]
    elements: int
    padded: bool
    stored: tuple[Run, ...] = ()

    def page_term(self, axis: Axis, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """What `index` along `axis` adds to the page number; same shape as `index`."""
        return _term(self.page, axis, self._digits_of(axis, index))

    def inside_term(self, axis: Axis, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """What `index` along `axis` adds to the element position within the page; same shape as `index`."""
        return _term(self.inside, axis, self._digits_of(axis, index))

    def _digits_of(self, axis: Axis, index: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.store(index) if axis == "dim" and self.stored else index

    def store(self, dim: NDArray[np.int64]) -> NDArray[np.int64]:
        """Stored indices of indices along dim; same shape."""
        return _permuted(_tables(self.stored)[0], dim)

    def unstore(self, stored: NDArray[np.int64]) -> NDArray[np.int64]:
        """The inverse of `store`."""
        return _permuted(_tables(self.stored)[1], stored)


@lru_cache(maxsize=256)
def _tables(runs: tuple[Run, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A permutation and its inverse."""
    forth = np.concatenate(
        [np.arange(r.count, dtype=np.int64) * r.step + r.to for r in runs] or [np.empty(0, np.int64)]
    )
    back = np.argsort(forth)
    for table in (forth, back):
        table.flags.writeable = False
    return forth, back


def _permuted(table: NDArray[np.int64], index: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(table) == 0:
        return index
    return np.where(index < len(table), table[np.minimum(index, len(table) - 1)], index)


def _term(digits: Sequence[Digit], axis: Axis, index: NDArray[np.int64]) -> NDArray[np.int64]:
    total = np.zeros_like(index)
    for d in digits:
        if d.axis == axis:
            total += (index // d.div) % d.ext * d.stride
    return total


@dataclass(frozen=True, slots=True)
class CompiledLayout:
    """A layout bound to a shape, a codec and a number of channels.

    name          the declaration's name, for messages
    shape         the index box
    codec         how elements are stored
    buffers       axes that select separate base addresses, a subset of `("layer", "kv")` in that order
    pieces        one, or one per value of kv
    pages         pages per buffer
    page_bytes    bytes of one page that mean something
    page_stride   distance of neighbouring pages of one channel: `page_bytes` rounded up to the alignment
    channels      pages are dealt to that many channels in turn: page i lies in channel `i % channels` at byte
                  `(i // channels) * page_stride` from the buffer's base in that channel; 1 for linear memory
    banks         which of the memory's channels each of these is, where it is not that of the same number
    scale         the layout of the tensor of scales, where elements have some that no codec holds: what moves the
                  one moves the other
    inset         0: its buffers are its own, behind those of the tensors before it.  Else its pages lie in those of
                  the last such tensor before it, page i that many bytes behind the beginning of page i
    per           what a row of it is of: a token, as of elements; a block, which has one slot then; or the whole
                  cache, which has one block of one slot
    of_scales     whether it holds scales, those of the tensor before it
    first         the first dim of the cache that it holds
    parts         where parts of every head are tensors of their own: these, each with its own dims and scales.  The
                  layout itself is the first of them then in all but name and shape, which are of the whole
    """

    name: str
    shape: CacheShape
    codec: CodecInfo
    buffers: tuple[Axis, ...]
    pieces: tuple[CompiledPiece, ...]
    pages: int
    page_bytes: int
    page_stride: int
    channels: int
    banks: tuple[int, ...] = ()
    scale: CompiledLayout | None = None
    inset: int = 0
    per: Per = "token"
    of_scales: bool = False
    first: int = 0
    parts: tuple[CompiledLayout, ...] = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # Planning looks layouts up many times for each block table, and one hashes scores of digits.
        if self._hash == 0:
            found = hash(tuple(getattr(self, f.name) for f in fields(self) if f.compare)) or 1
            object.__setattr__(self, "_hash", found)
        return self._hash

    def __reduce__(self) -> tuple[type[CompiledLayout], tuple[object, ...]]:
        # Without the hash: that of a string differs from process to process.
        return CompiledLayout, tuple(getattr(self, f.name) for f in fields(self) if f.compare)

    def piece(self, kv: int) -> CompiledPiece:
        """The piece that holds for this value of `kv`."""
        for piece in self.pieces:
            if kv in piece.kvs:
                return piece
        held = ", ".join(str(kv) for piece in self.pieces for kv in piece.kvs)
        raise InvalidArgument(
            "no piece of the layout holds this kv", field="kv", got=kv, expected=held, layout=self.name
        )

    @property
    def buffer_count(self) -> int:
        """Number of separate base addresses."""
        n = 1
        for axis in self.buffers:
            n *= self.shape.extent(axis)
        return n

    def buffer(self, layer: int, kv: int) -> int:
        """Number of the buffer that holds this layer and kv."""
        n = 0
        for axis in self.buffers:
            n = n * self.shape.extent(axis) + (layer if axis == "layer" else kv)
        return n

    @property
    def channel_bytes(self) -> int:
        """Bytes that one buffer needs in each channel."""
        return -(-self.pages // self.channels) * self.page_stride

    @property
    def shares_pages(self) -> bool:
        """Whether K and V lie in the same pages."""
        return any(d.axis == "kv" and d.ext > 1 for piece in self.pieces for d in piece.inside)

    @property
    def plane_kvs(self) -> range:
        """The values of kv that planes are counted by: all, or the first for both where they share pages."""
        return range(1 if self.shares_pages else self.shape.kvs)

    def first_position(self, kv: int) -> int:
        """What `kv` adds to the position within a page: 0 but where K and V lie in the same pages."""
        if "kv" in self.buffers:
            return 0
        return int(_term(self.piece(kv).inside, "kv", np.asarray([kv], dtype=np.int64))[0])

    @property
    def tensors(self) -> tuple[CompiledLayout, ...]:
        """The layout itself, or its parts; behind each that of its scales where it has some."""
        if self.parts:
            return tuple(tensor for part in self.parts for tensor in part.tensors)
        return (self,) if self.scale is None else (self, self.scale)

    @property
    def buffer_bytes(self) -> tuple[int, ...]:
        """Bytes in each channel of every buffer that a cache has: those of the elements, then those of scales."""
        found: list[int] = []
        for tensor in self.tensors:
            if not tensor.inset:
                found += [tensor.channel_bytes] * tensor.buffer_count
        return tuple(found)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each tensor the first of its buffers among `buffer_bytes`, and the bytes its pages are set in there."""
        found: list[tuple[int, int]] = []
        host = first = 0
        for tensor in self.tensors:
            at = host
            if not tensor.inset:
                at, first = first, first + tensor.buffer_count
                host = host if tensor.of_scales else at
            found.append((at, tensor.inset))
        return tuple(found)

    def fixed_term(self, kv: int, layer: int) -> int:
        """What `layer` and `kv` add to the page number (0 for an axis that selects the buffer)."""
        piece, total = self.piece(kv), 0
        for axis, index in (("layer", layer), ("kv", kv)):
            if axis not in self.buffers:
                total += int(_term(piece.page, axis, np.asarray([index], dtype=np.int64))[0])  # type: ignore[arg-type]
        return total

    def _part_of(self, dim: int) -> int:
        """Number of the tensor that holds elements of this dim."""
        held = [i for i, t in enumerate(self.tensors) if not t.of_scales and t.first <= dim]
        return held[-1]

    def locate(
        self, layer: int, kv: int, head: int, block: int, slot: int, dim: int
    ) -> tuple[int, int, int, int]:
        """Where one element lies: (buffer, channel, byte offset of its page there, position in the page).

        Of a layout in parts it is the buffer among all of the cache's.  Slow: for people and tests.
        """
        if self.parts:
            found = self._part_of(dim)
            tensor, (first, inset) = self.tensors[found], self.places[found]
            buffer, channel, begin, position = tensor.locate(layer, kv, head, block, slot, dim - tensor.first)
            return first + buffer, channel, begin + inset, position
        piece = self.piece(kv)
        index: dict[Axis, int] = {
            "layer": layer,
            "kv": kv,
            "head": head,
            "block": block,
            "slot": slot,
            "dim": dim,
        }
        for axis, value in index.items():
            if not 0 <= value < self.shape.extent(axis):
                raise InvalidArgument(
                    "index out of range", field=axis, got=value, expected=f"0..{self.shape.extent(axis) - 1}"
                )
        page = inside = 0
        for axis, value in index.items():
            at = np.asarray([value], dtype=np.int64)
            if axis not in self.buffers:
                page += int(piece.page_term(axis, at)[0])
            inside += int(piece.inside_term(axis, at)[0])
        return self.buffer(layer, kv), page % self.channels, page // self.channels * self.page_stride, inside
