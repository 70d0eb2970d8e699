"""What `hawk bench jobs` has measured."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hawk.bench.samples import machine

GOALS = {"embedded": 1.3, "separate": 2.5}
"""Round trips until the first byte, by where the decode agent is."""


@dataclass
class Light:
    """One job at a time: medians in seconds over runs that alternate.

    ping             round trip between the agents
    first, whole     by where the decode agent is: until the first byte, until it is ready
    ratio            first by ping, run by run
    phases           of the embedded agent's jobs
    """

    ping: float
    local: float
    first: dict[str, float]
    whole: dict[str, float]
    ratio: dict[str, float]
    phases: dict[str, float]


@dataclass
class Crowd:
    """Jobs that are all submitted at once.

    seconds    in all; `waits`: of each, from its submission on
    busy       refusals
    cpu        seconds of processor time that both agents took, whatever else the machine does
    """

    jobs: int
    seconds: float
    waits: list[float] = field(default_factory=list)
    busy: int = 0
    cpu: float = 0.0

    @property
    def each(self) -> float:
        """Seconds for one job, all overlapping."""
        return self.seconds / self.jobs

    def quantile(self, part: float) -> float:
        """Seconds within which that part of the jobs were ready."""
        return float(np.quantile(self.waits, part))

    def to_dict(self) -> dict[str, float]:
        """Plain values."""
        return {
            "jobs": self.jobs,
            "seconds": self.seconds,
            "jobs_per_s": 1 / self.each,
            "each": self.each,
            "p50": self.quantile(0.5),
            "p99": self.quantile(0.99),
            "busy": self.busy,
            "cpu_each": self.cpu / self.jobs,
        }


@dataclass
class JobsResult:
    """Outcome of `run`, by transport; `left_out` are counts that memory was too short for."""

    runs: int
    nbytes: int
    light: dict[str, Light] = field(default_factory=dict)
    far: dict[str, Light] = field(default_factory=dict)
    at_once: dict[str, Crowd] = field(default_factory=dict)
    queued: dict[str, list[Crowd]] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Seconds throughout."""
        return {
            "machine": machine(),
            "runs": self.runs,
            "bytes_per_job": self.nbytes,
            "goals": GOALS,
            "light": {name: vars(light) for name, light in self.light.items()},
            "far": {name: vars(light) for name, light in self.far.items()},
            "at_once": {name: crowd.to_dict() for name, crowd in self.at_once.items()},
            "queued": {name: [c.to_dict() for c in crowds] for name, crowds in self.queued.items()},
            "left_out": self.left_out,
            "correct": True,
        }
