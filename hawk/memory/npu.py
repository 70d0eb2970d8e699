"""An NPU made of host memory: channels, lock-step addresses, capacity and flush as a real one has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hawk.memory.channels import ChannelMemory, check_options
from hawk.units import Size

if TYPE_CHECKING:
    from hawk.memory.region import ByteRanges


@dataclass(frozen=True, slots=True)
class EmulatedNpuConfig:
    """`[memory.NAME]` with `kind = "emulated-npu"`."""

    capacity: Size = field(metadata={"help": "bytes in all channels together"})
    channels: int = field(default=8, metadata={"help": "memory channels of the device"})
    alignment: Size = field(
        default=64, metadata={"help": "every allocation and page starts at a multiple of this"}
    )
    huge_pages: bool = field(default=False, metadata={"help": "hint the kernel to use huge pages"})

    def __post_init__(self) -> None:
        check_options(self.capacity, self.channels, self.alignment)


class EmulatedNpu(ChannelMemory):
    """A device with `channels` banks, each a memfd region of this machine.

    flushes         how often `flush` was called
    flushed_ranges  ranges given to it, in all
    flushed_bytes   bytes in them
    """

    kind: ClassVar[str] = "emulated-npu"
    Config: ClassVar[type[EmulatedNpuConfig]] = EmulatedNpuConfig

    def __init__(
        self, name: str, *, capacity: int, channels: int = 8, alignment: int = 64, huge_pages: bool = False
    ) -> None:
        super().__init__(
            name, capacity=capacity, channels=channels, alignment=alignment, huge_pages=huge_pages
        )
        self.flushes = 0
        self.flushed_ranges = 0
        self.flushed_bytes = 0

    @classmethod
    def from_config(cls, name: str, config: EmulatedNpuConfig) -> EmulatedNpu:
        """The memory that a config table describes."""
        return cls(
            name,
            capacity=config.capacity,
            channels=config.channels,
            alignment=config.alignment,
            huge_pages=config.huge_pages,
        )

    async def flush(self, ranges: ByteRanges) -> None:
        """Makes the ranges visible to the device, through `make_visible`; raises `InvalidArgument` for bad ones."""
        self._check_ranges(ranges)
        await self.make_visible(ranges)
        self.flushes += 1
        self.flushed_ranges += len(ranges)
        self.flushed_bytes += ranges.total

    async def make_visible(self, ranges: ByteRanges) -> None:
        """The one step that depends on the device; a subclass with real write buffers overrides it.

        Here the pages are the host's own, so a byte that was written can be read, and there is nothing to do.
        A device behind a bus reads back from each window that was written: a read that waits for its answer
        cannot overtake the writes before it.
        """
