"""What retiling costs on one core: every pair of layouts that real use has, beside a plain copy, all in one run.

Figures are bytes read plus bytes written per second, of the data that is moved, in warm, page-aligned memory: one
thread, pieces and arena as a job plans them, block tables random.  Seconds are those that the thread spends on a
processor, so that what else runs on the machine costs the figures less.  A ratio is taken between a conversion and the
copy that ran just before it, and is the median of the runs.  What the C core wrote is compared with what the numpy core
wrote, byte for byte, so a fast wrong answer is no result; `tests/` hold both cores to accounts of their own.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from hawk.bench.retile_cases import Planned, cases
from hawk.bench.samples import Samples, machine, ratio
from hawk.errors import InternalError, InvalidArgument, OutOfMemory
from hawk.memory.available import available_memory
from hawk.retile import cpu, native

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from rich.console import Console

    from hawk.bench.retile_cases import Work

    U8 = NDArray[np.uint8]

MOST = 10
"""Times the size of a tensor in bf16 that is allocated at most: K and V in fp32, two such targets, and the copies."""


@dataclass(frozen=True)
class Row:
    """One conversion: rates in GB/s read and written, `ratio` to the copy's, and the numpy core's rate.

    Without the C core `gb_per_s` and `ratio` are the numpy core's.
    """

    group: str
    pair: str
    tensor: str
    goal: float
    gb_per_s: float
    copy_gb_per_s: float
    ratio: float
    numpy_gb_per_s: float

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        return self.ratio >= self.goal


@dataclass(frozen=True)
class Result:
    """All rows, and what they were measured on."""

    size: int
    repeats: int
    instructions: str
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        rows = [dataclasses.asdict(row) | {"met": row.met} for row in self.rows]
        return dataclasses.asdict(self) | {"machine": machine(), "rows": rows}


def run(
    size_mb: int | None = None, repeats: int | None = None, pair: str = "*", quick: bool = False
) -> Result:
    """Measure every pair that matches `pair` (a pattern, or a part of the pair or the group's title), on one thread.

    `size_mb` is the size of K or V in bf16, in units of 2**20 bytes, 128 unless `quick`, which takes 16; up to ten
    times that is allocated.  `repeats` is 7, or 3.

    Raises `InvalidArgument` for a size below one or a pattern without a match, `OutOfMemory` for a size that the
    machine has no room for, and `InternalError` where the two cores disagree.
    """
    size_mb, repeats = size_mb or (16 if quick else 128), repeats or (3 if quick else 7)
    if size_mb < 1 or repeats < 1:
        raise InvalidArgument(
            "nothing to measure", field="size_mb, repeats", got=f"{size_mb}, {repeats}", expected="1 or more"
        )
    size = size_mb << 20
    chosen = cases(size, pair)
    _require(MOST * size)
    copy = _aligned(size), _aligned(size)
    copy[0][:] = 1
    rows: list[Row] = []
    for case in chosen:
        planned = Planned(case)
        regions = [_aligned(nbytes) for nbytes in planned.region_bytes]
        planned.fill(regions)
        rows += [_measure(planned, work, regions, copy, repeats) for work in planned.work()]
    return Result(size, repeats, native.core().level() if native.available() else "none", tuple(rows))


def _require(nbytes: int) -> None:
    """Raises `OutOfMemory` for what cannot be: numpy's own failure comes late, and on many systems as a kill."""
    available = available_memory()
    if nbytes > available:
        raise OutOfMemory(
            "too little memory to measure that size",
            field="size_mb",
            asked=nbytes,
            available=available,
            hint="Measure a smaller size",
        )


def render(result: Result, console: Console) -> None:
    """Print `result` as a table, by group."""
    console.print(
        f"Retile, {result.size >> 20} MiB a tensor in bf16, one thread, median of {result.repeats}; "
        f"GB/s read + written; core: {result.instructions if result.instructions != 'none' else 'numpy'}"
    )
    table = Table()
    table.add_column("pair")
    table.add_column("tensor")
    for title in ("GB/s", "np.copyto GB/s", "ratio", "goal", "numpy core GB/s"):
        table.add_column(title, justify="right")
    group = ""
    for row in result.rows:
        if row.group != group:
            group = row.group
            table.add_section()
            table.add_row(f"[bold]{group}[/bold]")
        table.add_row(
            row.pair,
            row.tensor,
            f"{row.gb_per_s:.2f}",
            f"{row.copy_gb_per_s:.2f}",
            f"{row.ratio:.2f}" if row.met else f"[red]{row.ratio:.2f}[/red]",
            f"{row.goal:.2f}",
            f"{row.numpy_gb_per_s:.2f}",
        )
    console.print(table)


def _measure(planned: Planned, work: Work, regions: list[U8], copy: tuple[U8, U8], repeats: int) -> Row:
    moved = work.read + work.written
    arena, other = (_aligned(planned.chunk.nbytes) for _ in range(2))
    calls, slow = _calls(work, regions, arena), _calls(work, regions, other)
    with native.using("numpy"):
        numpy_rate = moved / _seconds(lambda: _run(slow))
    fast, copies = Samples(moved), Samples(2 * len(copy[0]))
    with native.using("c" if native.available() else "numpy"):
        for i in range(repeats + 1):
            took = _seconds(lambda: np.copyto(copy[1], copy[0])), _seconds(lambda: _run(calls))
            if i:  # the first round warms up
                copies.seconds.append(took[0])
                fast.seconds.append(took[1])
    if not np.array_equal(arena, other):
        first = int(np.flatnonzero(arena != other)[0])
        raise InternalError("a conversion is wrong", pair=planned.case.pair, tensor=work.tensor, byte=first)
    return Row(
        group=planned.case.group,
        pair=planned.case.pair,
        tensor=work.tensor,
        goal=planned.case.goal,
        gb_per_s=fast.rate / 1e9,
        copy_gb_per_s=copies.rate / 1e9,
        ratio=ratio(fast, copies),
        numpy_gb_per_s=numpy_rate / 1e9,
    )


def _calls(work: Work, regions: Sequence[U8], arena: U8) -> list[Callable[[], None]]:
    """The steps of `work` into `arena`, each ready to be carried out."""
    return [partial(cpu.run_step, step, regions, arena) for step in work.steps]


def _run(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _seconds(what: Callable[[], None]) -> float:
    start = time.thread_time()
    what()
    return time.thread_time() - start


def _aligned(nbytes: int) -> U8:
    """Zeros on a page boundary, as regions are; every page touched."""
    room = np.empty(nbytes + 4096, np.uint8)
    at = -room.ctypes.data % 4096
    room[at : at + nbytes] = 0
    return room[at : at + nbytes]
