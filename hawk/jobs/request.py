"""What a fetch is asked to do, and what it brought."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from hawk.jobs.scheduler import Ask

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hawk.jobs.caches import CacheEntry
    from hawk.plan.part import Part

_WAITS = ("connect", "accept", "release")
"""Phases in which parts wait side by side."""


@dataclass(frozen=True)
class Source:
    """Where a request, or a part of it, is to be had.

    source      name of the prefill agent
    generation  the run of the prefill agent that made the ticket, or empty where there is none
    part        what of a model's cache the offer holds, as its ticket says; None where that is not known yet
    """

    source: str
    address: str = ""
    generation: str = ""
    claim: str = ""
    part: Part | None = None


@dataclass(frozen=True)
class FetchRequest:
    """What one fetch is asked to do; `blocks` counts from token 0, tokens 0 means all from `first` on.

    claim, source, address, generation, part    see `Source`
    others      further sources, where the request comes in parts
    client      whose share of this agent's work it counts against
    priority    among the fetches of a client, the higher first
    due         loop time by which it should be ready; `inf` where nobody said
    """

    job: str
    request: str
    claim: str
    source: str
    address: str
    generation: str
    cache: CacheEntry
    blocks: NDArray[np.int64]
    first: int
    tokens: int
    timeout: float
    wait: bool
    client: str = ""
    priority: int = 0
    due: float = math.inf
    part: Part | None = None
    others: tuple[Source, ...] = ()

    def ask(self, nbytes: int, left: int) -> Ask:
        """What stands for this job where it waits for others, with `left` bytes to bring."""
        return Ask(self.client, nbytes, self.priority, self.due, left)

    @property
    def early(self) -> bool:
        """Whether it may come before its offer.  One that has a ticket was made already, or never will be again."""
        return self.wait and not self.generation

    def ttft(self) -> float:
        """What is left of the time within which it should be ready; 0 where nobody said, or it is over."""
        return 0.0 if math.isinf(self.due) else max(self.due - asyncio.get_running_loop().time(), 0.0)

    @property
    def sources(self) -> tuple[Source, ...]:
        """All of them, in the caller's order."""
        return Source(self.source, self.address, self.generation, self.claim, self.part), *self.others

    def of(self, source: Source) -> FetchRequest:
        """The same for one source alone."""
        if not self.others and source == self.sources[0]:
            return self
        return replace(self, **{f.name: getattr(source, f.name) for f in fields(source)}, others=())


@dataclass
class FetchResult:
    """What a ready fetch brought: counts in tokens and bytes, seconds per phase, bytes per channel.

    attempt     the job id on the wire, by which the prefill side knows the latest attempt
    parts       how many offers it came from
    """

    first: int = 0
    tokens: int = 0
    nbytes: int = 0
    note: bytes = b""
    transport: str = ""
    mode: str = ""
    attempt: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    channels: list[int] = field(default_factory=list)
    parts: int = 1

    @classmethod
    def joined(cls, results: Sequence[FetchResult]) -> FetchResult:
        """The parts of one request as one: bytes and the seconds of what parts share add up, waits overlap."""
        first = results[0]
        if len(results) == 1:
            return first
        phases: dict[str, float] = {}
        for name, seconds in ((name, s) for r in results for name, s in r.phases.items()):
            before = phases.get(name, 0.0)
            phases[name] = max(before, seconds) if name in _WAITS else before + seconds
        return cls(
            first=first.first,
            tokens=first.tokens,
            nbytes=sum(r.nbytes for r in results),
            note=next((r.note for r in results if r.note), b""),
            transport="+".join(sorted({r.transport for r in results if r.transport})),
            mode="+".join(sorted({r.mode for r in results if r.mode})),
            attempt=" ".join(r.attempt for r in results if r.attempt),
            phases=phases,
            channels=[sum(c) for c in zip_longest(*(r.channels for r in results), fillvalue=0)],
            parts=len(results),
        )
