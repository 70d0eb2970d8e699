"""Every transport that can be used here, moving the same bytes, beside the engine alone where it stands on one.

From one shared buffer into another, between two processes, as one segment, as 512 KB segments, and as 2 KB segments
dealt over eight parts of the target, which is how a scattered cache looks.  An engine alone is handed the same
segments, all at once, with nothing of HAWK around it; and, beside the 2 KB segments, the long ranges that HAWK makes
of them, which then lie where they arrived.  `nixl` is measured as it comes (through shared memory on one host), and
over TCP by READs and by WRITEs: these the other process is asked for, and its notice says that they are over.

JSON, seconds and bytes throughout; a *sample* is as in `hawk.bench.transfer`:

    machine      as in `hawk.bench.transfer`
    runs         measured runs of everything; one more came first
    left_out     by transport: why it cannot be used here
    sizes        list of {asked, bytes, sockets, memcpy, ways}; the baselines and `hawk`, `alone`, `joined` are samples
      ways         by way, then by pieces ("one", "512 KB", "2 KB"): {hawk, alone, joined, over_alone, over_joined};
                   those of an engine only where there is one, `joined` only for "2 KB"
    correct      true: what arrived was compared byte for byte (a wrong byte is an error instead)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import uvloop
from rich.table import Table
from rich.text import Text

from hawk.bench import bytes_alone
from hawk.bench.engine_alone import Alone, stands_on_one
from hawk.bench.samples import Samples, machine, of_runs, ratio
from hawk.bench.serving import Served
from hawk.errors import InternalError, InvalidArgument, NotViable
from hawk.memory import shared
from hawk.memory.region import Region, Segments
from hawk.transports import registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from hawk.bench.serving import Ways
    from hawk.memory.region import I64, U8
    from hawk.memory.shared import SharedBuffer

SIZES = (80_000_000,)
RUNS = 5
LONG = 512 << 10
CHUNK = 8 << 20
"""Bytes of the ranges that HAWK makes of short pieces: a transport's `chunk`."""

ONE, PIECES, SHORT = "one", "512 KB", "2 KB"
GOALS = {PIECES: 0.95, SHORT: 5.0}
"""Parts of the engine's own rate."""

_TIMEOUT = 120.0

_VARIANTS: dict[str, Ways] = {
    "nixl": {
        "nixl": {},
        "nixl+read": {"tls": "tcp", "direction": "pull"},
        "nixl+write": {"tls": "tcp", "direction": "push"},
    }
}


@dataclass
class SizeResult:
    """Everything that was measured of one size; `alone` and `joined` have the engines' own samples."""

    asked: int
    nbytes: int
    baselines: dict[str, Samples]
    hawk: dict[tuple[str, str], Samples]
    alone: dict[tuple[str, str], Samples] = field(default_factory=dict)
    joined: dict[str, Samples] = field(default_factory=dict)

    def _told(self, way: str, what: str) -> dict[str, object]:
        ours = self.hawk[way, what]
        told: dict[str, object] = {"hawk": ours.to_dict()}
        if (way, what) in self.alone:
            alone = self.alone[way, what]
            told |= {"alone": alone.to_dict(), "over_alone": ratio(ours, alone)}
        if what == SHORT and way in self.joined:
            joined = self.joined[way]
            told |= {"joined": joined.to_dict(), "over_joined": ratio(ours, joined)}
        return told

    def to_dict(self) -> dict[str, object]:
        """As in the module's description."""
        ways = dict.fromkeys(way for way, _ in self.hawk)
        return {
            "asked": self.asked,
            "bytes": self.nbytes,
            **{name: samples.to_dict() for name, samples in self.baselines.items()},
            "ways": {way: {what: self._told(way, what) for what in (ONE, PIECES, SHORT)} for way in ways},
        }


@dataclass
class EnginesResult:
    """Outcome of `run`; `left_out` are the transports that cannot be used here, with the reason."""

    runs: int
    left_out: dict[str, str]
    sizes: list[SizeResult] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """As in the module's description."""
        return {
            "machine": machine(),
            "runs": self.runs,
            "left_out": self.left_out,
            "sizes": [size.to_dict() for size in self.sizes],
            "correct": True,
        }


def run(sizes: Sequence[int] = SIZES, runs: int = RUNS, quick: bool = False) -> EnginesResult:
    """Measures every transport that can be used here; `quick` is one run of 8 MB.

    Raises `InvalidArgument` for sizes or runs that are none, `InternalError` for a way that moved wrongly.
    """
    if runs < 1:
        raise InvalidArgument("nothing to measure", field="runs", got=runs, expected="1 or more")
    for asked in sizes:
        if asked < 1:
            raise InvalidArgument("nothing to move", field="sizes", got=asked, expected="1 byte or more")
    if quick:
        sizes, runs = (8_000_000,), 1
    ways, left_out = _ways()
    result = EnginesResult(runs, left_out)
    for asked in sizes:
        nbytes = max(1, round(asked / LONG)) * LONG
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result.sizes.append(runner.run(_size(asked, nbytes, ways, runs)))
    return result


def _ways() -> tuple[Ways, dict[str, str]]:
    """What is measured, and what cannot be."""
    ways: Ways = {}
    left_out: dict[str, str] = {}
    for name, verdict in registry.survey().items():
        if not verdict.ok:
            left_out[name] = verdict.reason
            continue
        for way, settings in _VARIANTS.get(name, {name: {}}).items():
            try:
                asyncio.run(_starts(way, settings))
            except NotViable as error:
                left_out[way] = str(error)
            else:
                ways[way] = settings
    return ways, left_out


async def _starts(way: str, settings: dict[str, str]) -> None:
    """Raises `NotViable` for a transport that cannot serve memory of the host from here."""
    name = way.partition("+")[0]
    made = registry.make(name, registry.configure(name, settings) if settings else None)
    try:
        await made.start()
        if made.shadow is not None:
            raise NotViable("it serves memory of its own, not this")
    finally:
        await made.close()


async def _size(asked: int, nbytes: int, ways: Ways, runs: int) -> SizeResult:
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(shared.alloc(nbytes, name="bench-source"))
        target = stack.enter_context(shared.alloc(nbytes, name="bench-target"))
        bytes_alone.scramble(source.array)
        async with Served(source, ways) as served:
            rounds = _Rounds(asked, source, target.array, served, ways)
            for way, settings in ways.items():
                if stands_on_one(way.partition("+")[0]):
                    write = settings.get("direction") == "push"
                    alone = Alone(source, target.array, way, settings, write=write)
                    rounds.engine(way, stack.enter_context(alone))
            await rounds.run(runs)
            return rounds.result


class _Rounds:
    """Everything that is measured of one size, in turn."""

    def __init__(self, asked: int, source: SharedBuffer, target: U8, served: Served, ways: Ways) -> None:
        self._source, self._target = source.array, target
        nbytes = source.nbytes
        self._shapes = {ONE: _even(nbytes, nbytes), PIECES: _even(nbytes, LONG), SHORT: _dealt(nbytes)}
        baselines = {name: Samples(nbytes) for name in (bytes_alone.SOCKETS, bytes_alone.MEMCPY)}
        self.result = SizeResult(asked, nbytes, baselines, {})
        self._measured: list[tuple[Samples, Callable[[], Awaitable[None]], Segments, str]] = []

        async def sockets() -> None:
            served.receive(target)

        async def memcpy() -> None:
            np.copyto(target, self._source)

        self._measured.append((baselines[bytes_alone.SOCKETS], sockets, self._shapes[ONE], "sockets"))
        self._measured.append((baselines[bytes_alone.MEMCPY], memcpy, self._shapes[ONE], "memcpy"))
        regions = [Region("bench-target", target)]

        def over(way: str, rows: Segments) -> Callable[[], Awaitable[None]]:
            return lambda: served.links[way].read(served.keys[way], rows, regions, timeout=_TIMEOUT)

        for way in ways:
            for what, rows in self._shapes.items():
                samples = self.result.hawk[way, what] = Samples(nbytes)
                self._measured.append((samples, over(way, rows), rows, f"{way}, {what}"))

    def engine(self, way: str, alone: Alone) -> None:
        """Measures an engine beside the way that stands on it, with the same pieces and with joined ones."""

        def move(rows: Segments) -> Callable[[], Awaitable[None]]:
            async def moved() -> None:
                alone.move(rows.local, rows.remote, rows.nbytes)

            return moved

        for what, rows in self._shapes.items():
            samples = self.result.alone[way, what] = Samples(self.result.nbytes)
            self._beside(f"{way}, {what}", samples, move(rows), rows)
        joined = self.result.joined[way] = Samples(self.result.nbytes)
        rows = _even(self.result.nbytes, CHUNK)
        self._beside(f"{way}, {SHORT}", joined, move(rows), rows)

    def _beside(
        self, label: str, samples: Samples, call: Callable[[], Awaitable[None]], rows: Segments
    ) -> None:
        """Right behind what it is compared with: what else the machine does hits neighbours alike."""
        at = max(i for i, (_, _, _, name) in enumerate(self._measured) if name.startswith(label))
        self._measured.insert(at + 1, (samples, call, rows, f"{label}, the engine alone"))

    async def run(self, runs: int) -> None:
        """So many rounds, after one that warms up and is compared."""
        for turn in range(runs + 1):
            for samples, call, rows, label in self._measured:
                if turn == 0:
                    self._target[:] = 0
                began = time.perf_counter()
                await call()
                took = time.perf_counter() - began
                if turn:
                    samples.seconds.append(took)
                else:
                    self._compare(rows, label)

    def _compare(self, rows: Segments, label: str) -> None:
        for local, remote, nbytes in zip(
            rows.local.tolist(), rows.remote.tolist(), rows.nbytes.tolist(), strict=True
        ):
            if not np.array_equal(
                self._target[local : local + nbytes], self._source[remote : remote + nbytes]
            ):
                raise InternalError("the bytes that arrived are not those that were sent", way=label)


def _even(nbytes: int, piece: int) -> Segments:
    """The buffer in order, in pieces."""
    at = np.arange(0, nbytes, piece, dtype=np.int64)
    return _segments(at, at, np.minimum(piece, nbytes - at))


def _dealt(nbytes: int) -> Segments:
    """2 KB pieces, dealt over parts of the target in turn."""
    count = nbytes // bytes_alone.PIECE
    number = np.arange(count, dtype=np.int64)
    each = count // bytes_alone.CHANNELS
    place = number % bytes_alone.CHANNELS * each + number // bytes_alone.CHANNELS
    return _segments(
        place * bytes_alone.PIECE, number * bytes_alone.PIECE, np.full(count, bytes_alone.PIECE, np.int64)
    )


def _segments(local: I64, remote: I64, nbytes: I64) -> Segments:
    return Segments(np.zeros(len(nbytes), np.int32), local, remote, nbytes)


# -- telling -------------------------------------------------------------------------------------------------


def _rates(samples: Samples) -> tuple[str, str]:
    """The median, and what all of them lie between."""
    median, slowest, fastest = samples.told()
    return median, f"{slowest}-{fastest}"


def render(result: EnginesResult, console: Console) -> None:
    """Prints one table, and what was left out."""
    title = (
        f"The same bytes over every transport; {of_runs(result.runs)}, GB/s.  "
        "Goal: our rate by that of the engine alone"
    )
    # Narrow enough for 80 columns.
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    headings = ("MB", "way", "pieces", "GB/s", "between", "engine", "joined", "ratio", "goal")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i in (1, 2) else "right", no_wrap=True)
    for size in result.sizes:
        label = f"{size.nbytes / 1e6:.1f}"
        for name, samples in size.baselines.items():
            table.add_row(label, name, ONE, *_rates(samples))
            label = ""
        for (way, what), ours in size.hawk.items():
            alone, joined = size.alone.get((way, what)), size.joined.get(way) if what == SHORT else None
            part = None if alone is None else ratio(ours, alone)
            goal = GOALS.get(what)
            table.add_row(
                "",
                way if what == ONE else "",
                what,
                *_rates(ours),
                "" if alone is None else alone.told()[0],
                "" if joined is None else joined.told()[0],
                ""
                if part is None
                else Text(f"{part:.2f}", "green" if goal is None or part >= goal else "yellow"),
                "" if part is None or goal is None else f"{goal:.2f}",
            )
        table.add_section()
    console.print(table)
    for name, reason in result.left_out.items():
        console.print(Text(f"{name} left out: {reason}", "yellow"))
