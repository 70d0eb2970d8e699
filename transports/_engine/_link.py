"""A link on a foreign engine, as its transport and the rest of HAWK see it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from hawk.observe.log import get as get_log
from hawk.transports import _pieces
from hawk.transports._engine import _places
from hawk.transports._engine._client import EngineLane
from hawk.transports._links import LanesLink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.memory.region import I64, Region
    from hawk.transports._engine._client import Settings, Way
    from hawk.transports._engine._seam import Opener

log = get_log("hawk.transports.engine")

_MOST_ROWS = 1 << 18
"""Rows in one piece: bounds how long its tables take to lay out."""


class EngineLink(LanesLink):
    """Reads from one peer; `lanes` is how many engines it has for that."""

    def __init__(
        self,
        name: str,
        config: Settings,
        way: Way,
        opener: Opener,
        on_step: Callable[[int], None],
        lanes: int = 1,
    ) -> None:
        # Where lanes take all processors there is, their dealers would only be in their way.
        beside = lanes == 1 or len(os.sched_getaffinity(0)) >= 2 * lanes
        self._each = [EngineLane(config, way, opener, on_step, beside) for _ in range(lanes)]
        self._name = name
        self._told: set[int] = set()
        super().__init__(
            f"hawk-{name}-read", self._each, least=config.chunk, most=config.piece, rows=_MOST_ROWS
        )

    def _why_not(self, gpu: int) -> str:
        return next((why for lane in self._each if (why := lane.why_not(gpu))), "")

    def into(self, gpu: int) -> bool:
        """See `Link.into`; the log says once for each why not."""
        if (why := self._why_not(gpu)) and gpu not in self._told:
            self._told.add(gpu)
            log.info("memory of GPUs is filled by way of the host", transport=self._name, gpu=gpu, reason=why)
        return not why

    def _bases(self, regions: Sequence[Region]) -> I64:
        for region in regions:
            if region.gpu >= 0 and (why := self._why_not(region.gpu)):
                raise _places.not_taken(region, why)
        of_host = iter(_pieces.bases([r for r in regions if r.gpu < 0]).tolist())
        return np.asarray([r.address if r.gpu >= 0 else next(of_host) for r in regions], dtype=np.int64)
