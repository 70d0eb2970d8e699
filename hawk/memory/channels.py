"""What memories share whose channels this process has mapped; and those whose channels are memfd regions."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np

from hawk.endings import Threads
from hawk.errors import Aborted, InvalidArgument
from hawk.memory.base import Allocation, Memory, MoveSupport
from hawk.memory.copying import copy_within
from hawk.memory.lockstep import LockstepAllocator
from hawk.memory.shared import SharedBuffer, alloc, require_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hawk.memory.region import I32, I64, ByteRanges, Moves, Region

MOVE_PIECE = 32 << 20
"""Bytes that are moved between two looks at whether the move is still wanted."""

MAX_CHANNELS = 4096
MAX_ALIGNMENT = 1 << 30


def check_options(capacity: int, channels: int, alignment: int) -> None:
    """Raises `InvalidArgument` naming the option of a `[memory.NAME]` table that no memory can have."""
    if not 1 <= channels <= MAX_CHANNELS:
        raise InvalidArgument(
            "no number of channels", field="channels", got=channels, expected=f"1 to {MAX_CHANNELS}"
        )
    if not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise InvalidArgument(
            "no alignment",
            field="alignment",
            got=alignment,
            expected=f"a power of two, at most {MAX_ALIGNMENT}",
        )
    if capacity // channels < alignment:
        raise InvalidArgument(
            "too little for every channel to hold anything",
            field="capacity",
            got=capacity,
            expected=f"at least {channels * alignment} bytes",
        )


class Channels(Memory):
    """A memory whose channels this process has mapped, wherever they come from.

    name           unique in its agent; regions are called `name/channelN`
    channels       how many, at least 1
    channel_bytes  bytes of each, rounded down to `alignment`
    alignment      bytes; every allocation starts at a multiple of it

    A subclass calls this constructor, then sets `_regions`.
    """

    def __init__(self, name: str, *, channels: int, channel_bytes: int, alignment: int) -> None:
        self.name = name
        self.channels = channels
        self.alignment = alignment
        self._allocator = LockstepAllocator(channels, channel_bytes, alignment, name)
        self.channel_bytes = self._allocator.channel_bytes
        self._mover: Threads | None = None
        self._closing = threading.Event()
        self._regions: tuple[Region, ...] = ()

    @property
    def regions(self) -> Sequence[Region]:
        """One region per channel, in channel order; none once closed."""
        return self._regions

    @property
    def capacity(self) -> int:
        """Bytes in all channels together, after rounding."""
        return self.channels * self.channel_bytes

    def allocate(
        self, nbytes: int, owner: str, *, channels: Sequence[int] | None = None, brief: bool = False
    ) -> Allocation:
        """See `Memory.allocate`.  A piece in a few channels takes its offset from all lock-step ones."""
        return self._allocator.allocate(nbytes, owner, channels=channels, brief=brief)

    def free(self, allocation: Allocation) -> None:
        """See `Memory.free`; takes the very object that `allocate` returned."""
        self._allocator.free(allocation)

    def free_bytes(self) -> list[int]:
        """Free bytes per channel."""
        return self._allocator.free_bytes()

    def allocations(self) -> list[Allocation]:
        """Everything that is allocated now, for leak checks and reports."""
        return self._allocator.allocations()

    @property
    def move_support(self) -> MoveSupport:
        """The host's cores move the bytes."""
        return MoveSupport.HOST

    async def move(self, moves: Moves) -> None:
        """Copies inside channels, in a thread of this memory's own, without the GIL.

        When this ends, however it ends, nothing is being copied any more; a cancelled move has been done in
        part.  Raises `InvalidArgument` if a row leaves its channel (nothing was moved) and `Aborted` if the
        memory is closed meanwhile.
        """
        self._check("moves", moves.channel, moves.source, moves.nbytes)
        self._check("moves", moves.channel, moves.target, moves.nbytes)
        if not len(moves):
            return
        if self._mover is None:
            # One thread: copies are bound by memory, and the agent's retile has cores of its own to use.
            self._mover = Threads(1, thread_name_prefix=f"hawk-move-{self.name}")
        stop = threading.Event()
        work = asyncio.get_running_loop().run_in_executor(self._mover, self._move, moves, self._regions, stop)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await settle(work)
            raise

    def _move(self, moves: Moves, regions: Sequence[Region], stop: threading.Event) -> None:
        for c, region in enumerate(regions):
            rows = np.flatnonzero(moves.channel == c)
            source, target, nbytes = moves.source[rows], moves.target[rows], moves.nbytes[rows]
            cuts = np.flatnonzero(np.diff(np.cumsum(nbytes) // MOVE_PIECE)) + 1
            for piece in np.split(np.arange(len(rows)), cuts):
                if stop.is_set():
                    return
                if self._closing.is_set():
                    raise Aborted("the memory was closed during a move", field=self.name)
                copy_within(region, source[piece], target[piece], nbytes[piece])

    def _check(self, what: str, channel: I32, start: I64, nbytes: I64) -> None:
        """Raises `InvalidArgument` unless every row lies inside its channel."""
        if self._closing.is_set():
            raise InvalidArgument("the memory is closed", field=self.name)
        if not len(channel) == len(start) == len(nbytes):
            raise InvalidArgument("columns differ in length", field=what)
        bad = (channel < 0) | (channel >= self.channels) | (start < 0) | (nbytes <= 0)
        bad |= nbytes > self.channel_bytes - start
        if bad.any():
            i = int(np.argmax(bad))
            raise InvalidArgument(
                "a row lies outside its channel",
                field=f"{what}[{i}]",
                got=f"{int(nbytes[i])} bytes at {int(start[i])} of channel {int(channel[i])}",
                expected=f"within {self.channel_bytes} bytes of channels 0..{self.channels - 1}",
            )

    def _check_ranges(self, ranges: ByteRanges) -> None:
        spans = ranges.spans()
        self._check("ranges", spans.region, spans.start, spans.nbytes)

    def close(self) -> None:
        """Stops a move in progress and lets go of the regions; a subclass then closes what it opened.

        Pages stay mapped for as long as somebody holds a region or a view of one.
        """
        self._closing.set()
        if self._mover is not None:
            self._mover.shutdown(wait=True)
            self._mover = None
        self._regions = ()


class ChannelMemory(Channels):
    """One memfd region per channel, all there and touched once the constructor returns.

    name       unique in its agent; regions are called `name/channelN`
    capacity   bytes in all channels together; each gets its share, rounded down to `alignment`
    channels   how many, at least 1
    alignment  bytes; every allocation starts at a multiple of it
    huge_pages hints the kernel to back the channels with huge pages

    The constructor blocks while it fills the memory.  Raises `OutOfMemory` if the machine has not that much,
    `InvalidArgument` for figures that make no memory; nothing stays open then.
    """

    def __init__(
        self, name: str, *, capacity: int, channels: int, alignment: int = 64, huge_pages: bool = False
    ) -> None:
        if channels < 1:
            raise InvalidArgument(
                "a memory without channels", field=f"{name}.channels", got=channels, expected="at least 1"
            )
        if alignment < 1:
            raise InvalidArgument(
                "no alignment", field=f"{name}.alignment", got=alignment, expected="at least 1"
            )
        if capacity // channels < alignment:
            raise InvalidArgument(
                "too little for every channel to hold anything",
                field=f"{name}.capacity",
                got=capacity,
                expected=f"at least {channels * alignment} bytes",
            )
        super().__init__(name, channels=channels, channel_bytes=capacity // channels, alignment=alignment)
        self._buffers: list[SharedBuffer] = []
        # All at once first: half a device's channels filled and given back would be seconds for nothing.
        require_memory(channels * self.channel_bytes, name)
        try:
            for c in range(channels):
                self._buffers.append(
                    alloc(self.channel_bytes, name=f"{name}/channel{c}", huge_pages=huge_pages)
                )
        except BaseException:
            for buffer in self._buffers:
                buffer.close()
            raise
        self._regions = tuple(buffer.region() for buffer in self._buffers)

    def close(self) -> None:
        """Stops a move in progress, then closes the descriptors and lets go of the mappings.

        Pages stay mapped for as long as somebody holds a region or a view of one.
        """
        super().close()
        for buffer in self._buffers:
            buffer.close()


async def settle(work: asyncio.Future[None]) -> None:
    """Waits until `work` is over, however often this task is cancelled meanwhile; its outcome is dropped."""
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            continue  # the caller raises the first one; the thread ends after the piece it is at
    if not work.cancelled():
        work.exception()
