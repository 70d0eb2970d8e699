"""The decode engine of the chaos run: fetches into its cache and looks at every byte, wanted and unwanted."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from hawk.client import Client
from hawk.errors import HawkError, StillDraining
from hawk.handles import DeviceCache, Fetch
from tests.chaos import content as c
from tests.chaos.memory import map_raw, raw_file
from tests.chaos.worker import Command, Lost, Worker

MEMORY = "npu0"


@dataclass(eq=False)
class _Session:
    """`seen` is what a device would read, `raw` where transports write; free blocks hold the canary in both."""

    client: Client
    device: DeviceCache
    seen: c.Pool
    raw: c.Pool
    free: list[int]
    running: set[Fetch] = field(default_factory=set)

    def dirty(self, blocks: list[int]) -> str:
        """Where bytes landed that no job owned."""
        return self.seen.dirty(blocks) or self.raw.dirty(blocks)

    def give_back(self, blocks: list[int]) -> None:
        """The blocks are nobody's."""
        self.seen.paint(blocks)
        self.raw.paint(blocks)
        self.free += blocks


class Decoder(Worker):
    """Commands: `fetch`; `finish`, which aborts whatever runs; `audit`, which looks at all free blocks."""

    _session: _Session | None = None

    async def attach(self, client: Client) -> None:
        """Allocates the cache in the device's memory."""
        device = await client.allocate(c.TARGET, memory=MEMORY)
        raw = [map_raw(raw_file(self.folder, MEMORY, i)) for i in range(len(device.channels))]
        session = _Session(
            client, device, c.Pool(device.channels, device.offsets), c.Pool(raw, device.offsets), []
        )
        session.give_back(list(range(c.TARGET.blocks)))
        self._session = session

    async def detach(self) -> None:
        """The memory went with the agent."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(HawkError):
                await session.device.release()

    async def obey(self, number: int, command: Command) -> None:
        """See the class."""
        session = self._session
        if session is None:
            raise Lost
        if command["op"] == "finish":
            await asyncio.gather(*(job.abort() for job in session.running), return_exceptions=True)
            self.say(number, "over")
        elif command["op"] == "audit":
            self.say(number, "over", wrong=session.dirty(session.free), free=len(session.free))
        else:
            await self._fetch(number, session, command)

    async def _fetch(self, number: int, session: _Session, command: Command) -> None:
        first, tokens, dice = command["first"], command["tokens"], random.Random(command["seed"])
        need = -(-(first + tokens) // c.TARGET.block_size)
        if len(session.free) < need:
            self.say(number, "over", code="no-blocks")
            return
        blocks = dice.sample(session.free, need)
        session.free = [b for b in session.free if b not in blocks]
        wrong = session.dirty(blocks)
        if wrong:
            self.say(number, "wrong", what=wrong)
        try:
            job = session.client.fetch(
                command.get("tickets"),
                into=session.device,
                blocks=blocks,
                first=first,
                tokens=tokens,
                timeout=command["timeout"],
                request=command.get("request", ""),
                source=command.get("sources", ""),
                wait=command.get("wait", False),
                priority=command["priority"],
                abort_timeout="8s",
            )
        except HawkError as error:
            raise Lost from error  # the agent has died, and nobody has noticed yet
        session.running.add(job)
        code, reason = await self._ending(job, command)
        session.running.discard(job)
        if code == "ready":
            what = session.seen.differs(command["content"], blocks, first, tokens)
            if what:
                self.say(number, "wrong", what=f"ready, but {what}")
        if code != "still-draining":  # of those nothing may be touched any more
            session.give_back(blocks)
        self.say(number, "over", code=code, reason=reason, at=command.get("at"))

    async def _ending(self, job: Fetch, command: Command) -> tuple[str, str]:
        """The name of the ending, and its text; `ready`, or an error's code."""
        ender: asyncio.Task[str] | None = None
        fetching: asyncio.Task[str] = asyncio.get_running_loop().create_task(self._fetched(job))
        if command["end"]:
            ender = asyncio.get_running_loop().create_task(self._end(job, fetching, command))
        try:
            return "ready", await fetching
        except HawkError as error:
            return error.code, str(error)
        except asyncio.CancelledError as error:
            # By `_end`.  A note on it says that the abort was cut short, and bytes may still land.
            notes = "; ".join(getattr(error, "__notes__", []))
            return ("still-draining" if notes else "cancelled"), notes
        finally:
            if ender is not None:
                ender.cancel()
                with contextlib.suppress(asyncio.CancelledError, HawkError):
                    await ender

    async def _fetched(self, job: Fetch) -> str:
        await job
        return ""

    async def _end(self, job: Fetch, fetching: asyncio.Task[str], command: Command) -> str:
        """Ends the fetch early: at a state, or after some time; by an abort, or by cancelling who waits for it."""
        at = command["end"]
        if isinstance(at, str):
            async for progress in job.progress():
                if progress.state == at:
                    break
        else:
            await asyncio.sleep(at)
        command["at"] = "unknown" if job._latest is None else job._latest.state
        if command["how"] == "cancel":
            fetching.cancel()
        else:
            with contextlib.suppress(StillDraining):
                await job.abort()
        return ""
