"""Keeps blocks from vLLM's free list for as long as an offer of them may be read.

vLLM frees the blocks of a request that it preempts at once, and gives them to another in the same step.  So every offer
has a share of its own in its blocks (vLLM counts who uses a block), which ends when all workers have said that the
offer is over: no hook has to wait for that.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = get_log("hawk.integrations.vllm")

SOON = 5.0
"""Seconds for which the scheduler waits for blocks that were taken back, before it takes them from other requests."""


@dataclass
class _Loan:
    blocks: list[Any]
    told: int = 0
    back: float = 0.0


class Lent:
    """The blocks of open offers; `workers` of them have to say that one is over."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool: Any = None
        self._loans: dict[tuple[str, int], _Loan] = {}

    def bind(self, pool: Any) -> None:
        """Takes what counts the users of vLLM's blocks, before the first request."""
        self._pool = pool

    def __len__(self) -> int:
        return len(self._loans)

    def lend(self, key: str, attempt: int, blocks: Sequence[int]) -> None:
        """An offer of these blocks is about to be made."""
        held = [self._pool.blocks[number] for number in blocks]
        self._pool.touch(held)
        self._loans[key, attempt] = _Loan(held)

    def taken_back(self, key: str) -> None:
        """The request was preempted."""
        for (request, _), loan in self._loans.items():
            if request == key and not loan.back:
                loan.back = time.monotonic()

    def over(self, told: Mapping[tuple[str, int], int]) -> None:
        """So many workers more say that these offers are over."""
        for name, number in told.items():
            loan = self._loans.get(name)
            if loan is None:
                continue
            loan.told += number
            if loan.told >= self._workers:
                del self._loans[name]
                self._pool.free_blocks(reversed(loan.blocks))

    def soon(self) -> bool:
        """Whether blocks that were taken back are about to be free."""
        now = time.monotonic()
        return any(loan.back and now - loan.back < SOON for loan in self._loans.values())
