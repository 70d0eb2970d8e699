"""Faults of processes and of the network, carried out."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from tests.chaos.weather import CALM

if TYPE_CHECKING:
    from tests.chaos.report import Report
    from tests.chaos.schedule import Fault
    from tests.chaos.site import ChaosSite
    from tests.chaos.weather import Sky


class Mishaps:
    """Lets faults happen, several at a time, but one at a time to each target; `sky` is the weather between them."""

    def __init__(self, site: ChaosSite, report: Report) -> None:
        self._site = site
        self._report = report
        self._running: dict[str, asyncio.Task[None]] = {}
        self.sky: Sky = CALM

    def begin(self, fault: Fault) -> None:
        """A fault begins, unless its target still suffers from another one."""
        if fault.target in self._running:
            self._report.left_out += 1
            return
        self._report.faults[fault.kind] += 1
        happening = {
            "stop": self._stop,
            "cut off": self._cut_off,
            "kill": self._kill,
            "terminate": self._terminate,
            "reload": self._reload,
            "cut streams": self._cut,
            "stall streams": self._stall,
            "kill client": self._kill_client,
            "stop client": self._stop_client,
        }[fault.kind]
        task = asyncio.get_running_loop().create_task(happening(fault))
        self._running[fault.target] = task
        task.add_done_callback(lambda done: self._over(fault, done))

    def _over(self, fault: Fault, task: asyncio.Task[None]) -> None:
        del self._running[fault.target]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report.broke(
                f"after the fault {fault.kind!r} of {fault.target}: {type(error).__name__}: {error}"
            )

    async def over(self) -> None:
        """Returns when no fault is under way."""
        while self._running:
            await asyncio.wait(list(self._running.values()))

    async def close(self) -> None:
        """Ends faults in mid-way."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*list(self._running.values()), return_exceptions=True)

    # -- agents ------------------------------------------------------------------------------------------

    async def _stop(self, fault: Fault) -> None:
        life = self._site.agents[fault.target]
        life.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            life.send(signal.SIGCONT)

    async def _cut_off(self, fault: Fault) -> None:
        life = self._site.agents[fault.target]
        life.weather.drop = 1.0
        await asyncio.sleep(fault.seconds)
        life.weather.drop = self.sky.drop

    async def _kill(self, fault: Fault) -> None:
        life = self._site.agents[fault.target]
        life.process.kill()
        await self._site.ended(life)
        await self._again(fault)

    async def _terminate(self, fault: Fault) -> None:
        life = self._site.agents[fault.target]
        life.send(signal.SIGTERM)
        status = await self._site.ended(life)
        if status != 0:
            self._report.broke(f"{life.label} ended with status {status} after SIGTERM")
        await self._again(fault)

    async def _reload(self, fault: Fault) -> None:
        life = self._site.agents[fault.target]
        life.send(signal.SIGHUP)
        life.send(signal.SIGUSR1)

    async def _again(self, fault: Fault) -> None:
        await asyncio.sleep(fault.seconds)
        life = await self._site.start(fault.target)
        self.sky.set(life.weather)

    # -- streams and clients -----------------------------------------------------------------------------

    async def _cut(self, fault: Fault) -> None:
        self._site.proxies[fault.target].cut()

    async def _stall(self, fault: Fault) -> None:
        proxy = self._site.proxies[fault.target]
        proxy.stall()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            proxy.resume()

    async def _kill_client(self, fault: Fault) -> None:
        client = self._site.clients[fault.target]
        client.process.kill()
        await client.process.wait()
        if client.listening is not None:
            await client.listening
        await asyncio.sleep(fault.seconds)
        await self._site.start_client(fault.target)

    async def _stop_client(self, fault: Fault) -> None:
        process = self._site.clients[fault.target].process
        process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
