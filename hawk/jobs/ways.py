"""Where a chunk that a GPU makes is to be: in memory of the host, in a GPU's, or in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hawk.jobs.retilers import Portion


@dataclass(frozen=True, slots=True)
class Way:
    """Addresses, 0 where it is not to be: of memory of the host, of the GPU that makes it, and of another GPU."""

    host: int
    room: int = 0
    there: int = 0

    @classmethod
    def of(cls, portion: Portion, gpu: int) -> Way:
        """As a portion says that this GPU makes.

        What is to be on another GPU that this one does not reach is to be in memory of the host first.
        """
        host = portion.arena.address + portion.offset
        shadow = portion.shadow
        if shadow is None or (shadow.gpu != gpu and gpu not in shadow.reached_by):
            return cls(host)
        at = shadow.address + portion.offset
        seen = host if portion.seen else 0
        return cls(seen, at) if shadow.gpu == gpu else cls(seen, there=at)
