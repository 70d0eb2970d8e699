"""A plan told to people: what a transfer would move, in which pieces, and why in that way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.plan.check import check, check_blocks, check_selection, check_source, entries
from hawk.plan.decide import Statistics, decide, direct_requests, statistics
from hawk.plan.losses import loss, scales_told
from hawk.plan.target import split, target_chunk
from hawk.plan.tensors import carrier, riding
from hawk.plan.ways import program_part, ways

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from hawk.layouts.compiled import CompiledLayout
    from hawk.plan.decide import Direction, Override, Support
    from hawk.plan.types import Chunk, Decision, Selection


MAX_BYTES = 1 << 28
"""Bytes of the largest chunk that is counted with where nothing is said."""

SHORT_RUN = 512
"""Bytes; runs of that many or fewer cost more to ask for than to move."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found; `str()` of it is the text for people.

    selection, chunks    what is moved, and how it is cut
    source, target       the layouts' names, codecs in brackets
    payload              bytes of the selected tokens as the target stores them, without padding rows
    nbytes, arena_bytes  bytes moved and arena bytes, all chunks
    segments             rows of a direct transfer, all chunks (before any joining across planes)
    requests             work requests of a direct transfer, all chunks
    shortest, median, longest    run lengths in bytes; the median is that of the largest chunk
    channel_bytes        bytes moved per channel, all chunks
    placement            how the target's pages lie, in words
    lossy                why values may change, or None
    decision             of the largest chunk
    rows                 what meets in rows on the way, as "K"; "" where programs alone bring everything over
    scales               what becomes of scales; "" where there are none
    advice               what would make runs longer; "" where they are long or cannot be
    """

    selection: Selection
    chunks: tuple[Chunk, ...]
    source: str
    target: str
    payload: int
    nbytes: int
    arena_bytes: int
    segments: int
    requests: int
    shortest: int
    median: int
    longest: int
    channel_bytes: tuple[int, ...]
    placement: str
    lossy: str | None
    decision: Decision
    rows: str = ""
    scales: str = ""
    advice: str = ""

    @property
    def imbalance(self) -> float:
        """The fullest channel over the mean of all; 1 is perfect."""
        return max(self.channel_bytes) * len(self.channel_bytes) / self.nbytes

    def __str__(self) -> str:
        s = self.selection
        channels = ", ".join(f"{n:,}" for n in self.channel_bytes)
        lines = [
            f"{self.source} -> {self.target}",
            f"selection   layers {s.layer}..{s.layer + s.layers - 1}, tokens {s.token}..{s.token + s.tokens - 1}",
            f"bytes       {self.nbytes:,} moved, of them {self.payload:,} payload",
            f"arena       {self.arena_bytes:,} B in {len(self.chunks)} chunk{'s' if len(self.chunks) > 1 else ''}",
            f"segments    {self.segments:,} if direct, in {self.requests:,} requests",
            f"runs        {self.shortest:,} to {self.longest:,} B, median {self.median:,} B",
            f"placement   {self.placement}",
            f"channels    {channels} B; the fullest holds {self.imbalance:.3f} of the mean",
            f"values      {self.lossy or 'every value is kept'}",
            f"mode        {self.decision.reason}",
        ]
        if self.scales:
            lines.insert(-1, f"scales      {self.scales}")
        if self.advice:
            lines.insert(6, f"            {self.advice}")
        if self.rows:
            said = f"{self.rows} {'go' if ' ' in self.rows else 'goes'} through rows"
            lines.insert(-1, f"retile      {said}: in two passes, for what has to meet first")
        return "\n".join(lines)


def _placement(dst: CompiledLayout) -> str:
    where = f"page i in channel i % {dst.channels}" if dst.channels > 1 else "one after another"
    if dst.banks:
        where = f"in shards over banks {', '.join(map(str, dst.banks))}"
    found = []
    for number, host in enumerate(riding(dst)):
        tensor = carrier(dst, number)
        if host is None and not tensor.inset:
            gap = f" every {tensor.page_stride:,} B" if tensor.page_stride != tensor.page_bytes else ""
            buffers = f"{tensor.buffer_count:,} buffer{'s' if tensor.buffer_count > 1 else ''}"
            of = " of scales" if tensor.of_scales else ""
            found.append(f"{buffers}{of} of {tensor.pages:,} pages of {tensor.page_bytes:,} B{gap}")
    return f"{' and '.join(found)}, {where}"


def explain(
    src: CompiledLayout,
    dst: CompiledLayout,
    selection: Selection,
    *,
    dst_blocks: ArrayLike | None = None,
    max_bytes: int = MAX_BYTES,
    move_support: Support = "none",
    move_cost: float = 0.0,
    request_cost: float = 2e-6,
    bandwidth: float = 4e9,
    max_sge: int = 1024,
    override: Override = "auto",
    direction: Direction = "read",
) -> Explanation:
    """What moving `selection` from `src` to `dst` would do; nothing is moved.

    dst_blocks    the target's block table; neighbouring blocks from 0 on if not given
    max_bytes     largest chunk, arena bytes
    others        as for `decide`

    Raises what `check`, `check_blocks`, `split` and `decide` raise.
    """
    check_source(src, selection)
    check_selection(dst, selection)
    check(src, dst, selection)
    table = np.arange(entries(dst, selection)[1]) if dst_blocks is None else dst_blocks
    blocks = check_blocks(dst, table, selection, "dst_blocks")
    chunks = split(dst, selection, max_bytes=max_bytes)
    channel_bytes = np.zeros(dst.channels, np.int64)
    requests, found, largest = 0, [], 0
    decision: Decision | None = None
    for chunk in chunks:
        target = target_chunk(dst, blocks, selection, chunk)
        stats = statistics(target)
        found.append(stats)
        channel_bytes += np.asarray(stats.channel_bytes)
        requests += direct_requests(target, max_sge, direction)
        if decision is None or stats.nbytes > found[largest].nbytes:
            largest = len(found) - 1
            decision = decide(
                target,
                move_support=move_support,
                move_cost=move_cost,
                request_cost=request_cost,
                bandwidth=bandwidth,
                max_sge=max_sge,
                override=override,
                direction=direction,
            )
    assert decision is not None  # `split` never returns no chunk
    return _explanation(
        src, dst, selection, chunks, found, found[largest].median, requests, channel_bytes.tolist(), decision
    )


def _explanation(
    src: CompiledLayout,
    dst: CompiledLayout,
    selection: Selection,
    chunks: tuple[Chunk, ...],
    found: list[Statistics],
    median: int,
    requests: int,
    channel_bytes: list[int],
    decision: Decision,
) -> Explanation:
    return Explanation(
        selection=selection,
        chunks=chunks,
        source=f"{src.name} [{_codecs(src)}]",
        target=f"{dst.name} [{_codecs(dst)}]",
        payload=sum(_payload(t, selection, dst) for t in dst.tensors if not t.of_scales),
        nbytes=sum(s.nbytes for s in found),
        arena_bytes=sum(s.arena_bytes for s in found),
        segments=sum(s.runs for s in found),
        requests=requests,
        shortest=min(s.shortest for s in found),
        median=median,
        longest=max(s.longest for s in found),
        channel_bytes=tuple(channel_bytes),
        placement=_placement(dst),
        lossy=loss(src, dst, selection),
        decision=decision,
        rows=_rows(src, dst, selection),
        scales=scales_told(src, dst, selection),
        advice=_advice(dst, median),
    )


def _advice(dst: CompiledLayout, median: int) -> str:
    """Linear memory has no pages of its own: there a page of less than a block only makes runs short."""
    s, first = dst.shape, dst.tensors[0]
    blocks = s.blocks * s.layers * (1 if first.shares_pages else s.kvs)
    if dst.channels > 1 or median > SHORT_RUN or first.pages * first.buffer_count <= blocks:
        return ""
    return "short: in linear memory a page may be a block, with '|' behind 'block' in the target's order"


def _codecs(layout: CompiledLayout) -> str:
    return ", ".join(dict.fromkeys(t.codec.name for t in layout.tensors if not t.of_scales))


def _payload(tensor: CompiledLayout, selection: Selection, dst: CompiledLayout) -> int:
    """Bytes of the selected tokens as a tensor of `dst` stores them."""
    rows = selection.layers * dst.shape.kvs * selection.tokens * selection.target_heads(dst)[1]
    return tensor.codec.page_bytes(rows * tensor.shape.dim)


def _rows(src: CompiledLayout, dst: CompiledLayout, selection: Selection) -> str:
    found = [way.kvs for way in ways(src, dst, program_part(src, dst, selection)) if way.rows]
    kvs = sorted({kv for way in found for kv in way})
    return " and ".join("KV"[kv] for kv in kvs) if src.shape.kvs == 2 else "all" * bool(kvs)
