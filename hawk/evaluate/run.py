"""`hawk evaluate`: measures, reads, simulates, and writes the report."""

from __future__ import annotations

import os
import re
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hawk._version import __version__
from hawk.bench.samples import machine
from hawk.evaluate import here, output, page, plots, simulated, sources, told, transfers
from hawk.evaluate.records import REPLAYED, Absent, Input, Origin, Report
from hawk.memory.available import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hawk.evaluate.sources import Source


_COUNT = re.compile(r", \d+ of \d+$")
"""How far a step has come, in its words."""


@dataclass(frozen=True)
class Options:
    """What is asked for.

    out        folder of the report
    given      files and folders of figures measured elsewhere
    quick      small sizes, few runs, few requests: does it work, not how fast is it
    measure    whether anything is measured here
    overwrite  whether an earlier report in `out` may go
    seed       of all that is random
    workers    processes of the simulator; None: as many as there are processors
    devices    as `hawk bench transfer --devices`; None: what there is
    """

    out: Path
    given: tuple[Path, ...] = ()
    quick: bool = False
    measure: bool = True
    overwrite: bool = False
    seed: int = 0
    workers: int | None = None
    devices: str | None = None


@dataclass
class Outcome:
    """What was written."""

    out: Path
    files: list[str]
    summary: list[str]
    absent: list[Absent]
    facts: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {"out": str(self.out), "report": output.PAGE, **self.facts, "files": self.files}


def evaluate(options: Options) -> Outcome:
    """All of it; figures from elsewhere are read first, since they may be wrong and measuring takes minutes.

    Raises `MissingDependency` without the extra `evaluate`, `InvalidArgument` for an `out` that is taken and figures
    that cannot be read, `InternalError` where a byte was wrong, and `OSError`.
    """
    began, load = time.monotonic(), os.getloadavg()[0]
    plots.library()
    page.library()
    simulated.library()
    elsewhere = sources.gather(options.given, Origin.ELSEWHERE)
    if options.devices is not None:
        here.chosen(options.devices)
    earlier = output.claim(options.out, overwrite=options.overwrite, kept=options.given)
    output.begin(options.out, earlier)
    with _progress() as step:
        measured, absent = _measured(options, step)
        found = simulated.simulate(quick=options.quick, seed=options.seed, workers=options.workers, told=step)
        step("writing the report")
        report = assemble(measured, elsewhere, absent, found, options, load)
        facts = {
            "hawk": __version__,
            "date": report.date,
            "machine": machine(),
            "quick": options.quick,
            "seed": options.seed,
            "load_average": load,
            "seconds": round(time.monotonic() - began, 1),
            "summary": report.summary,
            "absent": [{"what": a.what, "why": a.why} for a in report.absent],
            "measured": [s.name for s in measured],
            "elsewhere": [{"file": s.name, "machine": s.machine, "date": s.date} for s in elsewhere],
            **found.facts(),
        }
        files = output.write(options.out, report, facts, [s.path for s in measured])
        output.remove(options.out, set(earlier) - set(files))
    return Outcome(options.out, files, report.summary, report.absent, facts)


def _measured(options: Options, step: Callable[[str], None]) -> tuple[list[Source], list[Absent]]:
    if not options.measure:
        return [], [Absent("anything", "measuring was not asked for (--no-measure)")]
    found = here.look()
    found.devices = options.devices or found.devices
    asked = here.QUICK_SIZES if options.quick else here.SIZES
    sizes, left = here.fitting(asked, available_memory())
    absent = [*found.absent, *left]
    measured: list[Source] = []
    planned = here.steps(found, sizes, quick=options.quick, seed=options.seed)
    for one in here.measure(planned, options.out / output.MEASURED, step):
        if isinstance(one, Absent):
            absent.append(one)
        else:
            measured.append(one)
            absent += here.left_out(one)
    return measured, absent


def assemble(
    measured: Sequence[Source],
    elsewhere: Sequence[Source],
    absent: Sequence[Absent],
    found: simulated.Simulated,
    options: Options,
    load: float = 0.0,
) -> Report:
    """The report's parts in order; `load`: the machine's load average when measuring began."""
    about = machine()
    report = Report(
        "HAWK: the paper's evaluation on this machine",
        f"{about['processor']}, {about['cpus']} CPUs, {about['system']}, Python {about['python']}",
        datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        absent=list(absent),
    )
    all_of_them = [*measured, *elsewhere]
    report.sections = [transfers.section(all_of_them, found.latencies), *found.sections(all_of_them)]
    report.inputs = [*_files(all_of_them), *found.inputs()]
    report.summary = told.summary(measured, elsewhere, found, quick=options.quick, load=load)
    return report


def _files(all_of_them: Sequence[Source]) -> list[Input]:
    return [
        Input(
            "figures of benchmarks",
            f"{s.benchmark}",
            f"{s.machine}; {s.date}" + ("" if s.data is not None else "; not shown in this report"),
            s.origin if s.benchmark not in REPLAYED else Origin.SIMULATED,
            s.name,
            "replayed, nothing is timed" if s.benchmark in REPLAYED else "timed",
        )
        for s in all_of_them
    ]


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is done now, on stderr: as a line that changes on a terminal, elsewhere as a line for each step."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None)
        yield lambda words: shown.update(task, description=words)


def _plain() -> Callable[[str], None]:
    last = ""

    def tell(words: str) -> None:
        nonlocal last
        step = _COUNT.sub("", words)
        if step != last:
            print(step, file=sys.stderr, flush=True)
            last = step

    return tell
