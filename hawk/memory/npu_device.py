"""The memory channels of an NPU behind the kernel module `hawk_npu` (docs/kmod.md).

The agent opens `/dev/hawk_npuN`, claims channels and maps them.  What it claimed is its own until it closes or
dies; the module then ends what others were given of it, or keeps the memory reserved where that cannot be ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from hawk.errors import HawkMemoryError, InvalidArgument, OutOfMemory
from hawk.memory import npu_abi as abi
from hawk.memory.base import MoveSupport
from hawk.memory.channels import Channels, check_options, settle
from hawk.memory.mapping import MADV_POPULATE_WRITE, Mapping
from hawk.memory.region import Region
from hawk.units import Size

if TYPE_CHECKING:
    import ctypes

    from hawk.memory.region import U8, ByteRanges

PROVIDERS = {abi.EMULATED: "emulated", abi.BAR: "bar", abi.DMABUF: "dmabuf"}


class Calls(Protocol):
    """What is asked of the kernel; a test answers in its place.  All raise `OSError`."""

    def open(self, path: str) -> int:
        """A descriptor of the device."""

    def ioctl(self, fd: int, request: int, argument: ctypes.Structure) -> None:
        """One ioctl, whose answer is in `argument`."""

    def map(self, fd: int, nbytes: int, offset: int) -> U8:
        """`uint8[nbytes]` over the device from file offset `offset` on."""

    def close(self, fd: int) -> None:
        """Closes a descriptor of `open`, or one that an ioctl gave."""


class Kernel:
    """The kernel itself."""

    def open(self, path: str) -> int:
        """See `Calls.open`."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def ioctl(self, fd: int, request: int, argument: ctypes.Structure) -> None:
        """See `Calls.ioctl`."""
        fcntl.ioctl(fd, request, argument, True)

    def map(self, fd: int, nbytes: int, offset: int) -> U8:
        """See `Calls.map`."""
        mapped = Mapping(fd, nbytes, True, offset)
        # A window of a device has no pages to bring in, and says so (EINVAL): the first touch maps it.
        problem = mapped.advise(MADV_POPULATE_WRITE)
        if problem not in (0, errno.EINVAL):
            raise OSError(problem, os.strerror(problem))
        return np.asarray(mapped)

    def close(self, fd: int) -> None:
        """See `Calls.close`."""
        os.close(fd)


@dataclass(frozen=True, slots=True)
class NpuConfig:
    """`[memory.NAME]` with `kind = "npu"`."""

    device: str = field(default="/dev/hawk_npu0", metadata={"help": "device of the kernel module hawk_npu"})
    channels: int = field(default=0, metadata={"help": "how many of its channels to claim; 0: all"})
    alignment: Size = field(
        default=64, metadata={"help": "every allocation and page starts at a multiple of this"}
    )

    def __post_init__(self) -> None:
        if not 0 <= self.channels <= abi.MAX_CHANNELS:
            raise InvalidArgument(
                "no number of channels",
                field="channels",
                got=self.channels,
                expected=f"0 (all) to {abi.MAX_CHANNELS}",
            )
        # How much there is, the device says.
        check_options(self.alignment, 1, self.alignment)


class NpuDevice(Channels):
    """Channels of one device of the module, claimed and mapped once the constructor returns.

    name       unique in its agent; regions are called `name/channelN`
    device     path of the character device
    channels   how many of its channels, the first ones; 0 for all
    alignment  bytes; every allocation starts at a multiple of it

    Each region has a dma-buf besides its mapping, for transports that register memory by one and for the
    client that a cache is allocated for.  The constructor blocks while the kernel zeroes the channels.  Raises
    `HawkMemoryError` naming what is wrong with the device, `OutOfMemory` if an emulated one has no room,
    `InvalidArgument` for channels that it does not have; nothing stays open then.
    """

    kind: ClassVar[str] = "npu"
    Config: ClassVar[type[NpuConfig]] = NpuConfig

    def __init__(
        self,
        name: str,
        *,
        device: str = "/dev/hawk_npu0",
        channels: int = 0,
        alignment: int = 64,
        calls: Calls | None = None,
    ) -> None:
        self._calls = calls or Kernel()
        self._device = device
        self._fds: list[int] = []
        self._asking = (
            threading.Lock()
        )  # while the descriptor is in use it is not closed, nor another's by then
        with contextlib.ExitStack() as undo:
            undo.callback(self._close_fds)
            fd = self._open(name)
            info = abi.Info()
            self._ask(name, fd, abi.INFO, info, "says nothing about itself; is it a device of hawk_npu?")
            count = self._checked(name, info, channels)
            self.provider = PROVIDERS[info.provider]
            self._has_pages = bool(info.flags & abi.HAS_PAGES)
            super().__init__(name, channels=count, channel_bytes=info.channel_bytes, alignment=alignment)
            self._regions = tuple(self._claim(fd, c, info.channel_bytes) for c in range(count))
            undo.pop_all()
        self._fd = fd

    @classmethod
    def obstacle(cls, config: NpuConfig) -> None:
        """Raises `HawkMemoryError` where the device is not there, or not for this user; claims nothing."""
        if not os.path.exists(config.device):
            raise HawkMemoryError(
                "there is no such device",
                field="device",
                got=config.device,
                hint="Load the kernel module hawk_npu (docs/kmod.md)",
            )
        if not os.access(config.device, os.R_OK | os.W_OK):
            raise HawkMemoryError(
                "this user may not open the device",
                field="device",
                got=config.device,
                hint="Give the agent's user the device by a udev rule (docs/kmod.md)",
            )

    @classmethod
    def from_config(cls, name: str, config: NpuConfig) -> NpuDevice:
        """The memory that a config table describes."""
        return cls(name, device=config.device, channels=config.channels, alignment=config.alignment)

    def _open(self, name: str) -> int:
        try:
            fd = self._calls.open(self._device)
        except OSError as e:
            hints = {
                errno.ENOENT: "Load the kernel module hawk_npu (docs/kmod.md)",
                errno.ENODEV: "Load the kernel module hawk_npu (docs/kmod.md)",
                errno.EACCES: "Give the agent's user the device by a udev rule (docs/kmod.md)",
            }
            raise HawkMemoryError(
                f"cannot open {self._device}",
                field=f"memory.{name}.device",
                got=e.strerror,
                hint=hints.get(e.errno or 0),
            ) from e
        self._fds.append(fd)
        return fd

    def _checked(self, name: str, info: abi.Info, channels: int) -> int:
        where = f"memory.{name}.device"
        if info.abi_version != abi.ABI_VERSION:
            raise HawkMemoryError(
                "the kernel module speaks another version",
                field=where,
                got=info.abi_version,
                expected=abi.ABI_VERSION,
                hint="Build hawk_npu from the kmod folder of this release",
            )
        if info.provider not in (abi.EMULATED, abi.BAR):
            raise HawkMemoryError(
                "the device has no memory of its own",
                field=where,
                got=PROVIDERS.get(info.provider, info.provider),
                expected="emulated or bar",
            )
        if channels > info.channels:
            raise InvalidArgument(
                "more channels than the device has",
                field=f"memory.{name}.channels",
                got=channels,
                expected=f"at most {info.channels}",
            )
        return channels or int(info.channels)

    def _claim(self, fd: int, channel: int, nbytes: int) -> Region:
        name = f"{self.name}/channel{channel}"
        self._ask(name, fd, abi.CLAIM, abi.Channel(channel=channel), "cannot be claimed")
        try:
            array = self._calls.map(fd, nbytes, channel << abi.MAP_SHIFT)
        except OSError as e:
            raise HawkMemoryError("the channel cannot be mapped", field=name, got=e.strerror) from e
        export = abi.Export(channel=channel, nbytes=nbytes, fd=-1)
        self._ask(name, fd, abi.EXPORT, export, "cannot be exported")
        self._fds.append(export.fd)
        return Region(name=name, array=array[: self.channel_bytes], dmabuf=export.fd)

    def _ask(self, field: str, fd: int, request: int, argument: ctypes.Structure, what: str) -> None:
        try:
            with self._asking:
                if fd not in self._fds:
                    raise OSError(errno.EBADF, "the memory is closed")
                self._calls.ioctl(fd, request, argument)
        except OSError as e:
            if e.errno == errno.ENOMEM:
                raise OutOfMemory(f"{self._device} {what}", field=field, got=e.strerror) from e
            raise HawkMemoryError(
                f"{self._device} {what}",
                field=field,
                got=e.strerror,
                hint="It belongs to another process, or a registration can still reach it"
                if e.errno == errno.EBUSY
                else None,
            ) from e

    @property
    def move_support(self) -> MoveSupport:
        """The host's cores, where the channels are pages; to read a device's window with them takes far too long."""
        return MoveSupport.HOST if self._has_pages else MoveSupport.NONE

    async def flush(self, ranges: ByteRanges) -> None:
        """Has the module read behind the last write of each channel, in a thread.

        Raises `InvalidArgument` for bad ranges and `HawkMemoryError` if the device is gone, or the memory is closed
        meanwhile.
        """
        self._check_ranges(ranges)
        work = asyncio.get_running_loop().run_in_executor(None, self._flush, ranges)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await settle(work)
            raise

    def _flush(self, ranges: ByteRanges) -> None:
        spans = ranges.spans()
        for channel in np.unique(spans.region).tolist():
            if self._closing.is_set():
                raise HawkMemoryError("the memory was closed during a flush", field=self.name)
            rows = spans.region == channel
            start = int(spans.start[rows].min())
            end = int((spans.start[rows] + spans.nbytes[rows]).max())
            self._ask(
                f"{self.name}/channel{channel}",
                self._fd,
                abi.FLUSH,
                abi.Range(channel=channel, offset=start, nbytes=end - start),
                "cannot be flushed",
            )

    def checksum(self, channel: int, offset: int, nbytes: int) -> int:
        """FNV-1a, 64 bits, of bytes as the kernel sees them; blocks for a millisecond per MiB or so.

        Raises `HawkMemoryError` for a range outside the channel.
        """
        argument = abi.Checksum(channel=channel, offset=offset, nbytes=nbytes)
        self._ask(f"{self.name}/channel{channel}", self._fd, abi.CHECKSUM, argument, "cannot be summed up")
        return int(argument.value)

    def close(self) -> None:
        """Stops a move, ends the dma-bufs and gives the channels back.

        The channels are free once the last view of a region is gone, too.
        """
        super().close()
        self._close_fds()

    def _close_fds(self) -> None:
        with self._asking:
            while self._fds:
                self._calls.close(self._fds.pop())
