"""Which instance a request goes to."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hawk.serving.scenario import Routing

T = TypeVar("T")


class Router(Generic[T]):
    """Picks one of some instances.

    round-robin     each in turn
    two-choices     the less loaded of two picked at random: near the best at a cost that does not grow with instances
    least-loaded    the least loaded of all, which are all looked at each time
    """

    def __init__(self, kind: Routing, instances: Sequence[T], load: Callable[[T], float], seed: int) -> None:
        self._instances, self._load = instances, load
        self._random = random.Random(seed)
        self._next = -1
        single = len(instances) == 1
        self.pick: Callable[[], T] = {
            "round-robin": self._in_turn,
            "two-choices": self._in_turn if single else self._of_two,
            "least-loaded": self._least,
        }[kind]

    def _in_turn(self) -> T:
        self._next = (self._next + 1) % len(self._instances)
        return self._instances[self._next]

    def _of_two(self) -> T:
        count, draw = len(self._instances), self._random.random
        first = int(draw() * count)
        second = (first + 1 + int(draw() * (count - 1))) % count
        a, b = self._instances[first], self._instances[second]
        return a if self._load(a) <= self._load(b) else b

    def _least(self) -> T:
        return min(self._instances, key=self._load)
