"""Plain host memory: one channel, and nothing to flush."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hawk.memory.channels import ChannelMemory, check_options
from hawk.units import Size

if TYPE_CHECKING:
    from hawk.memory.region import ByteRanges


@dataclass(frozen=True, slots=True)
class HostConfig:
    """`[memory.NAME]` with `kind = "host"`."""

    capacity: Size = field(metadata={"help": "bytes of the memory"})
    alignment: Size = field(default=64, metadata={"help": "every allocation starts at a multiple of this"})
    huge_pages: bool = field(default=False, metadata={"help": "hint the kernel to use huge pages"})

    def __post_init__(self) -> None:
        check_options(self.capacity, 1, self.alignment)


class HostMemory(ChannelMemory):
    """Host memory that a CPU reads: a single channel."""

    kind: ClassVar[str] = "host"
    Config: ClassVar[type[HostConfig]] = HostConfig

    def __init__(self, name: str, *, capacity: int, alignment: int = 64, huge_pages: bool = False) -> None:
        super().__init__(name, capacity=capacity, channels=1, alignment=alignment, huge_pages=huge_pages)

    @classmethod
    def from_config(cls, name: str, config: HostConfig) -> HostMemory:
        """The memory that a config table describes."""
        return cls(name, capacity=config.capacity, alignment=config.alignment, huge_pages=config.huge_pages)

    async def flush(self, ranges: ByteRanges) -> None:
        """Returns at once, having checked the ranges.

        Whoever reads this memory is a core of this machine, and the caches of all cores are coherent: a byte
        that one of them has written is what the others read.
        """
        self._check_ranges(ranges)
