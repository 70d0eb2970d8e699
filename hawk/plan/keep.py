"""Results kept for the next call: like `functools.lru_cache`, but what is large is not kept.

Layouts and block tables come from peers, so what a cache holds has to be bounded in bytes and not only in number.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

MOST_BYTES = 8 << 20
"""Of one result."""


class Kept(Generic[P, T]):
    """A pure function whose last `most` results are kept, the oldest going first; arguments must be hashable.

    nbytes    size of a result; one of more than `MOST_BYTES` is made anew each time
    """

    def __init__(self, make: Callable[P, T], most: int, nbytes: Callable[[T], int]) -> None:
        self.__doc__ = make.__doc__
        self._make, self._most, self._nbytes = make, most, nbytes
        self._known: dict[object, T] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns."""
        key = (args, tuple(sorted(kwargs.items()))) if kwargs else args
        found = self._known.get(key)
        if found is not None:
            return found
        found = self._make(*args, **kwargs)
        if self._nbytes(found) <= MOST_BYTES:
            with self._lock:
                if len(self._known) >= self._most:
                    self._known.pop(next(iter(self._known)))
                self._known[key] = found
        return found

    def cache_clear(self) -> None:
        """Forgets all."""
        with self._lock:
            self._known.clear()


def kept(most: int, nbytes: Callable[[Any], int]) -> Callable[[Callable[P, T]], Kept[P, T]]:
    """Decorates a pure function; see `Kept`."""
    return lambda make: Kept(make, most, nbytes)
