"""What has to be true after a storm."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
from typing import TYPE_CHECKING

from hawk.errors import HawkError
from tests.chaos import schedule
from tests.chaos.report import BrokenPromise
from tests.chaos.site import CACHES, DECODE, LEASE, PREFILL, AgentLife
from tests.chaos.weather import CALM, Sky

if TYPE_CHECKING:
    from collections.abc import Callable

    from hawk.control.messages import Status
    from tests.chaos.director import Director

STOPPED_LIMIT = 3 * LEASE + 6
"""Seconds within which what a silent peer holds is back or in quarantine: its lease, and time to tell."""

IDLE_LIMIT = 30.0
ATTACH_LIMIT = 40.0
TRIES = 3

MORE_DESCRIPTORS, MORE_THREADS, MORE_MEMORY = 16, 6, 24.0
"""What a life may grow by over its first measurement: streams that are made anew; MiB of books that are bounded."""


class Calm:
    """The checks between storms.  Raises `BrokenPromise` for what would make all later checks pointless."""

    def __init__(self, director: Director, dice: random.Random) -> None:
        self._director = director
        self._site = director.site
        self._report = director.report
        self._dice = dice
        self._owned: dict[str, tuple[tuple[str, int], ...]] = {}
        self._read: dict[str, int] = {}
        self._good = 1 << 28

    async def come(self) -> None:
        """One calm, from the end of a storm to the last check."""
        await self._one_stands_still()
        self._site.set_weather(CALM)
        await self._all_ended()
        await self._all_attached()
        for name in self._site.agents:
            await self._idle(name)
        await self._audits()
        await self._good_transfers()
        for name, life in self._site.agents.items():
            await self._idle(name)
            await self._measure(life)
        self._read_logs()

    async def down(self) -> None:
        """Every agent ends when it is told to."""
        for life in self._site.agents.values():
            life.send(signal.SIGTERM)
        for life in self._site.agents.values():
            status = await self._site.ended(life)
            if status != 0:
                self._report.broke(f"{life.label} ended with status {status} after SIGTERM")
        self._read_logs()

    # -- the end of a storm ------------------------------------------------------------------------------

    async def _one_stands_still(self) -> None:
        """While a decode agent is stopped nothing of it stays in use: it is back, or in quarantine.

        Nor of the other, whose clients give up: what tells the prefill side so may be lost.  The offers stay, so
        that nothing but the lease ends what nobody wants any more.
        """
        still = self._site.agents[self._dice.choice(DECODE)]
        # In the middle of chunks: a reader of shared memory cannot be shut out.
        Sky(slow=1.0, slowest=0.5).set(still.weather)
        for source, target in self._pairs(PREFILL, (still.name,)):
            self._director.begin(schedule.good(self._number(), source, target))
        await asyncio.sleep(0.3)
        still.send(signal.SIGSTOP)
        try:
            self._finish(DECODE)
            for name in PREFILL:
                status = await self._until(
                    name,
                    lambda s: s.serving == 0 and s.pools[0].owned == 0,
                    STOPPED_LIMIT,
                    f"while {still.label} stood still",
                )
                self._report.quarantined += status.pools[0].quarantined
        finally:
            still.send(signal.SIGCONT)

    def _finish(self, *sides: tuple[str, ...]) -> None:
        """Every client of these agents gives up what it still has under way."""
        for name in itertools.chain(*sides):
            for client in self._site.clients_of(name):
                client.tell(-1, op="finish")

    async def _all_ended(self) -> None:
        jobs = self._director.jobs
        end = asyncio.get_running_loop().time() + IDLE_LIMIT
        while jobs and (left := end - asyncio.get_running_loop().time()) > 0:
            self._finish(DECODE, PREFILL)
            await asyncio.wait(jobs, timeout=min(left, 1.0))
        if jobs:
            names = ", ".join(
                f"{r.name} ({' and '.join(r.prefill)} to {' and '.join(r.decode)})" for r in jobs.values()
            )
            raise BrokenPromise(
                f"transfers that never ended, {IDLE_LIMIT:g} s after they were ended: {names}"
            )

    async def _all_attached(self) -> None:
        for life in self._site.agents.values():
            if life.process.poll() is not None:
                raise BrokenPromise(f"{life.label} died by itself, with status {life.process.returncode}")
        for client in list(self._site.clients.values()):
            try:
                async with asyncio.timeout(ATTACH_LIMIT):
                    await client.attached.wait()
            except TimeoutError:
                raise BrokenPromise(f"the client {client.name} could not attach to its agent again") from None

    # -- pools -------------------------------------------------------------------------------------------

    async def _until(self, name: str, good: Callable[[Status], bool], limit: float, when: str) -> Status:
        """Asks an agent until its status is as wanted."""
        loop = asyncio.get_running_loop()
        end = loop.time() + limit
        last: Status | HawkError | None = None
        while loop.time() < end:
            try:
                last = status = await self._director.status(name)
                if good(status):
                    return status
            except HawkError as error:
                last = error
            await asyncio.sleep(0.05)
        raise BrokenPromise(f"{self._site.agents[name].label}, {when}, after {limit:g} s: {_shown(last)}")

    async def _idle(self, name: str) -> None:
        clients = len(self._site.clients_of(name))
        caches = clients * CACHES[name]

        def idle(status: Status) -> bool:
            busy = (
                status.offers,
                status.serving,
                status.fetching,
                status.blocks_owned,
                status.blocks_quarantined,
            )
            if any(busy) or status.caches != caches:
                return False
            pools = tuple((p.name, p.owned + p.quarantined) for p in status.pools)
            return pools == self._owned.get(name, pools) and pools[0][1] == 0

        status = await self._until(name, idle, IDLE_LIMIT, f"with {clients} idle clients")
        self._owned.setdefault(name, tuple((p.name, p.owned + p.quarantined) for p in status.pools))

    async def _audits(self) -> None:
        """No byte has landed where no job was."""
        for name in DECODE:
            for client in self._site.clients_of(name):
                news = await client.tell(-2, op="audit").get()
                if news.get("wrong"):
                    self._report.broke(f"{client.name}: {news['wrong']}")

    # -- whether it still works --------------------------------------------------------------------------

    async def _good_transfers(self) -> None:
        for source, target in self._pairs(PREFILL, DECODE):
            await self._good_transfer(source, target)

    def _pairs(self, prefill: tuple[str, ...], decode: tuple[str, ...]) -> list[tuple[tuple[str, ...], str]]:
        """Each of the clients of these agents with each of the others; also with one of each, for a part from both."""
        sources, targets = (
            [[c.name for c in self._site.clients_of(name)] for name in side] for side in (prefill, decode)
        )
        froms = [(name,) for names in sources for name in names] + [tuple(names[0] for names in sources)]
        return list(itertools.product(froms, itertools.chain(*targets)))

    def _number(self) -> int:
        self._good += 1
        return self._good

    async def _good_transfer(self, prefill: tuple[str, ...], decode: str) -> None:
        """One that has to succeed; a machine that is busy with other things may cost it a lease once or twice."""
        endings: list[str] = []
        self._report.good += 1
        while len(endings) < TRIES:
            endings += await self._director.begin(schedule.good(self._number(), prefill, decode))
            if endings[-1] == "ready" or self._report.broken:
                return
            self._report.again += 1
        raise BrokenPromise(f"in calm weather {' and '.join(prefill)} to {decode} ended {', '.join(endings)}")

    async def _measure(self, life: AgentLife) -> None:
        """Descriptors, threads and memory are as they were after the first jobs of this process."""
        limits = (MORE_DESCRIPTORS, MORE_THREADS, MORE_MEMORY)
        if life.warm is None:
            life.warm = life.usage()
            return
        for _ in range(50):
            grown = [now - then for now, then in zip(life.usage(), life.warm, strict=True)]
            if all(by <= most for by, most in zip(grown, limits, strict=True)):
                break
            await asyncio.sleep(0.1)
        else:
            self._report.broke(
                f"{life.label} grew by {grown[0]:g} descriptors, {grown[1]:g} threads, {grown[2]:.1f} MiB since its "
                f"first jobs; {limits} are allowed"
            )
        for what, by in zip(("descriptors", "threads", "MiB"), grown, strict=True):
            self._report.grew(what, by)

    def _read_logs(self) -> None:
        """No agent has met a fault of its own."""
        for life in self._site.lives:
            with life.log.open(errors="replace") as file:
                file.seek(self._read.get(life.label, 0))
                for line in file:
                    if line.endswith("\n") and _is_fault(line):
                        self._report.broke(f"{life.log.name}: {line.strip()[:600]}")
                self._read[life.label] = file.tell()


def _is_fault(line: str) -> bool:
    if not line.startswith("{"):
        return True  # an agent writes JSON; anything else is a traceback or a library's last words
    return str(json.loads(line).get("level")) in ("error", "critical")


def _shown(last: Status | HawkError | None) -> str:
    if last is None or isinstance(last, HawkError):
        return f"no status ({last})"
    pools = ", ".join(
        f"{p.name} {p.free} free {p.owned} owned {p.quarantined} quarantined" for p in last.pools
    )
    return (
        f"{last.serving} served, {last.fetching} fetched, {last.offers} offers, {last.caches} caches, "
        f"{last.blocks_owned} blocks owned, {last.blocks_quarantined} quarantined; {pools}"
    )
