"""Keeps an engine with the agent beside it, which has a life of its own and may restart."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hawk.client import connect
from hawk.errors import HawkError
from hawk.integrations import remote
from hawk.integrations.settings import beside, reachable
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from hawk.integrations.engine import Engine

log = get_log("hawk.integrations.keeping")

AGAIN = 1.0
"""Seconds between two looks."""


async def keep(engine: Engine) -> None:
    """Runs until it is cancelled.  Whenever the agent is gone it waits for one, and makes the cache known to that.

    What was under way when the agent went has failed, and so does what is ordered before another is there.
    """
    told = False
    while True:
        await asyncio.sleep(AGAIN)
        try:
            assert engine.client is not None
            engine.client.check_context()
            continue
        except HawkError as lost:
            if not told:
                log.error("the agent is gone; nothing is handed over until it is back", reason=str(lost))
                told = True
        try:
            worker = await _found_again(engine)
        except HawkError as error:
            log.debug("the agent is not back yet", reason=str(error))
            continue
        told = False
        if worker == engine.worker:
            log.info("the agent is back", agent=worker.name)
        else:  # the engine's scheduler has told others where it was, and does
            log.error("the agent came back elsewhere: restart the engine", got=worker, expected=engine.worker)


async def _found_again(engine: Engine) -> remote.Worker:
    client = connect(beside(engine.settings, engine.number))
    await client.open()
    try:
        status = await client.status()
        cache = None if engine.kv is None else await client.register(engine.kv)
    except BaseException:
        await client.close()
        raise
    old, engine.client, engine.cache, engine.scratch = engine.client, client, cache, None
    if old is not None:
        await old.close()
    return remote.Worker(status.name, reachable(status.control, engine.settings.host))
