"""The agent's memories as it starts: those that its config describes are filled, those that it was given looked at."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, TypeVar

from hawk.arguments import instance
from hawk.errors import InvalidArgument
from hawk.jobs.states import settle
from hawk.memory.arena import Arena
from hawk.memory.base import Memory
from hawk.units import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hawk.config_schema import MemoryConfig

M = TypeVar("M", Arena, Memory)


async def filled(make: Callable[[], M]) -> M:
    """What `make` makes, in a thread, which filling memory keeps busy for long.

    A thread cannot be ended: cancelled, this waits until it is done and closes what it made.
    """
    making = asyncio.get_running_loop().run_in_executor(None, make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        with contextlib.suppress(asyncio.CancelledError):
            await settle(making)
        if making.exception() is None:
            making.result().close()
        raise


def described(entry: MemoryConfig) -> str:
    """A memory of the config in a few words."""
    capacity = getattr(entry.options, "capacity", None)  # a plug-in's options need not have one
    return f"{entry.kind} {format_size(capacity)}" if isinstance(capacity, int) else entry.kind


def named(given: Sequence[Memory], config: Mapping[str, MemoryConfig]) -> dict[str, Memory]:
    """Memories that were made already by their names; raises `InvalidArgument` for what is none, or a name twice."""
    found: dict[str, Memory] = {}
    for number, memory in enumerate(given):
        field = f"memories[{number}]"
        name = instance(memory, Memory, field, "a memory").name  # type: ignore[type-abstract]
        if name in found or name in config:
            raise InvalidArgument(
                "another memory has this name",
                field=f"{field}.name",
                got=name,
                expected="a name that no [memory.NAME] of the config has, nor any other that is given",
            )
        found[name] = memory
    return found
