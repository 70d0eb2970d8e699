"""Makes an engine's cache known to its agent, and keeps the two together: an agent beside may restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from hawk.client import connect
from hawk.errors import DeadlineExceeded, HawkError, RegistrationFailed
from hawk.integrations import remote
from hawk.integrations.settings import beside, reachable
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from hawk.cache import KVCache
    from hawk.client import Client
    from hawk.handles import Cache
    from hawk.integrations.engine import Engine

log = get_log("hawk.integrations.keeping")

AGAIN = 1.0
"""Seconds between two looks."""

Maker = Callable[["Client"], Coroutine[Any, Any, "Cache"]]
"""Makes an engine's cache known to an agent, with a client of it; called again where the agent has restarted."""


def maker(cache: KVCache | Maker) -> Maker:
    """What registers these arrays, if they are that; what makes a cache is given back."""
    return cache if callable(cache) else lambda client: client.register(cache)


def known(engine: Engine, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
    """Has the engine's cache made on its loop, and waits; raises what `engine.make` raises, or `DeadlineExceeded`."""

    async def made() -> None:
        assert engine.client is not None
        assert engine.make is not None
        engine.cache = await engine.make(engine.client)

    future = asyncio.run_coroutine_threadsafe(made(), loop)
    if not wait([future], seconds).done:
        future.cancel()
        raise DeadlineExceeded("the cache was not made known in time", seconds=seconds)
    future.result()


async def keep(engine: Engine) -> None:
    """Runs until it is cancelled.  Whenever the agent is gone it waits for one, and makes the cache known to that.

    What was under way when the agent went has failed, and so does what is ordered before another is there.  A cache
    that was in the agent's own memory went with it: then this ends, and the log says to restart the engine.  An agent
    at another address is as good as gone to an engine that prefills: nothing is handed over.
    """
    told = False
    while True:
        await asyncio.sleep(AGAIN)
        try:
            assert engine.client is not None
            engine.client.check_context()
            continue
        except HawkError as lost:
            engine.gone = True
            if not told:
                log.error("the agent is gone; nothing is handed over until it is back", reason=str(lost))
                told = True
        try:
            worker = await _found_again(engine)
        except RegistrationFailed as error:  # and trying again would not help
            log.error("the agent that came back cannot have the cache", reason=str(error))
            return
        except HawkError as error:
            log.debug("the agent is not back yet", reason=str(error))
            continue
        told = False
        if worker == engine.worker:
            engine.gone = False
            log.info("the agent is back", agent=worker.name)
        else:  # others would be told where it was, and fail; what this engine fetches needs no address of its own
            engine.gone = engine.role != "decode"
            log.error("the agent came back elsewhere: restart the engine", got=worker, expected=engine.worker)


async def _found_again(engine: Engine) -> remote.Worker:
    client = connect(beside(engine.settings, engine.number))
    await client.open()
    try:
        status = await client.status()
        cache = None if engine.make is None else await engine.make(client)
    except BaseException:
        await client.close()
        raise
    old, engine.client, engine.cache, engine.scratch = engine.client, client, cache, None
    if old is not None:
        await old.close()
    return remote.Worker(status.name, reachable(status.control, engine.settings.host))
