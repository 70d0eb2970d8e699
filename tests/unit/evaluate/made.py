"""Benchmarks' objects and simulations as tests make them up."""

from __future__ import annotations

from typing import Any

from hawk.evaluate.records import Origin, Point, Series
from hawk.evaluate.simulated import GGH, Run, Simulated
from hawk.evaluate.transfers import FOUR, NAMES

MACHINE = {"cpus": 2, "python": "3.12.1", "numpy": "2.0", "retile_core": "c"}


def sample(seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "fastest": seconds * 0.9, "slowest": seconds * 1.2}


def between(**changes: Any) -> dict[str, Any]:
    """`hawk bench transfer --devices` of two sizes."""
    times = {"GG-Direct": 1.0, "GN-HAWK": 1.1, "GG-Host": 4.0, "GN-Host": 9.0}
    sizes = [
        {
            "bytes": nbytes,
            "tokens": nbytes >> 17,
            "raw": sample(0.001),
            "baselines": {"sockets": sample(0.01)},
            "ways": {
                name: {"host" if name.endswith("Host") else "paced": sample(t * nbytes / 1e9)}
                for name, t in times.items()
            },
            "naive_ratio": {"sockets": 0.9},
        }
        for nbytes in (8 << 20, 80 << 20)
    ]
    return {
        "machine": MACHINE,
        "devices": "cuda:0,cuda:1",
        "names": ["A GPU", "A GPU"],
        "runs": 5,
        "pace": 25e9,
        "correct": True,
        "sizes": sizes,
    } | changes


def load() -> dict[str, Any]:
    """`hawk bench serving` at two rates, one of which had a request that failed."""
    compared = [
        {"model": "alone", "percentile": p, "measured": m, "predicted": m * f}
        for p, m, f in ((50, 0.2, 1.05), (90, 0.5, 0.7))
    ]
    request = {"due": 0.0, "sent": 0.0, "first": 0.2, "last": 0.4, "input": 128, "output": 8}
    return {
        "benchmark": "load",
        "date": "2026-01-02T03:04:05+00:00",
        "machine": MACHINE,
        "calibration": {},
        "lacks": ["contention is not in it"],
        "holds": {"alone": True},  # what a file says of itself is not taken over
        "goal": 0.2,
        "rates": [
            {"fraction": 0.4, "per_second": 2.0, "requests": [request] * 3, "compared": compared},
            {"fraction": 0.8, "per_second": 4.0, "requests": [request], "compared": []},
        ],
    }


def simulated(**changes: Any) -> Simulated:
    """Runs at two rates; GN-Host reaches no knee, GG-Host one of 0.4 requests a second."""
    runs: list[Run] = []
    knees: dict[tuple[str, str], Run | None] = {}
    for workload in ("chatbot", "summarization"):
        for at, way in enumerate(("gg-direct", "gn-hawk", "gg-host", "gn-host")):
            runs += [
                Run(
                    workload,
                    way,
                    rate,
                    0.5 + at + rate,
                    0.05 * (1 + at),
                    0.99 - 0.3 * at * rate,
                    90 * rate,
                    2000,
                    9e4,
                )
                for rate in (0.2, 0.6)
            ]
        for way, rate, cost in (
            ("gg-direct", 0.65, 9e4),
            ("gn-hawk", 0.65, 5e4),
            ("gg-host", 0.4, 9e4),
            (GGH, 0.7, 2e5),
        ):
            knees[workload, way] = Run(workload, way, rate, 1.9, 0.1, 0.9, 120 * rate, 1000, cost)
        knees[workload, "gn-host"] = None
    made = Simulated(True, 0, 100, "paper", runs, knees)
    made.latencies = [
        Series(
            NAMES[way],
            way,
            Origin.SIMULATED,
            "made up",
            tuple(Point(10.0 * 2**n, (2.0 + at) * 2**n) for n in range(8)),
        )
        for at, way in enumerate(FOUR)
    ]
    for name, value in changes.items():
        setattr(made, name, value)
    return made
