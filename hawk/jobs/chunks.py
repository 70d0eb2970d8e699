"""What a job moves, how that is cut into chunks, and which setting is told when it cannot be."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from hawk.errors import InvalidArgument, OutOfMemory, Unmappable
from hawk.jobs.caches import part_of
from hawk.plan.check import check, entries
from hawk.plan.keep import MOST_BYTES, kept
from hawk.plan.losses import loss
from hawk.plan.part import selection
from hawk.plan.scales import check_selected
from hawk.plan.target import chunk_bytes, split
from hawk.plan.types import Chunk, Selection

if TYPE_CHECKING:
    from hawk.control.messages import Fetch
    from hawk.jobs.offers import OfferEntry
    from hawk.layouts import CompiledLayout
    from hawk.plan.part import Part


MOST_CHUNKS = 65_536
"""Chunks of a job; as many as a `Poll` can name."""


@lru_cache(maxsize=256)
def bytes_of(target: CompiledLayout, selection: Selection) -> int:
    """Bytes of the arena that all of a selection takes, as one chunk."""
    first, last = entries(target, selection)
    return chunk_bytes(target, selection, Chunk(selection.layer, selection.layers, first, last - first))


@lru_cache(maxsize=256)
def least_of(target: CompiledLayout, selection: Selection) -> int:
    """Bytes of the arena that one entry of one layer takes: the largest of the selection, which are at its ends."""
    first, last = entries(target, selection)
    ends = (Chunk(selection.layer, 1, block, 1) for block in (first, last - 1))
    return max(chunk_bytes(target, selection, chunk) for chunk in ends)


@kept(256, lambda chunks: len(chunks) * (MOST_BYTES >> 6))
def cut(target: CompiledLayout, selection: Selection, limit: int, setting: str) -> tuple[Chunk, ...]:
    """`split`, whose refusal names the `setting` that `limit` comes from instead of an argument.

    Kept where there are few chunks: small jobs, which come often.
    """
    try:
        return split(target, selection, max_bytes=limit)
    except OutOfMemory as fault:
        raise OutOfMemory(
            "one block of one layer does not fit into a chunk",
            field=setting,
            got=f"{limit} bytes",
            expected=fault.expected,
            hint="Raise it on the agent that names it here",
        ) from fault


class Agreement(NamedTuple):
    """What of an offer a target gets, its chunks, their bytes in the arena, and whether values may change."""

    selection: Selection
    chunks: tuple[Chunk, ...]
    nbytes: int
    lossy: bool


def agreed(
    offer: OfferEntry,
    fetch: Fetch,
    source: CompiledLayout,
    target: CompiledLayout,
    most: int,
    room: int,
    growing: bool,
) -> Agreement:
    """What of the offer the target gets, in chunks of `most` bytes, or half of the `room` that is there for them.

    growing    whether layers of the source are still being written, see `tapered`

    Raises `InvalidArgument` for tokens that the offer does not hold and for too many chunks, `PartsMismatch` or
    `Unmappable` for caches of which one cannot become the other, `OutOfMemory` for chunks that hold nothing.
    """
    first, tokens = fetch.first, fetch.tokens
    last = first + tokens if tokens else offer.tokens
    if first >= offer.tokens or last > offer.tokens:
        raise InvalidArgument(
            "the offer does not hold these tokens",
            field="tokens",
            got=f"[{first}, {last})",
            expected=f"within [0, {offer.tokens})",
        )
    whole = offer.cache.descr.part is None and fetch.target.part is None
    parts = None if whole else (offer.part, part_of(fetch.target))
    half = max(room // 2, 1)
    setting = "arena.size (half of it)" if half < most else "jobs.chunk"
    return _agreement(source, target, parts, first, last - first, min(most, half), setting, growing)


def tapered(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """The same layers in chunks of at most as many, and at most half of what is left, a layer at least.

    Where layers are still being written, what is left to send after the last of them is little, and before it chunks
    are large, for each costs the processor as much.
    """
    most, first = chunks[0].layers, chunks[0].layer
    if most == 1 or any((c.block, c.blocks) != (chunks[0].block, chunks[0].blocks) for c in chunks):
        return chunks
    found, left = [], sum(c.layers for c in chunks)
    while left:
        layers = max(1, min(most, left // 2))
        found.append(replace(chunks[0], layer=first, layers=layers))
        first, left = first + layers, left - layers
    return tuple(found)


_fit, _loss = lru_cache(maxsize=256)(check), lru_cache(maxsize=256)(loss)
"""Of caches and selections that come again and again, however many chunks they fall into; a refusal is not kept."""


@kept(256, lambda made: len(made.chunks) * (MOST_BYTES >> 6))
def _agreement(
    source: CompiledLayout,
    target: CompiledLayout,
    parts: tuple[Part, Part] | None,
    first: int,
    tokens: int,
    limit: int,
    setting: str,
    growing: bool,
) -> Agreement:
    """Kept where there are few chunks, as `cut` is; nothing of it depends on where anything lies."""
    if parts is None:
        # Two whole caches: whether they have the same layers and heads is for `check` to say.
        _fit(source, target)
        chosen = Selection(layer=0, layers=target.shape.layers, token=first, tokens=tokens)
    else:
        chosen = selection(*parts, first, tokens)
        _fit(source, target, chosen)
    chunks = cut(target, chosen, limit, setting)
    if growing:
        chunks = tapered(chunks)
    if len(chunks) > MOST_CHUNKS:
        raise InvalidArgument(
            "the request falls into too many chunks",
            field="jobs.chunk",
            got=f"{len(chunks)} chunks of at most {limit} bytes",
            expected=f"{MOST_CHUNKS} chunks or fewer",
        )
    return Agreement(chosen, chunks, bytes_of(target, chosen), _loss(source, target, chosen) is not None)


def fewest_heads(layout: CompiledLayout, selection: Selection) -> Selection:
    """The same with as few heads as one offer can bring: one, or all where a scale covers all of them."""
    one = replace(selection, heads=1)
    try:
        check_selected(layout, one)
    except Unmappable:
        return selection
    return one
