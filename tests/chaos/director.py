"""Storms and calms: the transfers and the faults of a run, and what has to be true after each storm.

A storm starts transfers as fast as the agents take them, and disturbs everything.  A calm ends what is left, then
asserts: with one decode agent standing still, that its ranges came back or are quarantined; with everybody back,
that every job has ended with a name, that every pool is as it was, that no byte landed where no job was, that each
pair of agents can still transfer, and that neither descriptors nor threads nor memory grew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from typing import TYPE_CHECKING, Any

import hawk
from tests.chaos import schedule
from tests.chaos.calm import Calm
from tests.chaos.mishaps import Mishaps
from tests.chaos.report import BrokenPromise, Report

if TYPE_CHECKING:
    from hawk.control.messages import Status
    from tests.chaos.schedule import Request
    from tests.chaos.site import ChaosSite, ClientLife

ROUND = 12.0
"""Seconds of a storm."""

MOST = 14
"""Transfers under way at a time."""

UNNAMED = ("error", "internal", "job", "control", "transport", "memory", "layout")
"""Codes of endings that say nothing: the bases of the error tree, and bugs."""

LIES = (
    *("bad-frame", "version-mismatch", "invalid-argument", "unknown-cache", "registration-failed", "config"),
    *("parts-mismatch", "verification-failed", "unverifiable"),
)
"""Codes of endings that somebody would have to do something wrong for, and nobody does."""

USED_NOTHING = ("lease-expired", "transfer-failed", "range-busy")
"""Codes of endings that a decode agent decided, and not the death of one: of several parts no offer was used up."""


class Director:
    """Runs one site through storms and calms; `report` is filled as it goes."""

    def __init__(self, site: ChaosSite, report: Report) -> None:
        self.site = site
        self.report = report
        self.jobs: dict[asyncio.Task[list[str]], Request] = {}
        self._numbers = itertools.count(1)
        self._requests = schedule.requests(report.seed, site.counts)
        self._faults = schedule.faults(report.seed, gentle=bool(site.broken))
        self._skies = schedule.skies(report.seed, lost_words=bool(site.broken))
        self._mishaps = Mishaps(site, report)
        self._calm = Calm(self, random.Random(f"{report.seed}/calm"))

    async def run(self) -> None:
        """Until the time is over or a promise is broken."""
        try:
            await self.site.open()
            await self._calm.come()
            until = time.monotonic() + self.report.minutes * 60
            while (left := until - time.monotonic()) > 0 and not self.report.broken:
                self.report.rounds += 1
                await self._storm(min(left, ROUND))
                if not self.report.broken:
                    await self._calm.come()
            if not self.report.broken:
                await self._calm.down()
        except BrokenPromise as error:
            self.report.broke(str(error))
        finally:
            await self._mishaps.close()
            for task in list(self.jobs):
                task.cancel()
            await asyncio.gather(*self.jobs, return_exceptions=True)
            self.report.lives = len(self.site.lives)
            for life in self.site.lives:
                self.report.count_frames(life)
            self.report.carried = sum(proxy.carried for proxy in self.site.proxies.values())
            await self.site.close()

    async def status(self, agent: str) -> Status:
        """What an agent says of itself."""
        async with hawk.connect(self.site.local(agent)) as client:
            return await client.status()

    # -- storms ------------------------------------------------------------------------------------------

    async def _storm(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        self._mishaps.sky = next(self._skies)
        self.site.set_weather(self._mishaps.sky)
        upset = loop.create_task(self._upset())
        try:
            while loop.time() < until and not self.report.broken:
                if len(self.jobs) < MOST:
                    request = next(self._requests)
                    if all(
                        self.site.clients[name].attached.is_set()
                        for name in (*request.prefill, *request.decode)
                    ):
                        self.begin(request)
                    await asyncio.sleep(0.03)
                else:
                    left = until - loop.time()
                    await asyncio.wait(self.jobs, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            upset.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await upset
        await self._mishaps.over()

    async def _upset(self) -> None:
        for fault in self._faults:
            await asyncio.sleep(fault.after)
            self._mishaps.begin(fault)

    # -- transfers ---------------------------------------------------------------------------------------

    def begin(self, request: Request) -> asyncio.Task[list[str]]:
        """Starts a transfer; its result are the endings of its fetches."""
        task = asyncio.get_running_loop().create_task(self._transfer(request))
        self.jobs[task] = request
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[list[str]]) -> None:
        del self.jobs[task]
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.report.broke(f"the chaos run itself failed: {type(fault).__name__}: {fault}")

    async def _transfer(self, request: Request) -> list[str]:
        prefill = [self.site.clients[name] for name in request.prefill]
        fetches = []
        if request.early:
            by_name = {"request": request.name, "sources": [client.agent for client in prefill], "wait": True}
            fetches.append(self._fetch(request, request.decode[0], **by_name))
            if not request.offered:
                return await asyncio.gather(*fetches)
            await asyncio.sleep(request.gap)
        offers = [self._offer(request, client) for client in prefill]
        news = [await said.get() for _, said in offers]
        if not request.early and all(each["event"] == "offered" for each in news):
            await asyncio.sleep(request.gap)
            tickets = [each["ticket"] for each in news]
            fetches += [self._fetch(request, name, tickets=tickets) for name in request.decode]
        endings = list(await asyncio.gather(*fetches))
        outcomes = []
        for client, (number, said), each in zip(prefill, offers, news, strict=True):
            last = await said.get() if each["event"] == "offered" else each
            client.heard.pop(number, None)
            outcomes.append(last.get("outcome", ""))
            code = last.get("code", "")
            self.report.offers[outcomes[-1] or code] += 1
            if _wrong(code):
                self.report.broke(f"the offer of {request.name} by {client.name} ended with {code}")
        self._judge(request, outcomes, endings)
        return endings

    def _offer(self, request: Request, client: ClientLife) -> tuple[int, asyncio.Queue[dict[str, Any]]]:
        number = next(self._numbers)
        return number, client.tell(
            number,
            op="offer",
            request=request.name,
            content=request.content,
            part=len(request.prefill) > 1,
            tokens=request.tokens,
            written=request.written,
            layers=request.layers,
            pause=request.pause,
            ttl=request.ttl,
            withdraw=request.withdraw,
            consumer=self.site.clients[request.decode[0]].agent if request.early else "",
            consumers=request.consumers,
            seed=request.seed,
        )

    def _fetch(self, request: Request, name: str, /, **how: Any) -> asyncio.Task[str]:
        return asyncio.get_running_loop().create_task(self._fetched(request, name, **how))

    async def _fetched(self, request: Request, name: str, /, **how: Any) -> str:
        decode, number = self.site.clients[name], next(self._numbers)
        said = decode.tell(
            number,
            op="fetch",
            content=request.content,
            first=request.first,
            tokens=request.tokens - request.first,
            timeout=request.timeout,
            priority=request.priority,
            end=request.end,
            how=request.how,
            seed=request.seed,
            **how,
        )
        while (news := await said.get())["event"] != "over":
            self.report.broke(f"{request.name} at {name}: {news['what']}")
        decode.heard.pop(number, None)
        code: str = news["code"]
        self.report.endings[code] += 1
        if code in ("aborted", "cancelled") and news.get("at"):
            self.report.given_up[news["at"]] += 1
        if _wrong(code):
            self.report.broke(f"{request.name} at {name} ended with {code}: {news.get('reason', '')}")
        return code

    def _judge(self, request: Request, outcomes: list[str], endings: list[str]) -> None:
        """What both sides say of one transfer has to fit."""
        ready = endings.count("ready")
        self.report.parts += ready * (len(request.prefill) > 1)
        if ready > request.consumers:
            self.report.broke(
                f"{request.name} is ready {ready} times, but was offered to {request.consumers}"
            )
        parts = len(request.prefill) > 1
        # Of a prefill side that died nothing is known; of several parts all were held, and the last word may be lost.
        refused = [outcome for outcome in outcomes if outcome not in ("", "consumed")]
        if ready == request.consumers and refused and not parts:
            self.report.broke(
                f"{request.name} is ready, but its offer ended {refused[0]}: nobody confirmed that the lease held"
            )
        if parts and "consumed" in outcomes and endings and all(code in USED_NOTHING for code in endings):
            self.report.broke(f"{request.name} failed ({', '.join(endings)}), but used up a part's offer")


def _wrong(code: str) -> bool:
    return code in UNNAMED or code in LIES or code.startswith("bug")
