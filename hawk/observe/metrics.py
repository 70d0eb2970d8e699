"""What an agent counts, in a registry of its own: embedding HAWK adds nothing to a host's metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST

_PHASES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LAGS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

PoolReader = Callable[[], Mapping[str, int]]
"""Bytes of one pool by state, such as `{"free": ..., "owned": ..., "quarantined": ...}`; quick, never blocks."""


class _Shown:
    """A registry without the times at which its series began, which nobody asked for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class Metrics:
    """The agent's counters.  Methods are cheap, and safe to call from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.last_lag = 0.0
        self._pools: dict[str, PoolReader] = {}
        self._readers: list[Callable[[], None]] = []
        own = self.registry
        self._jobs = Counter(
            "hawk_jobs", "Jobs that ended, by how they ended.", ["ending", "role", "transport"], registry=own
        )
        self._phase = Histogram(
            "hawk_phase_seconds",
            "Time that one phase of a job took.",
            ["phase"],
            buckets=_PHASES,
            registry=own,
        )
        self._bytes = Counter(
            "hawk_bytes", "Bytes of caches moved.", ["direction", "transport"], registry=own
        )
        self._pool = Gauge(
            "hawk_pool_bytes", "Bytes of a pool, by what holds them.", ["pool", "state"], registry=own
        )
        self._queue = Gauge("hawk_queue_jobs", "Jobs that wait for their turn or their offer.", registry=own)
        self._leases = Gauge("hawk_leases", "Jobs under way under a lease.", registry=own)
        self._peers = Gauge(
            "hawk_peer_up", "Whether a known agent can be talked with.", ["peer"], registry=own
        )
        self._directory_up = Gauge(
            "hawk_directory_up",
            "Whether what is known of other agents is up to date.",
            ["directory"],
            registry=own,
        )
        self._directory_agents = Gauge(
            "hawk_directory_agents", "Other agents that are registered.", ["directory"], registry=own
        )
        self._bad = Counter(
            "hawk_bad_frames",
            "Control frames that could not be read or did not fit.",
            ["reason"],
            registry=own,
        )
        self._fallbacks = Counter(
            "hawk_transport_fallbacks",
            "Jobs tried again over the next transport, by what failed.",
            ["reason"],
            registry=own,
        )
        self._events = Counter(
            "hawk_transport_events",
            "What a transport counts, by what happened.",
            ["event", "transport"],
            registry=own,
        )
        self._events_known: dict[tuple[str, str], int] = {}
        self._phases: dict[str, Histogram] = {}
        self._counters: dict[tuple[str, ...], Counter] = {}
        self._mismatches = Counter(
            "hawk_verify_mismatches", "Fetches whose bytes were not those that were sent.", registry=own
        )
        self._lag = Histogram(
            "hawk_loop_lag_seconds", "How late the event loop ran a timer.", buckets=_LAGS, registry=own
        )

    def job(self, ending: str, role: str, transport: str) -> None:
        """A job ended: `ending` is `"ready"` or an error's code."""
        self._counter(self._jobs, ending, role, transport or "none").inc()

    def phase(self, phase: str, seconds: float) -> None:
        """One phase of one job took `seconds`."""
        # Looked up once: several times a job, prometheus' own look-up by labels costs more than counting does.
        known = self._phases.get(phase)
        if known is None:
            known = self._phases[phase] = self._phase.labels(phase)
        known.observe(seconds)

    def moved(self, direction: str, transport: str, nbytes: int) -> None:
        """`nbytes` were sent or received."""
        self._counter(self._bytes, direction, transport).inc(nbytes)

    def _counter(self, of: Counter, *labels: str) -> Counter:
        known = self._counters.get(labels)
        if known is None:
            known = self._counters[labels] = of.labels(*labels)
        return known

    def pool(self, pool: str, state: str, nbytes: int) -> None:
        """`nbytes` of `pool` are in `state` now."""
        self._pool.labels(pool, state).set(nbytes)

    def watch_pool(self, pool: str, read: PoolReader) -> None:
        """Asks `read` for the pool's bytes whenever the metrics are read."""
        self._pools[pool] = read

    def watch(self, read: Callable[[], None]) -> None:
        """Calls `read` whenever the metrics are read, from any thread; it sets what is counted elsewhere."""
        self._readers.append(read)

    def jobs_now(self, *, queued: int, leases: int) -> None:
        """How many jobs wait, and how many run under a lease."""
        self._queue.set(queued)
        self._leases.set(leases)

    def peers_now(self, up: Mapping[str, bool]) -> None:
        """Which agents are known, and whether each is up; others are forgotten."""
        self._peers.clear()
        for name, there in up.items():
            self._peers.labels(name).set(there)

    def directory_now(self, directory: str, *, up: bool, agents: int) -> None:
        """Whether the directory answers, and how many other agents it tells of."""
        self._directory_up.labels(directory).set(up)
        self._directory_agents.labels(directory).set(agents)

    def transport_now(self, transport: str, counts: Mapping[str, int]) -> None:
        """What a transport has counted by now; where that is less than before it began anew."""
        for event, count in counts.items():
            known = self._events_known.get((event, transport), 0)
            self._events_known[event, transport] = count
            self._events.labels(event, transport).inc(count - known if count >= known else count)

    def forget_pool(self, pool: str) -> None:
        """Stops asking for a pool and takes its last figures away."""
        self._pools.pop(pool, None)
        for metric in list(self._pool.collect()):
            for sample in metric.samples:
                if sample.labels.get("pool") == pool:
                    self._pool.remove(pool, sample.labels["state"])

    def bad_frame(self, reason: str) -> None:
        """A frame was refused; `reason` comes from a short fixed list, never from the peer."""
        self._bad.labels(reason).inc()

    def fallback(self, reason: str) -> None:
        """A job goes on over another transport because of an error with this code."""
        self._fallbacks.labels(reason).inc()

    def mismatch(self) -> None:
        """A check failed: bytes arrived that were not sent."""
        self._mismatches.inc()

    def loop_lag(self, seconds: float) -> None:
        """The event loop ran a timer `seconds` late."""
        self.last_lag = max(0.0, seconds)
        self._lag.observe(self.last_lag)

    def value(self, name: str, **labels: str) -> float:
        """One sample as `/metrics` would show it, for tests and tools; 0 if it was never counted."""
        self._read_pools()
        found: float | None = self.registry.get_sample_value(name, labels)
        return 0.0 if found is None else found

    def render(self) -> bytes:
        """All of it in Prometheus' text format."""
        self._read_pools()
        return bytes(generate_latest(cast("CollectorRegistry", _Shown(self.registry))))

    def _read_pools(self) -> None:
        for reader in self._readers:
            reader()
        for pool, read in self._pools.items():
            for state, nbytes in read().items():
                self._pool.labels(pool, state).set(nbytes)
