"""Which retiler a source has: the processors' where they reach its memory, a GPU's where it is in that one's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hawk.jobs.lifting import lift
from hawk.jobs.refreshing import refreshed
from hawk.retile.cpu import INLINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.jobs.caches import CacheEntry
    from hawk.jobs.gpus import Gpus
    from hawk.jobs.offers import OfferEntry
    from hawk.jobs.turns import Slots
    from hawk.memory.region import U8, Region
    from hawk.plan.types import Step
    from hawk.retile.cpu import Retiler


@dataclass(frozen=True, slots=True)
class Portion:
    """One chunk as a retiler sees it.

    layers           layers `[0, layers)` of the source are what it may read
    steps            how it is made
    arena            where it goes to, `[offset, offset + nbytes)` of it
    shadow           memory of a GPU, in which it is to be at the same offset instead
    seen             with a shadow: whether it is to be in the arena, too, for processors to see
    """

    offer: OfferEntry
    layers: int
    steps: Sequence[Step]
    arena: Region
    offset: int
    nbytes: int
    shadow: Region | None = None
    seen: bool = False

    @property
    def view(self) -> U8:
        """The range, as processors see it."""
        return self.arena.array[self.offset : self.offset + self.nbytes]


class SourceRetiler(Protocol):
    """Retiles chunks of one kind of source; `turns` says how many at a time, `ahead` how many of one job."""

    turns: Slots
    ahead: int

    def at_once(self, portion: Portion) -> bool:
        """Fills it in this very call, where that is over before anybody could take a turn; False: nothing was done."""

    async def run(self, portion: Portion) -> None:
        """Fills the chunk's range of the arena.

        Returns, raises or is cancelled only when nobody reads the source or writes the arena any more.
        """


class OnProcessors:
    """Threads of the agent's, see `hawk.retile.cpu`."""

    ahead = 1  # each chunk takes all of them

    def __init__(self, retiler: Retiler, turns: Slots) -> None:
        self._retiler = retiler
        self.turns = turns

    def at_once(self, portion: Portion) -> bool:
        """See `SourceRetiler`: a small one takes no thread, and so nobody's turn."""
        memory = portion.offer.cache.memory
        if portion.nbytes > INLINE_BYTES or portion.shadow is not None or (memory and memory.refreshes):
            return False
        regions = [region.array for region in portion.offer.cache.regions]
        return self._retiler.at_once(portion.steps, regions, portion.view)

    async def run(self, portion: Portion) -> None:
        """See `SourceRetiler`."""
        regions = await refreshed(portion.offer.cache, portion.steps)
        await self._retiler.run_steps(portion.steps, regions, portion.view)
        if portion.shadow is not None:
            await lift(portion.arena, portion.shadow, portion.offset, portion.nbytes)


class Retilers:
    """The retilers of an agent; without `gpus` it takes no cache that is on one."""

    def __init__(self, processors: OnProcessors, gpus: Gpus | None = None) -> None:
        self.processors = processors
        self.gpus = gpus

    def of(self, cache: CacheEntry) -> SourceRetiler:
        """The one for a source; raises `DeviceLost` where its GPU is lost."""
        return self.processors if cache.gpu < 0 or self.gpus is None else self.gpus.of(cache.gpu)

    def writing(self, offer: OfferEntry) -> bool:
        """Whether layers of the offer are still to be written, by what its owner and its GPU have said so far."""
        cache = offer.cache
        if offer.layers < cache.layout.shape.layers:
            return True
        return cache.gpu >= 0 and self.gpus is not None and not self.gpus.of(cache.gpu).written(offer)
