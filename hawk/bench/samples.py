"""Times of repeated runs, and how they are told."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hawk._version import __version__
from hawk.retile.native import core_name


def of_runs(runs: int, but: str = "") -> str:
    """What a figure of so many runs is; `but` is said of their spread, which one run has not."""
    return "one run" if runs == 1 else f"the median of {runs} runs{but}"


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
    """What the figures were seen on, as the benchmarks' JSON says it; nothing that tells one host from another."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "retile_core": core_name(),
        "processor": processor(),
        "system": f"{platform.system()} {platform.release()}",
    }


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the kernel calls the first processor, or its architecture."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()


def stamped(benchmark: str, figures: dict[str, Any]) -> dict[str, Any]:
    """A benchmark's object with what a reader elsewhere has to know of it.

    benchmark    the module of `hawk.bench`
    date         when it ended, UTC
    hawk         version
    machine      see `machine`
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"benchmark": benchmark, "date": now, "hawk": __version__, "machine": machine()}
    return about | figures
