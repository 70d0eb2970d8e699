"""The seam to the CUDA driver: what memories and jobs ask of a GPU, as plain functions of whole numbers.

`load` finds libcuda when somebody asks for it, and not before: everything else of HAWK imports and runs without.
Tests put a driver of their own in its place with `using`.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hawk.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OUT_OF_MEMORY = 2

STICKY = frozenset({4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
"""Results after which a context answers nothing else any more: illegal addresses and instructions, launches that failed
or ran too long, errors of memory and of links that could not be mended, contexts and drivers that are gone (CUresult in
the driver's manual)."""

IPC_HANDLE_BYTES = 64
POSIX_FD = 1
"""CUmemAllocationHandleType of descriptors."""


class Attribute:
    """Numbers of CUdevice_attribute that HAWK asks for."""

    FLUSH_OPTIONS = 117
    WRITES_ORDERING = 118
    DMABUF = 124


ORDERED_FOR_OWNER = 100
"""WRITES_ORDERING from which the GPU itself sees what a NIC wrote without a flush (CUGPUDirectRDMAWritesOrdering)."""

FLUSH_BY_HOST = 1
"""Bit of FLUSH_OPTIONS: `flush_writes` works."""


class CudaFault(Exception):
    """A call of the driver failed: its name, the number that it returned and that number's name."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call, self.code, self.name = call, code, name

    @property
    def sticky(self) -> bool:
        """Whether the context is lost with it."""
        return self.code in STICKY


@dataclass(frozen=True, slots=True)
class Pointer:
    """What the driver knows of an address.

    device      that holds the memory; -1 where it is no memory of a device
    managed     it moves between devices and host by itself
    legacy      an IPC handle can be made of it
    by_fd       it was made to be passed on as a descriptor
    """

    device: int
    managed: bool = False
    legacy: bool = False
    by_fd: bool = False


Call = tuple[Any, ...]
"""The name of one of a driver's methods on streams and events, and its arguments."""


class Driver(Protocol):
    """Addresses, streams, events and handles are whole numbers; all raise `CudaFault`.

    Calls but those of the first group need a current context, see `enter`.
    """

    def device_count(self) -> int:
        """GPUs that this process sees."""

    def device_name(self, device: int) -> str:
        """As the vendor calls it."""

    def identity(self, device: int) -> str:
        """What the device is called in every process that sees it, whatever number it has there."""

    def reaches(self, device: int, peer: int) -> bool:
        """Whether the device can read and write the memory of another one."""

    def attribute(self, device: int, which: int) -> int:
        """A number of `Attribute`; 0 where the driver is too old to know it."""

    def pointer(self, address: int) -> Pointer:
        """What is at an address."""

    def enter(self, device: int) -> None:
        """Makes the device's primary context this thread's current one, until `leave`."""

    def leave(self) -> None:
        """Makes the context current again that was before `enter`."""

    # -- memory

    def allocate(self, nbytes: int) -> int:
        """Memory of the current device."""

    def free(self, address: int) -> None:
        """Gives that back."""

    def extent(self, address: int) -> tuple[int, int]:
        """First address and bytes of the allocation, or the mapping, that an address is in."""

    def pin(self, address: int, nbytes: int) -> None:
        """Locks memory of the host, so that copies to and from it run beside everything else."""

    def unpin(self, address: int) -> None:
        """Ends that."""

    def allocate_host(self, nbytes: int) -> int:
        """Locked memory of the host."""

    def free_host(self, address: int) -> None:
        """Gives that back."""

    # -- streams and events

    def stream(self, *, low: bool, high: bool = False) -> int:
        """A stream that waits for no other; `low`, `high`: of the least and of the greatest priority there is."""

    def drop_stream(self, stream: int) -> None:
        """Gives it back, once all that is on it has been done."""

    def event(self) -> int:
        """An event that nothing was recorded to."""

    def timer(self) -> int:
        """An event that tells when it was reached, see `elapsed`."""

    def elapsed(self, begin: int, end: int) -> float:
        """Seconds on the device between two timers that were reached."""

    def drop_event(self, event: int) -> None:
        """Gives it back; what waits for it already goes on waiting."""

    def record(self, event: int, stream: int) -> None:
        """The event is reached when all that is on the stream now has been done; stream 0 is the default one."""

    def wait(self, stream: int, event: int) -> None:
        """What comes onto the stream from now on begins when the event, as it was recorded last, is reached."""

    def reached(self, event: int) -> bool:
        """Whether it is."""

    def synchronise(self, event: int) -> None:
        """Returns when it is; without the GIL, and without using a processor."""

    def outwait(self, event: int) -> None:
        """`synchronise`, which is told soon where the event is soon reached: by asking for some milliseconds first."""

    def launch(
        self, function: int, blocks: int, threads: int, arguments: bytes, stream: int, shared: int = 0
    ) -> None:
        """Puts a kernel of one structure of arguments onto a stream; what compiled it gave the function's handle.

        shared    bytes of shared memory of each block
        """

    def run(self, calls: Sequence[Call]) -> None:
        """Makes these calls one after the other, until one fails, and lets nothing of this process come in between."""

    # -- copies, on a stream

    def to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        """Copies from the device."""

    def to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        """Copies to the device."""

    def across(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copies from one address of a device to another, or of another device that can be reached."""

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Sets every byte."""

    # -- for others

    def dmabuf(self, address: int, nbytes: int) -> int:
        """A dma-buf of a range whose ends are at multiples of the host's page size."""

    def flush_writes(self) -> None:
        """Returns when the current device sees all that others have written into its memory over the bus."""

    def ipc_handle(self, address: int) -> bytes:
        """A handle of the allocation that begins at that address, for other processes of this machine."""

    def ipc_open(self, handle: bytes) -> int:
        """The address at which another process' allocation is seen here."""

    def ipc_close(self, address: int) -> None:
        """Ends that."""

    def create(self, nbytes: int, device: int) -> int:
        """A handle of fresh physical memory of a device, which can be passed on as a descriptor."""

    def retain(self, address: int) -> int:
        """A handle of the physical memory mapped at an address."""

    def release(self, handle: int) -> None:
        """Gives a handle back."""

    def export_fd(self, handle: int) -> int:
        """A descriptor of physical memory that was made for it."""

    def import_fd(self, fd: int) -> int:
        """A handle of the physical memory behind a descriptor, which stays the caller's."""

    def reserve(self, nbytes: int) -> int:
        """Addresses that nothing is mapped at."""

    def unreserve(self, address: int, nbytes: int) -> None:
        """Gives them back."""

    def map(self, address: int, nbytes: int, handle: int, device: int) -> None:
        """Maps physical memory from its beginning, for `device` to read and write."""

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Lets another device read and write what is mapped there, too; one that does not reach it is a fault."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Ends that."""


_lock = threading.Lock()
_known: Driver | None = None


def load() -> Driver:
    """The driver of this machine, found once.

    Raises `MissingDependency` saying what is not there: the library, or a GPU that it drives.
    """
    global _known
    with _lock:
        if _known is None:
            from hawk.memory.cuda_lib import LibCuda

            try:
                _known = LibCuda()
            except OSError as error:
                # That its library is not there is the plain case; anything else is worth telling.
                plain = "No such file" in str(error)
                raise MissingDependency(
                    "no CUDA driver on this machine",
                    got=None if plain else error,
                    hint="Install the vendor's driver; in a container, pass the GPU and its driver through",
                ) from error
            except CudaFault as fault:
                raise MissingDependency(
                    "the CUDA driver is there but cannot be used", field="libcuda.so.1", got=fault
                ) from fault
        return _known


@contextmanager
def using(driver: Driver) -> Iterator[None]:
    """Within the block `driver` is what `load` returns; for tests."""
    global _known
    before, _known = _known, driver
    try:
        yield
    finally:
        _known = before
