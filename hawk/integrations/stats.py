"""What a connector counts: how many transfers, how long, how much, and how they ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

SAMPLES = ("fetch_seconds", "fetch_bytes", "held_seconds")
"""Observations by transfer: from the order to the last byte, bytes, and how long blocks were held for the reader."""

COUNTS = (
    "fetched",
    "fetch_failed",
    "fetch_aborted",
    "offered",
    "consumed",
    "expired",
    "withdrawn",
    "offer_failed",
    "late",
    "dropped",
    "bad_params",
    "other_prompt",
    "faults",
)
"""Endings, and what was refused.  `late` are offers that were taken back and read for long after, `faults` errors
inside hooks, which are a bug or a broken agent."""

_KEPT = 4096
"""Observations kept between two looks; of more, the first: nobody has looked for a while."""


def empty() -> dict[str, Any]:
    """Nothing counted: plain lists and numbers, that any encoder takes."""
    return {**{name: [] for name in SAMPLES}, **dict.fromkeys(COUNTS, 0)}


def is_empty(data: Mapping[str, Any]) -> bool:
    """Whether nothing was counted."""
    return not any(data.values())


def add(data: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Adds what another worker, or another moment, counted."""
    for name in SAMPLES:
        data[name] = (data.get(name, []) + list(other.get(name, [])))[:_KEPT]
    for name in COUNTS:
        data[name] = data.get(name, 0) + other.get(name, 0)
    return data


def count(data: dict[str, Any], counts: Counter[str]) -> None:
    """Adds single counts."""
    for name, number in counts.items():
        data[name] = data.get(name, 0) + number


def observe(data: dict[str, Any], name: str, value: float) -> None:
    """Adds one observation."""
    if len(data[name]) < _KEPT:
        data[name].append(value)


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """A line for the log: what happened since the last one."""
    seconds, nbytes = sorted(data["fetch_seconds"]), sum(data["fetch_bytes"])
    found: dict[str, int | float] = {"Fetched": data["fetched"]}
    if seconds:
        found["Median fetch (ms)"] = round(seconds[len(seconds) // 2] * 1e3, 3)
        found["Longest fetch (ms)"] = round(seconds[-1] * 1e3, 3)
        found["MiB fetched"] = round(nbytes / 2**20, 3)
    found["Offered"] = data["offered"]
    for name, words in (
        ("fetch_failed", "Failed fetches"),
        ("expired", "Expired offers"),
        ("offer_failed", "Failed offers"),
        ("late", "Blocks given back late"),
        ("faults", "Faults"),
    ):
        if data[name]:
            found[words] = data[name]
    return found
