"""Queue pairs that broke: how one is ended for good, and how long to wait before it is made anew."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from hawk.errors import TransferFailed
from hawk.observe.log import get as get_log
from hawk.transports.verbs import _wire
from hawk.transports.verbs._device import VerbsError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hawk.transports.verbs._dialogue import Dialogue
    from hawk.transports.verbs._end import End
    from hawk.transports.verbs._windows import WindowEnd

log = get_log("hawk.transports.verbs")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
"""Seconds before a queue pair that keeps breaking is made anew; the first time it is made at once."""


def pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    return 0.0 if failures <= 1 else min(_FIRST_PAUSE * 2.0 ** min(failures - 2, 16), _LONGEST_PAUSE)


async def rest(seconds: float, ending: asyncio.Event) -> None:
    """Waits; not for who ends meanwhile."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ending.wait(), seconds)


async def insist(ending: Callable[[], Awaitable[None]], what: str, **about: object) -> None:
    """Ends something, again and again where the device will not: until it is gone its bytes may land."""
    failures = 1
    while True:
        try:
            return await ending()
        except VerbsError as error:
            failures += 1
            log.error(what, reason=str(error), **about)
            await asyncio.sleep(pause(failures))


async def destroy(end: End | WindowEnd, **about: object) -> None:
    """Destroys a queue pair, however often that has to be asked for."""
    await insist(end.close, "a queue pair could not be destroyed", **about)


async def anew(
    dialogue: Dialogue, index: int, mine: _wire.QueueFacts, ports: int, timeout: float, *, inlet: bool = False
) -> _wire.QueueFacts:
    """Has the peer replace its end of a queue pair, and gives its facts; ours are `mine`.

    Raises `TransferFailed` where it makes none or answers nonsense, `TimeoutError` where it does not answer.
    """
    async with asyncio.timeout(timeout):
        answer = await dialogue.ask(_wire.Renew(0, index, mine, inlet))
    if not isinstance(answer, _wire.Renewed):
        text = answer.text if isinstance(answer, _wire.Refused) else type(answer).__name__
        raise TransferFailed("the peer made no queue pair", got=text)
    try:
        _wire.check(answer.queue, ports)
    except _wire.BadWire as error:
        raise TransferFailed("the peer's answer makes no sense", got=error) from error
    return answer.queue
