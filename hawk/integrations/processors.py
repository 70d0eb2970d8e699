"""Which processors the connector's threads may run on.

An engine on CPUs binds its OpenMP threads to a processor each, its main thread among them, and in Linux a thread that
is started later may run only where its parent may.  All of an agent's threads would so share one processor with the
engine's main thread, and answer nobody for as long as that computes.  They take instead what the engine was given
before it bound itself.  Other bindings, such as one to the processors next to a GPU, are left as they are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
from typing import TYPE_CHECKING

from hawk.errors import ConfigError
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

log = get_log("hawk.integrations.processors")

FIELD = "kv_connector_extra_config.cpus"

_BINDS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which OpenMP binds the thread that first uses it; an engine sets one for its workers alone."""

_PIECE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def parse(text: str) -> frozenset[int]:
    """The processors of a list as `taskset -c` takes it, such as "0-3,8"; raises `ConfigError`."""
    found: set[int] = set()
    for piece in text.split(","):
        match = _PIECE.fullmatch(piece.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first:
            raise ConfigError(
                "no list of processors", field=FIELD, got=text, expected='numbers and ranges such as "0-3,8"'
            )
        found.update(range(first, last + 1))
    return frozenset(found)


def given() -> AbstractSet[int]:
    """What the calling thread's process may use apart from what OpenMP has bound it to.

    Where OpenMP binds, this is what any thread of the process may use (those started before it are not bound) and what
    the process may that started this one as its worker; else it is what the calling thread may use now.
    """
    now = os.sched_getaffinity(0)
    if not any(os.environ.get(name) for name in _BINDS):
        return now
    parent = multiprocessing.parent_process()
    known = [int(name) for name in os.listdir("/proc/self/task")]
    for number in [*known, *([] if parent is None or parent.pid is None else [parent.pid])]:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            now |= os.sched_getaffinity(number)
    return now


def take(cpus: str = "") -> None:
    """Lets the calling thread, and those that it starts, run on `cpus`, or where none are named on what is `given`.

    Raises `ConfigError` where none of the named processors may be used.
    """
    wanted = parse(cpus) if cpus else given()
    before = os.sched_getaffinity(0)
    if wanted == before:
        return
    try:
        os.sched_setaffinity(0, wanted)
    except OSError as fault:
        if cpus:
            raise ConfigError(
                "none of these processors may be used here", field=FIELD, got=cpus, reason=str(fault)
            ) from fault
        log.warning("the agent's threads stay where the engine's are bound", reason=str(fault))
        return
    log.info("processors", was=_text(before), now=_text(os.sched_getaffinity(0)))


def _text(cpus: AbstractSet[int]) -> str:
    """As `parse` takes it."""
    pieces: list[list[int]] = []
    for cpu in sorted(cpus):
        if pieces and pieces[-1][1] == cpu - 1:
            pieces[-1][1] = cpu
        else:
            pieces.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)
