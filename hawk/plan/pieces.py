"""Where the pieces of a plane begin: a template that no block table changes, and its binding to two tables.

The address of a piece is a sum with one term an axis, and only the blocks' terms depend on the tables.  The rest,
most of the columns among it, is worked out once for each pair of layouts, selection and range of entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hawk.errors import InternalError
from hawk.plan.keep import kept
from hawk.plan.pattern import pattern
from hawk.plan.target import heads_moved, plane_runs
from hawk.plan.ways import program_part
from hawk.retile.build import build_programs
from hawk.retile.program import Pieces

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.layouts.compiled import Axis, CompiledLayout
    from hawk.plan.types import PlaneRuns, Selection

    I64 = NDArray[np.int64]


class Where(NamedTuple):
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


class _Template(NamedTuple):
    """Pieces as `[rows, heads, dims]`, or flat; a *row* is an entry of the target's table and a slot in it.

    src_entry, dst_entry    entry of either table for each row, the target's counted from the first
    src_page, dst_page      page numbers without the block's term
    each                    pieces of an entry where all entries have the same ones, else 0
    all_read                whether every piece reads something
    the others              columns of `Pieces` that are final
    """

    src_entry: I64
    dst_entry: I64
    src_page: I64
    dst_page: I64
    each: int
    all_read: bool
    reads: NDArray[np.bool_]
    src_start: I64
    dst_start: I64
    lo: I64
    hi: I64
    cols: I64


@kept(32, lambda found: found.lo.nbytes * 8)
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
    reads = (hi > 0)[:, None, None] & head_in[:, None] & dim_in

    def address(layout: CompiledLayout, inside: bool, slots: I64, heads: I64, dims: I64, first: int) -> I64:
        piece = layout.piece(kv)
        term = piece.inside_term if inside else piece.page_term

        def along(axis: Axis, index: I64) -> I64:
            return term(axis, index)

        total = along("slot", slots) + first
        return total[:, None, None] + along("head", heads)[:, None] + along("dim", dims)

    heads = np.where(head_in, program.heads + moved_by, 0)
    dims = np.where(dim_in, program.dims, 0)
    taken, into = (real % src_size, heads, dims), (slot, program.heads, program.dims)
    src_start = address(src, True, *taken, src.first_position(kv))

    def spread(row: I64) -> I64:
        return np.where(reads, row[:, None, None], 0).ravel()

    found = _Template(
        src_entry=real // src_size,
        dst_entry=entry,
        src_page=address(src, False, *taken, where.src_residue),
        dst_page=address(dst, False, *into, where.dst_residue),
        each=reads.size // where.blocks if ours.all() else 0,
        all_read=bool(reads.all()),
        reads=reads,
        src_start=np.where(reads, src_start, 0).ravel(),
        dst_start=address(dst, True, *into, dst.first_position(kv)).ravel(),
        lo=spread(lo),
        hi=spread(hi),
        cols=np.broadcast_to(program.cols, reads.shape).ravel(),
    )
    for value in found:
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    return found


@kept(32, lambda found: found[0].nbytes * 2)
def _dealt(where: Where) -> tuple[I64, I64]:
    """Channel and page in it of an entry's pieces, for each residue of the entry's first page: `[channels, each]`."""
    template, channels = _template(where), where.dst.channels
    # The block's own term is left out, so the first entry stands for all.
    page = template.dst_page.reshape(where.blocks, -1)[0]
    slot, channel = np.divmod(page + np.arange(channels, dtype=np.int64)[:, None], channels)
    return channel, slot


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
    src, dst, kv = where.src, where.dst, where.kv
    template = _template(where)
    heads = heads_moved(dst, where.selection)
    runs = plane_runs(dst, lead, where.dst_residue, cut, heads, dst_table)
    src_term = src.piece(kv).page_term("block", np.frombuffer(src_table, np.int64)[template.src_entry])
    number = template.src_page + src_term[:, None, None]
    if src.channels == 1:
        src_channel, slot = np.zeros(number.size, np.int64), number
    else:
        slot, src_channel = np.divmod(number, src.channels)
    src_page = slot * src.page_stride
    if not template.all_read:
        src_channel = np.where(template.reads, src_channel.reshape(number.shape), 0)
        src_page = np.where(template.reads, src_page, 0)
    dst_term = dst.piece(kv).page_term("block", np.frombuffer(dst_table, np.int64))
    pat = pattern(dst, lead, cut, heads)
    if template.each and pat.single and not cut:
        q, r = np.divmod(dst_term, dst.channels)
        channels, slots = _dealt(where)
        dealt = channels[r]
        dst_channel = dealt.ravel()
        page = (slots[r] + q[:, None]).ravel() * dst.page_stride
        # All pages of an entry in one channel lie in one run, at one distance from their places in the arena.
        first, moved = _entry_distances(dst, lead, heads, dst_term + where.dst_residue, runs)
        dst_page = page + moved[(dealt + first[:, None]).ravel()]
    else:
        number = template.dst_page + dst_term[template.dst_entry][:, None, None]
        slot, dst_channel = (a.ravel() for a in np.divmod(number, dst.channels))
        dst_page = arena_pages(runs, dst_channel, slot * dst.page_stride)
    found = Pieces(
        src_channel=src_channel.ravel(),
        src_page=src_page.ravel(),
        src_start=template.src_start,
        dst_channel=dst_channel,
        dst_page=dst_page,
        dst_start=template.dst_start,
        lo=template.lo,
        hi=template.hi,
        cols=template.cols,
    )
    for column in (found.src_channel, found.src_page, found.dst_channel, found.dst_page):
        column.flags.writeable = False  # several chunks share them
    return found


def _entry_distances(
    dst: CompiledLayout, lead: int, heads: tuple[int, int], term: I64, runs: PlaneRuns
) -> tuple[I64, I64]:
    """Where each entry's row begins in a flat table `[entries, channels]`, and that table: arena minus target."""
    pat, channels = pattern(dst, lead, 0, heads), dst.channels
    q, r = np.divmod(term, channels)
    row = r[:, None] * pat.even + np.arange(pat.even, dtype=np.int64)
    channel = pat.channel[row].ravel()
    page = (pat.slot[row] + q[:, None]).ravel() * dst.page_stride
    table = np.zeros(len(term) * channels, np.int64)
    entry = np.arange(len(term), dtype=np.int64) * channels
    table[np.repeat(entry, pat.even) + channel] = arena_pages(runs, channel, page) - page
    return entry, table
