"""A decode instance: continuous batching, with all steps between two changes of the batch passed over at once.

A step of b requests with c tokens of context takes s(b) + c * w seconds; each step adds b to c.  So k steps take

    k * (s(b) + c * w) + w * b * k * (k - 1) / 2

and how many have been made by a time is the root of a quadratic.  A request joins at the end of a step; its own number
of steps says at which count of steps it leaves, so a heap of these counts gives the next change.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hawk.serving.device import Rates
    from hawk.serving.engine import Engine


class DecodeInstance:
    """KV is reserved for prompt and answer, in whole blocks, before a transfer begins; who finds no room waits in turn.

    used        tokens of KV reserved
    context     tokens in the caches of the batch
    """

    __slots__ = (
        "admitted",
        "at",
        "base",
        "batch",
        "batch_seconds",
        "boundary",
        "busy_seconds",
        "capacity",
        "context",
        "engine",
        "leaving",
        "number",
        "pause",
        "peak",
        "rates",
        "ready",
        "received",
        "steps",
        "used",
        "version",
        "waiting",
    )

    def __init__(self, engine: Engine, number: int, rates: Rates) -> None:
        self.engine, self.number, self.rates = engine, number, rates
        self.capacity = rates.kv_tokens
        self.used = self.peak = self.admitted = 0
        self.waiting: deque[int] = deque()  # asked for room
        self.ready: deque[int] = deque()  # their KV is here
        self.leaving: list[tuple[int, int]] = []
        self.batch = self.context = self.steps = self.received = 0
        self.at = 0.0  # when the step that is counted last ended
        self.base = 0.0  # seconds of a step of this batch without its context
        self.pause = 0.0
        self.boundary = False
        self.version = 0
        self.busy_seconds = self.batch_seconds = 0.0

    def busy_by(self, now: float) -> float:
        """Seconds that it decoded or stood still for copies until now."""
        # Counted up to `at`: the step that runs is not over, and a pause may lie ahead.
        return self.busy_seconds + (now - self.at if self.batch else min(0.0, now - self.at))

    # -- room --------------------------------------------------------------------------------------------------

    def ask(self, request: int) -> None:
        """A request asks for room; `engine.admitted` is called when it has it."""
        self.admitted += 1
        self.waiting.append(request)
        self._admit()

    def _admit(self) -> None:
        engine = self.engine
        while self.waiting:
            need = engine.reserved[self.waiting[0]]
            if self.used + need > self.capacity:
                return
            self.used += need
            self.peak = max(self.peak, self.used)
            engine.admitted(self.waiting.popleft())

    # -- the batch ---------------------------------------------------------------------------------------------

    def arrive(self, request: int) -> None:
        """The KV of a request is here."""
        self.ready.append(request)
        self._change()

    def stall(self, seconds: float) -> None:
        """The engine stands still for so long from the end of this step on."""
        if self.batch:
            self.pause += seconds
            self._change()

    def _change(self) -> None:
        """Looks at the batch again at the end of the step that runs."""
        if self.boundary:
            return
        now = self.engine.now
        if not self.batch:
            self.at = max(self.at, now)
            if self.at > now:
                self._look_at(self.at)
            else:
                self._look(None)
            return
        self._advance(now)
        # After a pause `at` lies ahead: a step begins there.  Who has made the last step goes before another begins.
        here = self.at >= now or self.leaving[0][0] <= self.steps
        self._look_at(self.at if here else self.at + self._seconds(1))

    def _look_at(self, when: float) -> None:
        self.boundary = True
        self.engine.at(when, self._look, when)

    def _seconds(self, steps: int) -> float:
        w = self.rates.step_context
        return steps * (self.base + self.context * w) + w * self.batch * (steps * (steps - 1) / 2)

    def _advance(self, now: float) -> None:
        """Counts the steps that have ended by `now`."""
        spent = now - self.at
        if spent <= 0.0 or not self.batch:
            return
        first, growth = (
            self.base + self.context * self.rates.step_context,
            self.rates.step_context * self.batch,
        )
        if first <= 0.0:
            return
        if growth > 0.0:
            half = first / growth - 0.5
            # The difference of a root and `half`, without the loss of digits where they are nearly the same.
            steps = int(2 * spent / growth / (math.sqrt(half * half + 2 * spent / growth) + half))
        else:
            steps = int(spent / first)
        # A rounded root may be one off; the step that runs is not over before its end.
        while steps > 0 and self._seconds(steps) > spent:
            steps -= 1
        while self._seconds(steps + 1) <= spent:
            steps += 1
        self._count(min(steps, self.leaving[0][0] - self.steps))

    def _count(self, steps: int) -> None:
        if steps <= 0:
            return
        seconds = self._seconds(steps)
        self.busy_seconds += seconds
        self.batch_seconds += seconds * self.batch
        self.at += seconds
        self.steps += steps
        self.context += steps * self.batch

    def _look(self, when: float | None) -> None:
        """At the end of a step: who is done leaves, the engine stands still if it has to, who is ready joins."""
        engine = self.engine
        if when is None:
            self.at = engine.now
        elif self.batch and when > self.at:
            self._count(1)
            self.at = when
        self.boundary = False
        self._leave()
        if self.pause:
            self.at += self.pause
            self.busy_seconds += self.pause
            self.batch_seconds += self.pause * self.batch
            self.pause = 0.0
        while self.ready and self.batch < engine.max_batch:
            request = self.ready.popleft()
            heappush(self.leaving, (self.steps + engine.decode_steps[request], request))
            self.batch += 1
            self.context += engine.input[request]
            engine.joined.append(request)
        self.base = self.rates.base(self.batch) if self.batch else 0.0
        if engine.joined:
            first = self.at + (self._seconds(1) if engine.first_at_step else 0.0)
            for request in engine.joined:
                engine.begun(request, self.at, first)
            engine.joined.clear()
        self.version += 1
        if self.batch:
            left = self.leaving[0][0] - self.steps
            engine.at(self.at + self._seconds(left), self._done, self.version)

    def _done(self, version: int) -> None:
        """The next request of the batch has made its last step, unless the batch has changed since."""
        if version != self.version or self.boundary:
            return
        self._count(self.leaving[0][0] - self.steps)
        self._look(self.at)

    def _leave(self) -> None:
        engine, left = self.engine, False
        while self.leaving and self.leaving[0][0] <= self.steps:
            _, request = heappop(self.leaving)
            self.batch -= 1
            self.context -= engine.input[request] + engine.decode_steps[request]
            self.used -= engine.reserved[request]
            self.admitted -= 1
            engine.ended(request, self.at)
            left = True
        if left:
            self._admit()
