"""What `hawk bench vllm` has measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hawk.bench.samples import machine

if TYPE_CHECKING:
    from rich.console import Console

ABOUT = {
    "alone": "one engine, no connector",
    "hawk": "HAWK, prefill and then decode",
    "hawk-early": "HAWK, both at once",
    "example": "vLLM's ExampleConnector, files in memory",
    "nixl": "vLLM's NixlConnector",
}


@dataclass
class Way:
    """One way: seconds to the first token, and tokens that decode never computed, by length of the prompt.

    others    answers whose first token is right, and a later one another than the engine's alone
    """

    name: str
    others: int = 0
    seconds: dict[int, list[float]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)


@dataclass
class Result:
    """All ways; `left_out` has those that could not be measured, and why."""

    ways: list[Way]
    lengths: list[int]
    shape: dict[str, int]
    dtype: str
    block: int
    left_out: dict[str, str]

    def add(self, way: str, length: int, seconds: float, cached: int, *, other: bool) -> None:
        """One run."""
        entry = self.way(way)
        entry.others += other
        entry.seconds.setdefault(length, []).append(seconds)
        entry.cached[length] = min(cached, entry.cached.get(length, cached))

    def leave_out(self, name: str, why: str) -> None:
        """It has failed: what it took before counts for nothing."""
        self.left_out[name] = why
        self.ways = [way for way in self.ways if way.name != name]

    def way(self, name: str) -> Way:
        """The way of that name."""
        return next(way for way in self.ways if way.name == name)

    def over(self, name: str, length: int) -> float:
        """Seconds by which it is later than the engine alone: the median over runs with the same prompt."""
        pairs = zip(self.way(name).seconds[length], self.way("alone").seconds[length], strict=True)
        return statistics.median(a - b for a, b in pairs)

    def token_bytes(self) -> int:
        """Bytes of one token's cache."""
        shape = self.shape
        width = 4 if self.dtype == "float32" else 2
        return 2 * shape["layers"] * shape["kv_heads"] * shape["dim"] * width

    def to_dict(self) -> dict[str, Any]:
        """Plain values, seconds."""
        return {
            "machine": machine(),
            "model": self.shape,
            "dtype": self.dtype,
            "block": self.block,
            "token_bytes": self.token_bytes(),
            "left_out": self.left_out,
            "ways": {
                way.name: {"others": way.others}
                | {
                    str(length): {
                        "median": statistics.median(seconds),
                        "fastest": min(seconds),
                        "slowest": max(seconds),
                        "over_alone": self.over(way.name, length),
                        "cached": way.cached[length],
                        "runs": seconds,
                    }
                    for length, seconds in way.seconds.items()
                }
                for way in self.ways
            },
        }


def render(result: Result, console: Console) -> None:
    """A table: milliseconds, the median with the fastest and the slowest run."""
    from rich.table import Table

    table = Table(title="time to the first token, ms")
    table.add_column("way")
    for length in result.lengths:
        mib = length * result.token_bytes() / 2**20
        table.add_column(f"{length} tokens ({mib:.3g} MiB)", justify="right")
        table.add_column("over alone", justify="right")
        table.add_column("fetched", justify="right")
    for way in result.ways:
        cells = []
        for length in result.lengths:
            ms = sorted(1e3 * s for s in way.seconds[length])
            cells.append(f"{statistics.median(ms):.1f} ({ms[0]:.1f} to {ms[-1]:.1f})")
            alone = way.name == "alone"
            cells.append("" if alone else f"{1e3 * result.over(way.name, length):+.1f}")
            cells.append("" if alone else str(way.cached[length]))
        table.add_row(ABOUT[way.name], *cells)
    console.print(table)
    for way in result.ways:
        if way.others:
            console.print(
                f"{ABOUT[way.name]}: {way.others} answers go on otherwise, for a part was computed anew"
            )
    for name, why in result.left_out.items():
        console.print(f"{ABOUT[name]}: not measured: {why}")
