"""What simulating serving costs: events a request, and processor time an event, as a cluster grows.

Half of the nodes prefill and half decode, an instance each, every one of them asked as much whatever their number, so
that a request meets the same queues.  Beside it, in the same run, events of the library alone that do nothing.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from hawk.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hawk.serving.scenario import Scenario

NODES = (10, 100, 1000)
REQUESTS = 20_000
RATE = 0.5
"""Requests a second for each prefill instance: 0.8 of what it keeps its promises for."""

_ALONE = 100_000


@dataclass(frozen=True)
class Row:
    """One cluster: processor time in seconds, and how long it took by the clock.

    cpu          of the whole simulation;  alone: of as many events of the library that do nothing
    simulated    seconds that went by in the simulation
    """

    nodes: int
    requests: int
    events: int
    cpu: float
    wall: float
    alone: float
    simulated: float
    attainment: float

    @property
    def per_request(self) -> float:
        """Events of a request."""
        return self.events / self.requests

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return dataclasses.asdict(self) | {
            "events_per_request": self.per_request,
            "us_per_event": self.cpu / self.events * 1e6,
            "us_per_request": self.cpu / self.requests * 1e6,
        }


@dataclass(frozen=True)
class Result:
    """All rows."""

    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"rows": [row.to_dict() for row in self.rows]}


def scenario(nodes: int, requests: int, seed: int = 0) -> Scenario:
    """A cluster of the paper's prefill and decode instances, HAWK between them."""
    from hawk.serving.scenario import paper_scenario

    half = nodes // 2
    base = paper_scenario("gn-hawk", "chatbot", RATE * half, requests=requests, seed=seed)
    return replace(
        base, prefill=replace(base.prefill, instances=half), decode=replace(base.decode, instances=half)
    )


def run(nodes: Sequence[int] = NODES, requests: int = REQUESTS, seed: int = 0) -> Result:
    """Simulates `requests` requests on each of these numbers of nodes.

    Raises `MissingDependency` without SimPy, `InvalidArgument` for fewer than two nodes.
    """
    from hawk.serving.engine import simulate

    for count in nodes:
        if count < 2:
            raise InvalidArgument(
                "too few to prefill and decode", field="nodes", got=count, expected="2 or more"
            )
    rows = []
    for count in nodes:
        asked = scenario(count, requests, seed)
        # The planner's answers are kept for good: they are no part of what one more event costs.
        simulate(replace(asked, requests=min(requests, 2000)))
        cpu, wall = time.process_time(), time.perf_counter()
        found = simulate(asked)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        alone = _alone() / _ALONE * found.events
        rows.append(Row(count, requests, found.events, cpu, wall, alone, found.seconds, found.attainment))
    return Result(tuple(rows))


def _alone() -> float:
    """Processor time of `_ALONE` events of the library, each of which makes the next."""
    from hawk.serving.library import simpy as library

    simpy = library()
    environment = simpy.Environment()
    left = _ALONE

    def following(_: object) -> None:
        nonlocal left
        left -= 1
        if left:
            simpy.Timeout(environment, 1.0).callbacks.append(following)

    simpy.Timeout(environment, 1.0).callbacks.append(following)
    begun = time.process_time()
    environment.run()
    return time.process_time() - begun


def render(result: Result, console: Console) -> None:
    """Prints a row for each cluster."""
    table = Table(
        title="Simulating serving: events of a request, and what they take beside ones that do nothing",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for heading in (
        "nodes",
        "requests",
        "events",
        "us/event",
        "by alone",
        "cpu, s",
        "clock, s",
        "kept",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            f"{row.nodes:,}",
            f"{row.requests:,}",
            f"{row.per_request:.2f}",
            f"{row.cpu / row.events * 1e6:.1f}",
            f"{row.cpu / row.alone:.1f}",
            f"{row.cpu:.1f}",
            f"{row.wall:.1f}",
            f"{row.attainment:.1%}",
        )
    console.print(table)
