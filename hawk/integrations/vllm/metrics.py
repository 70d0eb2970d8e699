"""What a connector counts, in vLLM's log and among its Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hawk.integrations import stats
from hawk.integrations.vllm.api import KVConnectorPromMetrics, KVConnectorStats, create_metric_per_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
BYTES = tuple(float(2**n) for n in range(12, 36, 2))

HISTOGRAMS = (
    ("fetch_seconds", "vllm:hawk_fetch_seconds", "Time from the order of a fetch to its last byte.", SECONDS),
    ("fetch_bytes", "vllm:hawk_fetch_bytes", "Bytes of one fetch.", BYTES),
    (
        "held_seconds",
        "vllm:hawk_held_seconds",
        "Time for which a prefilled request held its blocks.",
        SECONDS,
    ),
)

COUNTERS = (
    ("fetched", "vllm:hawk_fetched", "Requests whose cache came from a prefill engine."),
    ("fetch_failed", "vllm:hawk_fetch_failed", "Fetches that failed."),
    ("fetch_aborted", "vllm:hawk_fetch_aborted", "Fetches that ended because the request did."),
    ("offered", "vllm:hawk_offered", "Requests that were offered to a decode engine."),
    ("consumed", "vllm:hawk_consumed", "Offers that were fetched."),
    ("expired", "vllm:hawk_expired", "Offers that nobody fetched in time."),
    ("withdrawn", "vllm:hawk_withdrawn", "Offers that this engine took back."),
    ("offer_failed", "vllm:hawk_offer_failed", "Offers that could not be made."),
    (
        "late",
        "vllm:hawk_late",
        "Offers that this engine took back and whose blocks were read for long after.",
    ),
    ("dropped", "vllm:hawk_dropped", "Offers given back unread, as the request had all it needed, or ended."),
    ("bad_params", "vllm:hawk_bad_params", "Requests whose kv_transfer_params could not be used."),
    ("other_prompt", "vllm:hawk_other_prompt", "Requests that had been prefilled from another prompt."),
    ("faults", "vllm:hawk_faults", "Errors inside hooks: a bug, or an agent that is gone."),
)


class HawkStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The counts of an interval."""

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(data=stats.add(stats.empty(), data or {}))

    def reset(self) -> None:
        """Nothing counted."""
        self.data = stats.empty()

    def aggregate(self, other: Any) -> HawkStats:
        """Adds another worker's, or another interval's."""
        stats.add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return stats.summary(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return stats.is_empty(self.data)


class HawkMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # as above
    """The same for Prometheus, by engine."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, types, labels, values)
        self._histograms = {
            key: create_metric_per_engine(
                self._histogram_cls(name=name, documentation=text, buckets=list(buckets), labelnames=labels),
                values,
            )
            for key, name, text, buckets in HISTOGRAMS
        }
        self._counters = {
            key: create_metric_per_engine(
                self._counter_cls(name=name, documentation=text, labelnames=labels), values
            )
            for key, name, text in COUNTERS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds an interval's counts."""
        for key, histograms in self._histograms.items():
            for value in transfer_stats_data.get(key, ()):
                histograms[engine_idx].observe(value)
        for key, counters in self._counters.items():
            if number := transfer_stats_data.get(key, 0):
                counters[engine_idx].inc(number)
