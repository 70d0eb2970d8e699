"""A device whose memory holds writes back: what was written can be read only once it was flushed.

Transports and moves write into one set of pages, the client sees another, and `flush` copies exactly the ranges
that it is given from the first into the second.  So a byte that is not flushed, or is flushed before it arrived,
is not there when the client looks.  The pages that transports write are files in `folder`, so that a test can see
who still writes, and where, after a job has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hawk.memory.channels import ChannelMemory, check_options
from hawk.memory.region import Region
from hawk.units import Size

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hawk.memory.region import ByteRanges


@dataclass(frozen=True, slots=True)
class HeldBackConfig:
    """`[memory.NAME]` with `kind = "held-back"`."""

    capacity: Size = field(metadata={"help": "bytes in all channels together"})
    folder: str = field(metadata={"help": "where the pages lie that transports write"})
    channels: int = field(default=8, metadata={"help": "memory channels"})

    def __post_init__(self) -> None:
        check_options(self.capacity, self.channels, 64)


def raw_file(folder: str | Path, name: str, channel: int) -> Path:
    """The file of the pages that transports write."""
    return Path(folder) / f"{name}.{channel}.raw"


def map_raw(path: Path) -> NDArray[np.uint8]:
    """Those pages, shared with whoever else maps the file."""
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class HeldBackMemory(ChannelMemory):
    """See the module."""

    kind: ClassVar[str] = "held-back"
    Config: ClassVar[type[HeldBackConfig]] = HeldBackConfig

    def __init__(self, name: str, *, capacity: int, channels: int, folder: str) -> None:
        super().__init__(name, capacity=capacity, channels=channels)
        self._visible = [buffer.array for buffer in self._buffers]
        self._raw = [self._made(raw_file(folder, name, c)) for c in range(channels)]
        self._regions = tuple(
            Region(name=f"{name}/channel{c}", array=raw, fd=buffer.fd)
            for c, (raw, buffer) in enumerate(zip(self._raw, self._buffers, strict=True))
        )

    def _made(self, path: Path) -> NDArray[np.uint8]:
        # A new file: somebody may still have the pages of the one before mapped.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, self.channel_bytes)
        finally:
            os.close(fd)
        return map_raw(path)

    @classmethod
    def from_config(cls, name: str, config: HeldBackConfig) -> HeldBackMemory:
        """The memory that a config table describes."""
        return cls(name, capacity=config.capacity, channels=config.channels, folder=config.folder)

    async def flush(self, ranges: ByteRanges) -> None:
        """Lets the client see these ranges as they are now."""
        self._check_ranges(ranges)
        columns = (ranges.region.tolist(), ranges.start.tolist(), ranges.nbytes.tolist())
        for c, start, nbytes in zip(*columns, strict=True):
            self._visible[c][start : start + nbytes] = self._raw[c][start : start + nbytes]
