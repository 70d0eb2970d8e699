"""What planning costs: a long request from rows to a device's banks, with fresh random block tables each time.

Every figure is for one chunk of all layers, and says what it covers:

    bind       the target's side for a block table: checks, where each page lies in the arena, the runs of a plane
    segments   the runs of all planes, each with region and offsets: what a transport is given
    ranges     what is touched: what a flush is given
    pieces     the source's side for both tables: what the retile core is given, for all planes
    seen       bind, segments and pieces one after the other
    new        the same for a shape that was never seen: nothing is kept of earlier plans
    again      both sides of the next chunk of a request: other layers, the same tables
    rows       every segment written out in batches: what a transport adds while it moves bytes, in a thread of its own
    steps      every step made: what a retiler adds while it writes, one for each plane

All but `new` are for a shape seen before; all but `again` have tables that were not.  `rows` and `steps` are no part of
a plan, but whoever carries it out pays them: a few nanoseconds a segment, beside the hundreds that moving it takes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from rich.table import Table

from hawk.demo import scenario
from hawk.errors import InvalidArgument
from hawk.layouts.compiled import CacheShape
from hawk.plan.check import check, entries
from hawk.plan.kept import forget
from hawk.plan.segments import direct, touched
from hawk.plan.source import retile_steps
from hawk.plan.target import target_chunk
from hawk.plan.types import Chunk, Placement, Selection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray
    from rich.console import Console

    from hawk.layouts.compiled import CompiledLayout
    from hawk.memory.region import Segments
    from hawk.plan.types import Step, TargetChunk

    I64 = NDArray[np.int64]

HEADS, DIM = 8, 128
BLOCK = (16, 64)
"""Tokens of a block of the source and of the target."""

T = TypeVar("T")

STAGES = ("bind", "segments", "ranges", "pieces", "seen", "new", "again", "rows", "steps")


@dataclass(frozen=True)
class Row:
    """One stage at one size: seconds of the runs, in order, and how many segments there were (the median).

    cpu    seconds of processor time that the planning thread took in each run, whatever else the machine did
    """

    channels: int
    tokens: int
    stage: str
    segments: int
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Result:
    """All rows, and what was planned."""

    layers: int
    runs: int
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, object]:
        """For JSON: seconds, and microseconds per 1000 segments."""
        rows = [
            {
                "channels": r.channels,
                "tokens": r.tokens,
                "stage": r.stage,
                "segments": r.segments,
                "median": r.median,
                "fastest": min(r.seconds),
                "slowest": max(r.seconds),
                "cpu_least": min(r.cpu),
                "cpu_median": statistics.median(r.cpu),
                "us_per_1000_segments": r.median / r.segments * 1e9,
            }
            for r in self.rows
        ]
        return dataclasses.asdict(self) | {"rows": rows}


def run(
    tokens: int = 8192, layers: int = 80, channels: tuple[int, ...] = (7, 8, 12), runs: int = 25
) -> Result:
    """Plans `runs` requests of every size: `tokens`, and a half, a quarter and an eighth of it.

    Raises `InvalidArgument` for a number below 1, or fewer than 8 tokens.
    """
    for name, value, least in (("tokens", tokens, 8), ("layers", layers, 2), ("runs", runs, 1)):
        if value < least:
            raise InvalidArgument("too small", field=name, got=value, expected=f"{least} or more")
    rows: list[Row] = []
    for count in channels:
        for n in (tokens // 8, tokens // 4, tokens // 2, tokens):
            rows += _Request(n, layers, count).measure(runs)
    return Result(layers, runs, tuple(rows))


class _Request:
    """Requests of one size, each with tables of its own."""

    def __init__(self, tokens: int, layers: int, channels: int) -> None:
        self.tokens, self.channels, self.rng = tokens, channels, np.random.default_rng(tokens + channels)
        # Pools of eight requests, so that blocks seldom neighbour each other.
        pools = [CacheShape(layers, HEADS, DIM, size, 8 * -(-tokens // size)) for size in BLOCK]
        names = scenario.load(tokens=1)
        self.src: CompiledLayout = names.source.resolve().compile(pools[0])
        self.dst: CompiledLayout = names.target.resolve().compile(pools[1], channels=channels)
        self.here, self.there = _placed(self.src), _placed(self.dst)
        self.selection = Selection(0, layers, 0, tokens)
        self.used = [entries(layout, self.selection)[1] for layout in (self.src, self.dst)]

    def tables(self) -> list[I64]:
        """Fresh ones, for both sides."""
        shapes = (self.src.shape, self.dst.shape)
        return [
            self.rng.permutation(s.blocks)[:n].astype(np.int64)
            for s, n in zip(shapes, self.used, strict=True)
        ]

    def measure(self, runs: int) -> list[Row]:
        """One row for each stage."""
        seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
        cpu: dict[str, list[float]] = {stage: [] for stage in STAGES}
        counts: list[int] = []
        layers, selection = self.selection.layers, self.selection
        whole = Chunk(0, layers, 0, self.used[1])
        half = layers // 2
        parts = [Chunk(at, half, 0, self.used[1]) for at in (0, half)]
        for i in range(runs + 2):
            first, second = self.tables()
            forget()
            took = {"new": _timed(partial(self._whole, first, second, whole))[0]}
            # The layers of both halves were seen; their tables come next.
            for part in parts:
                self._both(first, second, part)
            first, second = self.tables()
            took["bind"], target = _timed(partial(target_chunk, self.dst, second, selection, whole))
            took["segments"], segments = _timed(partial(direct, target, self.there, 0))
            took["ranges"], _ = _timed(partial(touched, target, self.there))
            took["pieces"], steps = _timed(partial(retile_steps, self.src, first, self.here, target, second))
            took["seen"] = took["bind"] + took["segments"] + took["pieces"]
            took["rows"], written = _timed(partial(_written, segments))
            took["steps"], _ = _timed(partial(_made, steps))
            counts.append(written)
            del steps
            took["again"], _ = _timed(partial(self._both, first, second, parts[1]))
            if i >= 2:  # the first rounds warm up
                for stage, value in took.items():
                    seconds[stage].append(value.wall)
                    cpu[stage].append(value.cpu)
        count = int(statistics.median(counts))
        return [
            Row(self.channels, self.tokens, stage, count, tuple(seconds[stage]), tuple(cpu[stage]))
            for stage in STAGES
        ]

    def _both(self, first: I64, second: I64, chunk: Chunk) -> TargetChunk:
        """Both sides of a chunk."""
        target = target_chunk(self.dst, second, self.selection, chunk)
        retile_steps(self.src, first, self.here, target, second)
        return target

    def _whole(self, first: I64, second: I64, chunk: Chunk) -> None:
        """A whole plan, and whether it can be made."""
        check(self.src, self.dst, self.selection)
        direct(self._both(first, second, chunk), self.there, 0)


class Took(NamedTuple):
    """Seconds by the clock, and of the processor."""

    wall: float
    cpu: float

    def __add__(self, other: Took) -> Took:  # type: ignore[override]
        return Took(self.wall + other.wall, self.cpu + other.cpu)


def _timed(what: Callable[[], T]) -> tuple[Took, T]:
    begin, cpu = time.perf_counter(), time.thread_time()
    found = what()
    return Took(time.perf_counter() - begin, time.thread_time() - cpu), found


def _written(segments: Segments) -> int:
    return sum(len(rows.nbytes) for rows in segments.batches())


def _made(steps: Iterable[Step]) -> int:
    return sum(step.kv for step in steps)


def _placed(layout: CompiledLayout) -> Placement:
    """Every channel a region, the buffers one behind another in each."""
    shape = (layout.buffer_count, layout.channels)
    offset = np.arange(shape[0], dtype=np.int64)[:, None] * layout.channel_bytes + np.zeros(
        shape[1], np.int64
    )
    return Placement(np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)), offset)


_TITLES = {
    "bind": "bind a table, shape seen",
    "segments": "segments of all planes",
    "ranges": "ranges touched",
    "pieces": "pieces, shape seen",
    "seen": "whole plan, shape seen",
    "new": "whole plan, shape never seen",
    "again": "next chunk, same tables",
    "rows": "segments written out",
    "steps": "steps made",
}


def render(result: Result, console: Console) -> None:
    """Print `result` as tables."""
    most = max(r.tokens for r in result.rows)
    table = Table(
        title=f"Planning {most} tokens x {result.layers} layers x K and V, {HEADS} heads of {DIM}, random tables; "
        f"milliseconds, {result.runs} runs"
    )
    for title in ("channels", "segments"):
        table.add_column(title, justify="right")
    table.add_column("what")
    for title in ("median", "fastest", "slowest", "processor, median", "processor, least"):
        table.add_column(title, justify="right")
    for r in result.rows:
        if r.tokens == most:
            times = (r.median, min(r.seconds), max(r.seconds), statistics.median(r.cpu), min(r.cpu))
            numbers = (f"{x * 1e3:.3f}" for x in times)
            table.add_row(str(r.channels), f"{r.segments:,}", _TITLES[r.stage], *numbers)
    console.print(table)
    growth = Table(title="Microseconds per 1,000 segments, by the number of segments")
    growth.add_column("channels", justify="right")
    growth.add_column("segments", justify="right")
    for stage in STAGES:
        growth.add_column(stage, justify="right")
    for count in dict.fromkeys(r.channels for r in result.rows):
        for tokens in dict.fromkeys(r.tokens for r in result.rows):
            own = [r for r in result.rows if (r.channels, r.tokens) == (count, tokens)]
            values = (f"{r.median / r.segments * 1e9:.1f}" for r in own)
            growth.add_row(str(count), f"{own[0].segments:,}", *values)
    console.print(growth)
