"""Leaving without breaking a promise: no new work, what was promised is finished, and everyone is told.

Two kinds.  An operator's drain (`begin`) also keeps what was promised by tickets: open offers may still be fetched,
until they were consumed or their time ran out, however long that is; and it can be taken back.  The drain of a
process that ends (`hurry`) waits for jobs that run, for as long as `agent.drain` says, and for no offer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hawk.control.messages import Drained
from hawk.errors import InvalidArgument
from hawk.observe.log import get as get_log

if TYPE_CHECKING:
    from hawk.agent.core import Agent

log = get_log("hawk.agent.draining")


class Drainer:
    """Whether the agent drains, and what is left to do.

    `touch` has to be called whenever a fetch, a serve or an offer ended.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last = False
        self.draining = False

    def touch(self) -> None:
        """Something ended; what waits for the end of everything looks again."""
        self._changed.set()

    def begin(self) -> None:
        """Takes no new work from now on, and finishes what was promised, offers included."""
        if not self.draining:
            self._stop_accepting(promised=True)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._finish())

    def resume(self) -> None:
        """Takes new work again.  Raises `InvalidArgument` where the process is ending."""
        if self._last:
            raise InvalidArgument("the agent's process is ending; that cannot be taken back", field="resume")
        self._cancel()
        if self.draining:
            self.draining = False
            self._agent.serving.accept()
            self._tell(draining=False)
            log.info("drain taken back")

    async def wait(self, timeout: float) -> bool:
        """Whether all that was promised is done, now or within `timeout` seconds."""
        if self._task is not None and timeout:
            await asyncio.wait({self._task}, timeout=timeout)
        return not self._left(offers=True)

    async def hurry(self, timeout: float) -> bool:
        """Takes no new work, open offers' included, and waits for the running jobs; False if that was too short."""
        self._last = True
        agent = self._agent
        self._stop_accepting(promised=False)
        try:
            async with asyncio.timeout(timeout):
                await self._until_done(offers=False)
        except TimeoutError:
            log.warning("jobs cut off", serving=agent.serving.jobs, fetching=agent.fetching)
            return False
        return True

    def close(self) -> None:
        """The agent ends: nothing is waited for any more."""
        self.draining = True
        self._cancel()

    def report(self, call: int) -> Drained:
        """How far it is."""
        agent = self._agent
        return Drained(
            id=call,
            done=self.draining and not self._left(offers=True),
            draining=self.draining,
            offers=len(agent.offers),
            serving=agent.serving.jobs,
            fetching=agent.fetching,
        )

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _stop_accepting(self, *, promised: bool) -> None:
        agent, first = self._agent, not self.draining
        self.draining = True
        agent.serving.drain(promised=promised)
        log.info("draining", serving=agent.serving.jobs, fetching=agent.fetching, offers=len(agent.offers))
        if first:
            self._tell(draining=True)

    def _tell(self, *, draining: bool) -> None:
        self._agent.serving.guests.notify(draining=draining)
        self._agent.peers.notify(draining=draining)

    def _left(self, *, offers: bool) -> bool:
        agent = self._agent
        return bool(agent.fetching or agent.serving.jobs or (offers and len(agent.offers)))

    async def _until_done(self, *, offers: bool) -> None:
        while self._left(offers=offers):
            self._changed.clear()
            await self._changed.wait()

    async def _finish(self) -> None:
        await self._until_done(offers=True)
        log.info("drained: nothing that was promised is left")
