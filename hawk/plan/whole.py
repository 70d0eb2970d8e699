"""A whole transfer told to people: every part of a model between two groups of workers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import InvalidArgument, counted
from hawk.layouts import CacheShape
from hawk.plan.explain import MAX_BYTES, Explanation, explain
from hawk.plan.shards import Part, cache_layers, check_parts, parts, shard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hawk.layouts import CompiledLayout, Layout
    from hawk.plan.shards import Grid, Model

MAX_TOKENS = 1 << 24
"""Tokens of a request that is explained: its block tables are made for it, and have to fit into memory."""


@dataclass(frozen=True, slots=True)
class PartExplanation:
    """Parts that are alike: one of them, how many there are, and what each does."""

    part: Part
    count: int
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class WholeExplanation:
    """What `explain_model` found; `str()` of it is the text for people.

    senders, receivers    most parts that one worker sends, and receives
    max_bytes             largest chunk that was counted with, arena bytes
    """

    model: Model
    source: Grid
    target: Grid
    tokens: int
    first: int
    parts: tuple[PartExplanation, ...]
    senders: int
    receivers: int
    max_bytes: int = MAX_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes moved, all parts together."""
        return sum(p.count * p.explanation.nbytes for p in self.parts)

    @property
    def segments(self) -> int:
        """Rows of direct transfers, all parts together."""
        return sum(p.count * p.explanation.segments for p in self.parts)

    def __str__(self) -> str:
        m, total = self.model, sum(p.count for p in self.parts)
        busiest = f"at most {self.senders} from one worker and {self.receivers} to one"
        what = f"{m.layers} layers, {m.heads} KV head{'s' * (m.heads > 1)} of {m.dim}"
        lines = [
            f"{m.name}: {what}, {'K and V' if m.kvs == 2 else 'one tensor'}",
            f"workers     {_grid(self.source)} -> {_grid(self.target)}: {counted(total, 'transfer')}, {busiest}",
            f"tokens      {self.first}..{self.tokens - 1}, block tables of scattered blocks",
            f"in all      {self.nbytes:,} bytes, {self.segments:,} segments if direct",
            f"chunks      of at most {self.max_bytes / (1 << 20):g} MiB; agents cut by jobs.chunk (16 MiB)",
        ]
        for p in self.parts:
            part = p.part
            kind = "" if len(m.all_kinds) == 1 and part.kind.window is None else f", {part.kind.name} layers"
            if part.kind.window is not None:
                kind += f" (window {part.kind.window:,})"
            heads = f"heads {part.source_head}..{part.source_head + part.heads - 1} -> "
            heads += f"{part.head}..{part.head + part.heads - 1}"
            lines += [
                "",
                f"{p.count} x worker {part.source} -> worker {part.target}{kind}, {heads}"
                if p.count > 1
                else f"worker {part.source} -> worker {part.target}{kind}, {heads}",
                *(f"  {line}" for line in str(p.explanation).splitlines()),
            ]
        return "\n".join(lines)


def _grid(grid: Grid) -> str:
    return f"TP {grid.tp}" + (f" PP {grid.pp}" if grid.pp > 1 else "")


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def _compiled(
    model: Model,
    grid: Grid,
    rank: int,
    part: Part,
    layout: Layout,
    size: int,
    tokens: int,
    options: Mapping[str, Any],
) -> CompiledLayout:
    shape = CacheShape(
        layers=len(cache_layers(model, grid, rank, part.kind)),
        heads=len(shard(model, grid, rank).heads),
        dim=model.dim,
        block_size=size,
        # A pool of four times the request, so that its blocks are scattered as in one that serves others too.
        blocks=4 * _blocks(tokens, size),
        kvs=model.kvs,
    )
    return layout.compile(shape, **options)


def explain_model(
    model: Model,
    src: Layout,
    dst: Layout,
    *,
    source: Grid,
    target: Grid,
    tokens: int,
    first: int = 0,
    block_sizes: tuple[int, int] = (16, 64),
    src_options: Mapping[str, Any] | None = None,
    dst_options: Mapping[str, Any] | None = None,
    **costs: Any,
) -> WholeExplanation:
    """What it takes to move the cache of tokens `[first, tokens)` of `model` from one group of workers to another.

    block_sizes                 tokens of a block of the source and of the target
    src_options, dst_options    `codec`, `channels`, `align`, `params` as for `Layout.compile`
    costs                       as for `explain`

    Raises what `explain` raises, and `InvalidArgument` where a side has more stages than layers, or `tokens` is more
    than `MAX_TOKENS`.
    """
    if tokens > MAX_TOKENS:
        raise InvalidArgument(
            "more than is explained", field="tokens", got=tokens, expected=f"1..{MAX_TOKENS}"
        )
    if not 0 <= first < tokens:
        raise InvalidArgument(
            "nothing is left to move", field="first", got=first, expected=f"0..{tokens - 1}"
        )
    if min(block_sizes) < 1:
        raise InvalidArgument(
            "a block holds a token", field="block_sizes", got=block_sizes, expected="1 or more"
        )
    found = parts(model, source, target)
    check_parts(model, source, target, found)
    rng = np.random.default_rng(0)
    table = rng.permutation(4 * _blocks(tokens, block_sizes[1]))[: _blocks(tokens, block_sizes[1])]
    alike: dict[object, PartExplanation] = {}
    for part in found:
        selection = part.selection(tokens, first)
        if selection is None:
            continue
        a = _compiled(model, source, part.source, part, src, block_sizes[0], tokens, src_options or {})
        b = _compiled(model, target, part.target, part, dst, block_sizes[1], tokens, dst_options or {})
        # Which of the source's heads it is changes nothing of what is told.
        key = a, b, replace(selection, source_head=0), part.kind.name
        known = alike.get(key)
        if known is None:
            alike[key] = PartExplanation(part, 1, explain(a, b, selection, dst_blocks=table, **costs))
        else:
            alike[key] = PartExplanation(known.part, known.count + 1, known.explanation)
    return WholeExplanation(
        model=model,
        source=source,
        target=target,
        tokens=tokens,
        first=first,
        parts=tuple(alike.values()),
        senders=max(Counter(p.source for p in found).values()),
        receivers=max(Counter(p.target for p in found).values()),
        max_bytes=costs.get("max_bytes", MAX_BYTES),
    )
