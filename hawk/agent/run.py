"""An agent as a process: from start to the signal that ends it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from hawk.agent.core import Agent
from hawk.agent.dump import dump
from hawk.agent.reloading import reload
from hawk.config import missing
from hawk.errors import ConfigError, HawkError
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.config import Config

log = get_log("hawk.agent")


def check_config(config: Config) -> None:
    """Raises `ConfigError`, with a line for each, for what a running agent cannot do without."""
    problems = missing(config)
    if problems:
        raise ConfigError("the agent cannot start:", problems=tuple(problems))


async def _start(agent: Agent, stop: asyncio.Event) -> bool:
    """Starts the agent; False, with nothing left of it, if `stop` was set before it was up."""
    loop = asyncio.get_running_loop()
    starting, stopped = loop.create_task(agent.start()), loop.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (starting, stopped):
            if not task.done():
                task.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
    if starting.cancelled():
        return False
    starting.result()
    return True


def _reload(agent: Agent, read: Callable[[], Config] | None) -> None:
    """Takes over what changed in the configuration; one that cannot be used is refused whole."""
    if not agent.up or read is None:
        log.info("nothing to reload", reason="starting" if read else "the agent has no configuration file")
        return
    try:
        reload(agent, read())
    except HawkError as error:
        log.error("the new configuration is refused; the old one goes on", reason=str(error))


async def run(
    config: Config,
    *,
    on_up: Callable[[Agent], None] | None = None,
    read: Callable[[], Config] | None = None,
) -> int:
    """Runs an agent until SIGTERM or SIGINT, then drains it; a second signal cuts that short.

    SIGHUP takes over what `read()` says of peers, their keys and the log level, and certificates; SIGUSR1 writes jobs
    and tasks to the log.
    A signal while it still starts ends that, as soon as the memory that is being filled is full.  `on_up(agent)`
    is called once it answers.  Returns the exit status.
    """
    check_config(config)
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    agent = Agent(config, embedded=False)
    loop.add_signal_handler(signal.SIGHUP, lambda: _reload(agent, read))
    loop.add_signal_handler(signal.SIGUSR1, lambda: dump(agent) if agent.up else None)
    if not await _start(agent, stop):
        log.info("agent down", drained=True, reason="it was told to stop before it was up")
        return 0
    drained = False
    try:
        if on_up is not None:
            on_up(agent)
        await stop.wait()
        drain = loop.create_task(agent.drain(config.agent.drain))
        hurried = loop.create_task(hurry.wait())
        await asyncio.wait({drain, hurried}, return_when=asyncio.FIRST_COMPLETED)
        drained = drain.done() and drain.result()
        for task in (drain, hurried):
            task.cancel()
        await asyncio.gather(drain, hurried, return_exceptions=True)
    finally:
        await agent.close()
    log.info("agent down", drained=drained)
    return 0
