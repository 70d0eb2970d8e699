"""Registered caches: where their bytes are, and which job owns which of their blocks."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from hawk.control.messages import PartDescr
from hawk.errors import Busy, InvalidArgument, RangeBusy, UnknownCache
from hawk.layouts import CacheShape, Layout
from hawk.plan.part import Part, span

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from hawk.control.messages import CacheDescr
    from hawk.layouts import CompiledLayout
    from hawk.memory.base import Memory
    from hawk.memory.region import Region
    from hawk.plan.types import Placement


def read_part(descr: PartDescr, field: str = "part") -> Part:
    """The part that a message speaks of; raises `InvalidArgument` for one that cannot be."""
    try:
        return _read_part(descr)
    except InvalidArgument as fault:
        raise InvalidArgument(
            "no part of a model", field=field, got=fault.got, expected=fault.expected
        ) from fault


@lru_cache(maxsize=256)
def _read_part(descr: PartDescr) -> Part:
    return Part(
        range(descr.head, descr.head + descr.heads),
        descr.of_heads,
        range(descr.layer, descr.layer + descr.layers),
        descr.of_layers,
        descr.copy,
        descr.copies,
    )


@lru_cache(maxsize=256)
def write_part(part: Part) -> PartDescr:
    """The part for a message."""
    heads, layers = part.heads, part.layers
    return PartDescr(
        heads.start,
        len(heads),
        part.of_heads,
        layers.start,
        len(layers),
        part.of_layers,
        part.copy,
        part.copies,
    )


def part_of(descr: CacheDescr) -> Part:
    """What of a model's cache a cache is: all of it, unless it says so.  Raises `InvalidArgument`."""
    if descr.part is None:
        return _all_of(descr.heads, descr.layers)
    part = read_part(descr.part, "cache.part")
    for name in ("heads", "layers"):
        got, expected = getattr(part, name), getattr(descr, name)
        if len(got) != expected:
            raise InvalidArgument(
                f"the cache has another number of {name} than its part",
                field=f"cache.part.{name}",
                got=span(got),
                expected=f"{expected} {name}",
            )
    return part


@lru_cache(maxsize=256)
def _all_of(heads: int, layers: int) -> Part:
    return Part(range(heads), heads, range(layers), layers)


def compile_descr(descr: CacheDescr) -> CompiledLayout:
    """The compiled layout of a cache description; raises `LayoutError` or `InvalidArgument`."""
    part_of(descr)
    return _compile(
        descr.layout,
        (descr.layers, descr.heads, descr.dim, descr.block_size, descr.blocks, descr.kvs),
        descr.codec,
        descr.channels,
        descr.align,
        tuple(sorted(descr.params.items())) if descr.params else (),
    )


@lru_cache(maxsize=256)
def _compile(
    text: str,
    sizes: tuple[int, int, int, int, int, int],
    codec: str,
    channels: int,
    align: int,
    params: tuple[tuple[str, int], ...],
) -> CompiledLayout:
    layers, heads, dim, block_size, blocks, kvs = sizes
    shape = CacheShape(layers=layers, heads=heads, dim=dim, block_size=block_size, blocks=blocks, kvs=kvs)
    layout = Layout.from_toml(text, origin="a cache description")
    return layout.compile(
        shape, codec=codec, channels=channels or None, align=align or None, params=dict(params)
    )


@dataclass(eq=False)
class CacheEntry:
    """One registered cache.

    regions      what `placement.region` indexes; none any more once the entry was dropped
    memory       the agent's memory that holds it, or None where the client's own memory does
    session      the client that owns it
    on_close     gives back what the entry holds (mappings, allocations)
    owners       the job that writes each block; `quarantined` once that job was told to end and has not yet
    lent         how many open offers may be read from each block
    """

    descr: CacheDescr
    layout: CompiledLayout
    placement: Placement
    regions: tuple[Region, ...]
    session: bytes
    memory: Memory | None = None
    on_close: Callable[[], None] | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    owners: dict[int, str] = field(default_factory=dict)
    quarantined: dict[int, str] = field(default_factory=dict)
    lent: Counter[int] = field(default_factory=Counter)
    _owned: dict[str, list[int]] = field(
        default_factory=dict
    )  # by job: blocks of many jobs are not searched for one's
    users: int = 0
    closing: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def part(self) -> Part:
        """What of a model's cache it is."""
        return part_of(self.descr)

    @property
    def gpu(self) -> int:
        """The GPU whose memory it is in, -1 where processors reach it."""
        return self.regions[0].gpu if self.regions else -1

    def drop(self) -> None:
        """Gives back what the entry holds.

        The regions go now and not with the entry: whatever may still refer to that (the memory of a request, a
        traceback) must not keep a client's memory mapped.
        """
        self.regions = ()
        on_close, self.on_close = self.on_close, None
        if on_close is not None:
            on_close()

    def own(self, blocks: NDArray[np.int64], job: str) -> None:
        """Gives `blocks` to `job`, which will write them; all or none.

        Raises `RangeBusy` naming the first that another job writes or an open offer may be read from.
        """
        wanted = [int(b) for b in blocks]
        for i, block in enumerate(wanted):
            self._check_written(i, block)
            if self.lent[block]:
                raise RangeBusy(
                    "an open offer holds the block",
                    field=f"blocks[{i}]",
                    got=block,
                    hint="Wait until the offer has ended, or withdraw it",
                )
        for block in wanted:
            self.owners[block] = job
        self._owned.setdefault(job, []).extend(wanted)

    def _check_written(self, i: int, block: int) -> None:
        holder = self.owners.get(block) or self.quarantined.get(block)
        if holder is not None:
            raise RangeBusy(
                "the block still belongs to another job", field=f"blocks[{i}]", got=block, holder=holder
            )

    def quarantine(self, job: str) -> None:
        """`job` was told to end: its blocks are nobody's to use until it has, for a byte may still land in them."""
        for block in self._owned.get(job, ()):
            if self.owners.get(block) == job:
                self.quarantined[block] = self.owners.pop(block)

    def disown(self, job: str) -> None:
        """`job` has ended and no byte of it can land any more: its blocks are free."""
        for block in self._owned.pop(job, ()):
            for table in (self.owners, self.quarantined):
                if table.get(block) == job:
                    del table[block]

    def lend(self, blocks: NDArray[np.int64]) -> None:
        """An offer will be read from `blocks`, as others may be; raises `RangeBusy` for one that a job writes."""
        wanted = [int(b) for b in blocks]
        for i, block in enumerate(wanted):
            self._check_written(i, block)
        self.lent.update(wanted)

    def take_back(self, blocks: NDArray[np.int64]) -> None:
        """The offer has ended, and its blocks are read no more."""
        for block in blocks.tolist():
            left = self.lent.pop(block, 0) - 1
            if left > 0:
                self.lent[block] = left


class CacheBook:
    """All caches of an agent, by id."""

    def __init__(self, limit: int = 4096) -> None:
        self._entries: dict[str, CacheEntry] = {}
        self._limit = limit

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> list[CacheEntry]:
        """Every cache."""
        return list(self._entries.values())

    def add(self, entry: CacheEntry) -> None:
        """Makes the cache known."""
        if len(self._entries) >= self._limit:
            raise Busy(f"this agent keeps at most {self._limit} caches", retry_after=1.0)
        self._entries[entry.id] = entry

    def get(self, cache_id: str, session: bytes) -> CacheEntry:
        """The cache of that id, if this client owns it; raises `UnknownCache`."""
        entry = self._entries.get(cache_id)
        if entry is None or entry.session != session or entry.closing:
            raise UnknownCache(
                "no such cache",
                field="cache",
                got=cache_id,
                expected="the id of a cache this client registered",
            )
        return entry

    def of_session(self, session: bytes) -> list[CacheEntry]:
        """All caches of a client."""
        return [e for e in self._entries.values() if e.session == session]

    def use(self, entry: CacheEntry) -> None:
        """A job begins to use the cache."""
        entry.users += 1

    def done(self, entry: CacheEntry) -> None:
        """A job no longer uses the cache; one that is closing goes with its last user."""
        entry.users -= 1
        if entry.closing:
            self._finish(entry)

    def close(self, entry: CacheEntry) -> None:
        """Takes the cache away; its memory goes back when the last job has left it."""
        entry.closing = True
        self._finish(entry)

    def _finish(self, entry: CacheEntry) -> None:
        if entry.users > 0 or entry.id not in self._entries:
            return
        del self._entries[entry.id]
        entry.drop()
        entry.gone.set()
