"""The bytes alone: over each transport, in one piece and in many, beside plain sockets and a memcpy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hawk.bench.samples import Samples
from hawk.bench.serving import Served
from hawk.errors import InternalError
from hawk.memory import shared
from hawk.memory.region import Region, Segments

if TYPE_CHECKING:
    from hawk.bench.serving import Ways
    from hawk.memory.region import I64, U8

PIECE = 2048
"""Bytes of the small pieces: one tile of 16-bit elements, or a token's head of a few."""

SOCKETS, MEMCPY = "sockets", "memcpy"

CHANNELS = 8
"""Parts of the target over which the small pieces are dealt."""

_TIMEOUT = 120.0
_STEP = 16 << 20


@dataclass(frozen=True)
class BytesAlone:
    """Samples by way: `sockets`, `memcpy`, and by transport `(name, "one")`, `(name, "pieces")`, `(name, "random")`.

    `one` is one segment; `pieces` are small segments dealt over CHANNELS parts of the target in turn, as pages are
    over a device's channels; `random` are the same in random order, which no plan makes: the worst for caches.
    """

    baselines: dict[str, Samples]
    transports: dict[tuple[str, str], Samples]


async def measure(nbytes: int, transports: tuple[str, ...] | Ways, runs: int) -> BytesAlone:
    """Moves `nbytes` (a multiple of PIECE) from one shared buffer into another, each way in turn, `runs` times.

    transports    names, or settings by way as `Served` takes them; results are named alike

    A first round warms up and is compared byte by byte; it raises `InternalError` for a way that moved wrongly.
    """
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(shared.alloc(nbytes, name="bench-source"))
        target = stack.enter_context(shared.alloc(nbytes, name="bench-target"))
        scramble(source.array)
        async with Served(source, transports) as served:
            return await _rounds(source.array, target.array, served, tuple(transports), runs)


async def _rounds(
    source: U8, target: U8, served: Served, transports: tuple[str, ...], runs: int
) -> BytesAlone:
    region = [Region("bench-target", target)]
    nbytes = len(source)
    count = nbytes // PIECE
    number = np.arange(count, dtype=np.int64)
    # Where piece i goes; what does not make a whole round stays at the end.
    even = count // CHANNELS * CHANNELS
    dealt = np.where(number < even, number % CHANNELS * (even // CHANNELS) + number // CHANNELS, number)
    places = {"pieces": dealt, "random": np.random.default_rng(0).permutation(count).astype(np.int64)}
    segments = {"one": Segments.of([(0, 0, 0, nbytes)])}
    for what, place in places.items():
        segments[what] = Segments(
            np.zeros(count, np.int32), place * PIECE, number * PIECE, np.full(count, PIECE, np.int64)
        )

    async def sockets() -> None:
        served.receive(target)

    async def memcpy() -> None:
        np.copyto(target, source)

    def over(name: str, segments: Segments) -> Callable[[], Awaitable[None]]:
        return lambda: served.links[name].read(served.keys[name], segments, region, timeout=_TIMEOUT)

    ways: list[tuple[Samples, Callable[[], Awaitable[None]], I64 | None, str]] = []
    baselines = {SOCKETS: Samples(nbytes), MEMCPY: Samples(nbytes)}
    ways.append((baselines[SOCKETS], sockets, None, SOCKETS))
    ways.append((baselines[MEMCPY], memcpy, None, MEMCPY))
    results: dict[tuple[str, str], Samples] = {}
    for name in transports:
        for what, rows in segments.items():
            results[name, what] = Samples(nbytes)
            ways.append((results[name, what], over(name, rows), places.get(what), f"{name}, {what}"))
    for turn in range(runs + 1):
        for samples, way, went, label in ways:
            if turn == 0:
                target[:] = 0
            began = time.perf_counter()
            await way()
            took = time.perf_counter() - began
            if turn:
                samples.seconds.append(took)
            else:
                _compare(source, target, went, label)
    return BytesAlone(baselines, results)


def scramble(array: U8) -> None:
    """Fills an array so that every 8 bytes differ from all others."""
    words = array[: len(array) // 8 * 8].view(np.uint64)
    for at in range(0, len(words), _STEP // 8):
        part = np.arange(at, min(at + _STEP // 8, len(words)), dtype=np.uint64)
        words[at : at + len(part)] = part * np.uint64(0x9E3779B97F4A7C15)


def _compare(source: U8, target: U8, place: I64 | None, label: str) -> None:
    rows, got = source.reshape(-1, PIECE), target.reshape(-1, PIECE)
    for at in range(0, len(rows), _STEP // PIECE):
        end = min(at + _STEP // PIECE, len(rows))
        there = got[at:end] if place is None else got[place[at:end]]
        if not np.array_equal(there, rows[at:end]):
            raise InternalError("the bytes that arrived are not those that were sent", way=label)
