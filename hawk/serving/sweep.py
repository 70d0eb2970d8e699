"""Many simulations: over all cores, and the rate up to which a promise is kept."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from hawk.errors import InvalidArgument
from hawk.serving.engine import simulate
from hawk.serving.figures import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from multiprocessing.connection import Connection

    from hawk.serving.outcome import Outcome
    from hawk.serving.scenario import Scenario

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def sweep(
    scenarios: Iterable[Scenario],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """The outcome of each scenario, in their order, the same for any number of workers.

    workers     processes; None: one for each core; 1: this process alone.  With more than one a script that calls this
                needs the usual `if __name__ == "__main__":`, since processes are started afresh
    progress    called with how many are done, and of how many
    """
    return spread(simulate, list(scenarios), workers=workers, progress=progress)


def spread(
    work: Callable[[T], R],
    items: Sequence[T],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[R]:
    """`work` of every item, in their order, over that many processes; both have to be picklable."""
    count = cores() if workers is None else workers
    if count < 1:
        raise InvalidArgument("nobody would work", field="workers", got=workers, expected="1 or more")
    count = min(count, len(items))
    tell = progress or (lambda done, of: None)
    found: list[R] = []
    if count <= 1:
        for item in items:
            found.append(work(item))
            tell(len(found), len(items))
        return found
    # Started afresh, not forked: the caller may have threads.
    context = multiprocessing.get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    with theirs, ours, ProcessPoolExecutor(count, context, _end_with, (theirs,)) as pool:
        try:
            # Not `map`: it calls off what waits when it ends early, and a pool whose workers are gone trips over that.
            for one in [pool.submit(work, item) for item in items]:
                found.append(one.result())
                tell(len(found), len(items))
        except BaseException:
            ours.close()  # nobody waits for what is being simulated
            raise
    return found


def _end_with(parent: Connection) -> None:
    """In a worker: ends it when the process that started it ends, in whatever way, or wants no more."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends it to all; the parent says what becomes of it

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            parent.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class Knee:
    """Up to which rate a promise is kept.

    rate       requests a second; 0.0 where not even the lowest rate that was tried keeps it
    outcome    at that rate, or at the lowest that was tried
    bounded    False where the highest rate that was tried keeps it still
    """

    rate: float
    outcome: Outcome
    bounded: bool


def knee(
    scenario: Scenario,
    attainment: float = 0.9,
    *,
    low: float = 0.05,
    high: float = 64.0,
    tolerance: float = 0.01,
    seeds: int = 1,
) -> Knee:
    """The rate up to which that part of the requests meets the scenario's promises, within `tolerance` of it.

    Doubles from `low` and then halves; where the part that does wavers about `attainment`, that is one of the rates
    at which it falls below.  A rate at which queues grow for as long as requests come (`Outcome.steady`) keeps no
    promise.  All rates have the same random numbers, so that one more request a second
    only brings arrivals closer; `seeds` of them are run and their attainments averaged.
    """
    number(attainment, "attainment", 0.0, 1.0)
    number(tolerance, "tolerance", 1e-4, 1.0)
    number(high, "high", number(low, "low", 1e-6))
    if seeds < 1:
        raise InvalidArgument("no seeds", field="seeds", got=seeds, expected="1 or more")

    def run(rate: float) -> tuple[bool, Outcome]:
        found = [simulate(replace(scenario, rate=rate, seed=scenario.seed + i)) for i in range(seeds)]
        kept = sum(o.attainment for o in found) / seeds >= attainment
        # Few requests are over before the queues of a cluster that drowns are long.
        return kept and found[0].steady, found[0]

    kept, best = run(low)
    if not kept:
        return Knee(0.0, best, True)
    rate, upper = low, low
    while kept:
        if upper >= high:
            return Knee(rate, best, False)
        upper = min(2 * upper, high)
        kept, outcome = run(upper)
        if kept:
            rate, best = upper, outcome
    while upper - rate > tolerance * rate:
        middle = (rate + upper) / 2
        kept, outcome = run(middle)
        if kept:
            rate, best = middle, outcome
        else:
            upper = middle
    return Knee(rate, best, True)
