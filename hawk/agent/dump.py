"""What an agent is doing just now, for whoever asks by SIGUSR1: its jobs, and where each of its tasks waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from hawk.agent.core import Agent

log = get_log("hawk.agent.dump")

MOST = 1000
"""Jobs and tasks that are told, of each."""


def where(coroutine: Any) -> list[str]:
    """The places in the code at which a coroutine waits, the outermost first."""
    places = []
    while coroutine is not None:
        frame = next(
            (f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(coroutine, name, None))),
            None,
        )
        if frame is None:
            break
        places.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        coroutine = next(
            (c for name in ("cr_await", "gi_yieldfrom", "ag_await") if (c := getattr(coroutine, name, None))),
            None,
        )
    return places


def dump(agent: Agent) -> None:
    """Writes them into the log, one event each, as warnings so that every level shows them.

    Places and ids only: no arguments, no variables, nothing that a task handles.
    """
    entries = agent.ledger.find(ended=False)
    tasks = asyncio.all_tasks()
    log.warning(
        "dump", jobs=len(entries), tasks=len(tasks), offers=len(agent.offers), draining=agent.draining
    )
    for entry in entries[:MOST]:
        info = entry.info()
        log.warning(
            "dump: job",
            job=info.job,
            attempt=info.attempt,
            role=info.role,
            request=info.request,
            peer=info.peer,
            state=info.state,
            phase=info.phase,
            bytes=info.nbytes,
            total=info.total,
            age=round(info.age, 3),
            left=None if info.deadline is None else round(info.deadline, 3),
        )
    for number, task in enumerate(sorted(tasks, key=lambda task: task.get_name())[:MOST], 1):
        log.warning("dump: task", task=number, at=where(task.get_coro()))
