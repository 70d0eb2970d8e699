"""What came of a simulation: a column for everything that is known of each request, and what is told of all."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hawk.serving.figures import number

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.serving.scenario import Scenario

    F64 = NDArray[np.float64]
    I64 = NDArray[np.int64]
    I32 = NDArray[np.int32]

Measure = Literal["ttft", "tpot"]


@dataclass(frozen=True, eq=False)
class Outcome:
    """Columns by request in the order of arrival; seconds from the simulation's beginning.

    first_token           as the scenario's `first_token` counts it
    prefill_busy, decode_busy    seconds that each instance computed or stood still for copies, `float64[instances]`
    decode_batch_seconds  the same times the requests in its batch
    decode_kv_peak        most tokens of KV that were reserved at a time, of `decode_kv_tokens`
    inside_seconds        time integral of requests that instances know of and have not answered
    events                events of the simulation
    utilisation           part of the time that prefill and decode instances were busy while reported requests arrived;
                          what comes afterwards, while the system empties, is left out
    load                  what all requests took of prefill instances, of links and of decode instances (room for KV or
                          for requests, whichever is scarcer), as part of what there was while they arrived.  Above 1
                          queues grow for as long as requests come, whatever part of these few was answered in time

    What is told of all leaves the first `scenario.warm_up` of the requests out.
    """

    scenario: Scenario
    arrival: F64
    prefill_start: F64
    prefill_end: F64
    transfer_start: F64
    transfer_end: F64
    decode_start: F64
    first_token: F64
    end: F64
    input: I64
    output: I64
    prefill_instance: I32
    decode_instance: I32
    prefill_busy: F64
    decode_busy: F64
    decode_batch_seconds: F64
    decode_kv_peak: I64
    decode_kv_tokens: int
    bytes_sent: I64
    bytes_received: I64
    inside_seconds: float
    events: int
    utilisation: tuple[float, float]
    load: tuple[float, float, float]

    def __len__(self) -> int:
        return len(self.arrival)

    @cached_property
    def measured(self) -> slice:
        """The requests that are reported."""
        return slice(int(len(self) * self.scenario.warm_up), len(self))

    @cached_property
    def ttft(self) -> F64:
        """Seconds from arrival to the first token, of reported requests."""
        found: F64 = (self.first_token - self.arrival)[self.measured]
        return found

    @cached_property
    def tpot(self) -> F64:
        """Seconds a token after the first, of reported requests; NaN for answers of one token."""
        after = self.output[self.measured] - 1
        took = (self.end - self.first_token)[self.measured]
        found: F64 = np.full(len(after), np.nan)
        np.divide(took, after, out=found, where=after > 0)
        return found

    def percentile(self, what: Measure, percent: float) -> float:
        """That percentile of `ttft` or `tpot`, seconds; NaN where no answer has a second token."""
        values: F64 = self.ttft if what == "ttft" else self.tpot
        values = values[~np.isnan(values)]
        return float(np.percentile(values, number(percent, "percent", 0, 100))) if len(values) else np.nan

    @cached_property
    def attainment(self) -> float:
        """Part of the reported requests that met both promises."""
        slo = self.scenario.slo
        met = (self.ttft <= slo.ttft) & ~(self.tpot > slo.tpot)
        return float(met.mean())

    @property
    def steady(self) -> bool:
        """Whether it could go on like this, with a load below 1.  A trace is all that is asked and may end in time."""
        return bool(self.scenario.workload.recorded) or max(self.load) < 1

    @cached_property
    def ttft_attainment(self) -> float:
        """Part that met the promise on the first token."""
        return float((self.ttft <= self.scenario.slo.ttft).mean())

    @cached_property
    def tpot_attainment(self) -> float:
        """Part that met the promise on the tokens after it."""
        return float((~(self.tpot > self.scenario.slo.tpot)).mean())

    @cached_property
    def seconds(self) -> float:
        """From the first arrival to the last answer."""
        return float(self.end.max() - self.arrival[0])

    @cached_property
    def output_throughput(self) -> float:
        """Tokens of answers a second that came while reported requests arrived.

        A request's tokens after the first count as spread evenly over its time in the batch.  What comes after the last
        arrival, while the system empties, is left out: a system that goes on does not empty.
        """
        begin, until = self.arrival[self.measured][0], self.arrival[-1]
        if until <= begin:
            return float(self.output.sum() / self.seconds) if self.seconds > 0 else 0.0
        start = np.maximum(self.first_token, self.decode_start)  # who waits for a place makes none meanwhile
        spans = np.maximum(self.end - start, 1e-12)
        inside = np.clip(np.minimum(self.end, until) - np.maximum(start, begin), 0, None) / spans
        later = float(((self.output - 1) * inside).sum())
        firsts = float(((self.first_token >= begin) & (self.first_token < until)).sum())
        return (later + firsts) / float(until - begin)

    @property
    def mean_batch(self) -> float:
        """Requests in the batches of decode instances, while these decode."""
        busy = float(self.decode_busy.sum())
        return float(self.decode_batch_seconds.sum()) / busy if busy > 0 else 0.0

    @property
    def power(self) -> float:
        """Watts of all devices' ASICs while reported requests arrive: each phase's power while busy, else idle."""
        s, (before, after) = self.scenario, self.utilisation
        total = 0.0
        for side, busy, phase in ((s.prefill, before, "power_prefill"), (s.decode, after, "power_decode")):
            v = side.device.value
            mean = busy * v(phase) + (1 - busy) * v("power_idle")
            total += side.tp * side.instances * mean
        return total

    @property
    def cost(self) -> float:
        """Dollars of all devices."""
        s = self.scenario
        return sum(side.tp * side.instances * side.device.value("price") for side in (s.prefill, s.decode))

    @property
    def power_efficiency(self) -> float:
        """Tokens of answers a joule; NaN without power."""
        return self.output_throughput / self.power if self.power > 0 else np.nan

    @property
    def cost_efficiency(self) -> float:
        """Tokens of answers a second and dollar; NaN without prices."""
        return self.output_throughput / self.cost if self.cost > 0 else np.nan

    def columns(self) -> dict[str, NDArray[Any]]:
        """Every column with one row a request, by name."""
        return {
            f.name: value
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), np.ndarray)
            and len(value) == len(self)
            and not f.name.startswith(("prefill_busy", "decode_busy", "decode_batch", "decode_kv", "bytes"))
        }

    def summary(self) -> dict[str, float]:
        """What is told of all, for tables and JSON."""
        before, after = self.utilisation
        return {
            "ttft_p50": self.percentile("ttft", 50),
            "ttft_p90": self.percentile("ttft", 90),
            "tpot_p50": self.percentile("tpot", 50),
            "tpot_p90": self.percentile("tpot", 90),
            "attainment": self.attainment,
            "ttft_attainment": self.ttft_attainment,
            "tpot_attainment": self.tpot_attainment,
            "output_throughput": self.output_throughput,
            "prefill_utilisation": before,
            "decode_utilisation": after,
            "mean_batch": self.mean_batch,
            "power": self.power,
            "cost": self.cost,
        }
