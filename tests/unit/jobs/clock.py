"""An event loop whose time is the test's: it passes at once, and only as far as it is told to."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from hawk.retile.cpu import run_step

if TYPE_CHECKING:
    from tests.unit.jobs.rig import Rig

T = TypeVar("T")

_BEYOND = 1e-6
"""Seconds by which a timer fires late, so that what it waited for is over and not just being so."""


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits in the loop's own time."""

    loop: ClockLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("everything waits for something that will never come")
        if not ready and timeout:
            self.loop.now += timeout + _BEYOND
        return ready


class ClockLoop(asyncio.SelectorEventLoop):
    """Runs callbacks until none is left (`settle`), lets time pass (`advance`), and keeps what went wrong in them.

    Nothing may run in threads, for which the loop would not wait: see `without_threads`.
    """

    def __init__(self) -> None:
        selector = _Selector()
        selector.loop = self
        self.now = 1000.0
        self.faults: list[dict[str, Any]] = []
        super().__init__(selector)
        self.set_exception_handler(lambda _, context: self.faults.append(context))

    def time(self) -> float:
        """Seconds of the test's own clock."""
        return self.now

    def settle(self) -> None:
        """Runs all that can run now."""
        while self._ready:  # type: ignore[attr-defined]
            self.call_soon(self.stop)
            self.run_forever()

    def do(self, function: Callable[[], T]) -> T:
        """Calls a function inside the loop, and runs all that follows from it."""
        got: list[T] = []
        self.call_soon(lambda: got.append(function()))
        self.settle()
        assert got, self.faults
        return got[0]

    def await_(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end, in this loop's time."""
        return self.run_until_complete(coroutine)

    def advance(self, seconds: float) -> None:
        """Lets so much time pass, timer by timer."""
        end = self.now + seconds
        while (timers := self._scheduled) and timers[0]._when <= end:  # type: ignore[attr-defined]
            self.now = max(self.now, timers[0]._when + _BEYOND)
            self.call_soon(lambda: None)
            self.settle()
        self.now = max(self.now, end)


class _Inline:
    """What runs in threads elsewhere, done at once."""

    async def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def soon(self, function: Any) -> None:
        function()

    async def run_steps(self, steps: Any, regions: Any, arena: Any) -> None:
        for step in steps:
            run_step(step, regions, arena)


def without_threads(made: Rig) -> None:
    """The rig plans and retiles in the loop from now on."""
    inline: Any = _Inline()
    made.planner.call = inline.call  # type: ignore[method-assign]
    made.planner.soon = inline.soon  # type: ignore[method-assign]
    made.retiler.run_steps = inline.run_steps  # type: ignore[method-assign]


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a test in a loop whose time is its own: a busy machine lets nothing run out, and waiting costs no time."""
    loop = ClockLoop()
    try:
        loop.await_(coroutine)
    finally:
        loop.close()
    assert loop.faults == []


def timeless(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is `run` so."""

    @functools.wraps(test)
    def inside(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return inside
