"""Times of repeated runs, and how they are told."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field

import numpy as np

from hawk.retile.native import core_name


@dataclass
class Samples:
    """Seconds that each run took to move `nbytes`."""

    nbytes: int
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)

    @property
    def rate(self) -> float:
        """Bytes a second, of the median run."""
        return self.nbytes / self.median

    def to_dict(self) -> dict[str, float]:
        """Median, fastest and slowest run in seconds, and 10**9 bytes a second of each."""
        fastest, slowest = min(self.seconds), max(self.seconds)
        return {
            "seconds": self.median,
            "fastest": fastest,
            "slowest": slowest,
            "gb_per_s": self.rate / 1e9,
            "gb_per_s_most": self.nbytes / fastest / 1e9,
            "gb_per_s_least": self.nbytes / slowest / 1e9,
        }

    def told(self) -> tuple[str, str, str]:
        """10**9 bytes a second of the median, the slowest and the fastest run, as text."""
        rates = (self.rate, self.nbytes / max(self.seconds), self.nbytes / min(self.seconds))
        median, least, most = (f"{rate / 1e9:.2f}" for rate in rates)
        return median, least, most


def ratio(of: Samples, to: Samples) -> float:
    """The rate of one as part of the rate of the other, the median over runs that followed each other directly.

    Run by run, because what else the machine does changes in the course of a benchmark, and hits neighbours alike.
    """
    pairs = zip(of.seconds, to.seconds, strict=True)
    return statistics.median((of.nbytes / a) / (to.nbytes / b) for a, b in pairs)


def machine() -> dict[str, object]:
    """What the figures were seen on, as the benchmarks' JSON says it."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "retile_core": core_name(),
    }
