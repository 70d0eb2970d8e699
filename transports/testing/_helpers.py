"""What tests of transports need: memory to serve, targets with canaries, segments at random, a gate, a device."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from hawk.memory.region import Region, Segments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.region import U8, ByteRanges

CANARY = 0xA5
"""What targets hold before a read."""

FRESH = 0xEE
"""What an arena is overwritten with after a revoke; patterns never contain it."""


def pattern(nbytes: int, seed: int = 0) -> U8:
    """Random bytes below 128, `uint8[nbytes]`: never `CANARY`, never `FRESH`."""
    return np.random.default_rng(seed).integers(0, 128, nbytes, dtype=np.uint8)


class SharedArena:
    """Memory that any transport can serve: a sealed memfd, mapped.  `close` gives the descriptor back."""

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.fd = os.memfd_create("hawk-contract", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        array = np.frombuffer(mmap.mmap(self.fd, nbytes), dtype=np.uint8)
        array[:] = pattern(nbytes, seed)
        self.region = Region("contract-arena", array, fd=self.fd)

    def close(self) -> None:
        """Closes the descriptor; the mapping goes with its last array."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Targets:
    """Regions to read into, each with canary bytes before, inside and after it."""

    PAD = 256

    def __init__(self, sizes: Sequence[int], fill: int = CANARY) -> None:
        self._whole = [np.full(size + 2 * self.PAD, fill, np.uint8) for size in sizes]
        self.regions = [
            Region(f"target{i}", whole[self.PAD : len(whole) - self.PAD])
            for i, whole in enumerate(self._whole)
        ]

    def fill(self, value: int) -> None:
        """Sets every byte, canaries included."""
        for whole in self._whole:
            whole[:] = value

    def only(self, value: int) -> bool:
        """Whether every byte, canaries included, has this value."""
        return all(bool((whole == value).all()) for whole in self._whole)

    def holds(self, value: int) -> bool:
        """Whether any byte has this value."""
        return any(bool((whole == value).any()) for whole in self._whole)

    def check(self, segments: Segments, source: U8, fill: int = CANARY) -> None:
        """Asserts that the segments are in place and that every other byte is still `fill`."""
        expected = [np.full(len(whole), fill, np.uint8) for whole in self._whole]
        columns = (segments.region, segments.local, segments.remote, segments.nbytes)
        for region, local, remote, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            at = self.PAD + local
            expected[region][at : at + nbytes] = source[remote : remote + nbytes]
        for i, (whole, right) in enumerate(zip(self._whole, expected, strict=True)):
            wrong = np.flatnonzero(whole != right)
            assert len(wrong) == 0, (
                f"target{i}: {len(wrong)} wrong bytes, the first at {int(wrong[0]) - self.PAD}: "
                f"{int(whole[wrong[0]])} instead of {int(right[wrong[0]])}"
            )


def scatter(
    lengths: Sequence[int], regions: int, *, seed: int = 0, gap: int = 64
) -> tuple[Segments, list[int]]:
    """Segments of these lengths: in random order over `regions` targets, with random gaps on both sides.

    Also gives the sizes that the targets need.  The remote side begins at 0.
    """
    rng = np.random.default_rng(seed)
    n = len(lengths)
    nbytes = np.asarray(lengths, np.int64)
    region = rng.integers(0, regions, n).astype(np.int32)
    remote = np.concatenate(([0], np.cumsum(nbytes + rng.integers(0, gap + 1, n))[:-1])).astype(np.int64)
    local = np.zeros(n, np.int64)
    sizes = [1] * regions
    for i in rng.permutation(n).tolist():
        where = int(region[i])
        local[i] = sizes[where] + int(rng.integers(0, gap + 1))
        sizes[where] = int(local[i] + nbytes[i])
    return Segments(region, local, remote, nbytes), sizes


class Gate:
    """Holds a read in the middle: put it where the transport calls it between chunks (`on_step`).

    The reading thread stops at the first call and goes on after `open`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        self._open = threading.Event()

    def __call__(self, done: int) -> None:
        if not self._open.is_set():
            self._loop.call_soon_threadsafe(self._reached.set)
            # Bounded, so that a failing test ends with its own message.
            self._open.wait(30.0)

    async def reached(self) -> None:
        """Returns when a read is held."""
        await asyncio.wait_for(self._reached.wait(), 30.0)

    def open(self) -> None:
        """Lets the read go on, and every later one through."""
        self._open.set()


class HoldingMemory:
    """Channels whose bytes are seen by the device only after `flush`: leaving the flush out shows.

    `regions` are what a transport writes into; `visible[c]` is channel c as the device sees it, `uint8[nbytes]`.
    Has the members of a HAWK memory that reading needs, without being one.
    """

    kind = "holding"

    def __init__(
        self, channels: int, channel_bytes: int, *, fill: int = CANARY, name: str = "holding"
    ) -> None:
        self.name = name
        self.channels = channels
        self.channel_bytes = channel_bytes
        self.flushes = 0
        self.visible = [np.full(channel_bytes, fill, np.uint8) for _ in range(channels)]
        self.regions = [
            Region(f"{name}/channel{i}", np.full(channel_bytes, fill, np.uint8)) for i in range(channels)
        ]

    async def flush(self, ranges: ByteRanges) -> None:
        """Makes what was written into these ranges visible; everything else stays as the device knew it."""
        self.flushes += 1
        columns = (ranges.region, ranges.start, ranges.nbytes)
        for channel, start, nbytes in zip(*(c.tolist() for c in columns), strict=True):
            stop = start + nbytes
            self.visible[channel][start:stop] = self.regions[channel].array[start:stop]

    def close(self) -> None:
        """Nothing to give back."""
