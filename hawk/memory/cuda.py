"""Memory of a GPU: its device in this process, regions in it, and a memory of them.

A device's context can be lost: after some errors (an engine's kernel that wrote where nothing is, say) the driver
answers every call of this process with that error.  Then `CudaDevice.lost` says so, whatever needs the device raises
`DeviceLost`, and nothing else is touched by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hawk.errors import (
    Aborted,
    DeviceLost,
    HawkMemoryError,
    InvalidArgument,
    OutOfMemory,
    RegistrationFailed,
)
from hawk.memory import cuda_driver
from hawk.memory.base import MoveSupport
from hawk.memory.channels import Channels, check_options
from hawk.memory.cuda_driver import FLUSH_BY_HOST, ORDERED_FOR_OWNER, Attribute, CudaFault
from hawk.memory.cuda_rows import Rows, most_rows
from hawk.memory.cuda_wait import none_left
from hawk.memory.region import Region
from hawk.units import Size, approximate_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hawk.memory.cuda_driver import Driver
    from hawk.memory.region import U8, ByteRanges, Moves

PAGE = 2 << 20
"""Bytes that an allocation of ours is rounded up to: what the GPU maps at a time, and whole pages of the host."""

MOVES_AT_ONCE, MOVED_AT_ONCE = 1 << 14, 256 << 20
"""Rows of a move, and bytes unless one row has more, that are on the way between two looks at whether it is wanted."""


class DeviceRegion(Region):
    """A region in the memory of a GPU: it has an address, and no bytes that this process' processors could read."""

    # Its owner lets go of it when the memory goes, which whoever registered it learns by a weak reference.
    __slots__ = ("__weakref__", "_address", "_gpu", "_nbytes", "_reached_by")

    _address: int
    _reached_by: frozenset[int]
    _gpu: int
    _nbytes: int

    def __init__(
        self,
        name: str,
        address: int,
        nbytes: int,
        device: int,
        *,
        dmabuf: int = -1,
        dmabuf_offset: int = 0,
        reached_by: frozenset[int] = frozenset(),
    ) -> None:
        plain = {"name": name, "fd": -1, "fd_offset": 0, "extents": (0,), "handles": ()}
        own = {"_address": address, "_nbytes": nbytes, "_gpu": device, "_reached_by": reached_by}
        for key, value in (plain | own | {"dmabuf": dmabuf, "dmabuf_offset": dmabuf_offset}).items():
            object.__setattr__(self, key, value)

    @property
    def array(self) -> U8:
        """Raises `RegistrationFailed`: processors do not reach these bytes."""
        raise RegistrationFailed(
            "the memory is a GPU's and cannot be read or written by processors",
            field=self.name,
            got=f"memory of cuda:{self.gpu}",
            expected="memory of the host",
        )

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    @property
    def address(self) -> int:
        """Address of the first byte, for the GPU and its driver."""
        return self._address

    @property
    def gpu(self) -> int:
        """The device, as this process numbers them."""
        return self._gpu

    @property
    def reached_by(self) -> frozenset[int]:
        """Other GPUs of this process that can write it."""
        return self._reached_by


class CudaDevice:
    """One GPU as this process uses it; made by `device`.

    lost       why nothing of it can be used any more, once that is so
    on_lost    called once when that happens, from whichever thread met it
    """

    def __init__(self, driver: Driver, number: int) -> None:
        self.driver, self.number = driver, number
        self.name = driver.device_name(number)
        self.lost: DeviceLost | None = None
        self.on_lost: list[Callable[[DeviceLost], None]] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<cuda:{self.number} {self.name}{', lost' if self.lost else ''}>"

    @contextlib.contextmanager
    def current(self) -> Iterator[Driver]:
        """Within the block the device's context is this thread's; faults come out as typed errors.

        Raises `DeviceLost` at once where it is lost, and `OutOfMemory` or `HawkMemoryError` for calls that failed.
        """
        self.check()
        try:
            self.driver.enter(self.number)
        except CudaFault as fault:
            raise self.typed(fault) from fault
        try:
            yield self.driver
        except CudaFault as fault:
            raise self.typed(fault) from fault
        finally:
            with contextlib.suppress(CudaFault):
                self.driver.leave()

    def check(self) -> None:
        """Raises `DeviceLost` where it is lost."""
        if self.lost is not None:
            raise DeviceLost(self.lost.message, field=self.lost.field, got=self.lost.got, hint=self.lost.hint)

    def typed(self, fault: CudaFault) -> HawkMemoryError:
        """The error that a fault is told as; one that sticks is remembered."""
        if fault.sticky:
            return self.lose(fault)
        what = f"cuda:{self.number}"
        if fault.code == cuda_driver.OUT_OF_MEMORY:
            return OutOfMemory("the GPU has too little free memory", field=what, got=fault)
        return HawkMemoryError("the CUDA driver refused a call", field=what, got=fault)

    def lose(self, why: object) -> DeviceLost:
        """The device is lost to this process; whoever asked to be told is told, once."""
        with self._lock:
            first = self.lost is None
            error = self.lost = self.lost or DeviceLost(
                "the GPU's context in this process has failed, and everything in its memory with it",
                field=f"cuda:{self.number}",
                got=why,
                hint="The process that computes on the GPU has to be started anew; look for the kernel that failed",
            )
        if first:
            for told in list(self.on_lost):
                told(error)
        return error


def needs_flush(driver: Driver, number: int) -> bool | None:
    """Whether what other devices write into a GPU's memory has to be flushed before it is seen there.

    None where it has to be and nothing that the host can call does it.
    """
    if driver.attribute(number, Attribute.WRITES_ORDERING) >= ORDERED_FOR_OWNER:
        return False
    return True if driver.attribute(number, Attribute.FLUSH_OPTIONS) & FLUSH_BY_HOST else None


_devices: dict[tuple[int, int], CudaDevice] = {}
_lock = threading.Lock()


def device(number: int, *, field: str = "device") -> CudaDevice:
    """The GPU of that number, the same object each time; may block while the driver starts.

    Raises `MissingDependency` where there is no driver, `InvalidArgument` where there is no such GPU.
    """
    driver = cuda_driver.load()
    with _lock:
        found = _devices.get((id(driver), number))
        if found is not None and found.driver is driver:
            return found
        try:
            count = driver.device_count()
            if 0 <= number < count:
                found = _devices[id(driver), number] = CudaDevice(driver, number)
                return found
        except CudaFault as fault:
            raise HawkMemoryError("the GPU cannot be used", field=field, got=fault) from fault
    raise InvalidArgument(
        "no such device",
        field=field,
        got=f"cuda:{number}",
        expected=f"cuda:0..cuda:{count - 1}" if count else "a machine with a GPU",
    )


class Pinned:
    """Memory of the host that is locked for copies to and from a GPU; where it cannot be, `why` says so."""

    def __init__(self, device: CudaDevice, address: int, nbytes: int) -> None:
        self._device, self._address = device, address
        self.why = ""
        try:
            with device.current() as driver:
                driver.pin(address, nbytes)
        except DeviceLost:
            raise
        except HawkMemoryError as error:
            self.why = str(error)

    def close(self) -> None:
        """Unlocks it.  Safe to call twice."""
        address, self._address = self._address, 0
        if address and not self.why and self._device.lost is None:
            with contextlib.suppress(HawkMemoryError), self._device.current() as driver:
                driver.unpin(address)


@dataclass(frozen=True, slots=True)
class CudaConfig:
    """`[memory.NAME]` with `kind = "cuda"`."""

    capacity: Size = field(metadata={"help": "bytes in all regions together"})
    gpu: int = field(default=0, metadata={"help": "which GPU, as the driver numbers them"})
    channels: int = field(
        default=1, metadata={"help": "regions that it is divided into, one after the other"}
    )
    alignment: Size = field(default=256, metadata={"help": "every allocation starts at a multiple of this"})

    def __post_init__(self) -> None:
        check_options(self.capacity, self.channels, self.alignment)
        if self.gpu < 0:
            raise InvalidArgument("no number of a GPU", field="gpu", got=self.gpu, expected="0 or more")


class CudaMemory(Channels):
    """Memory of a GPU, allocated once: `channels` regions of it, and a dma-buf for NICs where the driver makes one.

    why_no_dmabuf    why there is none; empty where there is one

    The constructor blocks while the driver starts.  Raises `MissingDependency`, `InvalidArgument`, or `OutOfMemory`.
    """

    kind: ClassVar[str] = "cuda"
    Config: ClassVar[type[CudaConfig]] = CudaConfig
    move_cost = 1e-12
    move_row_cost = 3e-6

    def __init__(
        self, name: str, *, capacity: int, gpu: int = 0, channels: int = 1, alignment: int = 256
    ) -> None:
        check_options(capacity, channels, alignment)
        super().__init__(name, channels=channels, channel_bytes=capacity // channels, alignment=alignment)
        self.device = device(gpu, field=f"{name}.gpu")
        self._stream = self._event = self._base = 0
        self._rows: Rows | None = None
        self._dmabuf = -1
        self.why_no_dmabuf = ""
        whole = -(-channels * self.channel_bytes // PAGE) * PAGE
        try:
            with self.device.current() as driver:
                self._base = driver.allocate(whole)
                self._stream = driver.stream(low=False)
                self._event = driver.event()
                self._export(driver, whole)
        except BaseException as error:
            self.close()
            if isinstance(error, OutOfMemory):
                error.hint = (
                    f"{approximate_size(whole)} were asked for; leave the memory room beside the engine"
                )
            raise
        self._regions = tuple(
            DeviceRegion(
                f"{name}/channel{c}",
                self._base + c * self.channel_bytes,
                self.channel_bytes,
                gpu,
                dmabuf=self._dmabuf,
                dmabuf_offset=c * self.channel_bytes if self._dmabuf >= 0 else 0,
            )
            for c in range(channels)
        )

    @classmethod
    def obstacle(cls, config: CudaConfig) -> None:
        """Raises `MissingDependency` or `InvalidArgument` where the driver, or this GPU, is not there."""
        device(config.gpu, field="gpu")

    @classmethod
    def from_config(cls, name: str, config: CudaConfig) -> CudaMemory:
        """The memory that a config table describes."""
        return cls(
            name,
            capacity=config.capacity,
            gpu=config.gpu,
            channels=config.channels,
            alignment=config.alignment,
        )

    def _export(self, driver: Driver, nbytes: int) -> None:
        """A dma-buf, where it can be made and what comes through it can be made visible."""
        number = self.device.number
        self._flushes = needs_flush(driver, number)
        if not driver.attribute(number, Attribute.DMABUF):
            self.why_no_dmabuf = "the driver exports no dma-bufs of this GPU's memory"
        elif self._flushes is None:
            # Bytes that came could be there and not be seen, and no call of ours would change that.
            self.why_no_dmabuf = "the GPU neither keeps a NIC's writes in order nor lets the host flush them"
        else:
            try:
                self._dmabuf = driver.dmabuf(self._base, nbytes)
            except CudaFault as fault:
                if fault.sticky:
                    raise
                self.why_no_dmabuf = str(fault)

    async def flush(self, ranges: ByteRanges) -> None:
        """Returns when the GPU sees what was written into these ranges; raises `DeviceLost`.

        Copies of ours were waited for.  What a NIC wrote is seen in order by most GPUs (their ordering attribute says
        so), and of others the driver flushes all of it.
        """
        self._check_ranges(ranges)
        self.device.check()
        if self._dmabuf < 0 or not self._flushes or not len(ranges):
            return
        await asyncio.get_running_loop().run_in_executor(None, self._flush)

    def _flush(self) -> None:
        with self.device.current() as driver:
            driver.flush_writes()

    @property
    def move_support(self) -> MoveSupport:
        """A kernel moves the bytes, or the GPU's copy engines where rows are long or there is nothing to compile it."""
        return MoveSupport.DEVICE

    def _move(self, moves: Moves, regions: Sequence[Region], stop: threading.Event) -> None:
        base = np.asarray([region.address for region in regions], np.int64)[moves.channel]
        source, target, ends = base + moves.source, base + moves.target, np.cumsum(moves.nbytes)
        begin = done = 0
        with self.device.current() as driver, none_left(driver, self._stream, self._event):
            if self._rows is None:
                most = most_rows(MOVED_AT_ONCE, MOVES_AT_ONCE)
                self._rows = Rows(self.device, driver, self._stream, most)
            while begin < len(moves):
                end = max(int(ends.searchsorted(done + MOVED_AT_ONCE, "right")), begin + 1)
                part = slice(begin, min(end, begin + MOVES_AT_ONCE))
                calls = self._rows.calls(source[part], target[part], moves.nbytes[part])
                driver.run([*calls, ("record", self._event, self._stream), ("outwait", self._event)])
                begin, done = part.stop, int(ends[part.stop - 1])
                if stop.is_set():
                    return
                if self._closing.is_set():
                    raise Aborted("the memory was closed during a move", field=self.name)

    def close(self) -> None:
        """Gives the memory back to the GPU.  Safe to call twice."""
        super().close()
        fd, self._dmabuf = self._dmabuf, -1
        if fd >= 0:
            os.close(fd)
        base, self._base = self._base, 0
        rows, self._rows = self._rows, None
        stream, event, self._stream, self._event = self._stream, self._event, 0, 0
        if not base or self.device.lost is not None:
            return  # with a lost context the driver has taken all of it
        with contextlib.suppress(HawkMemoryError), self.device.current() as driver:
            if rows is not None:
                rows.close(driver)
            if stream:
                driver.drop_stream(stream)
            if event:
                driver.drop_event(event)
            driver.free(base)
