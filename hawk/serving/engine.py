"""The simulation itself: events of a discrete-event library, and what happens at each.

A request takes the same few events however many instances there are: it arrives, its step of prefill ends, its KV has
come, and it joins and leaves a batch.  What a user waits for is written down as it happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hawk.errors import InternalError, InvalidArgument
from hawk.serving import library
from hawk.serving.decode import DecodeInstance
from hawk.serving.outcome import Outcome
from hawk.serving.prefill import PrefillInstance
from hawk.serving.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.serving.scenario import Scenario
    from hawk.serving.transfer import Cost

BLOCK = 16
"""Tokens of a block of a decode instance where no layout says otherwise."""


class Engine:
    """One run of one scenario; `run` gives its outcome."""

    def __init__(self, scenario: Scenario) -> None:
        simpy = library.simpy()
        self.scenario = scenario
        self.env, self._timeout = simpy.Environment(), simpy.Timeout
        self.now = 0.0
        self.events = 0
        drawn = scenario.workload.draw(scenario.rate, scenario.requests, scenario.seed)
        self.arrival: list[float] = drawn.arrival.tolist()
        self.input: list[int] = drawn.input.tolist()
        self.output: list[int] = drawn.output.tolist()
        count = len(drawn)
        before, after = scenario.rates()
        self.block = BLOCK if scenario.transfer is None else scenario.transfer.sides[1].block
        self.reserved = [
            -(-(i + o) // self.block) * self.block for i, o in zip(self.input, self.output, strict=True)
        ]
        self._refuse_what_never_fits(before.kv_tokens, after.kv_tokens)
        self.first_at_step = scenario.first_token == "step"
        self.decode_steps = self.output if self.first_at_step else [n - 1 for n in self.output]
        self.max_tokens, self.chunk = scenario.prefill.max_tokens, scenario.prefill.chunk
        self.max_batch = scenario.decode.max_batch
        self.joined: list[int] = []
        self.prefills = [PrefillInstance(self, i, before) for i in range(scenario.prefill.instances)]
        self.decodes = [DecodeInstance(self, i, after) for i in range(scenario.decode.instances)]
        self._to_prefill = Router(scenario.router, self.prefills, lambda p: p.waiting, scenario.seed * 2 + 1)
        self._to_decode = Router(scenario.router, self.decodes, lambda d: d.admitted, scenario.seed * 2 + 2)
        self.source_free = [0.0] * -(-len(self.prefills) // scenario.prefill.per_node)
        self.target_free = [0.0] * -(-len(self.decodes) // scenario.decode.per_node)
        self._layers = 0
        if scenario.transfer is not None and scenario.transfer.overlap == "layers":
            self._layers = scenario.served.layers
        self._costs: dict[int, Cost] = {}
        never = [-1.0] * count
        self.prefill_start, self.prefill_end = never[:], never[:]
        self.granted, self.transfer_start, self.transfer_end = never[:], never[:], never[:]
        self.decode_start, self.first, self.end = never[:], never[:], never[:]
        self.prefill_of, self.decode_of = [-1] * count, [-1] * count
        self._marks: list[tuple[float, float, float]] = []
        self._held = [0.0, 0.0]
        self._inside, self._inside_since, self._inside_seconds = 0, 0.0, 0.0
        self.finished = 0

    def _refuse_what_never_fits(self, before: int, after: int) -> None:
        for name, needs, room in (("prefill", self.input, before), ("decode", self.reserved, after)):
            if max(needs) > room:
                raise InvalidArgument(
                    "a request is larger than an instance's KV",
                    field=f"{name}.kv_tokens",
                    got=room,
                    expected=f"{max(needs)} tokens or more",
                )

    # -- events ------------------------------------------------------------------------------------------------

    def at(self, when: float, what: Callable[[Any], None], value: Any) -> None:
        """Calls `what(value)` at that time, or now if that is over."""
        event = self._timeout(self.env, max(0.0, when - self.env.now), (what, value, when))
        event.callbacks.append(self._call)

    def _call(self, event: Any) -> None:
        what, value, when = event.value
        # The library adds up delays; what is written down are the times that were meant.
        if when > self.now:
            self.now = when
        self.events += 1
        what(value)

    def run(self) -> Outcome:
        """Runs until every request has its answer."""
        self.at(self.arrival[0] + self.scenario.overhead, self._arrive, 0)
        self.env.run()
        if self.finished != len(self.arrival):
            raise InternalError(
                "requests were lost", got=self.finished, expected=len(self.arrival), field="finished"
            )
        return self._outcome()

    def _arrive(self, request: int) -> None:
        following = request + 1
        if following < len(self.arrival):
            self.at(self.arrival[following] + self.scenario.overhead, self._arrive, following)
        self._count(1, self.now)
        if request == int(len(self.arrival) * self.scenario.warm_up) or following == len(self.arrival):
            self._mark()
        self._to_prefill.pick().arrive(request)

    def _count(self, change: int, when: float) -> None:
        """Keeps the time integral of requests in the system."""
        self._inside_seconds += self._inside * (when - self._inside_since)
        self._inside_since = when
        self._inside += change

    def _mark(self) -> None:
        """Writes down how long instances have been busy, at the first reported arrival and at the last."""
        before = sum(one.busy_by(self.now) for one in self.prefills)
        self._marks.append((self.now, before, sum(one.busy_by(self.now) for one in self.decodes)))

    # -- what instances tell -----------------------------------------------------------------------------------

    def prefill_begins(self, number: int, request: int) -> None:
        """A prompt's first tokens are computed from now on."""
        self.prefill_start[request] = self.now
        self.prefill_of[request] = number
        if self._layers:
            self._ask(request)

    def prefill_ended(self, number: int, request: int) -> float:
        """A prompt is computed; returns seconds that the instance stands still for its transfer."""
        self.prefill_end[request] = self.now
        if self.scenario.first_token == "prefill":
            self.first[request] = self.now
        if not self._layers:
            self._ask(request)
        elif self.granted[request] >= 0:
            self._move(request)
        return 0.0 if self.scenario.transfer is None else self._cost(self.input[request]).stall_source

    def _ask(self, request: int) -> None:
        target = self._to_decode.pick()
        self.decode_of[request] = target.number
        target.ask(request)

    def admitted(self, request: int) -> None:
        """A decode instance has room for a request."""
        self.granted[request] = self.now
        if self.prefill_end[request] >= 0:
            self._move(request)

    def _cost(self, tokens: int) -> Cost:
        transfer = self.scenario.transfer
        assert transfer is not None
        blocks = -(-tokens // self.block)
        cost = self._costs.get(blocks)
        if cost is None:
            s = self.scenario
            cost = transfer.cost(s.served, blocks * self.block, s.prefill.tp, s.decode.tp)
            self._costs[blocks] = cost
        return cost

    def _move(self, request: int) -> None:
        """The KV goes: one transfer after another on the link of either node."""
        scenario = self.scenario
        if scenario.transfer is None:
            self.transfer_start[request] = self.now
            self._moved(request)
            return
        cost = self._cost(self.input[request])
        here = self.prefill_of[request] // scenario.prefill.per_node
        there = self.decode_of[request] // scenario.decode.per_node
        begin = max(self.source_free[here], self.target_free[there])
        if self._layers:
            # Layers went while later ones were computed, from when there was room for them.
            begin = max(begin, self.prefill_start[request], self.granted[request])
            end = max(begin + cost.alone, self.now + cost.alone / self._layers)
        else:
            begin = max(begin, self.now)
            end = begin + cost.alone
        self._held[0] += cost.hold_source
        self._held[1] += cost.hold_target
        self.source_free[here] = begin + cost.hold_source
        self.target_free[there] = begin + cost.hold_target
        self.transfer_start[request] = begin
        self.prefills[self.prefill_of[request]].sent += cost.moved.nbytes
        self.at(end, self._moved, request)
        if cost.stall_target:
            target = self.decodes[self.decode_of[request]]
            self.at(end - cost.stall_target, target.stall, cost.stall_target)

    def _moved(self, request: int) -> None:
        self.transfer_end[request] = self.now
        if self.scenario.first_token == "transfer":
            self.first[request] = self.now
        target = self.decodes[self.decode_of[request]]
        if self.scenario.transfer is not None:
            target.received += self._cost(self.input[request]).moved.nbytes
        self.prefills[self.prefill_of[request]].release(self.input[request])
        target.arrive(request)

    def begun(self, request: int, at: float, first: float) -> None:
        """A request is in the batch."""
        self.decode_start[request] = at
        if self.first_at_step:
            self.first[request] = first

    def ended(self, request: int, at: float) -> None:
        """A request has its whole answer."""
        self.end[request] = at
        self.finished += 1
        self._count(-1, at)

    def _utilisation(self) -> tuple[float, float]:
        first, last = self._marks[0], self._marks[-1]
        if last[0] <= first[0]:  # all at once: from the first arrival to the last answer
            first = (self.arrival[0], 0.0, 0.0)
            before = sum(one.busy_seconds for one in self.prefills)
            last = (max(self.end), before, sum(one.busy_seconds for one in self.decodes))
        seconds = max(last[0] - first[0], 1e-12)
        before = (last[1] - first[1]) / seconds / len(self.prefills)
        after = (last[2] - first[2]) / seconds / len(self.decodes)
        return min(before, 1.0), min(after, 1.0)  # sums of thousands of steps end in rounded digits

    def _load(self) -> tuple[float, float, float]:
        count, decodes = len(self.arrival), len(self.decodes)
        span = self.arrival[-1] - self.arrival[0]
        if span <= 0:
            return 0.0, 0.0, 0.0
        span *= count / (count - 1)  # as many gaps as requests
        links = (
            held / len(free)
            for held, free in zip(self._held, (self.source_free, self.target_free), strict=True)
        )
        kept = sum(n * (b - a) for n, a, b in zip(self.reserved, self.transfer_start, self.end, strict=True))
        batch = sum(d.batch_seconds for d in self.decodes)
        decode = max(kept / self.decodes[0].capacity, batch / self.max_batch) / decodes
        return (
            sum(p.busy_seconds for p in self.prefills) / len(self.prefills) / span,
            max(links) / span,
            decode / span,
        )

    def _outcome(self) -> Outcome:
        def column(values: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
            return np.asarray(values, np.float64)

        return Outcome(
            scenario=self.scenario,
            arrival=column(self.arrival),
            prefill_start=column(self.prefill_start),
            prefill_end=column(self.prefill_end),
            transfer_start=column(self.transfer_start),
            transfer_end=column(self.transfer_end),
            decode_start=column(self.decode_start),
            first_token=column(self.first),
            end=column(self.end),
            input=np.asarray(self.input, np.int64),
            output=np.asarray(self.output, np.int64),
            prefill_instance=np.asarray(self.prefill_of, np.int32),
            decode_instance=np.asarray(self.decode_of, np.int32),
            prefill_busy=column([p.busy_seconds for p in self.prefills]),
            decode_busy=column([d.busy_seconds for d in self.decodes]),
            decode_batch_seconds=column([d.batch_seconds for d in self.decodes]),
            decode_kv_peak=np.asarray([d.peak for d in self.decodes], np.int64),
            decode_kv_tokens=self.decodes[0].capacity,
            bytes_sent=np.asarray([p.sent for p in self.prefills], np.int64),
            bytes_received=np.asarray([d.received for d in self.decodes], np.int64),
            inside_seconds=self._inside_seconds,
            events=self.events,
            utilisation=self._utilisation(),
            load=self._load(),
        )


def simulate(scenario: Scenario) -> Outcome:
    """Runs a scenario to its last answer.

    Raises `MissingDependency` without SimPy, `InvalidArgument` where a request fits into no instance.
    """
    return Engine(scenario).run()
