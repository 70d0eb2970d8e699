"""What retiling costs on a GPU: generated kernels beside plain copies, all in one run.

Figures are bytes read plus bytes written per second.  The copy is the better of `cudaMemcpyAsync` and a vector copy of
ours, of as many bytes in all.  Buffers rotate over more than four times the second-level cache, so that nothing is
found there from the run before.  Times are between two events around several launches, divided by their number; a
ratio is taken between neighbours and is the median of the runs.  Before anything is timed, every byte that the kernel
wrote is compared with what the CPU's core writes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from hawk.bench.retile_cases import Planned, cases, device_goals
from hawk.bench.samples import Samples, ratio
from hawk.errors import InternalError, InvalidArgument
from hawk.retile import cpu
from hawk.retile.cuda.launch import CudaRetiler, span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from hawk.bench.retile_cases import Work
    from hawk.plan.types import Step

ROTATED = 4
"""Times the second-level cache that buffers rotate over."""

LAUNCHES = 8
"""Launches between two events at least."""

SMALL = ("nhd > tiles", "nhd > tiles:bfp8_b")
"""Pairs of which few tokens of many layers are measured: those that have kernels for K and V each."""

COPY = r"""
extern "C" __global__ void __launch_bounds__(1024) copy(const uint4 *from, uint4 *to, unsigned long long n)
{
    unsigned long long i = blockIdx.x * 2048ull + threadIdx.x;
    if (i + 1024 < n) {
        uint4 a = __ldcs(from + i), b = __ldcs(from + i + 1024);
        __stcs(to + i, a);
        __stcs(to + i + 1024, b);
    } else if (i < n) {
        __stcs(to + i, __ldcs(from + i));
    }
}
"""


@dataclass(frozen=True)
class Row:
    """One conversion: rates in GB/s read and written, `ratio` to the better copy's, the least and the most seen."""

    pair: str
    tensor: str
    mb: int
    goal: float | None
    gb_per_s: float
    copy_gb_per_s: float
    ratio: float
    least: float
    most: float
    microseconds: float

    @property
    def met(self) -> bool:
        """Whether the goal is reached, or there is none."""
        return self.goal is None or self.ratio >= self.goal


@dataclass(frozen=True)
class Small:
    """Few tokens of many layers in one launch: microseconds, each the median.

    kernel, copy    on the GPU, of the retile and of a copy of as many bytes
    call, graph     of the processor's time until a launch returns: from Python, and of a CUDA graph that holds it
    prepare         from steps to a prepared launch, kernels compiled already
    """

    pair: str
    tokens: int
    layers: int
    nbytes: int
    kernels: int
    kernel: float
    copy: float
    call: float
    graph: float
    graph_kernel: float
    prepare: float


@dataclass(frozen=True)
class Result:
    """All rows, and what they were measured on."""

    device: str
    cache_bytes: int
    repeats: int
    rows: tuple[Row, ...]
    small: tuple[Small, ...] = field(default=())

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        rows = [dataclasses.asdict(row) | {"met": row.met} for row in self.rows]
        return dataclasses.asdict(self) | {"rows": rows}


def run(
    device: str,
    size_mb: int | None = None,
    repeats: int | None = None,
    pair: str | None = None,
    quick: bool = False,
) -> Result:
    """Measure on `device` (`"cuda:0"`) the pairs with goals there, or those that match `pair`.

    `size_mb` is the size of K or V in bf16, in units of 2**20 bytes, 128 unless `quick`, which takes 16; `repeats` is
    9, or 3.

    Raises `InvalidArgument` for a device or a pattern that is not there, `MissingDependency` without CuPy, and
    `InternalError` where a kernel's bytes are not the CPU's.
    """
    size_mb, repeats = size_mb or (16 if quick else 128), repeats or (3 if quick else 9)
    if size_mb < 1 or repeats < 1:
        raise InvalidArgument(
            "nothing to measure", field="size_mb, repeats", got=f"{size_mb}, {repeats}", expected="1 or more"
        )
    bench = _Bench(_number(device), repeats)
    goals = device_goals()
    chosen = cases(size_mb << 20, pair or "*", () if pair else goals)
    rows = [row for case in chosen for row in bench.rows(Planned(case), size_mb, goals.get(case.pair, []))]
    small = [] if pair else [bench.small(name) for name in SMALL]
    return Result(bench.name, bench.cache, repeats, tuple(rows), tuple(small))


def _number(device: str) -> int:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise InvalidArgument(
            "no such device", field="device", got=device, expected="cuda, cuda:0, cuda:1, ..."
        )
    return int(number or "0")


class _Bench:
    """One device, and what it takes to measure on it."""

    def __init__(self, device: int, repeats: int) -> None:
        self.retiler = CudaRetiler(device)
        self.cupy: Any = import_module("cupy")
        self.cupy.cuda.Device(device).use()
        facts = self.cupy.cuda.runtime.getDeviceProperties(device)
        self.name, self.cache, self.repeats = facts["name"].decode(), int(facts["l2CacheSize"]), repeats
        self.plain = self.cupy.RawKernel(COPY, "copy")

    def rows(self, planned: Planned, size_mb: int, goals: Sequence[float]) -> list[Row]:
        """All rows of a case."""
        found = []
        for i, work in enumerate(planned.work()):
            goal = goals[i] if i < len(goals) else None
            found.append(self._row(planned, work, size_mb, goal))
        return found

    def _row(self, planned: Planned, work: Work, size_mb: int, goal: float | None) -> Row:
        cp, moved = self.cupy, work.read + work.written
        host = [np.zeros(nbytes, np.uint8) for nbytes in planned.region_bytes]
        planned.fill(host)
        calls = []
        for number in range(self._rotation(moved)):
            regions = [cp.asarray(one) for one in host]
            arena = cp.zeros(planned.chunk.nbytes, cp.uint8)
            prepared = self.retiler.prepare(work.steps, [span(r) for r in regions], span(arena))
            if number == 0:
                prepared.launch()
                self._compare(planned, work, host, arena)
            calls.append(_Kept(prepared.launch, (regions, arena, prepared)))
        fast, copies = self._beside([calls, *self._copies(moved // 2)], moved)
        ratios = [fast_s / copy_s for fast_s, copy_s in zip(copies.seconds, fast.seconds, strict=True)]
        return Row(
            pair=planned.case.pair,
            tensor=work.tensor,
            mb=size_mb,
            goal=goal,
            gb_per_s=fast.rate / 1e9,
            copy_gb_per_s=copies.rate / 1e9,
            ratio=ratio(fast, copies),
            least=min(ratios),
            most=max(ratios),
            microseconds=fast.median * 1e6,
        )

    def _compare(self, planned: Planned, work: Work, host: list[Any], arena: Any) -> None:
        want = np.zeros(planned.chunk.nbytes, np.uint8)
        for step in work.steps:
            cpu.run_step(step, host, want, threads=4)
        got = arena.get()
        if not np.array_equal(got, want):
            first = int(np.flatnonzero(got != want)[0])
            raise InternalError("a kernel is wrong", pair=planned.case.pair, tensor=work.tensor, byte=first)

    def _rotation(self, moved: int) -> int:
        return max(2, -(-ROTATED * self.cache // moved))

    def _copies(self, nbytes: int) -> list[list[_Kept]]:
        """Copies of `nbytes`, by the driver and by ours, each over buffers of its own."""
        cp, nbytes = self.cupy, nbytes // 16 * 16
        by_driver, by_us = [], []
        for _ in range(self._rotation(2 * nbytes)):
            a, b = (cp.zeros(nbytes, cp.uint8) for _ in range(2))
            move = partial(cp.cuda.runtime.memcpyAsync, b.data.ptr, a.data.ptr, nbytes, 3)
            by_driver.append(_Kept(partial(_on_stream, cp, move), (a, b)))
            blocks = (-(-nbytes // 16 // 2048),)
            by_us.append(_Kept(partial(self.plain, blocks, (1024,), (a, b, np.uint64(nbytes // 16))), (a, b)))
        return [by_driver, by_us]

    def _beside(self, ways: list[list[_Kept]], moved: int) -> tuple[Samples, Samples]:
        """The first way's times, and the best of the others' of each round."""
        fast, copies = Samples(moved), Samples(moved)
        for i in range(self.repeats + 1):
            took = [self._seconds(calls) for calls in ways]
            if i:  # the first round warms up
                fast.seconds.append(took[0])
                copies.seconds.append(min(took[1:]))
        return fast, copies

    def _seconds(self, calls: Sequence[_Kept]) -> float:
        """Seconds of one call, on the GPU."""
        cp, count = self.cupy, -(-LAUNCHES // len(calls)) * len(calls)
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        for i in range(count):
            calls[i % len(calls)].call()
        end.record()
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(begin, end)) * 1e-3 / count

    def small(self, name: str, tokens: int = 64, layers: int = 80) -> Small:
        """Few tokens of many layers, in one launch, into one arena."""
        cp = self.cupy
        (case,) = cases(1, name, (name,), tokens=tokens, layers=layers)
        planned = Planned(case)
        moved = planned.moved
        host = [np.zeros(nbytes, np.uint8) for nbytes in planned.region_bytes]
        planned.fill(host)
        regions = [cp.asarray(one) for one in host]
        calls, prepare = [], []
        for _ in range(self._rotation(moved)):
            arena = cp.zeros(planned.chunk.nbytes, cp.uint8)
            steps: Sequence[Step] = list(planned.steps)
            start = time.perf_counter()
            prepared = self.retiler.prepare(steps, [span(r) for r in regions], span(arena))
            prepare.append(time.perf_counter() - start)
            calls.append(_Kept(prepared.launch, (arena, prepared)))
        fast, copies = self._beside([calls, *self._copies(moved // 2)], moved)
        stream = cp.cuda.Stream(non_blocking=True)
        graphs = []
        for one in calls:
            with stream:
                stream.begin_capture()
                one.call()
                graph = stream.end_capture()
            graphs.append(_Kept(partial(graph.launch, stream), graph))
        with stream:
            graph_kernel = statistics.median(self._seconds(graphs) for _ in range(self.repeats))
        return Small(
            pair=name,
            tokens=tokens,
            layers=layers,
            nbytes=moved,
            kernels=prepared.kernels,
            kernel=fast.median * 1e6,
            copy=copies.median * 1e6,
            call=self._call(calls),
            graph=self._call(graphs),
            graph_kernel=graph_kernel * 1e6,
            prepare=statistics.median(prepare[1:] or prepare) * 1e6,
        )

    def _call(self, calls: Sequence[_Kept], count: int = 20) -> float:
        """Microseconds until a launch returns, the GPU idle at first."""
        found = []
        for _ in range(self.repeats):
            self.cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            for i in range(count):
                calls[i % len(calls)].call()
            found.append((time.perf_counter() - start) / count)
        self.cupy.cuda.Device().synchronize()
        return statistics.median(found) * 1e6


@dataclass(frozen=True)
class _Kept:
    """A call, and the memory that it needs."""

    call: Callable[[], object]
    memory: object


def _on_stream(cupy: Any, move: Callable[[int], object]) -> None:
    move(cupy.cuda.get_current_stream().ptr)


def render(result: Result, console: Console) -> None:
    """Print `result` as tables."""
    console.print(
        f"Retile on {result.device}, median of {result.repeats}; GB/s read + written; buffers rotate over "
        f"{ROTATED * result.cache_bytes >> 20} MiB"
    )
    table = Table()
    for title in ("pair", "tensor"):
        table.add_column(title)
    for title in ("MiB", "us", "GB/s", "copy GB/s", "ratio", "least", "most", "goal"):
        table.add_column(title, justify="right")
    for row in result.rows:
        told = f"{row.ratio:.2f}" if row.met else f"[red]{row.ratio:.2f}[/red]"
        figures = (row.mb, f"{row.microseconds:.1f}", f"{row.gb_per_s:.0f}", f"{row.copy_gb_per_s:.0f}", told)
        goal = "" if row.goal is None else f"{row.goal:.2f}"
        table.add_row(row.pair, row.tensor, *map(str, figures), f"{row.least:.2f}", f"{row.most:.2f}", goal)
    console.print(table)
    if not result.small:
        return
    table = Table(title="Few tokens, many layers, one launch; microseconds")
    for title in ("pair", "tokens", "layers", "MB", "kernels", "kernel", "copy", "kernel / copy"):
        table.add_column(title, justify="right")
    for title in ("call", "graph's call", "graph's kernel", "prepare"):
        table.add_column(title, justify="right")
    for s in result.small:
        times = (s.call, s.graph, s.graph_kernel, s.prepare)
        table.add_row(
            s.pair,
            str(s.tokens),
            str(s.layers),
            f"{s.nbytes / 1e6:.1f}",
            str(s.kernels),
            f"{s.kernel:.1f}",
            f"{s.copy:.1f}",
            f"{s.kernel / s.copy:.2f}",
            *(f"{t:.1f}" for t in times),
        )
    console.print(table)
