"""Where the pieces of a plane begin: a template that no block table changes, and its binding to two tables.

The address of a piece is a sum with one term an axis, and only the blocks' terms depend on the tables.  The rest,
most of the columns among it, is worked out once for each pair of layouts, selection and range of entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.errors import InternalError
from hawk.plan.bind import block_digits, dealt_pieces, pages, terms
from hawk.plan.keep import kept
from hawk.plan.target import heads_moved, plane_runs
from hawk.plan.ways import program_part
from hawk.retile.build import build_programs
from hawk.retile.program import Pieces

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.types import PlaneRuns, Selection

    I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Where:
    """Which pieces: the pass (`number` of the programs of `kv`), and the entries `[block, block + blocks)`.

    src_residue, dst_residue    the page at which the plane begins, modulo the channels
    """

    src: CompiledLayout
    dst: CompiledLayout
    kv: int
    number: int
    selection: Selection
    block: int
    blocks: int
    src_residue: int
    dst_residue: int
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        # Asked for several times with every table; see `CompiledLayout`.
        if self._hash == 0:
            known = (self.src, self.dst, self.kv, self.number, self.selection, self.block, self.blocks)
            object.__setattr__(self, "_hash", hash((*known, self.src_residue, self.dst_residue)) or 1)
        return self._hash


class _Template(NamedTuple):
    """What no block table changes: what both sides are, and the columns of `Pieces` that are final."""

    source: _Source
    target: _Target
    src_start: I64
    dst_start: I64
    lo: I64
    hi: I64
    cols: I64


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Pages of the source for pieces as `[rows, heads, dims]`; a *row* is an entry of the target's table and a slot.

    digits      of the block in a page number, as `block_digits` gives them
    entry       entry of the source's table for each row
    page        page numbers without the block's term
    reads       whether each piece reads something
    all_read    whether all do
    at          `page` in bytes, where the source has one channel
    channel     zeros, where the source has one channel
    """

    layout: CompiledLayout
    digits: I64
    entry: I64
    page: I64
    reads: NDArray[np.bool_]
    all_read: bool
    at: I64
    channel: I64


@dataclass(frozen=True, slots=True, eq=False)
class _Target:
    """Pages of the target for the same pieces.

    digits      of the block in a page number, as `block_digits` gives them
    entry       entry of the target's table for each row, counted from the first
    page        page numbers without the block's term
    dealt       where all entries have the same pieces: channel and byte offset in it of each of them, for each residue
                of the entry's first page, `int64[channels, each]`; else None
    """

    layout: CompiledLayout
    digits: I64
    entry: I64
    page: I64
    dealt: tuple[I64, I64] | None


_Terms = tuple[bytes, bytes, bytes]
"""What slots, heads and dims each add to an address."""


def _read_digits(table: bytes) -> I64:
    return np.frombuffer(table, np.int64).reshape(-1, 3)


def _block_term(side: _Source | _Target, table: bytes) -> I64:
    """What each entry of a table adds to the page number."""
    return terms(side.digits, np.frombuffer(table, np.int64))


def _summed(terms: _Terms) -> I64:
    slots, heads, dims = (np.frombuffer(term, np.int64) for term in terms)
    return slots[:, None, None] + heads[:, None] + dims


def _frozen(arrays: Iterable[I64 | NDArray[np.bool_]]) -> None:
    for array in arrays:
        array.flags.writeable = False


# Both sides are looked up by content, so that K and V whose pieces lie in the same pages share them.


@kept(32, lambda side: side.page.nbytes * 3)
def _source(
    layout: CompiledLayout, digits: bytes, entry: bytes, terms: _Terms, reads: tuple[bytes, ...]
) -> _Source:
    page = _summed(terms)
    rows, heads, dims = (np.frombuffer(part, np.bool_) for part in reads)
    read = rows[:, None, None] & heads[:, None] & dims
    one = layout.channels == 1
    side = _Source(
        layout=layout,
        digits=_read_digits(digits),
        entry=np.frombuffer(entry, np.int64),
        page=page,
        reads=read,
        all_read=bool(read.all()),
        at=page * layout.page_stride if one else page[:0],
        channel=np.zeros(page.size if one else 0, np.int64),
    )
    _frozen((side.page, side.reads, side.at, side.channel))
    return side


@kept(32, lambda side: side.page.nbytes * 3)
def _target(layout: CompiledLayout, digits: bytes, entry: bytes, terms: _Terms, blocks: int) -> _Target:
    page, channels, dealt = _summed(terms), layout.channels, None
    if blocks:
        # The block's own term is left out, so the first entry stands for all.
        each = page.reshape(blocks, -1)[0]
        slot, channel = np.divmod(each + np.arange(channels, dtype=np.int64)[:, None], channels)
        dealt = channel, slot * layout.page_stride
        _frozen(dealt)
    side = _Target(layout, _read_digits(digits), np.frombuffer(entry, np.int64), page, dealt)
    _frozen((page,))
    return side


@kept(32, lambda found: found.lo.nbytes * 5)
def _template(where: Where) -> _Template:
    src, dst, kv, selection = where.src, where.dst, where.kv, where.selection
    program = build_programs(src, dst, kv, program_part(src, dst, selection))[where.number]
    size, rows, src_size = dst.shape.block_size, program.rows, src.shape.block_size
    entry = np.arange(where.blocks, dtype=np.int64)
    token = ((where.block + entry)[:, None] * size + program.slots).ravel()
    slot = np.tile(program.slots, where.blocks)
    entry = np.repeat(entry, len(program.slots))
    padding = slot >= size
    lo = np.where(padding, 0, np.clip(selection.token - token, 0, rows))
    end = np.minimum(selection.token + selection.tokens - token, size - slot)
    hi = np.where(padding, 0, np.clip(end, 0, rows))
    # Pieces that hold nothing but rows before the range are their neighbour's.
    ours = lo < rows
    token, slot, entry, lo, hi = (a[ours] for a in (token, slot, entry, lo, hi))
    # Padding reads nothing; give it an address that exists, and drop that below.
    real = np.where(hi > 0, token, selection.token)
    head_in = program.heads < dst.shape.heads
    moved_by = selection.source_head - selection.head
    dim_in = program.dims < dst.shape.dim
    heads = np.where(head_in, program.heads + moved_by, 0)
    dims = np.where(dim_in, program.dims, 0)
    taken, into = (real % src_size, heads, dims), (slot, program.heads, program.dims)

    def terms(layout: CompiledLayout, inside: bool, index: tuple[I64, I64, I64], first: int) -> _Terms:
        piece = layout.piece(kv)
        term = piece.inside_term if inside else piece.page_term
        slots, heads, dims = index
        return (
            (term("slot", slots) + first).tobytes(),
            term("head", heads).tobytes(),
            term("dim", dims).tobytes(),
        )

    source = _source(
        src,
        block_digits(src, kv).tobytes(),
        (real // src_size).tobytes(),
        terms(src, False, taken, where.src_residue),
        ((hi > 0).tobytes(), head_in.tobytes(), dim_in.tobytes()),
    )
    target = _target(
        dst,
        block_digits(dst, kv).tobytes(),
        entry.tobytes(),
        terms(dst, False, into, where.dst_residue),
        where.blocks if ours.all() else 0,
    )
    reads, all_read = source.reads, source.all_read

    def spread(row: I64) -> I64:
        wide = np.broadcast_to(row[:, None, None], reads.shape)
        return (wide if all_read else np.where(reads, wide, 0)).ravel()

    src_start = _summed(terms(src, True, taken, src.first_position(kv)))
    found = _Template(
        source=source,
        target=target,
        src_start=(src_start if all_read else np.where(reads, src_start, 0)).ravel(),
        dst_start=_summed(terms(dst, True, into, dst.first_position(kv))).ravel(),
        lo=spread(lo),
        hi=spread(hi),
        cols=np.broadcast_to(program.cols, reads.shape).ravel(),
    )
    _frozen(found[2:])
    return found


@kept(16, lambda found: found[0].nbytes * 2)
def _source_pages(side: _Source, table: bytes) -> tuple[I64, I64]:
    """`src_channel` and `src_page` of all pieces for a block table, `int64` entries from 0 on."""
    src = side.layout
    term = _block_term(side, table)
    if src.channels == 1:
        channel, page = side.channel, pages(term, side.entry, side.at, src.page_stride)
    else:
        slot, channel = np.divmod(side.page + term[side.entry][:, None, None], src.channels)
        page = slot * src.page_stride
        if not side.all_read:
            channel = np.where(side.reads, channel, 0)
    if not side.all_read:
        page = np.where(side.reads.ravel(), page.ravel(), 0)
    found = channel.ravel(), page.ravel()
    _frozen(found)
    return found


@kept(16, lambda found: found[0].nbytes * 2)
def _target_pages(
    side: _Target, lead: int, residue: int, cut: int, heads: tuple[int, int], table: bytes
) -> tuple[I64, I64]:
    """`dst_channel` and `dst_page` of all pieces; arguments as for `plane_runs`."""
    dst = side.layout
    runs = plane_runs(dst, lead, residue, cut, heads, table)
    term = _block_term(side, table)
    if side.dealt is not None and len(runs.moved):
        found = dealt_pieces(dst, term, *side.dealt, runs.moved)
    else:
        number = side.page + term[side.entry][:, None, None]
        slot, channel = (a.ravel() for a in np.divmod(number, dst.channels))
        found = channel, arena_pages(runs, channel, slot * dst.page_stride)
    _frozen(found)
    return found


def arena_pages(runs: PlaneRuns, channel: I64, page: I64) -> I64:
    """Byte offset in the plane's part of the arena of the pages at target offsets `page` of `channel`.

    Pages keep their distance between target and arena within a run, so the run that is the first to end behind
    the page's first byte tells where the page lies, even where only a part of it moves.
    """
    span = int(max(page.max(initial=0), (runs.target + runs.nbytes).max(initial=0))) + 1
    row = np.searchsorted(
        runs.channel * span + runs.target + runs.nbytes, channel * span + page, side="right"
    )
    if row.max(initial=0) >= len(runs.nbytes) or (runs.channel[row] != channel).any():
        raise InternalError("a piece lies in a page that the chunk does not touch")
    return page + runs.arena[row] - runs.target[row]


@kept(16, lambda pieces: pieces.dst_page.nbytes * 4)
def bound(where: Where, lead: int, cut: int, src_table: bytes, dst_table: bytes) -> Pieces:
    """The pieces for two block tables: block by block of the target, in it by token, head and dim.

    lead, cut              as for `plane_runs`
    src_table, dst_table   `int64` entries: the source's from 0 on, the target's from `where.block` on

    Kept for a few tables, for the chunks of one request follow each other with the same blocks in other layers.
    """
    template, heads = _template(where), heads_moved(where.dst, where.selection)
    src_channel, src_page = _source_pages(template.source, src_table)
    dst_channel, dst_page = _target_pages(template.target, lead, where.dst_residue, cut, heads, dst_table)
    return Pieces(
        src_channel=src_channel,
        src_page=src_page,
        src_start=template.src_start,
        dst_channel=dst_channel,
        dst_page=dst_page,
        dst_start=template.dst_start,
        lo=template.lo,
        hi=template.hi,
        cols=template.cols,
    )
