"""A prefill and decode pair in simulated time, that takes exactly what its tables say, and a loop whose time jumps."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hawk.bench.load_pair import Spoken

BUDGET = 2048
"""Tokens of a step of prefill."""


SLICE = 0.004
"""Seconds after which a side looks again whether the other works."""


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """Waits for nothing: the loop's time moves on by what it would have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("the loop would wait for good")
        self.now += max(0.0, timeout)
        return super().select(0)


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop for what needs no input: hours of it take as long as its callbacks."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def hog(self, seconds: float) -> None:
        """Something keeps the loop busy for so long."""
        self._jumping.now += seconds


class FakePair:
    """As vLLM goes about it: steps, of prompts up to `BUDGET` tokens or of one token for each of a batch.

    prefill(tokens), fetch(tokens), step(batch)  seconds; either side is `slowed` times as slow while the other works
    rest                                         seconds of HTTP, in front of the prefill

    A fetch is as much slower while a prompt is computed.
    """

    def __init__(
        self,
        prefill: Callable[[int], float],
        fetch: Callable[[int], float],
        step: Callable[[int], float],
        rest: float = 0.0,
        slowed: float = 1.0,
    ) -> None:
        self._prefill, self._fetch, self._step, self._rest, self._slowed = prefill, fetch, step, rest, slowed
        self._prompts: deque[list[Any]] = deque()
        self._prefiller: asyncio.Task[None] | None = None
        self._joining: list[tuple[Spoken, int, asyncio.Event]] = []
        self._decoder: asyncio.Task[None] | None = None
        self.busy = {"prefill": False, "decode": False}
        self.counted: dict[tuple[str, str], float] = {}
        self.asked: list[tuple[str, int, int]] = []

    def _count(self, side: str, name: str, seconds: float) -> None:
        for of, by in (("sum", seconds), ("count", 1)):
            key = side, f"{name}_{of}"
            self.counted[key] = self.counted.get(key, 0) + by

    async def counts(self, side: str, names: Sequence[str]) -> dict[str, float]:
        return {name: self.counted.get((side, name), 0.0) for name in names}

    async def _work(self, side: str, seconds: float) -> float:
        """Takes so long, or longer beside the other side; how long it was."""
        other = "decode" if side == "prefill" else "prefill"
        self.busy[side] = True
        took = await self._stretched(other, seconds)
        self.busy[side] = False
        return took

    async def _stretched(self, by: str, seconds: float) -> float:
        """Takes so long, or longer while that side works; how long it was."""
        if self._slowed == 1.0:
            await asyncio.sleep(seconds)
            return seconds
        took, left = 0.0, seconds
        while left > 1e-9:
            stretch = self._slowed if self.busy[by] else 1.0
            part = min(left * stretch, SLICE)
            await asyncio.sleep(part)
            took += part
            left -= part / stretch
        return took

    async def stream(self, way: str, prompt: Sequence[int], tokens: int, spoken: Spoken) -> None:
        clock = asyncio.get_running_loop().time
        spoken.sent = clock()
        self.asked.append((way, len(prompt), tokens))
        if way != "decode":
            if way == "proxy":
                await asyncio.sleep(self._rest)
            computed = asyncio.Event()
            self._prompts.append([len(prompt), computed, None])
            if self._prefiller is None or self._prefiller.done():
                self._prefiller = asyncio.ensure_future(self._compute())
            await computed.wait()
            if way == "prefill":
                spoken.times.append(clock())
                return
            self._count(
                "decode", "hawk_fetch_seconds", await self._stretched("prefill", self._fetch(len(prompt)))
            )
            self.counted["decode", "hawk_fetched_total"] = (
                self.counted.get(("decode", "hawk_fetched_total"), 0) + 1
            )
        ended = asyncio.Event()
        entry = (spoken, tokens, ended)
        self._joining.append(entry)
        if self._decoder is None or self._decoder.done():
            self._decoder = asyncio.ensure_future(self._decode())
        try:
            await ended.wait()
        finally:
            ended.set()

    async def _compute(self) -> None:
        """Prompts in their order; the last one of a step may have only a part of itself in it."""
        clock = asyncio.get_running_loop().time
        while self._prompts:
            room, done, began = BUDGET, [], clock()
            for entry in self._prompts:
                part = min(room, entry[0])
                if not part:
                    break
                entry[2] = began if entry[2] is None else entry[2]
                entry[0] -= part
                room -= part
                done += [entry] * (entry[0] == 0)
            await self._work("prefill", self._prefill(BUDGET - room))
            for entry in done:
                self._prompts.remove(entry)
                self._count("prefill", "request_prefill_time_seconds", clock() - entry[2])
                entry[1].set()

    async def _decode(self) -> None:
        running: list[tuple[Spoken, int, asyncio.Event]] = []
        while self._joining or running:
            new, self._joining = self._joining, []
            running += new
            took = await self._work("decode", self._step(len(running)))
            now = asyncio.get_running_loop().time()
            for _ in new:
                self._count("decode", "request_prefill_time_seconds", took)
            for spoken, tokens, ended in running:
                if ended.is_set():
                    continue  # whoever asked has left
                spoken.times.append(now)
                if len(spoken.times) == tokens:
                    ended.set()
            running = [entry for entry in running if not entry[2].is_set()]
