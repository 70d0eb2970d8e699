"""An agent as a process: from start to the signal that ends it."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from hawk.agent.core import Agent
from hawk.config import missing
from hawk.errors import ConfigError
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.config import Config, Sources

log = get_log("hawk.agent")


def check_config(config: Config) -> None:
    """Raises `ConfigError`, with a line for each, for what a running agent cannot do without."""
    problems = missing(config)
    if problems:
        raise ConfigError("the agent cannot start:", problems=tuple(problems))


async def run(
    config: Config, sources: Sources | None = None, *, on_up: Callable[[Agent], None] | None = None
) -> int:
    """Runs an agent until SIGTERM or SIGINT, then drains it; a second signal cuts that short.

    `on_up(agent)` is called once it answers.  Returns the exit status.
    """
    del sources
    check_config(config)
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    agent = Agent(config, embedded=False)
    await agent.start()
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
