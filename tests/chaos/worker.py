"""A client in a process of its own: `python -m tests.chaos.worker prefill|decode ADDRESS FOLDER`.

Takes commands as JSON lines on its standard input and tells what happened on its standard output, so that whoever
directs it may kill it at any moment.  When its agent dies it attaches to the next one at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import hawk
from hawk.client import Client
from hawk.errors import HawkError, PeerLost

Command = dict[str, Any]

_WATCH = 0.25
"""Seconds between two looks at whether the agent still lives."""


class Lost(Exception):
    """There is no agent just now."""


class Worker(ABC):
    """Reads commands, runs each as a task, and keeps a session with the agent."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.folder = folder
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def say(self, number: int, event: str, **facts: Any) -> None:
        """One line to whoever directs us."""
        print(json.dumps({"id": number, "event": event, **facts}), flush=True)

    @abstractmethod
    async def attach(self, client: Client) -> None:
        """Makes what the worker needs of a fresh agent."""

    @abstractmethod
    async def detach(self) -> None:
        """Lets go of what a dead agent has left."""

    @abstractmethod
    async def obey(self, number: int, command: Command) -> None:
        """Carries out one command."""

    async def _live(self) -> None:
        while True:
            try:
                async with hawk.connect(self.address, timeout="5s") as client:
                    await self.attach(client)
                    self.say(0, "attached")
                    await self._watch(client)
            except HawkError:
                await asyncio.sleep(0.1)
            finally:
                await self.detach()
            self.say(0, "detached")

    async def _watch(self, client: Client) -> None:
        while True:
            try:
                await client.status()
            except PeerLost:
                return
            except HawkError:
                pass  # it does not answer just now
            await asyncio.sleep(_WATCH)

    async def run(self) -> None:
        """Until the end of standard input."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        living = loop.create_task(self._live())
        while line := await reader.readline():
            command = json.loads(line)
            number = command.pop("id")
            task = loop.create_task(self._run(number, command))
            self.tasks[number] = task
            task.add_done_callback(functools.partial(self._done, number))
        living.cancel()
        for task in list(self.tasks.values()):
            task.cancel()
        await asyncio.gather(living, *self.tasks.values(), return_exceptions=True)

    def _done(self, number: int, task: asyncio.Task[None]) -> None:
        if self.tasks.get(number) is task:  # numbers below 0 are used again
            del self.tasks[number]

    async def _run(self, number: int, command: Command) -> None:
        try:
            await self.obey(number, command)
        except Lost:
            self.say(number, "over", code="unattached")
        except Exception as fault:  # noqa: BLE001 - a bug here must be seen, not swallowed with the task
            self.say(number, "over", code=f"bug in the worker: {type(fault).__name__}: {fault}")


def main() -> None:
    """Runs a worker of either kind."""
    from tests.chaos.decode import Decoder
    from tests.chaos.prefill import Prefiller

    role, address, folder = sys.argv[1:]
    worker = {"prefill": Prefiller, "decode": Decoder}[role](address, Path(folder))
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(worker.run())


if __name__ == "__main__":
    main()
