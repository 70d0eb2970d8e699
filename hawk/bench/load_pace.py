"""How quick processors are from moment to moment, while others use them.

    python -m hawk.bench.load_pace 0,1

A virtual machine's processor is often a share of a real one.  Where a neighbour computes on the rest of it, all that
runs takes up to two or three times as long for seconds, at which no count of the machine's own changes: not the time
that its processors were taken away, and not what its programs wait.  So a small product of matrices is timed fifty
times a second, by the processor time that it takes, which waiting for a turn is no part of.  It is of the engines' own
kind (bf16, PyTorch's), for products of other kinds slow otherwise; without PyTorch it is of numpy's floats.

The process does that on the processors that are named until its standard input ends, then prints a JSON list of pairs:
the system's count of seconds, and seconds of the product.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np

from hawk.bench.ttft_process import ROOT
from hawk.errors import InternalError

if TYPE_CHECKING:
    from numpy.typing import NDArray

EVERY = 0.02
"""Seconds between two samples."""

GRAIN = 0.1
"""Seconds of which the mean is kept."""

FULL = 10
"""The percentile of all samples that counts as full pace."""

_ROWS, _WIDTH = 128, 512


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How many times as long as at full pace a side's processors took, from `since` on, for each `GRAIN` seconds."""

    since: float
    slow: list[Annotated[float, msgspec.Meta(ge=1)]]

    def mean(self, begin: float, end: float) -> float:
        """Over that time, or what there is of it; before it 1, after it the last."""
        if end < self.since:
            return 1.0
        first = int((begin - self.since) / GRAIN)
        last = int((end - self.since) / GRAIN) + 1
        those = self.slow[max(0, first) : max(0, last)] or self.slow[-1:]
        return sum(those) / len(those) if those else 1.0

    def part(self, share: float) -> Pace:
        """For work of which only so much, or more than all, slows as this says."""
        return Pace(since=self.since, slow=[1 + share * (value - 1) for value in self.slow])

    def from_(self, zero: float) -> Pace:
        """On a clock that is 0 then."""
        return Pace(since=self.since - zero, slow=self.slow)

    def takes(self, now: float, seconds: float) -> float:
        """Seconds that work takes from `now` on which would take so many at full pace.

        Before what was sampled that is full pace, and after it the last.
        """
        took, left = max(0.0, min(self.since - now, seconds)), seconds
        left -= took
        place = max(0, int((now + took - self.since) / GRAIN))
        for number in range(place, len(self.slow)):
            room = self.since + (number + 1) * GRAIN - now - took
            if left * self.slow[number] <= room:
                return took + left * self.slow[number]
            took += room
            left -= room / self.slow[number]
        return took + left * (self.slow[-1] if self.slow else 1.0)


def pace_of(samples: NDArray[np.float64]) -> Pace:
    """From `[n, 2]` times and seconds of a product, in the order of their times."""
    if not len(samples):
        return Pace(since=0.0, slow=[])
    times, took = samples[:, 0], samples[:, 1]
    slow = np.maximum(1.0, took / np.percentile(took, FULL))
    place = ((times - times[0]) // GRAIN).astype(np.int64)
    count = np.bincount(place)
    sums = np.bincount(place, slow)
    # A moment without a sample is as the one before.
    known = np.maximum.accumulate(np.where(count > 0, np.arange(len(count)), 0))
    return Pace(
        since=float(times[0]), slow=[round(float(v), 3) for v in (sums / np.maximum(count, 1))[known]]
    )


@dataclass
class Watch:
    """What `watched` gives: filled when its block ends.  `samples` are by side."""

    samples: dict[str, NDArray[np.float64]] = field(default_factory=dict)


@contextlib.contextmanager
def watched(sides: Mapping[str, frozenset[int]], python: Path = Path(sys.executable)) -> Iterator[Watch]:
    """Samples each side's processors, by that Python, for as long as the block runs, from its beginning.

    Raises `InternalError` where that did not work.
    """
    found = Watch()
    with contextlib.ExitStack() as stack:
        processes = {side: stack.enter_context(_sampling(python, cpus)) for side, cpus in sides.items()}
        for side, process in processes.items():
            assert process.stdout is not None
            # What that Python says at its start, of its own, is passed over.
            if b"ready\n" not in process.stdout:
                raise _not_taken(side, process)
        yield found
        for side, process in processes.items():
            told, _ = process.communicate()
            if process.returncode:
                raise _not_taken(side, process)
            found.samples[side] = np.asarray(json.loads(told), np.float64).reshape(-1, 2)


def _not_taken(side: str, process: subprocess.Popen[bytes]) -> InternalError:
    return InternalError("the pace of processors was not taken", side=side, status=process.wait())


@contextlib.contextmanager
def _sampling(python: Path, cpus: frozenset[int]) -> Iterator[subprocess.Popen[bytes]]:
    one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [str(python), "-m", "hawk.bench.load_pace", ",".join(map(str, sorted(cpus)))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **one, "PYTHONPATH": path},
        process_group=0,  # Ctrl-C on a terminal is for us alone
    )
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _product() -> Callable[[], object]:
    """Of the engines' kind, where that can be had."""
    shapes = (_ROWS, _WIDTH), (_WIDTH, _WIDTH), (_ROWS, _WIDTH)
    try:
        import torch
    except ImportError:
        one, two, out = (np.ones(shape, np.float32) for shape in shapes)
        return lambda: np.matmul(one, two, out=out)
    torch.set_num_threads(1)
    a, b, c = (torch.ones(shape, dtype=torch.bfloat16) for shape in shapes)
    return lambda: torch.matmul(a, b, out=c)


def main() -> None:
    """The process."""
    os.sched_setaffinity(0, {int(cpu) for cpu in sys.argv[1].split(",")})
    product = _product()
    found = []
    print("ready", flush=True)
    over = False
    while not over:
        product()  # caches are as the others have left them
        began = time.thread_time()
        product()
        product()
        found.append((time.monotonic(), time.thread_time() - began))
        over = bool(select.select([sys.stdin], [], [], EVERY)[0])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
