"""Where a chunk that a GPU makes is to be: in memory of the host, in a GPU's, or in both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hawk.jobs.retilers import Portion


@dataclass(frozen=True, slots=True)
class Way:
    """Addresses, 0 where it is not to be: of memory of the host, and of the GPU that makes it."""

    host: int
    room: int = 0

    @classmethod
    def of(cls, portion: Portion, gpu: int) -> Way:
        """As a portion says that this GPU makes: what is to be on another one is to be in memory of the host first.

        Memory that is passed on by descriptor is mapped for its own GPU alone; others' copies to it are faults.
        """
        host = portion.arena.address + portion.offset
        shadow = portion.shadow
        if shadow is None or shadow.gpu != gpu:
            return cls(host)
        return cls(host if portion.seen else 0, shadow.address + portion.offset)
