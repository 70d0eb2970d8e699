"""Where a chunk that a GPU makes is to be: in memory of the host, in a GPU's, or in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hawk.jobs.retilers import Portion


@dataclass(frozen=True, slots=True)
class Way:
    """Addresses, 0 where it is not to be; `gpu` holds `room`."""

    host: int
    gpu: int = -1
    room: int = 0

    @classmethod
    def of(cls, portion: Portion) -> Way:
        """As a portion says."""
        host = portion.arena.address + portion.offset
        shadow = portion.shadow
        if shadow is None:
            return cls(host)
        return cls(host if portion.seen else 0, shadow.gpu, shadow.address + portion.offset)
