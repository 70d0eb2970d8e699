"""The retile core that always works: numpy, a bounded batch of pieces at a time.

Per batch the elements of all pieces are gathered in the target's order, converted, and scattered.  Both ways
use units as wide as the contiguous runs and the addresses allow (`V32` for a 32-byte row), for numpy moves a
wide unit as fast as a narrow one.  The results equal the C core's bit for bit.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from functools import cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np

from hawk.errors import InvalidArgument
from hawk.layouts.codecs import decode, encode
from hawk.retile.program import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CodecInfo
    from hawk.retile.program import Program

    I64 = NDArray[np.int64]
    U8 = NDArray[np.uint8]
    Bools = NDArray[np.bool_]

COLUMNS = tuple(f.name for f in fields(Pieces))

BATCH_BYTES = 512 * 1024
"""Bytes of elements gathered at once: temporaries stay a few times this, in the second-level cache."""

_log = logging.getLogger("hawk.retile")
_said = False


def announce(reason: str) -> None:
    """Say once in this process that the slower core does the work."""
    global _said
    if not _said:
        _said = True
        _log.warning("retile runs on the numpy core: %s", reason)


@dataclass(frozen=True)
class _Offsets:
    """Where the elements of a piece lie, in the target's order: `int64[elements]` each.

    Every aligned stretch of `src_run` (`dst_run`) elements is contiguous in the source (target).
    """

    src: I64
    dst: I64
    row: I64
    col: I64
    src_run: int
    dst_run: int


def _offsets(program: Program) -> _Offsets:
    total = [np.zeros(1, np.int64) for _ in range(4)]
    for loop in program.loops:
        steps = np.arange(loop.ext, dtype=np.int64)
        for i, step in enumerate((loop.src, loop.dst, loop.row, loop.col)):
            total[i] = (total[i][:, None] + steps * step).ravel()
    src, dst, row, col = total
    return _Offsets(src, dst, row, col, _run(src), _run(dst))


def _run(offsets: I64) -> int:
    """The largest number of elements such that each aligned stretch of so many is contiguous."""
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    return gcd(len(offsets), *breaks.tolist())


def run(
    program: Program, pieces: Pieces, src: Sequence[U8], dst: Sequence[U8], *, checked: bool = False
) -> None:
    """Carry out `program` for all `pieces` between the channels' slices `src[c]` and `dst[c]`.

    `checked` says that these pieces have been through `check`.

    Raises
    ------
    InvalidArgument
        a piece leaves its page, its channel or its codec's grouping; nothing was written
    """
    if len(pieces) == 0:
        return
    off = _offsets(program)
    if not checked:
        check(program, pieces, [len(s) for s in src], [len(d) for d in dst], off)
    full = (pieces.lo <= 0) & (pieces.hi > off.row.max()) & (pieces.cols > off.col.max())
    work = len(off.src) * max(program.src_codec.bits, program.dst_codec.bits, 8) // 8
    batch = max(1, BATCH_BYTES // max(1, work))
    for whole, s, d, chosen in _classes(pieces, full, batch):
        _Batch(program, off, pieces, chosen, whole).move(src[s] if s >= 0 else None, dst[d])


def _classes(pieces: Pieces, full: Bools, batch: int) -> Iterator[tuple[bool, int, int, I64]]:
    """Batches of one source channel, one target channel, whole or partial; -1 for a source that is not read."""
    reads = (pieces.hi > np.maximum(pieces.lo, 0)) & (pieces.cols > 0)
    source = np.where(reads, pieces.src_channel, -1)
    order = np.lexsort((source, pieces.dst_channel, full))
    keys = np.stack((full, source, pieces.dst_channel))[:, order]
    cuts = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
    for group in np.split(order, cuts):
        first = int(group[0])
        for i in range(0, len(group), batch):
            part = group[i : i + batch].astype(np.int64, copy=False)
            yield bool(full[first]), int(source[first]), int(pieces.dst_channel[first]), part


def _view(buffer: U8, unit: int) -> NDArray[Any]:
    """`buffer` as a row of `unit`-byte elements; a tail shorter than that is left out."""
    return buffer[: len(buffer) // unit * unit].view(_unit_type(unit))


def _unit_type(unit: int) -> str:
    return f"u{unit}" if unit in (1, 2, 4, 8) else f"V{unit}"


class _Batch:
    """Some pieces of one class, read and written at once."""

    def __init__(self, program: Program, off: _Offsets, pieces: Pieces, chosen: I64, whole: bool) -> None:
        self.program, self.off, self.whole = program, off, whole
        self.src_page, self.src_start = pieces.src_page[chosen], pieces.src_start[chosen]
        self.dst_page, self.dst_start = pieces.dst_page[chosen], pieces.dst_start[chosen]
        lo, hi, cols = (c[chosen, None] for c in (pieces.lo, pieces.hi, pieces.cols))
        if whole:
            self.kept = self.valid = np.ones((1, 1), np.bool_)
        else:
            self.kept = off.row >= lo
            self.valid = self.kept & (off.row < hi) & (off.col < cols)

    def move(self, src: U8 | None, dst: U8) -> None:
        """Read from the source channel (None: only zeros are due), convert, write to the target channel."""
        codec, same = self.program.dst_codec, self.program.src_codec == self.program.dst_codec
        if same and codec.group == 1:
            self._put(dst, self.dst_page, codec.bits // 8, self._elements(src))
            return
        values = self._values(src)
        encoded = encode(codec, values)
        header = codec.header_bytes(values.shape[1])
        scales, codes = encoded[:, :header], encoded[:, header:]
        if same and src is not None:
            self._keep_groups(src, scales, codes)
        if header:
            self._put(dst, self.dst_page, 1, scales, per=codec.group)
        first = self.dst_page + codec.header_bytes(self.program.dst_elements)
        if codec.bits < 8:
            self._put(dst, first, 1, codes, per=8 // codec.bits)
        else:
            width = codec.bits // 8
            self._put(dst, first, width, np.ascontiguousarray(codes).view(f"u{width}"))

    def _elements(self, src: U8 | None) -> NDArray[Any]:
        """Elements of an elementwise source codec, `[pieces, elements]`; 0 where there is none."""
        width = self.program.src_codec.bits // 8
        if src is None:
            return np.zeros((len(self.dst_page), len(self.off.src)), f"u{width}")
        base, at = self.src_page + self.src_start * width, self.off.src * width
        run = self.off.src_run if self.whole else 1
        unit = _unit(width, run, base, at[::run])
        if unit >= width:
            where = base[:, None] // unit + at[:: unit // width] // unit
            view = _view(src, unit)
        else:  # odd addresses: byte by byte
            view, where = src, np.add.outer(base, np.add.outer(at, np.arange(width)))
        if not self.whole:
            where = np.where(self.valid.reshape(*self.valid.shape, *([1] * (where.ndim - 2))), where, 0)
        found = np.empty(where.shape, view.dtype)
        np.take(view, where, out=found, mode="clip")
        elements: NDArray[Any] = found.reshape(len(base), -1).view(f"u{width}")
        return elements if self.whole else np.where(self.valid, elements, elements.dtype.type(0))

    def _values(self, src: U8 | None) -> NDArray[np.uint32]:
        """binary32 bits of the source's elements, `[pieces, elements]`; 0 where there is none."""
        codec, shape = self.program.src_codec, (len(self.dst_page), len(self.off.src))
        if src is None:
            return np.zeros(shape, np.uint32)
        if codec.group == 1:
            elements = self._elements(src)
            return decode(codec, elements.view(np.uint8), shape[1])
        scales, codes = self._codes(src)
        values: NDArray[np.uint32] = _table(codec)[scales, codes]
        return values if self.whole else np.where(self.valid, values, np.uint32(0))

    def _codes(self, src: U8) -> tuple[U8, U8]:
        """Exponent and code of each element of a grouped source, `[pieces, elements]`."""
        codec, page = self.program.src_codec, self.src_page[:, None]
        at = self.src_start[:, None] + self.off.src
        body = page + codec.header_bytes(self.program.src_elements)
        codes = src[np.where(self.valid, body + at * codec.bits // 8, 0)]
        if codec.bits == 4:
            codes = np.where(at & 1 == 1, codes >> 4, codes & 15)
        return src[np.where(self.valid, page + at // codec.group, 0)], codes

    def _keep_groups(self, src: U8, scales: U8, codes: U8) -> None:
        """Whole groups that both sides form alike keep their bytes: another packer may have rounded otherwise."""
        codec = self.program.dst_codec
        groups = self.off.src.reshape(-1, codec.group)
        aligned = (self.src_start[:, None] + groups[:, 0]) % codec.group == 0
        keep = aligned & (np.diff(groups, axis=1) == 1).all(axis=1)
        if not self.whole:
            keep = keep & self.valid.reshape(len(keep), -1, codec.group).all(axis=2)
        if not keep.any():
            return
        exponents, each = self._codes(src)
        found = each if codec.bits == 8 else each[:, 0::2] | each[:, 1::2] << np.uint8(4)
        scales[keep] = exponents[:, :: codec.group][keep]
        per = codec.group * codec.bits // 8
        packed = codes.reshape(len(keep), -1, per)
        packed[keep] = found.reshape(packed.shape)[keep]

    def _put(self, dst: U8, first: I64, width: int, values: NDArray[Any], *, per: int = 1) -> None:
        """Scatter `values`, units of `width` bytes that hold `per` elements each, behind byte `first` of a page."""
        base, at = first + self.dst_start // per * width, self.off.dst[::per] // per * width
        run = self.off.dst_run // per if self.whole else 1
        unit = _unit(width, run, base, at[::run])
        if not self.whole:
            kept = self.kept[:, ::per]
            where, values = (base[:, None] + at)[kept], values[kept]
        else:
            where = base[:, None] + (at if unit < width else at[:: unit // width])
        if unit < width:
            where = np.add.outer(where, np.arange(width))
            dst[where] = np.ascontiguousarray(values).view(np.uint8).reshape(where.shape)
        else:
            view = _view(dst, unit)
            where //= unit
            view[where] = np.ascontiguousarray(values).view(view.dtype).reshape(where.shape)


def _unit(width: int, run: int, base: I64, starts: I64) -> int:
    """The widest unit of whole elements, in bytes, in which runs at `base + starts` can be moved, or 1."""
    unit = gcd(run * width, int(np.gcd.reduce(base)), int(np.gcd.reduce(starts)))
    return 1 if unit % width else unit


@cache
def _table(codec: CodecInfo) -> NDArray[np.uint32]:
    """binary32 bits by exponent and code, `uint32[256, 2**bits]`."""
    n = max(1 << codec.bits, codec.group)
    pages = np.empty((256, codec.page_bytes(n)), np.uint8)
    header = codec.header_bytes(n)
    pages[:, :header] = np.arange(256)[:, None]
    codes = np.arange(n) % (1 << codec.bits)
    pages[:, header:] = codes if codec.bits == 8 else codes[0::2] | codes[1::2] << 4
    return decode(codec, pages, n)[:, : 1 << codec.bits]


def check(
    program: Program,
    pieces: Pieces,
    src_bytes: Sequence[int],
    dst_bytes: Sequence[int],
    off: _Offsets | None = None,
) -> None:
    """Refuse pieces that leave their page, their channel or the target's groups; the C core checks the same."""
    off = off or _offsets(program)
    dst_codec, n = program.dst_codec, len(pieces)
    for name in COLUMNS:
        if len(getattr(pieces, name)) != n:
            raise _bad(f"pieces.{name}", "one row a piece", len(getattr(pieces, name)), n)
    group = dst_codec.group
    if len(off.dst) % group or (np.diff(off.dst.reshape(-1, group), axis=1) != 1).any():
        raise _bad("program.loops", "the target's groups are not filled", "other steps", f"{group} in a row")
    if (np.diff(off.row.reshape(-1, group), axis=1) != 0).any() or (off.dst[::group] % group).any():
        raise _bad("program.loops", "a target's group spans tokens", "other steps", f"{group} of one token")
    page = dst_codec.page_bytes(program.dst_elements)
    _within("dst_channel", pieces.dst_channel, 0, len(dst_bytes) - 1)
    _within("dst_page", pieces.dst_page, 0, np.asarray(dst_bytes)[pieces.dst_channel] - page)
    _within("dst_start", pieces.dst_start, 0, program.dst_elements - 1 - int(off.dst.max()))
    _within("dst_start", pieces.dst_start % group, 0, 0)
    lo, hi, cols = pieces.lo, pieces.hi, pieces.cols
    reads = np.flatnonzero((hi > np.maximum(lo, 0)) & (cols > 0))
    if len(reads) == 0:
        return
    page = program.src_codec.page_bytes(program.src_elements)
    channel = pieces.src_channel[reads]
    _within("src_channel", channel, 0, len(src_bytes) - 1, reads)
    _within("src_page", pieces.src_page[reads], 0, np.asarray(src_bytes)[channel] - page, reads)
    reach = np.full(len(reads), int(off.src.max()))
    # Few kinds of partial pieces: their reach is found once for each, by a number that tells them apart.
    rows, width = int(off.row.max()) + 1, int(off.col.max()) + 1
    a, b, c = lo[reads].clip(0, rows), hi[reads].clip(0, rows), cols[reads].clip(0, width)
    partial = np.flatnonzero((a > 0) | (b < rows) | (c < width))
    kinds, first, which = np.unique(
        ((a * (rows + 1) + b) * (width + 1) + c)[partial], return_index=True, return_inverse=True
    )
    for k in range(len(kinds)):
        i = partial[first[k]]
        read = off.src[(off.row >= a[i]) & (off.row < b[i]) & (off.col < c[i])]
        reach[partial[which == k]] = read.max() if len(read) else 0
    _within("src_start", pieces.src_start[reads], 0, program.src_elements - 1 - reach, reads)


def _within(name: str, got: I64, low: int, high: I64 | int, rows: I64 | None = None) -> None:
    bad = np.flatnonzero((got < low) | (got > high))
    if len(bad):
        i = int(bad[0])
        limit = int(np.broadcast_to(high, got.shape)[i])
        row = i if rows is None else int(rows[i])
        raise _bad(f"pieces[{row}].{name}", "the piece does not fit", int(got[i]), f"{low}..{limit}")


def _bad(field: str, message: str, got: object, expected: object) -> InvalidArgument:
    return InvalidArgument(message, field=field, got=got, expected=expected)
