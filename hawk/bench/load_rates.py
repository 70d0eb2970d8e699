"""The rates that a simulator is fed with: what single requests take, and what each side takes beside the other.

Four steps, the first of which has one request at a time in the whole pair:

singles  prompts of each length, or nearly so, through the proxy: the engines' own counts of prefill and fetch, the
         client's time to the first token; what is left of that is HTTP, the proxy, and the order of things
steps    decode steps by the number of requests that decode together, at the workload's mean length.  This takes
         requests side by side, for a step of four cannot be had from one
beside   single requests through the proxy while so many others decode, and the others' steps during their prefills:
         what the sides take from each other where they share a machine
behind   single requests with a prompt behind them in the prefill engine's line: what their way to the first token takes
         while the next prefill goes on
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hawk.bench.load_client import prompt
from hawk.bench.load_pair import Spoken, settled
from hawk.bench.load_single import Beside, Calibration, Single, Step
from hawk.errors import InternalError

if TYPE_CHECKING:
    from hawk.bench.load_pair import Pair

PREFILLED = "request_prefill_time_seconds"
FETCHED = "hawk_fetch_seconds"
ANSWER = 4
"""Tokens of a single request's answer."""

STEPS = 40
"""Decode steps of a batch that are measured."""

MOST = 1024
"""Tokens of an answer that decodes while single requests are measured: it is cut off before."""

APART = 0.01
"""Seconds after a single request in which the one behind it is sent: the first has to be at the engine before it."""

BESIDE = 4
"""Requests that decode beside a single one, at most: more of them do not last until all lengths are measured."""

KEPT = 128
"""So many prompts later an engine has forgotten what it prepared for a length: vLLM keeps it for 32."""

_LOOK = 0.005

Tell = Callable[[str], None]


class Rates:
    """Measures them on a pair; prompts are drawn from `dice`.

    longest    tokens of a prompt, at most: more would not be computed in one step
    """

    def __init__(self, pair: Pair, vocabulary: int, dice: random.Random, longest: int = 1 << 30) -> None:
        self._pair, self._vocabulary, self._dice, self._longest = pair, vocabulary, dice, longest
        self._sent: deque[int] = deque(maxlen=KEPT)

    async def measure(
        self, lengths: Sequence[int], batches: Sequence[int], context: int, runs: int, tell: Tell
    ) -> Calibration:
        """All four; every length and batch goes once before, unmeasured."""
        found = Calibration()
        for length in lengths:
            await self.single(length)
        for run in range(runs):
            tell(f"single requests, {run + 1} of {runs}")
            found.singles += [await self.single(length) for length in self._mixed(lengths)]
        for batch in batches:
            tell(f"decode steps of {batch}")
            found.steps.append(await self.steps(batch, context))
        for batch in [batch for batch in batches if batch <= BESIDE]:
            tell(f"single requests beside {batch} that decode")
            found.beside += await self.beside(batch, context, self._mixed(lengths), max(1, runs // 2))
        for run in range(max(1, runs // 2)):
            tell(f"single requests before a prefill, {run + 1} of {max(1, runs // 2)}")
            found.behind += await self.behind(self._mixed(lengths), max(lengths))
        return found

    def _mixed(self, lengths: Sequence[int]) -> list[int]:
        return self._dice.sample(list(lengths), len(lengths))

    def _prompt(self, length: int) -> list[int]:
        return prompt(length, self._vocabulary, self._dice)

    def _new_prompt(self, length: int) -> list[int]:
        """One whose length is the nearest to that which none of the last `KEPT` has had.

        An engine may prepare for each number of tokens that it computes, and keep what it has prepared, as vLLM does on
        CPUs for products of matrices.  A workload's requests come in ever new lengths, so single ones have to as well.
        """
        near = (
            n for by in range(self._longest) for n in (length - by, length + by) if 0 < n <= self._longest
        )
        new = (n for n in near if n not in self._sent)
        found = next(new, None) or self._sent.popleft()  # where there are too few: what was longest ago
        self._sent.append(found)
        return self._prompt(found)

    async def _sums(self, side: str, names: Sequence[str]) -> dict[str, float]:
        return await self._pair.counts(side, [f"{name}_{of}" for name in names for of in ("sum", "count")])

    async def single(
        self, length: int, spoken: Spoken | None = None, sending: Callable[[], object] = lambda: None
    ) -> Single:
        """One request through the proxy; `spoken` has its times, `sending` is called just before it goes."""
        first = await self._sums("prefill", [PREFILLED])
        second = await self._sums("decode", [PREFILLED, FETCHED])
        spoken = Spoken(0.0) if spoken is None else spoken
        prompt = self._new_prompt(length)
        sending()
        await self._pair.stream("proxy", prompt, ANSWER, spoken)
        for side, before in (("prefill", first), ("decode", second)):
            await settled(self._pair, side, f"{PREFILLED}_count", before[f"{PREFILLED}_count"] + 1)
        first_then = await self._sums("prefill", [PREFILLED])
        second_then = await self._sums("decode", [PREFILLED, FETCHED])
        if second_then[f"{FETCHED}_count"] != second[f"{FETCHED}_count"] + 1:
            raise InternalError("the decode engine computed what was to be fetched", field=f"{length} tokens")
        return Single(
            input=length,
            first=spoken.times[0] - spoken.sent,
            prefill=first_then[f"{PREFILLED}_sum"] - first[f"{PREFILLED}_sum"],
            fetch=second_then[f"{FETCHED}_sum"] - second[f"{FETCHED}_sum"],
            step=second_then[f"{PREFILLED}_sum"] - second[f"{PREFILLED}_sum"],
            at=spoken.sent,
        )

    async def steps(self, batch: int, context: int) -> Step:
        """Steps of requests that decode together, with prompts of `context` tokens; prefill has nothing to do."""
        async with self._decoding(batch, context, STEPS + 2 * batch + 8) as streams:
            begun = asyncio.get_running_loop().time()
            while all(len(spoken.times) < STEPS + 2 for spoken in streams):
                await asyncio.sleep(_LOOK)
            # The first gap holds what was left of the last one's own prefill.
            gaps = [gap for spoken in streams for start, gap in _gaps(spoken) if start >= begun]
            until = asyncio.get_running_loop().time()
        return Step(
            batch=batch,
            context=context,
            seconds=statistics.fmean(gaps),
            gaps=len(gaps),
            at=begun,
            until=until,
        )

    async def beside(self, batch: int, context: int, lengths: Sequence[int], runs: int) -> list[Beside]:
        """Single requests of each length while so many others decode."""
        found: list[Single] = []
        windows: list[tuple[float, float]] = []
        async with self._decoding(batch, context, MOST) as streams:
            for length in [*lengths] * runs:
                spoken = Spoken(0.0)
                single = await self.single(length, spoken)
                if any(len(spoken.times) >= MOST for spoken in streams):
                    break  # fewer than `batch` have decoded beside it
                found.append(single)
                # HTTP before the prefill is in it, too: it is short, and nobody here knows where it ends.
                windows.append((spoken.sent, spoken.times[0] - single.fetch - single.step))
            gaps = [
                gap
                for spoken in streams
                for start, gap in _gaps(spoken)
                if any(since <= start and start + gap <= until for since, until in windows)
            ]
        others = statistics.fmean(gaps) if gaps else None
        return [Beside(batch=batch, others=others, one=single) for single in found]

    async def behind(self, lengths: Sequence[int], longest: int) -> list[Single]:
        """Single requests of each length, each with a prompt of the longest behind it; those that it outlasts."""
        found = []
        for length in lengths:
            before = (await self._sums("prefill", [PREFILLED]))[f"{PREFILLED}_count"]
            followers: list[asyncio.Future[None]] = []
            try:
                single = await self.single(length, sending=partial(self._send, longest, followers))
                if not followers[0].done():
                    found.append(single)
                await followers[0]
            finally:
                await _ended(*followers)
            await settled(self._pair, "prefill", f"{PREFILLED}_count", before + 2)
        return found

    def _send(self, length: int, sent: list[asyncio.Future[None]]) -> None:
        sent.append(asyncio.ensure_future(self._follow(length)))

    async def _follow(self, length: int) -> None:
        await asyncio.sleep(APART)
        await self._pair.stream("prefill", self._new_prompt(length), 1, Spoken(0.0))

    @contextlib.asynccontextmanager
    async def _decoding(self, batch: int, context: int, tokens: int) -> AsyncIterator[list[Spoken]]:
        """So many requests that the decode engine computes alone, once each has two tokens; they end with the block."""
        streams = [Spoken(0.0) for _ in range(batch)]
        tasks = [
            asyncio.ensure_future(self._pair.stream("decode", self._prompt(context), tokens, spoken))
            for spoken in streams
        ]
        try:
            while not all(len(spoken.times) >= 2 for spoken in streams):
                for task in tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(_LOOK)
            yield streams
        finally:
            faults = await _ended(*tasks)
        if faults:
            raise faults[0]


async def _ended(*tasks: asyncio.Future[Any]) -> list[Exception]:
    """Cancels what is not over; with what went wrong before, when all is."""
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    return [fault for fault in ended if isinstance(fault, Exception)]


def _gaps(spoken: Spoken) -> list[tuple[float, float]]:
    """When each step began, and its seconds."""
    return [(a, b - a) for a, b in zip(spoken.times, spoken.times[1:], strict=False)]
