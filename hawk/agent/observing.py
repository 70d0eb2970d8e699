"""What an agent shows to machines: its pools and counts as metrics, and its health, from before it touches memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hawk.agent import report
from hawk.observe.http import ObserveServer
from hawk.observe.watchdog import LoopWatch, Watchdog

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

    from hawk.agent.core import Agent
    from hawk.memory.arena import Arena
    from hawk.memory.base import Memory


async def observe(agent: Agent, stack: contextlib.AsyncExitStack, look: Callable[[], float]) -> None:
    """Watches the loop, and serves health and metrics where the configuration says so; `stack` ends it.

    `look` is called often by the thread that watches, see `Watchdog`.
    """
    config = agent.config.agent
    watched = bool(config.observe) or not agent.embedded
    watch = LoopWatch(config.max_lag, agent.metrics.loop_lag, alone=not watched)
    watch.start()
    stack.callback(watch.stop)
    agent.metrics.watch(lambda: report.measure(agent))
    server: ObserveServer | None = None
    if config.observe:
        server = ObserveServer(
            config.observe, agent.metrics, lambda: report.not_ready(agent), alive=watch.trouble
        )
    if watched:
        watchdog = Watchdog(watch, server, look)
        stack.push_async_callback(watchdog.close)
        await watchdog.start()


def watch_memory(agent: Agent, name: str, memory: Memory) -> None:
    """Counts the bytes of a memory."""

    def states() -> dict[str, int]:
        free = sum(memory.free_bytes())
        return {"free": free, "owned": memory.channels * memory.channel_bytes - free}

    agent.metrics.watch_pool(name, states)


def watch_arena(agent: Agent, arena: Arena) -> None:
    """Counts the bytes of the arena."""

    def states() -> dict[str, int]:
        free, kept = arena.allocator.free_bytes, arena.allocator.quarantined_bytes
        return {"free": free, "quarantined": kept, "owned": arena.region.nbytes - free - kept}

    agent.metrics.watch_pool("arena", states)
