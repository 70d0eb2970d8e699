"""Requests that arrive whether or not earlier ones are over, and what became of each.

The loop is open: each request has a time at which it is due, drawn beforehand, and the time to its first token counts
from then.  One that is sent late, because this program or the machine was busy, is late in the figures, and delays no
other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.bench.load_pair import Spoken
from hawk.bench.load_result import Request
from hawk.errors import HawkError

if TYPE_CHECKING:
    from hawk.bench.load_pair import Pair
    from hawk.bench.load_result import Lengths

AHEAD = 1.0
"""Seconds between the beginning of a run and the time from which requests are due."""


@dataclass(frozen=True)
class Arrival:
    """A request that is due `due` seconds after the first may come."""

    due: float
    input: int
    output: int


def arrivals(rate: float, count: int, lengths: Lengths, dice: np.random.Generator) -> list[Arrival]:
    """A Poisson stream of `rate` requests a second."""
    inputs, outputs = lengths.draw(dice, count)
    due = np.cumsum(dice.exponential(1 / rate, count))
    return [Arrival(float(t), i, o) for t, i, o in zip(due, inputs, outputs, strict=True)]


def prompt(length: int, vocabulary: int, dice: random.Random) -> list[int]:
    """Token ids that no cache has seen; the first four are the tokenizer's own."""
    return [dice.randrange(4, vocabulary) for _ in range(length)]


async def open_loop(
    pair: Pair, plan: Sequence[Arrival], vocabulary: int, dice: random.Random
) -> tuple[float, list[Request]]:
    """Sends every request when it is due.

    Returns when all have ended: the loop's time of the zero that they are due from, and them in order of their arrival.
    """
    prompts = [prompt(arrival.input, vocabulary, dice) for arrival in plan]
    clock = asyncio.get_running_loop().time
    start = clock() + AHEAD

    async def one(arrival: Arrival, tokens: list[int]) -> Request:
        await asyncio.sleep(start + arrival.due - clock())
        spoken, error = Spoken(clock()), ""
        try:
            await pair.stream("proxy", tokens, arrival.output, spoken)
        except HawkError as fault:
            error = str(fault)
        times = spoken.times if not error else []
        return Request(
            due=arrival.due,
            sent=spoken.sent - start,
            first=times[0] - start if times else None,
            last=times[-1] - start if times else None,
            input=arrival.input,
            output=arrival.output,
            error=error,
        )

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*each)) for each in zip(plan, prompts, strict=True)]
    return start, [task.result() for task in tasks]
