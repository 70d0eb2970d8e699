"""A prefill instance: requests in the order they came, whole prompts together or in chunks, one step after another."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hawk.serving.device import Rates
    from hawk.serving.engine import Engine


class PrefillInstance:
    """Steps as `Rates` has them.  A request's KV stays until its transfer has ended; without room for the next prompt
    the instance stands still, which is how a slow decode side makes itself felt here.

    waiting    tokens of prompts that are not computed yet, for the router
    used       tokens of KV that are kept
    """

    __slots__ = (
        "busy_seconds",
        "capacity",
        "done",
        "engine",
        "number",
        "queue",
        "rates",
        "running",
        "sent",
        "takes",
        "until",
        "used",
        "waiting",
    )

    def __init__(self, engine: Engine, number: int, rates: Rates) -> None:
        self.engine, self.number, self.rates = engine, number, rates
        self.queue: deque[int] = deque()
        self.running = False
        self.done = 0  # tokens of the queue's head that earlier steps have computed
        self.waiting = self.used = self.sent = 0
        self.capacity, self.takes = rates.kv_tokens, engine.scenario.prefill.takes
        self.busy_seconds = self.until = 0.0  # of steps that have begun, and when the last of them ends

    def busy_by(self, now: float) -> float:
        """Seconds that it computed or stood still for copies until now."""
        return self.busy_seconds - max(0.0, self.until - now)

    def arrive(self, request: int) -> None:
        """A request has come."""
        self.queue.append(request)
        self.waiting += self.engine.input[request]
        if not self.running:
            self._start()

    def release(self, tokens: int) -> None:
        """A decode instance has the KV of a request."""
        self.used -= tokens
        if not self.running:
            self._start()

    def _start(self) -> None:
        if not self.queue:
            return
        if self.engine.chunk is None:
            self._whole()
        else:
            self._chunked(self.engine.chunk)

    def _keep(self, request: int) -> bool:
        """Takes room for a prompt; False where there is none."""
        tokens = self.engine.input[request]
        if self.used + tokens > self.capacity:
            return False
        self.used += tokens
        self.engine.prefill_begins(self.number, request)
        return True

    def _whole(self) -> None:
        """Starts a step of whole prompts."""
        engine, queue = self.engine, self.queue
        ended: list[int] = []
        tokens, seconds = 0, self.rates.fixed
        while queue:
            request = queue[0]
            length = engine.input[request]
            if (ended and tokens + length > engine.max_tokens) or not self._keep(request):
                break
            queue.popleft()
            ended.append(request)
            tokens += length
            seconds += self.rates.work(0, length)
        if ended:
            self._run(seconds, ended, tokens)

    def _chunked(self, chunk: int) -> None:
        """Starts the steps that the head of the queue has for itself, or the one that others share."""
        engine, queue = self.engine, self.queue
        head = queue[0]
        if self.done == 0 and not self._keep(head):
            return
        left = engine.input[head] - self.done
        if left > chunk:
            # All full chunks but the last part: nobody else is in these, so they are one event.
            steps = (left - 1) // chunk
            tokens = steps * chunk
            seconds = steps * self.rates.fixed + self.rates.work(self.done, tokens)
            self.done += tokens
            self._run(seconds, [], tokens)
            return
        room, seconds, ended, tokens = chunk, self.rates.fixed, [], 0
        while queue and room:
            request = queue[0]
            if request != head and not self._keep(request):
                break
            part = min(room, engine.input[request] - self.done)
            seconds += self.rates.work(self.done, part)
            room -= part
            tokens += part
            self.done += part
            if self.done < engine.input[request]:
                break
            queue.popleft()
            ended.append(request)
            self.done = 0
        self._run(seconds, ended, tokens)

    def _run(self, seconds: float, ended: list[int], tokens: int) -> None:
        self.running = True
        if self.takes is not None:
            seconds = self.takes(self.engine.now, seconds)
        self.busy_seconds += seconds
        self.until = self.engine.now + seconds
        self.engine.at(self.until, self._ended, (ended, tokens))

    def _ended(self, what: tuple[list[int], int]) -> None:
        ended, tokens = what
        self.waiting -= tokens
        stall = 0.0
        for request in ended:
            stall += self.engine.prefill_ended(self.number, request)
        if stall > 0.0:  # copies that the engine waits for
            self.busy_seconds += stall
            self.until = self.engine.now + stall
            self.engine.at(self.until, self._go_on, None)
            return
        self._go_on(None)

    def _go_on(self, _: None) -> None:
        self.running = False
        self._start()
